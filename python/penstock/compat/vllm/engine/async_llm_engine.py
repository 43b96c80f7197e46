"""vLLM's `engine.async_llm_engine`: `AsyncLLMEngine`, another name of `AsyncLLM`."""

from penstock.compat.vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["AsyncLLMEngine"]

AsyncLLMEngine = AsyncLLM
