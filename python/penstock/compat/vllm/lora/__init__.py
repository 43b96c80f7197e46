"""vLLM's `lora`."""
