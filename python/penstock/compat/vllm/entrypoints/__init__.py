"""vLLM's `entrypoints`."""
