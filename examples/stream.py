"""Streams the answer to one question: `python examples/stream.py MODEL "Why is the sky blue?"`."""

import sys

import anyio

import penstock


async def main(model: str, question: str) -> None:
    """`model` is a Hugging Face directory or a GGUF file."""
    async with penstock.Engine(model) as engine:
        request = await engine.start_request([{"role": "user", "content": question}], max_tokens=256)
        async for chunk in request:
            print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2])
