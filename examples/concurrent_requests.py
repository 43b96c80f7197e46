"""Concurrent requests in one batch: `python examples/concurrent_requests.py [MODEL]`."""

import sys

import anyio

import penstock
from penstock.demo import model_path

CITIES = ("Paris", "Lima", "Nairobi", "Osaka", "Oslo", "Quito", "Hanoi", "Accra")


async def ask(engine: penstock.Engine, city: str) -> None:
    """Prints the output as soon as it is complete."""
    result = await engine.generate(
        [{"role": "user", "content": f"In which country is {city}? One word."}], max_tokens=16, temperature=0
    )
    print(f"{city:8} {result.text!r} after {result.timings.total:.2f} s")


async def main(model: str) -> None:
    """One task per request; the engine batches them in every step."""
    async with penstock.Engine(model) as engine, anyio.create_task_group() as group:
        for city in CITIES:
            group.start_soon(ask, engine, city)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
