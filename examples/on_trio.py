"""Streams text on trio: `python examples/on_trio.py MODEL`."""

import sys

import trio

import penstock


async def main(model: str) -> None:
    """The code is the same on asyncio and uvloop."""
    async with penstock.Engine(model) as engine:
        async with engine.stream("The three primary colours are", max_tokens=32) as request:
            async for chunk in request:
                print(chunk.text, end="", flush=True)
        print()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
