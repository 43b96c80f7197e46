"""Streams the answer to one question: `python examples/stream.py [MODEL [QUESTION]]`."""

import sys

import anyio

import penstock
from penstock.demo import model_path


async def main(model: str, question: str) -> None:
    """`model` is a Hugging Face directory or a GGUF file."""
    async with penstock.Engine(model) as engine:
        messages = [{"role": "user", "content": question}]
        async with engine.stream(messages, max_tokens=256) as request:
            async for chunk in request:
                print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    model = sys.argv[1] if sys.argv[1:] else str(model_path())
    anyio.run(main, model, sys.argv[2] if sys.argv[2:] else "Why is the sky blue?")
