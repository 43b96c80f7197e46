"""`engine.rerank`: prompts, scores, order and failures. Each model with tokens for the answers has scores."""

from __future__ import annotations

import gc
import math
import shutil
import weakref
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import assert_at_rest, make_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

QUERY = "What is the capital of France?"
DOCUMENTS = ["Paris is the capital of France.", "Bananas are {yellow}.", "France is a country.", ""]
#: The documented prompt of Qwen3-Reranker.
PROMPT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
SEARCH = "Given a web search query, retrieve relevant passages that answer the query"


@pytest.fixture(scope="module")
def engine(demo_model: Path) -> Iterator[penstock.Engine]:
    with penstock.Engine(demo_model, max_model_len=256) as engine:
        yield engine


def expected_score(engine: penstock.Engine, prompt: str) -> float:
    """P(yes) / (P(yes) + P(no)) by the logits at the last position."""
    result = engine.blocking.generate(prompt, max_tokens=1, output_logits="generation")
    [yes], [no] = (engine.encode(word, add_special_tokens=False) for word in ("yes", "no"))
    logits = np.asarray(result.logits)[-1].astype(np.float64)
    return 1 / (1 + math.exp(logits[no] - logits[yes]))


@pytest.mark.anyio
@pytest.mark.parametrize("instruction", [None, "Find fruit."])
async def test_scores_are_those_of_the_logits(engine: penstock.Engine, instruction: str | None) -> None:
    ranking = await engine.rerank(QUERY, DOCUMENTS, instruction=instruction, family="qwen3")
    assert len({item.score for item in ranking.items}) == len(DOCUMENTS)
    for item in ranking.items:
        assert item.document == DOCUMENTS[item.index]
        prompt = PROMPT.format(instruction or SEARCH, QUERY, item.document)
        assert item.score == pytest.approx(expected_score(engine, prompt), abs=1e-5)


OWN = {"prompt": "{document}: does it answer {query}? {instruction} {{Answer}}:", "positive": "yes"}


@pytest.mark.parametrize("negative", [None, "maybe"])
def test_family_can_be_described_by_a_mapping(engine: penstock.Engine, negative: str | None) -> None:
    family = {**OWN, **({} if negative is None else {"negative": negative})}
    ranking = engine.blocking.rerank(QUERY, DOCUMENTS, instruction="Be brief.", family=family)
    for item in ranking.items:
        prompt = f"{item.document}: does it answer {QUERY}? Be brief. {{Answer}}:"
        result = engine.blocking.generate(prompt, max_tokens=1, output_logits="generation")
        weights = np.exp(np.asarray(result.logits)[-1].astype(np.float64))
        [yes] = engine.encode("yes", add_special_tokens=False)
        total = weights.sum()
        if negative is not None:
            [other] = engine.encode(negative, add_special_tokens=False)
            total = weights[yes] + weights[other]
        assert item.score == pytest.approx(weights[yes] / total, abs=1e-5)


def test_documents_are_in_descending_order_of_scores(engine: penstock.Engine) -> None:
    rerank = engine.blocking.rerank
    everything = rerank(QUERY, [*DOCUMENTS, DOCUMENTS[0]], family="qwen3").items
    scores = [item.score for item in everything]
    assert scores == sorted(scores, reverse=True)
    assert sorted(item.index for item in everything) == list(range(5))
    equal = [item.index for item in everything if item.document == DOCUMENTS[0]]
    assert equal == [0, 4]
    assert (
        rerank(QUERY, DOCUMENTS, family="qwen3", top_n=2).items
        == tuple(item for item in everything if item.index != 4)[:2]
    )
    assert rerank(QUERY, [], family="qwen3").items == ()


def test_generation_settings_of_the_model_do_not_change_scores(engine: penstock.Engine) -> None:
    params = penstock.Reranker(engine, "qwen3").params
    result = engine.blocking.generate(PROMPT.format(SEARCH, QUERY, "Paris"), params)
    assert result.logprobs is not None
    assert len(result.logprobs) == 1
    with engine.blocking.stream("a", params) as request:
        assert (request.params.repetition_penalty, request.params.top_k) == (1.0, 0)


