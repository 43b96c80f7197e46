"""vLLM's `v1`."""
