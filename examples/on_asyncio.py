"""Concurrent requests with a timeout on asyncio: `python examples/on_asyncio.py [MODEL]`."""

import asyncio
import sys

import penstock
from penstock.demo import model_path

COUNTRIES = ("France", "Italy", "Japan", "Peru")


async def ask(engine: penstock.Engine, country: str) -> str:
    """Returns the answer, or its part before the timeout."""
    question = f"What is the capital of {country}? Answer in one sentence."
    text = ""
    try:
        async with asyncio.timeout(20):
            messages = [{"role": "user", "content": question}]
            async with engine.stream(messages, max_tokens=32, temperature=0) as request:
                async for chunk in request:
                    text += chunk.text
    except TimeoutError:
        text += " [timeout]"
    return text


async def main(model: str) -> None:
    """`asyncio.TaskGroup`, `asyncio.gather` and `asyncio.timeout` need nothing from anyio or trio."""
    async with penstock.Engine(model) as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(engine, country)) for country in COUNTRIES]
        for country, task in zip(COUNTRIES, tasks, strict=True):
            print(f"{country}: {task.result()}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else str(model_path())))
