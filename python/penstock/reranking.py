"""`Reranker`: scores of documents for a query, by models that answer with a token such as `yes` or `no`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock._checks import invalid
from penstock._core import SamplingParams, Usage
from penstock.batch import error_at
from penstock.errors import GenerationError, InvalidRequestError

if TYPE_CHECKING:
    from penstock._core import Result
    from penstock.batch import BatchItem

__all__ = ["Ranking", "Relevance", "Reranker"]


_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RerankerModel(Protocol):
    """The members of an engine that a `Reranker` uses."""

    @property
    def name(self) -> str: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...


class _Family(NamedTuple):
    """The prompt that a family of rerankers was trained with, and the tokens of its answers."""

    prompt: str
    positive: str
    #: Without one, the score is the probability of the positive answer among all tokens.
    negative: str | None = None


#: By the name; a part of the names of such models, in lower case.
_NAMES = {"qwen3": "qwen3-reranker"}
_FAMILIES = {
    "qwen3": _Family(
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
        "score": "The probability of the positive answer, such as `yes` against `no`, from 0 to 1.",
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

    `engine` is open. `family` says how its model was trained: `qwen3` for Qwen3-Reranker, or a mapping with

    - `prompt`: the text of a prompt with `{query}`, `{document}` and, optionally, `{instruction}`, as
      `str.format` takes it: other braces are doubled.
    - `positive` and, optionally, `negative`: the answers, of which each is one token. The score is the
      probability of the positive one against the other or, without the other, among all tokens.

    By default, the name of the model has to say it.

    Raises `InvalidRequestError` if the model is not known as a reranker or lacks the tokens of the answers.
    """

    #: The names of the families that are built in.
    FAMILIES = tuple(_FAMILIES)

    def __init__(self, engine: RerankerModel, family: str | Mapping[str, str] | None = None) -> None:
        self._family = _family_of(engine, family)
        answers = list(filter(None, (self._family.positive, self._family.negative)))
        token_ids = [engine.encode(answer, add_special_tokens=False) for answer in answers]
        if any(len(ids) != 1 for ids in token_ids):
            limit = "left out: this model's tokenizer has no single token for " + " and ".join(answers)
            raise invalid("family", family, limit)
        answer_ids = [ids[0] for ids in token_ids]
        self._positive = answer_ids[0]
        #: The parameters of the requests: the distribution over the answers, without any filter. That of a
        #: single answer is over all tokens.
        self.params = SamplingParams(
            max_tokens=1,
            allowed_token_ids=answer_ids,
            logprobs=True,
            logprobs_mode="raw" if self._family.negative is None else "processed",
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            typical_p=1.0,
            epsilon_cutoff=0.0,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            seed=0,
        )

    @staticmethod
    def check_family(family: str | Mapping[str, str]) -> None:
        """Check a value of `family` without a model. Raises `InvalidRequestError`."""
        if isinstance(family, str) and family in _FAMILIES:
            return
        if not isinstance(family, Mapping):
            limit = f"{' or '.join(map(repr, _FAMILIES))}, or a mapping with prompt, positive and negative"
            raise invalid("family", family, limit)
        for name in family.keys() - set(_Family._fields):
            raise invalid(f"family[{name!r}]", family[name], f"one of {', '.join(_Family._fields)}")
        for name in _Family._fields:
            value = family.get(name)
            if (name, value) != ("negative", None) and not (isinstance(value, str) and value):
                raise invalid(f"family[{name!r}]", value, "a text that is not empty")
        if family["positive"] == family.get("negative"):
            raise invalid("family['negative']", family["negative"], "another text than positive")
        if not _is_template(family["prompt"]):
            limit = "a text with {query}, {document} and no other name in braces but {instruction}"
            raise invalid("family['prompt']", family["prompt"], limit)

    def prompt(self, query: str, document: str, instruction: str | None = None) -> str:
        """The prompt for a document. `instruction` is the task in one sentence, by default a web search."""
        return self._family.prompt.format(
            instruction=_INSTRUCTION if instruction is None else instruction,
            query=query,
            document=document,
        )

    def prompts(self, pairs: Sequence[tuple[str, str]], instruction: str | None = None) -> Sequence[str]:
        """The prompts of pairs of a query and a document.

        Each is made when it is read, so that a long query is not in memory once for each document.
        """
        return _Prompts(self, pairs, instruction)

    def score(self, result: Result) -> float:
        """The probability of the positive answer, from the result of a prompt with `params`.

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
                raise invalid(name, text, "a text")
        if isinstance(documents, (str, bytes, dict)) or not isinstance(documents, Iterable):
            raise invalid("documents", documents, "an iterable of texts")
        if top_n is not None and (isinstance(top_n, bool) or not isinstance(top_n, int) or top_n < 1):
            raise invalid("top_n", top_n, "an integer of at least 1")
        self._documents = list(documents)
        for index, document in enumerate(self._documents):
            if not isinstance(document, str):
                raise invalid(f"documents[{index}]", document, "a text")
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


def _family_of(engine: RerankerModel, family: str | Mapping[str, str] | None) -> _Family:
    if family is not None:
        Reranker.check_family(family)
        return _FAMILIES[family] if isinstance(family, str) else _Family(**family)
    model = engine.name.lower()
    for name, part in _NAMES.items():
        if part in model:
            return _FAMILIES[name]
    message = (
        f"{engine.name!r} is not known as a reranker; if it was trained as Qwen3-Reranker was, pass "
        "family='qwen3', or start the server with --rerank qwen3"
    )
    raise InvalidRequestError(message, "family", None, "'qwen3'")


def _is_template(prompt: str) -> bool:
    try:
        parts = [part for part in Formatter().parse(prompt) if part[1] is not None]
    except ValueError:
        return False
    names = {name for _, name, _, _ in parts}
    is_plain = not any(spec or conversion for _, _, spec, conversion in parts)
    return is_plain and {"query", "document"} <= names <= {"query", "document", "instruction"}
