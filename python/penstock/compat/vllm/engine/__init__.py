"""vLLM's `engine`."""
