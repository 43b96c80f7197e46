"""Documents by their relevance for a question: `python examples/rerank.py [MODEL]`.

The model should be a reranker such as Qwen/Qwen3-Reranker-0.6B, for which `family` is not needed. It lets
another one run, too, such as the demo model, but those scores mean nothing.
"""

import sys

import anyio

import penstock
from penstock.demo import model_path

QUERY = "What is the capital of France?"
DOCUMENTS = (
    "Paris is the capital of France.",
    "The Eiffel Tower was finished in 1889.",
    "Bananas are rich in potassium.",
)


async def main(model: str) -> None:
    """Prints the documents, the most relevant one first."""
    async with penstock.Engine(model) as engine:
        ranking = await engine.rerank(QUERY, DOCUMENTS, family="qwen3")
    for item in ranking.items:
        print(f"{item.score:.3f}  {item.document}")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if sys.argv[1:] else str(model_path()))
