"""Reads and checks the lines of a batch's input, each a request, and makes the lines of its output."""

from __future__ import annotations

import secrets
from http import HTTPStatus
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from penstock.server.sse import json_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = [
    "ENDPOINTS",
    "ID_PREFIX",
    "PIECE_BYTES",
    "Answer",
    "FileCheck",
    "Line",
    "LineReader",
    "Requester",
    "answer_of",
    "unanswered",
]

#: The values of `url`.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/rerank",
    "/v1/score",
)
#: The beginning of the ids of output lines.
ID_PREFIX = "batch_req_"
#: Above the largest body by default. A body that is too large for the server is an error of its line.
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


class Answer(NamedTuple):
    """A line of the output, with its end, and whether the request has succeeded."""

    text: bytes
    is_ok: bool


def unanswered(line: Line, code: str, message: str) -> Answer:
    """The answer to a request that was not computed."""
    return answer_of(line, None, {"code": code, "message": message})


def answer_of(line: Line, response: dict[str, Any] | None, error: dict[str, Any] | None) -> Answer:
    """The line of the output for a request with this response, or with an error."""
    fields = {
        "id": ID_PREFIX + secrets.token_hex(16),
        "custom_id": line.custom_id,
        "response": response,
        "error": error and {"code": error["code"], "message": error["message"]},
    }
    is_ok = response is not None and response["status_code"] == HTTPStatus.OK
    return Answer(json_bytes(fields) + b"\n", is_ok)
