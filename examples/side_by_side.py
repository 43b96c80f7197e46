"""Many requests, one engine: `python examples/side_by_side.py MODEL`. They share every step."""

import sys

import anyio

import penstock

CITIES = ("Paris", "Lima", "Nairobi", "Osaka", "Oslo", "Quito", "Hanoi", "Accra")


async def ask(engine: penstock.Engine, city: str) -> None:
    """Answers appear in the order in which they are done."""
    result = await engine.generate(
        [{"role": "user", "content": f"In which country is {city}? One word."}], max_tokens=16, temperature=0
    )
    print(f"{city:8} {result.text!r} after {result.timings.total:.2f} s")


async def main(model: str) -> None:
    """The task group ends when the last answer is there."""
    async with penstock.Engine(model) as engine, anyio.create_task_group() as group:
        for city in CITIES:
            group.start_soon(ask, engine, city)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
