"""The core on vLLM servers that run `helmsight-vllm`: one more transport of the client."""
