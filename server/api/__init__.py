"""The routes of OpenAI's protocol and of operators, and what they share."""
