"""HTTP: wire schema, images, auth, limits, metrics and the command line. Speaks OpenAI's chat-completions protocol."""
