"""`/v1/rerank` and `/v1/score`: documents for a query, scored by a reranker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import penstock
from penstock.server.calls import Call
from penstock.server.disconnects import while_connected
from penstock.server.errors import invalid
from penstock.server.generation import begin, concurrency_of
from penstock.server.prompt_batch import PromptBatch
from penstock.server.prompts import check_length, max_bytes
from penstock.server.protocol.rerank import RerankRequest, ScoreRequest, TextObject
from penstock.server.sampling import Unsupported, read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.server.calls import Generation
    from penstock.server.http import Exchange
    from penstock.server.state import State

    #: A query and a document.
    Pair = tuple[str, str]

__all__ = ["rerank", "score"]

_NO_TRUNCATION = "left out: a longer document is an error"
UNSUPPORTED: Unsupported = {
    "add_special_tokens": ((True,), "true"),
    "max_chunks_per_doc": ((), _NO_TRUNCATION),
    "max_tokens_per_doc": ((0,), _NO_TRUNCATION),
    "truncate_prompt_tokens": ((), _NO_TRUNCATION),
    "truncation_side": (("left", "right"), "left or right"),
    "use_activation": ((True,), "true: a score is a probability"),
}


async def rerank(state: State, exchange: Exchange) -> None:
    """Answer with the documents in the order of their relevance for the query."""
    _, request = await read_request(state, exchange, RerankRequest, (), UNSUPPORTED)
    _check_number(state, "documents", request.documents)
    texts = [item.text if isinstance(item, TextObject) else item for item in request.documents]
    pairs = [(request.query, text) for text in texts]
    generation, batch, scores = await _scored(state, exchange, request, pairs, "documents", "rerank-")
    order = sorted(range(len(texts)), key=lambda index: (-scores[index], index))
    results: list[dict[str, Any]] = [
        {"index": index, "relevance_score": scores[index]} for index in order[: request.top_n or None]
    ]
    if request.return_documents:
        for result in results:
            result["document"] = {"text": texts[result["index"]]}
    answer = {"id": generation.id, "model": generation.name, "usage": batch.usage(), "results": results}
    await exchange.send_json(answer)


async def score(state: State, exchange: Exchange) -> None:
    """Answer with the score of each pair of texts."""
    _, request = await read_request(state, exchange, ScoreRequest, (), UNSUPPORTED)
    first, queries = _texts(state, request, "text_1", "queries")
    second, documents = _texts(state, request, "text_2", "documents")
    if len(queries) not in (1, len(documents)):
        limit = f"one text, or as many as {second} has: {len(documents)}"
        raise invalid(first, f"a list of {len(queries)}", limit)
    pairs = list(zip(queries * (len(documents) // len(queries)), documents, strict=True))
    generation, batch, scores = await _scored(state, exchange, request, pairs, second, "score-")
    data = [{"index": index, "object": "score", "score": scores[index]} for index in range(len(documents))]
    answer = {
        "id": generation.id,
        "object": "list",
        "created": generation.created,
        "model": generation.name,
        "data": data,
        "usage": batch.usage(),
    }
    await exchange.send_json(answer)


def _check_number(state: State, field: str, texts: Sequence[object]) -> None:
    """Check the number of texts before anything is made of them."""
    if not 0 < len(texts) <= state.calls.max_prompts:
        raise invalid(field, f"a list of {len(texts)}", f"a list of 1 to {state.calls.max_prompts} texts")


def _texts(state: State, request: ScoreRequest, name: str, other: str) -> tuple[str, list[str]]:
    """The name of the field that has the texts, and the texts."""
    given = {field: value for field in (name, other) if (value := getattr(request, field)) is not None}
    if len(given) != 1:
        raise invalid(name, None, f"a text or a list of texts, as {name} or as {other}")
    [(field, value)] = given.items()
    texts = [value] if isinstance(value, str) else value
    _check_number(state, field, texts)
    return field, texts


async def _scored(
    state: State,
    exchange: Exchange,
    request: RerankRequest | ScoreRequest,
    pairs: Sequence[Pair],
    field: str,
    prefix: str,
) -> tuple[Generation, PromptBatch, dict[int, float]]:
    """The scores of pairs by their index. `field` is that of the documents."""
    reranker = _reranker(state, request.model)
    prompts = reranker.prompts(pairs, request.instruction)
    call = Call(prompts, reranker.params.replace(priority=request.priority), returns_tokens=False)
    generation = begin(state, exchange, prefix, request.model, call, prompt=field)
    batch = PromptBatch(state, generation, field)
    concurrency = concurrency_of(batch.engine.info, call)
    sizes = _prompt_sizes(reranker, batch, pairs, request.instruction)
    exchange.hold(sum(sorted(sizes)[-concurrency:]))
    scores: dict[int, float] = {}

    async def take(index: int, result: penstock.Result) -> None:
        scores[index] = reranker.score(result)

    with state.calls.running(generation):
        await while_connected(exchange.receive, lambda: batch.run(take, concurrency=concurrency))
    return generation, batch, scores


def _prompt_sizes(
    reranker: penstock.Reranker, batch: PromptBatch, pairs: Sequence[Pair], instruction: str | None
) -> list[int]:
    """The bytes that each prompt takes at most, without making it. Raises if one is too long."""
    common = reranker.prompt("", "", instruction)
    sizes: list[int] = []
    for index, pair in enumerate(pairs):
        check_length(batch.engine, len(common) + sum(map(len, pair)), batch.place(index))
        sizes.append(max_bytes(common, *pair))
    return sizes


def _reranker(state: State, name: str | None) -> penstock.Reranker:
    """The reranker that a request names."""
    try:
        return penstock.Reranker(state.models.select(name).model.engine, state.settings.rerank)
    except penstock.InvalidRequestError as error:
        raise invalid("model", name, f"a reranker: {error}") from error
