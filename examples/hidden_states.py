"""Sentence embeddings from hidden states: `python examples/hidden_states.py MODEL`."""

import sys

import anyio
import numpy as np
from numpy.typing import NDArray

import penstock

SENTENCES = (
    "The cat sleeps on the sofa.",
    "A kitten naps on the couch.",
    "Interest rates rose again in May.",
)


async def embed(engine: penstock.Engine, sentence: str) -> NDArray[np.float32]:
    """The mean hidden state of a sentence, normalised to length 1."""
    result = await engine.generate(sentence, max_tokens=1, output_hidden_states="prompt")
    states = np.asarray(result.choices[0].hidden_states)  # one row per token, without a copy
    vector: NDArray[np.float32] = states.mean(axis=0)
    vector /= np.linalg.norm(vector)
    return vector


async def main(model: str) -> None:
    """Prints the cosine similarity of sentences."""
    async with penstock.Engine(model) as engine:
        vectors = [await embed(engine, sentence) for sentence in SENTENCES]
    for sentence, vector in zip(SENTENCES[1:], vectors[1:], strict=True):
        print(f"{vectors[0] @ vector:.2f}  {SENTENCES[0]!r} and {sentence!r}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1])
