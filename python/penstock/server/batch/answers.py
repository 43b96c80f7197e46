"""Answers the lines of a batch's input with the handlers of their routes, as over HTTP."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import anyio
import msgspec

from penstock.server.batch.lines import ENDPOINTS, answer_of
from penstock.server.chat import chat_completions
from penstock.server.completions import completions
from penstock.server.embeddings import embeddings
from penstock.server.errors import ApiError
from penstock.server.http import Exchange
from penstock.server.logs import request_id
from penstock.server.rerank import rerank, score
from penstock.server.responses.handlers import create_response

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.types import Message

    from penstock.server.batch.lines import Answer, Line, Requester
    from penstock.server.limits import Handler
    from penstock.server.state import State

__all__ = ["answer_line"]

_ANSWERERS = (chat_completions, completions, embeddings, create_response, rerank, score)
_HANDLERS: Mapping[str, Handler] = dict(zip(ENDPOINTS, _ANSWERERS, strict=True))
#: Times that a response is computed for which the server has no room.
_MAX_COMPUTED = 3


class _LineExchange(Exchange):
    """The request of a line, and its response."""

    def __init__(self, state: State, line: Line, requester: Requester) -> None:
        body = bytes(line.body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "method": "POST", "path": line.url, "query_string": b"", "headers": headers}
        super().__init__(scope, self._next_message, self._take_message, state)
        self.key, self.client, self.min_priority = requester
        self._unread: bytes | None = body
        self._parts: list[bytes] = []

    async def _next_message(self) -> Message:
        body, self._unread = self._unread, None
        if body is None:
            await anyio.sleep_forever()  # the client does not disconnect
        return {"type": "http.request", "body": body}

    async def _take_message(self, message: Message) -> None:
        self._parts.append(message.get("body", b""))

    async def start_stream(self) -> None:
        raise ApiError(400, "stream=True is not allowed: it must be false in a batch", param="stream")

    @property
    def body(self) -> msgspec.Raw:
        """The body of the response."""
        return msgspec.Raw(b"".join(self._parts))


async def answer_line(
    state: State, line: Line, requester: Requester, before_retry: Callable[[], object]
) -> Answer:
    """The response to a request. One that the server has no room for now is repeated until it has.

    A request with a computed response that has no room is computed three times at most. `before_retry`
    can raise to give up.
    """
    label = secrets.token_hex(16)
    token = request_id.set(label)
    try:
        num_computed = 0
        while True:
            exchange = await _answered(state, line, requester)
            error = exchange.error
            num_computed += exchange.generation is not None and bool(exchange.generation.ended)
            if error is None or error.retry_after is None or num_computed == _MAX_COMPUTED:
                break
            before_retry()
            await anyio.sleep(error.retry_after)
    finally:
        request_id.reset(token)
    response = {"status_code": exchange.status, "request_id": label, "body": exchange.body}
    return answer_of(line, response, None if error is None else error.body()["error"])


async def _answered(state: State, line: Line, requester: Requester) -> _LineExchange:
    exchange = _LineExchange(state, line, requester)
    try:
        await _HANDLERS[line.url](state, exchange)
    except Exception as error:  # noqa: BLE001 - the boundary of the request
        await exchange.send_error(exchange.error_of(error))
    finally:
        exchange.close()
    return exchange