def test_usage_counts_all_prompts(engine: penstock.Engine) -> None:
    usage = engine.blocking.rerank(QUERY, DOCUMENTS, family="qwen3").usage
    prompts = [PROMPT.format(SEARCH, QUERY, document) for document in DOCUMENTS]
    assert usage.prompt_tokens == sum(map(engine.count_tokens, prompts))
    assert usage.completion_tokens == 0


def test_name_of_the_model_makes_it_a_reranker(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "Qwen3-Reranker-0.6B.gguf"
    shutil.copy(demo_model, path)
    with penstock.Engine(path, max_model_len=256) as engine:
        named = engine.blocking.rerank(QUERY, DOCUMENTS)
        assert [item.score for item in named.items] == [
            item.score for item in engine.blocking.rerank(QUERY, DOCUMENTS, family="qwen3").items
        ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"family": None}, "family"),
        ({"family": "bert"}, "family"),
        ({"family": 7}, "family"),
        ({"family": {**OWN, "other": "a"}}, "family['other']"),
        ({"family": {"prompt": OWN["prompt"]}}, "family['positive']"),
        ({"family": {**OWN, "negative": ""}}, "family['negative']"),
        ({"family": {**OWN, "negative": "yes"}}, "family['negative']"),
        ({"family": {**OWN, "prompt": "{query}"}}, "family['prompt']"),
        ({"family": {**OWN, "prompt": "{query} {document} {other}"}}, "family['prompt']"),
        ({"family": {**OWN, "prompt": "{query.x} {query} {document}"}}, "family['prompt']"),
        ({"family": {**OWN, "prompt": "{query!r} {document}"}}, "family['prompt']"),
        ({"family": {**OWN, "prompt": "{query} {document} {"}}, "family['prompt']"),
        ({"family": {**OWN, "positive": "yes and no"}}, "family"),
        ({"query": 7}, "query"),
        ({"instruction": 7}, "instruction"),
        ({"documents": "text"}, "documents"),
        ({"documents": ["a", 7]}, "documents[1]"),
        ({"documents": ["a", "long " * 300]}, "documents[1]"),
        ({"top_n": 0}, "top_n"),
    ],
)
async def test_invalid_argument_is_named(
    engine: penstock.Engine, arguments: dict[str, Any], field: str
) -> None:
    given = {"query": QUERY, "documents": DOCUMENTS, "family": "qwen3"} | arguments
    with pytest.raises(penstock.InvalidRequestError) as raised:
        await engine.rerank(**given)
    assert raised.value.field == field
    await assert_at_rest(engine)


def test_tokenizer_without_the_answers_is_refused(tiny_model: Path) -> None:
    refused = pytest.raises(penstock.InvalidRequestError, match="no single token for yes and no")
    with make_engine(tiny_model) as engine, refused:
        engine.blocking.rerank(QUERY, DOCUMENTS, family="qwen3")


@pytest.mark.anyio
@pytest.mark.loops
async def test_cancelling_the_task_ends_all_requests(engine: penstock.Engine) -> None:
    with anyio.move_on_after(0.01) as scope:
        await engine.rerank(QUERY, DOCUMENTS * 50, family="qwen3")
    assert scope.cancelled_caught
    await assert_at_rest(engine)


class Text(str):
    """A text that has weak references."""

    __slots__ = ("__weakref__",)


@pytest.mark.anyio
@pytest.mark.parametrize("num_words", [1, 300], ids=["computed", "refused"])
async def test_few_prompts_are_in_memory_at_a_time(
    engine: penstock.Engine, monkeypatch: pytest.MonkeyPatch, num_words: int
) -> None:
    made = weakref.WeakSet[Text]()
    numbers: list[int] = []
    prompt = penstock.Reranker.prompt

    def count(self: penstock.Reranker, *parts: Any) -> str:
        text = Text(prompt(self, *parts))
        made.add(text)
        numbers.append(len(made))
        return text

    monkeypatch.setattr(penstock.Reranker, "prompt", count)
    documents = list(map(str, range(200)))
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(penstock.InvalidRequestError) if num_words > 1 else nullcontext():
            await engine.rerank("word " * num_words, documents, family="qwen3")
    finally:
        gc.enable()
    assert len(numbers) > 100
    assert max(numbers) < 100
