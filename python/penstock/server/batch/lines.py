"""The lines of a batch's input, each a request: checks of a file, and the answers to its requests.

A request is answered by the handler of its route, so it gets the response that it would get over HTTP.
"""

from __future__ import annotations

import secrets
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import msgspec

from penstock.server.chat import chat_completions
from penstock.server.completions import completions
from penstock.server.embeddings import embeddings
from penstock.server.errors import ApiError
from penstock.server.http import Exchange
from penstock.server.logs import request_id
from penstock.server.rerank import rerank, score
from penstock.server.responses.handlers import create_response
from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from starlette.types import Message

    from penstock.server.limits import Handler
    from penstock.server.state import State

__all__ = [
    "ENDPOINTS",
    "ID_PREFIX",
    "PIECE_BYTES",
    "Answer",
    "FileCheck",
    "Line",
    "LineReader",
    "Requester",
    "answer_line",
    "unanswered",
]

_HANDLERS: Mapping[str, Handler] = {
    "/v1/chat/completions": chat_completions,
    "/v1/completions": completions,
    "/v1/embeddings": embeddings,
    "/v1/responses": create_response,
    "/v1/rerank": rerank,
    "/v1/score": score,
}
#: The values of `url`.
ENDPOINTS = tuple(_HANDLERS)
#: The beginning of the ids of output lines.
ID_PREFIX = "batch_req_"
#: Above the largest body by default. A body that is too large for the server is an error of its line.
#: Times that a response is computed for which the server has no room.
_MAX_COMPUTED = 3
_MAX_LINE_BYTES = 33 << 20
#: Bytes of lines that are read at once; a longer line is read whole.
PIECE_BYTES = 1 << 20
_MAX_ID_CHARS = 256
#: The number of errors that are listed of a file.
_MAX_ERRORS = 20


class Line(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Problem(NamedTuple):
    """An error of a line, by its number from 1, or of the file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


_decode = msgspec.json.Decoder(Line).decode


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers. One that is too long ends the file."""
    with path.open("rb") as file:
        for number in count(1):
            line = file.readline(_MAX_LINE_BYTES + 1)
            if not line:
                return
            yield number, line
            if len(line) > _MAX_LINE_BYTES:
                return


class LineReader:
    """Reads the requests of a file that has been checked."""

    def __init__(self, path: Path) -> None:
        self._lines = _lines(path)

    def read(self) -> list[Line] | None:
        """The requests of the next lines, `PIECE_BYTES` of them or one more; nothing at the end."""
        found: list[Line] = []
        size = 0
        for _, text in self._lines:
            if not text.isspace():
                found.append(_decode(text))
            size += len(text)
            if size >= PIECE_BYTES:
                break
        return found if size else None


class FileCheck:
    """Checks the lines of a file. With `endpoint`, all must have that one."""

    def __init__(self, path: Path, *, endpoint: str | None = None, max_lines: int | None = None) -> None:
        self._lines = _lines(path)
        self._endpoint = endpoint
        self._max_lines = max_lines
        self.custom_ids = set[str]()
        #: Bytes of the longest line.
        self.longest = 0
        #: The first errors.
        self.problems: list[Problem] = []

    def advance(self) -> bool:
        """Check the next lines, `PIECE_BYTES` of them or one more; returns whether there can be others."""
        size = 0
        for number, text in self._lines:
            if self._max_lines is not None and number > self._max_lines:
                message = f"the file has too many lines: the limit is {self._max_lines}, blank ones included"
                self.problems.append(Problem("too_many_requests", message))
                return False
            if not text.isspace():
                self._check(number, text)
            if len(self.problems) == _MAX_ERRORS:
                return False
            size += len(text)
            if size >= PIECE_BYTES:
                return True
        if not (self.custom_ids or self.problems):
            self.problems.append(Problem("empty_file", "the file has no request"))
        return False

    def _check(self, number: int, text: bytes) -> None:
        self.longest = max(self.longest, len(text))
        problem = _problem(number, text, self._endpoint, self.custom_ids)
        if problem is not None:
            self.problems.append(problem)


def _problem(number: int, text: bytes, endpoint: str | None, custom_ids: set[str]) -> Problem | None:
    """The error of a line, if it has one; otherwise its id is added to the others."""
    if len(text) > _MAX_LINE_BYTES:
        message = f"the line is too long: the limit is {_MAX_LINE_BYTES} bytes"
        return Problem("line_too_long", message, number)
    try:
        line = _decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Problem("invalid_json_line", f"the line is not a request: {error}", number)
    if len(line.custom_id) > _MAX_ID_CHARS:
        limit = f"a text of at most {_MAX_ID_CHARS} characters"
        message = f"custom_id={line.custom_id[:64]!r} is not allowed: it must be {limit}"
        return Problem("invalid_custom_id", message, number, "custom_id")
    if line.method != "POST":
        message = f"method={line.method[:64]!r} is not allowed: it must be POST"
        return Problem("invalid_method", message, number, "method")
    allowed = ENDPOINTS if endpoint is None else (endpoint,)
    if line.url not in allowed:
        message = f"url={line.url[:64]!r} is not allowed: it must be {' or '.join(allowed)}"
        return Problem("invalid_url" if endpoint is None else "mismatched_endpoint", message, number, "url")
    if line.custom_id in custom_ids:
        message = f"custom_id={line.custom_id[:64]!r} is not allowed: another line has it"
        return Problem("duplicate_custom_id", message, number, "custom_id")
    custom_ids.add(line.custom_id)
    return None


class Requester(NamedTuple):
    """The client that the requests of a batch belong to."""

    #: The digest of its API key.
    key: bytes = b""
    client: int = 0
    min_priority: int | None = None


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


class Answer(NamedTuple):
    """A line of the output, with its end, and whether the request has succeeded."""

    text: bytes
    is_ok: bool


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
    return _answer(line, response, None if error is None else error.body()["error"])


async def _answered(state: State, line: Line, requester: Requester) -> _LineExchange:
    exchange = _LineExchange(state, line, requester)
    try:
        await _HANDLERS[line.url](state, exchange)
    except Exception as error:  # noqa: BLE001 - the boundary of the request
        await exchange.send_error(exchange.error_of(error))
    finally:
        exchange.close()
    return exchange


def unanswered(line: Line, code: str, message: str) -> Answer:
    """The answer to a request that was not computed."""
    return _answer(line, None, {"code": code, "message": message})


def _answer(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> Answer:
    fields = {
        "id": ID_PREFIX + secrets.token_hex(16),
        "custom_id": line.custom_id,
        "response": response,
        "error": error and {"code": error["code"], "message": error["message"]},
    }
    is_ok = response is not None and response["status_code"] == HTTPStatus.OK
    return Answer(json_bytes(fields) + b"\n", is_ok)
