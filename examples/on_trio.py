"""Streams an answer on trio: `python examples/on_trio.py [MODEL]`."""

import sys

import trio

import penstock
from penstock.demo import model_path


async def main(model: str) -> None:
    """The code is the same on asyncio and uvloop."""
    async with penstock.Engine(model) as engine:
        messages = [{"role": "user", "content": "Name the three primary colours."}]
        async with engine.stream(messages, max_tokens=32) as request:
            async for chunk in request:
                print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    trio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
