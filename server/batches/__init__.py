"""OpenAI's batch files: requests in lines, answered by a model in this process or by a server, and kept as lines."""
