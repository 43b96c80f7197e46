"""`/v1/embeddings`: pooled hidden states of the last layer."""

from __future__ import annotations

from base64 import b64encode
from typing import TYPE_CHECKING

import msgspec

import penstock
from penstock.server.calls import Call
from penstock.server.disconnects import while_connected
from penstock.server.errors import invalid
from penstock.server.generation import begin
from penstock.server.prompt_batch import PromptBatch
from penstock.server.prompts import text_prompts
from penstock.server.protocol.openai_embeddings import EmbeddingsRequest
from penstock.server.sampling import Unsupported, read_request
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from penstock.server.http import Exchange
    from penstock.server.state import State

__all__ = ["embeddings"]

UNSUPPORTED: Unsupported = {
    "add_special_tokens": ((True,), "true"),
    "embed_dtype": (("float32",), "float32"),
    "endianness": (("native", "little"), "little"),
    "messages": ((), "left out: input has the text"),
    "truncate_prompt_tokens": ((), "left out: a longer input is an error"),
    "truncation_side": (("left", "right"), "left or right"),
}

#: One token is generated, because the engine has no request without. The prefix cache keeps no prompt.
_PARAMS = penstock.SamplingParams(max_tokens=1, output_hidden_states="prompt", use_prefix_cache=False)
#: Bounds of the prompts of a request that are computed together: their number, the bytes of their states.
_MAX_CONCURRENT = 64
_MAX_BYTES = 256 << 20
_FLOAT_BYTES = 4


async def embeddings(state: State, exchange: Exchange) -> None:
    """Answer with an embedding of each text."""
    _, request = await read_request(state, exchange, EmbeddingsRequest, (), UNSUPPORTED)
    prompts = text_prompts("input", request.input, state.calls.max_prompts)
    call = Call(prompts, _PARAMS.replace(priority=request.priority), returns_tokens=False)
    generation = begin(state, exchange, "embd-", request.model, call, prompt="input")
    batch = PromptBatch(state, generation, "input")
    found: dict[int, msgspec.Raw] = {}
    with state.calls.running(generation):
        encoder = _Encoder(request, generation.model.engine.info)

        async def encode(index: int, result: penstock.Result) -> None:
            text = await state.response_threads.run(encoder.encode, result)
            exchange.hold(len(text))
            found[index] = msgspec.Raw(text)

        async def run() -> None:
            await batch.run(encode, concurrency=encoder.concurrency(max(map(len, prompts))))

        await while_connected(exchange.receive, run)
    data = [
        {"object": "embedding", "index": index, "embedding": found[index]} for index in range(len(prompts))
    ]
    await exchange.send_json(
        {"object": "list", "data": data, "model": generation.name, "usage": batch.usage()}
    )


class _Encoder:
    """Makes the embeddings of a request from results, with the defaults of the model."""

    def __init__(self, request: EmbeddingsRequest, info: penstock.ModelInfo) -> None:
        self._request = request
        self._info = info
        self._pooling: str = request.pooling or info.pooling
        if self._pooling not in ("last", "mean"):
            limit = "'last' or 'mean' in the request: the model's files ask for another one"
            raise invalid("pooling", self._pooling, limit)
        given = [value for value in (request.normalize, request.use_activation) if value is not None]
        self._normalize = all(given) if given else info.normalize
        if request.dimensions is not None and request.dimensions > info.hidden_size:
            limit = f"at most {info.hidden_size}, the size of the model"
            raise invalid("dimensions", request.dimensions, limit)

    def concurrency(self, longest: int) -> int:
        """The number of prompts that are computed together; the longest has this length."""
        # A character has at most four tokens, which are its bytes.
        num_tokens = min(4 * longest + 1, self._info.max_model_len)
        fitting = _MAX_BYTES // (num_tokens * self._info.hidden_size * _FLOAT_BYTES)
        return min(max(fitting, 1), _MAX_CONCURRENT)

    def encode(self, result: penstock.Result) -> bytes:
        """The embedding as JSON text."""
        if result.hidden_states is None:
            raise AssertionError("the request has asked for hidden states")
        dimensions = self._request.dimensions
        pooled = result.hidden_states.pooled(self._pooling, normalize=self._normalize, dimensions=dimensions)
        vector = memoryview(pooled)
        if self._request.encoding_format == "base64":
            return json_bytes(b64encode(vector).decode())
        return json_bytes(vector.tolist())
