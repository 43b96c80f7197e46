"""A conversation; each turn computes only its new tokens: `python examples/conversation.py [MODEL]`."""

import sys

import anyio

import penstock
from penstock.demo import model_path

QUESTIONS = ("Name a river in Africa.", "Which sea does it flow into?", "Name a city on its banks.")


async def main(model: str) -> None:
    """Every prompt repeats all earlier turns; their KV blocks come from the prefix cache."""
    async with penstock.Engine(model) as engine:
        messages = []
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            result = await engine.generate(messages, max_tokens=48, temperature=0)
            messages.append({"role": "assistant", "content": result.content})
            usage = result.usage
            print(f"{question} {result.text!r}")
            print(f"  {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} of them cached")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
