"""`/v1/embeddings`: pooled hidden states of the last layer."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

import penstock
from penstock.server.disconnects import while_connected
from penstock.server.errors import ApiError, invalid
from penstock.server.generation import begin
from penstock.server.prompts import text_prompts
from penstock.server.protocol.openai_embeddings import EmbeddingsRequest
from penstock.server.sampling import read_request
from penstock.server.sse import json_bytes
from penstock.server.state import Call

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import Generation, State

__all__ = ["embeddings"]

#: One token is generated, because the engine has no request without. The prefix cache keeps no prompt.
_PARAMS = penstock.SamplingParams(max_tokens=1, output_hidden_states="prompt", use_prefix_cache=False)
#: Bounds of the prompts of a request that are computed together: their number, the bytes of their states.
_MAX_CONCURRENT = 64
_MAX_BYTES = 256 << 20
_FLOAT_BYTES = 4


async def embeddings(state: State, exchange: Exchange) -> None:
    """Answer with an embedding of each text."""
    _, request = await read_request(state, exchange, EmbeddingsRequest)
    prompts = text_prompts("input", request.input, state.max_prompts)
    call = Call(prompts, _PARAMS.replace(priority=request.priority))
    generation = begin(state, exchange, "embd", request.model, call, prompt="input")
    batch = _EmbeddingBatch(state, generation, request)
    with state.running(generation):
        await while_connected(exchange.receive, batch.run)
    await exchange.send_json(batch.response())


class _EmbeddingBatch:
    """The embeddings of one HTTP request. Hidden states are dropped as soon as they are pooled."""

    def __init__(self, state: State, generation: Generation, request: EmbeddingsRequest) -> None:
        self._state = state
        self._generation = generation
        self._request = request
        self._embeddings: dict[int, msgspec.Raw] = {}
        self._num_tokens = 0

    async def run(self) -> None:
        """Compute all embeddings."""
        with anyio.CancelScope() as scope:
            self._generation.add(scope)
            await self._compute(await self._hidden_size())
        if scope.cancelled_caught:
            raise ApiError(503, "the request was aborted", code="aborted")

    async def _hidden_size(self) -> int:
        model = self._generation.model
        if model.hidden_size is None:
            result = await model.engine.generate([0], _PARAMS)
            model.hidden_size = _states(result).shape[1]
        return model.hidden_size

    async def _compute(self, hidden_size: int) -> None:
        request, call, engine = self._request, self._generation.call, self._generation.model.engine
        if request.dimensions is not None and request.dimensions > hidden_size:
            raise invalid("dimensions", request.dimensions, f"at most {hidden_size}, the size of the model")
        # A character has at most four tokens, which are its bytes.
        longest = min(4 * max(map(len, call.prompts)) + 1, engine.info.max_model_len)
        concurrency = _MAX_BYTES // (longest * hidden_size * _FLOAT_BYTES)
        concurrency = min(max(concurrency, 1), _MAX_CONCURRENT)
        items = engine.generate_many(call.prompts, call.params, concurrency=concurrency, ordered=False)
        async with items:
            async for item in items:
                if item.result is None:
                    place = None if len(call.prompts) == 1 else f"input[{item.index}]"
                    raise self._generation.error_of(item.error or AssertionError(), place)
                self._generation.end(item.result)
                self._count(item.result.usage.prompt_tokens)
                threads, states = self._state.response_threads, _states(item.result)
                self._embeddings[item.index] = await threads.run(_pooled, states, request)

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        limit = self._state.settings.max_embedding_tokens
        if self._num_tokens > limit:
            raise invalid("input", f"{self._num_tokens} tokens or more", f"at most {limit} tokens in all")

    def response(self) -> dict[str, Any]:
        """The embeddings in the order of the input."""
        found = [self._embeddings[index] for index in range(len(self._generation.call.prompts))]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": embedding}
                for index, embedding in enumerate(found)
            ],
            "model": self._generation.name,
            "usage": {"prompt_tokens": self._num_tokens, "total_tokens": self._num_tokens},
        }


def _states(result: penstock.Result) -> penstock.Tensor:
    if result.hidden_states is None:
        raise AssertionError("the request has asked for hidden states")
    return result.hidden_states


def _pooled(states: penstock.Tensor, request: EmbeddingsRequest) -> msgspec.Raw:
    """The embedding as JSON text: the mean or the last one of the hidden states."""
    import numpy as np

    rows = np.asarray(states)
    vector = rows[-1] if request.pooling == "last" else rows.mean(axis=0, dtype=np.float64)
    vector = vector[: request.dimensions].astype(np.float64)
    if request.normalize:
        vector /= np.linalg.norm(vector) or 1.0
    floats = vector.astype("<f4")
    if request.encoding_format == "base64":
        return msgspec.Raw(json_bytes(b64encode(floats.tobytes()).decode()))
    return msgspec.Raw(json_bytes(floats.tolist()))
