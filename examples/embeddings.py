"""Similar sentences by their embeddings: `python examples/embeddings.py [MODEL]`."""

import sys

import anyio
import numpy as np

import penstock
from penstock.demo import model_path

SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten naps on the couch.",
    "Interest rates rose again in May.",
)


async def main(model: str) -> None:
    """Prints the cosine similarity of sentences."""
    async with penstock.Engine(model) as engine:
        embeddings = await engine.embed(SENTENCES, normalize=True)
    vectors = np.asarray(embeddings.tensor)  # one row per sentence, without a copy
    for sentence, vector in zip(SENTENCES[1:], vectors[1:], strict=True):
        print(f"{vectors[0] @ vector:.2f}  {SENTENCES[0]!r} and {sentence!r}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
