"""Images of requests, from what the client sends to pictures."""
