"""HTTP: wire schema, images, auth, limits, metrics and the command line for OpenAI's chat-completions protocol."""
