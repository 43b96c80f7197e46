"""A timeout for a request: `python examples/timeout.py [MODEL [SECONDS]]`.

Leaving the `stream` block cancels the request, whatever the reason, and frees its memory within one step.
Timeouts, lost connections and exceptions need no extra code.
"""

import sys

import anyio

import penstock
from penstock.demo import model_path


async def main(model: str, seconds: float) -> None:
    """Prints the tokens generated before the timeout."""
    async with penstock.Engine(model) as engine:
        with anyio.move_on_after(seconds) as scope:
            async with engine.stream("Once upon a time", max_tokens=512, ignore_eos=True) as request:
                async for chunk in request:
                    print(chunk.text, end="", flush=True)
        print("\n-- timeout" if scope.cancelled_caught else "\n-- complete")


if __name__ == "__main__":
    model = sys.argv[1] if sys.argv[1:] else str(model_path())
    anyio.run(main, model, float(sys.argv[2]) if sys.argv[2:] else 0.5)
