"""Errors as responses in the form of AIBrix's runtime."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ApiError", "api_error", "invalid_body", "not_allowed"]

logger = logging.getLogger("penstock.runtime")

#: Characters of a message, which can have texts of the client or of the engine.
_MAX_MESSAGE = 2000


class ApiError(Exception):
    """An error response: a flat object with the fields `object`, `message`, `type`, `param` and `code`."""

    def __init__(
        self,
        status: int,
        kind: str,
        message: str,
        *,
        param: str | None = None,
        fields: Mapping[str, Any] | None = None,
        is_flat: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        #: Further fields of the object, or all of them.
        self.fields = dict(fields or {})
        self._is_flat = is_flat

    def body(self) -> dict[str, Any]:
        """The JSON object of the response."""
        if not self._is_flat:
            return self.fields
        text = str(self)
        message = text if len(text) <= _MAX_MESSAGE else text[:_MAX_MESSAGE] + " ..."
        found = {"object": "error", "message": message, "type": self.kind, "param": self.param}
        return {**found, "code": self.status, **self.fields}


def invalid_body(message: str, kind: str, location: Sequence[str | int]) -> ApiError:
    """The error 422 of a body that does not have the form of its route, with pydantic's list `detail`."""
    place = ("body", *location)
    detail = [{"type": kind, "loc": place, "msg": message}]
    param = ".".join(map(str, location)) or None
    text = f"{param}: {message}" if param else message
    return ApiError(422, "RequestValidationError", text, param=param, fields={"detail": detail})


def not_allowed(kind: str, field: str, value: object, limit: str) -> ApiError:
    """The error 400 of an invalid field."""
    shown = repr(value)
    shown = shown if len(shown) <= 128 else shown[:128] + " ..."  # noqa: PLR2004 - the bound of a message
    return ApiError(400, kind, f"{field}={shown} is not allowed: it must be {limit}", param=field)


def api_error(error: Exception) -> ApiError:
    """The response for an exception."""
    if isinstance(error, ApiError):
        return error
    logger.error("request failed", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "InternalError", "internal error")
