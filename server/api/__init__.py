"""The routes of OpenAI's protocol and of those who run the server, and what they share."""
