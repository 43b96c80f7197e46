"""Generates text in a plain thread, without an event loop: `python examples/blocking.py [MODEL]`."""

import sys

import penstock
from penstock.demo import model_path


def main(model: str) -> None:
    """`engine.blocking` has the same methods without `await`; any number of threads can share one engine."""
    with penstock.Engine(model) as engine:
        with engine.blocking.stream("Water boils at", max_tokens=32) as request:
            for chunk in request:
                print(chunk.text, end="", flush=True)
        result = engine.blocking.generate("Water freezes at", max_tokens=8, temperature=0)
        print(f"\n{result.text!r}: {result.usage.completion_tokens} tokens, {result.finish_reason}")


if __name__ == "__main__":
    main(sys.argv[1] if sys.argv[1:] else str(model_path()))
