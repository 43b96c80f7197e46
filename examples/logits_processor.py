"""A custom logits processor: `python examples/logits_processor.py [MODEL]`."""

import sys
from collections.abc import Callable, Sequence

import anyio
import numpy as np

import penstock
from penstock.demo import model_path

Processor = Callable[[Sequence[int], penstock.Tensor], None]


def make_processor(engine: penstock.Engine) -> Processor:
    """Returns a processor that bans two consecutive words with the same first letter."""
    first = np.array([engine.decode([token])[:2].lower() for token in range(engine.info.vocabulary_size)])

    def never_alliterate(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
        words = [first[token] for token in token_ids if first[token].startswith(" ")]
        if words:
            np.asarray(logits)[first == words[-1]] = -np.inf

    return never_alliterate


async def main(model: str) -> None:
    """The processor modifies the logits in place, without a copy."""
    async with penstock.Engine(model) as engine:
        result = await engine.generate(
            "Six sly snakes", max_tokens=24, temperature=0, logits_processors=[make_processor(engine)]
        )
        print("Six sly snakes" + result.text)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
