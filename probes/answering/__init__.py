"""The answerers of a benchmark's questions: an engine in this process, or a server that speaks OpenAI's protocol."""
