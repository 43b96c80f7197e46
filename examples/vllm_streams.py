"""vLLM's API, three streams on one event loop: `python examples/vllm_streams.py [MODEL]`."""

import asyncio
import sys

from penstock.compat.vllm import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from penstock.demo import model_path

PROMPTS = ("The future of artificial intelligence is", "In a galaxy far, far away", "The key to happiness is")


async def stream(llm: AsyncLLM, prompt: str, request_id: str) -> None:
    """Print the output of a prompt when it is complete, and each part of it before that."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=42, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in llm.generate(prompt, params, request_id):
        text += output.outputs[0].text
        print(f"{request_id}: {output.outputs[0].text!r}")
    print(f"{prompt}{text}")


async def main(model: str) -> None:
    """Stream the outputs of all prompts together."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, enforce_eager=True, max_model_len=1024))
    try:
        await asyncio.gather(*(stream(llm, prompt, str(index)) for index, prompt in enumerate(PROMPTS)))
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else str(model_path())))
