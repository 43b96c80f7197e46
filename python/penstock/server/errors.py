"""Exceptions as responses in the forms of OpenAI's and Anthropic's APIs.

A message has no path and no address, because it goes to clients; the log has the exception as it is.
"""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Sized
from http import HTTPStatus
from typing import Any, cast

import penstock

__all__ = ["ApiError", "api_error", "invalid", "prompt_error", "prompt_too_long"]

logger = logging.getLogger("penstock.server")

#: Paths, but those of the server's routes, and addresses.
_PRIVATE = re.compile(r"(?<![\w.])(?!/v1/)(?:/[\w.+@~-]+){2,}/?|\b0x[0-9a-fA-F]{4,}\b")

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
#: The limit in the engine's error of a prompt that is too long.
_PROMPT_LIMIT = re.compile("at most ([0-9]+) (tokens|bytes|ids)")
#: Parts of a value that a message shows.
_shown = reprlib.Repr()
_shown.maxlevel = 3
_shown.maxstring = _shown.maxother = _shown.maxlong = 60
#: Characters of a message, which can have names and values of the client.
_MAX_MESSAGE = 2000


class ApiError(Exception):
    """An error response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after
        #: The methods of the path, of an error 405.
        self.allow = allow

    def body(self) -> dict[str, Any]:
        """The JSON object of the response in the form of OpenAI's API."""
        other = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else _TYPES[400]
        kind = _TYPES.get(self.status, other)
        return {"error": {"message": self._message(), "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The JSON object of the response in the form of Anthropic's API."""
        other = "api_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        kind = _ANTHROPIC_TYPES.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": self._message()}}

    def _message(self) -> str:
        text = str(self)
        if len(text) > _MAX_MESSAGE:
            text = text[:_MAX_MESSAGE] + " ..."
        return _PRIVATE.sub("...", text)

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that belong to the error."""
        found = [(b"content-type", b"application/json")]
        if self.retry_after is not None:
            found.append((b"retry-after", str(self.retry_after).encode()))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.status == HTTPStatus.UNAUTHORIZED:
            found.append((b"www-authenticate", b"Bearer"))
        return found


def invalid(field: str, value: object, limit: str) -> ApiError:
    """The error of an invalid field."""
    return ApiError(400, f"{field}={_shown.repr(value)} is not allowed: it must be {limit}", param=field)


def prompt_too_long(field: str, size: int | str, limit: int, unit: str, max_model_len: int) -> ApiError:
    """The error of a prompt that is longer than the model can read.

    Clients shorten a conversation after OpenAI's code, or after a phrase of the message: "maximum context
    length" is OpenAI's, "prompt is too long" Anthropic's. `size` is "more than" a number if the rest was not
    counted.
    """
    message = (
        f"prompt is too long: {size} {unit} > {limit} maximum; this model's maximum context length is "
        f"{max_model_len} tokens, output included; {field} must be shorter"
    )
    return ApiError(400, message, param=field, code="context_length_exceeded")


def prompt_error(error: penstock.InvalidRequestError, field: str, max_model_len: int | None) -> ApiError:
    """The response for an invalid prompt, which has the name `field` in the request."""
    found = _PROMPT_LIMIT.fullmatch(error.limit or "")
    if found is None:
        return ApiError(400, str(error).replace("prompt", field, 1), param=field)
    size = error.value
    if isinstance(size, Sized) and not isinstance(size, str):
        size = len(size)
    limit, unit = int(found[1]), found[2].replace("ids", "tokens")
    return prompt_too_long(field, cast("int | str", size), limit, unit, max_model_len or limit)


def api_error(error: BaseException) -> ApiError:
    """The response for an exception."""
    if isinstance(error, ApiError):
        # The request keeps its error, and the frames of a traceback have the request: a cycle.
        error.__cause__ = error.__context__ = None
        return error.with_traceback(None)
    if isinstance(error, penstock.AdapterNotFoundError):
        message = "the model does not exist: its adapter was unloaded"
        return ApiError(404, message, param="model", code="model_not_found")
    if isinstance(error, penstock.InvalidRequestError):
        return ApiError(400, str(error), param=error.field)
    if isinstance(error, penstock.OverloadedError):
        return ApiError(429, str(error), code="overloaded", retry_after=1)
    if isinstance(error, penstock.EngineStoppedError):
        logger.warning("request refused: %s", error)
        return ApiError(503, "the model is not available now", code="unavailable", retry_after=5)
    if isinstance(error, penstock.OutOfMemoryError):
        logger.warning("request refused: %s", error)
        return ApiError(503, "the server has too little memory now", code="unavailable", retry_after=5)
    if isinstance(error, penstock.GenerationError):
        logger.warning("request failed: %s", error)
        return ApiError(500, str(error), code="generation_failed")
    logger.error("request failed", exc_info=error)
    return ApiError(500, "internal error", code="internal_error")
