"""`Reranker`: scores of documents for a query, by models that answer `yes` or `no`."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from penstock._batch_items import error_at
from penstock._core import SamplingParams, Usage
from penstock.errors import GenerationError, InvalidRequestError

if TYPE_CHECKING:
    from penstock._core import Result
    from penstock._session import Session
    from penstock.batch import BatchItem
    from penstock.engine import Engine

__all__ = ["Ranking", "Relevance", "Reranker"]


class _Family(NamedTuple):
    """The prompt that a family of rerankers was trained with, and the tokens of its answers."""

    #: A part of the names of such models, in lower case.
    name: str
    instruction: str
    prompt: str
    positive: str
    negative: str


_FAMILIES = {
    "qwen3": _Family(
        name="qwen3-reranker",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        prompt=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
            'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
            "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
            "<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n"
        ),
        positive="yes",
        negative="no",
    )
}


@dataclass(frozen=True)
class Relevance:
    """The score of one document."""

    index: int
    score: float
    document: str

    __slots__ = {  # noqa: RUF023 - in the order of the fields
        "index": "The position of the document in the call, from 0.",
        "score": "The probability of the answer `yes` against `no`, from 0 to 1.",
        "document": "The text of the document.",
    }


@dataclass(frozen=True)
class Ranking:
    """The return value of `Engine.rerank`: the documents by their scores."""

    items: tuple[Relevance, ...]
    usage: Usage

    __slots__ = {
        "items": "The documents with the highest scores, in descending order; at most `top_n`.",
        "usage": "The token counts of the prompts of all documents together, without the answers.",
    }


class Reranker:
    """The prompts of a reranker and the score of a result. `Engine.rerank` runs both.

    `engine` is open. `family` says how its model was trained: `qwen3` for Qwen3-Reranker. By default, the
    name of the model has to say it.

    Raises `InvalidRequestError` if the model is not known as a reranker or lacks the tokens of the answers.
    """

    #: The values of `family`.
    FAMILIES = tuple(_FAMILIES)

    def __init__(self, engine: Engine | Session, family: str | None = None) -> None:
        self._family = _family_of(engine, family)
        answers = self._family.positive, self._family.negative
        token_ids = [engine.encode(answer, add_special_tokens=False) for answer in answers]
        if any(len(ids) != 1 for ids in token_ids):
            limit = "left out: this model's tokenizer has no single token for " + " and ".join(answers)
            raise _invalid("family", family, limit)
        self._positive, negative = (ids[0] for ids in token_ids)
        #: The parameters of the requests: the distribution over the two answers, without any filter.
        self.params = SamplingParams(
            max_tokens=1,
            allowed_token_ids=[self._positive, negative],
            logprobs=True,
            logprobs_mode="processed",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            seed=0,
        )

    def prompt(self, query: str, document: str, instruction: str | None = None) -> str:
        """The prompt for a document. `instruction` is the task in one sentence, by default a web search."""
        return self._family.prompt.format(
            instruction=self._family.instruction if instruction is None else instruction,
            query=query,
            document=document,
        )

    def prompts(self, pairs: Sequence[tuple[str, str]], instruction: str | None = None) -> Sequence[str]:
        """The prompts of pairs of a query and a document.

        Each is made when it is read, so that a long query is not in memory once for each document.
        """
        return _Prompts(self, pairs, instruction)

    def score(self, result: Result) -> float:
        """The probability of `yes`, from the result of a prompt with `params`.

        Raises `GenerationError` if the request ended without an answer.
        """
        if not result.logprobs:
            message = f"{result.finish_reason}: the request ended before the document was scored"
            raise GenerationError(message)
        probability = math.exp(result.logprobs[0])
        return probability if result.token_ids[0] == self._positive else 1.0 - probability


class _Prompts(Sequence[str]):
    """The return value of `Reranker.prompts`."""

    def __init__(self, reranker: Reranker, pairs: Sequence[tuple[str, str]], instruction: str | None) -> None:
        self._reranker = reranker
        self._pairs = pairs
        self._instruction = instruction

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> str:  # type: ignore[override] # there are no slices
        query, document = self._pairs[index]
        return self._reranker.prompt(query, document, self._instruction)


class Documents:
    """The documents of a call, and their scores once all items were added."""

    def __init__(
        self,
        reranker: Reranker,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None,
        top_n: int | None,
    ) -> None:
        for name, text in (("query", query), ("instruction", instruction)):
            if not isinstance(text, str) and (name, text) != ("instruction", None):
                raise _invalid(name, text, "a text")
        if isinstance(documents, (str, bytes, dict)) or not isinstance(documents, Iterable):
            raise _invalid("documents", documents, "an iterable of texts")
        if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
            raise _invalid("top_n", top_n, "an integer of at least 1")
        self._documents = list(documents)
        for index, document in enumerate(self._documents):
            if not isinstance(document, str):
                raise _invalid(f"documents[{index}]", document, "a text")
        self.prompts = reranker.prompts([(query, text) for text in self._documents], instruction)
        self._reranker = reranker
        self._top_n = top_n
        self._found: list[Relevance] = []
        self._usages: list[Usage] = []

    def add(self, item: BatchItem) -> None:
        """Add the score of an item; raises its error, with the place of the document as the field."""
        if item.result is None:
            raise error_at(item, f"documents[{item.index}]")
        score = self._reranker.score(item.result)
        self._found.append(Relevance(item.index, score, self._documents[item.index]))
        self._usages.append(item.result.usage)

    def ranking(self) -> Ranking:
        """The documents by their scores; of equal ones, the first in the call comes first."""
        found = sorted(self._found, key=lambda item: (-item.score, item.index))
        fields = ("prompt_tokens", "cached_tokens", "cached_host_tokens")
        totals = {name: sum(getattr(usage, name) for usage in self._usages) for name in fields}
        return Ranking(tuple(found[: self._top_n]), Usage(**totals))


def _family_of(engine: Engine | Session, name: str | None) -> _Family:
    if name is not None:
        if name not in _FAMILIES:
            raise _invalid("family", name, " or ".join(map(repr, _FAMILIES)))
        return _FAMILIES[name]
    model = engine.name.lower()
    for family in _FAMILIES.values():
        if family.name in model:
            return family
    message = (
        f"{engine.name!r} is not known as a reranker; if it was trained as Qwen3-Reranker was, pass "
        "family='qwen3', or start the server with --rerank qwen3"
    )
    raise InvalidRequestError(message, "family", None, "'qwen3'")


def _invalid(name: str, value: object, limit: str) -> InvalidRequestError:
    message = f"{name}={reprlib.repr(value)} is not allowed: it must be {limit}"
    return InvalidRequestError(message, name, value, limit)
