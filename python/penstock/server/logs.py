"""Log records as text or JSON, with the id of the HTTP request that causes them; one for each ended request.

No record has a prompt or an output.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import sys
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from starlette.types import Scope

__all__ = [
    "AccessRecord",
    "access_logger",
    "client_of",
    "configure_logging",
    "request_id",
    "unknown_path_of",
]

#: The id of the HTTP request that the current task answers.
request_id: ContextVar[str] = ContextVar("request_id", default="")
access_logger = logging.getLogger("penstock.server.access")

_MAX_PORT = (1 << 16) - 1
#: Characters of an unknown path.
_MAX_PATH = 128


@dataclass(frozen=True, kw_only=True)
class AccessRecord:
    """The message about an HTTP request that has ended."""

    method: str
    #: That of the route, with the names of its parameters; of an unknown path, a part as it was sent.
    path: str
    status: int
    #: From the headers to the end of the response.
    milliseconds: float
    #: Of the body of the response.
    bytes: int
    #: As `client_of` returns it.
    client: str
    #: The first digits of the API key's SHA-256, if it is valid.
    key: str | None
    model: str | None
    prompt_tokens: int | None
    completion_tokens: int | None

    def __str__(self) -> str:
        fields = {name: value for name, value in asdict(self).items() if value is not None}
        words = [fields.pop("method"), fields.pop("path")]
        return " ".join([*words, *(f"{name}={value}" for name, value in fields.items())])


def client_of(scope: Scope) -> str:
    """The address and the port of the client of a request; nothing of one that is no address.

    A server may have the client from a header, which has any text.
    """
    host, port = scope.get("client") or ("", 0)
    try:
        address = ipaddress.ip_address(str(host).partition("%")[0])  # without the name of an interface
    except ValueError:
        return ""
    text = f"[{address}]" if address.version == 6 else str(address)  # noqa: PLR2004 - IPv6
    return f"{text}:{port}" if isinstance(port, int) and 0 < port <= _MAX_PORT else text


def unknown_path_of(scope: Scope) -> str:
    """A part of the path of a request without a route, in printable ASCII without blanks."""
    path: bytes = scope.get("raw_path") or b""
    return re.sub(rb"[^!-~]", lambda found: b"%%%02X" % found[0][0], path[:_MAX_PATH]).decode()[:_MAX_PATH]


class _TextFormatter(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s%(label)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name of the base class
        found = request_id.get()
        record.label = found and f" [{found}]"
        return super().formatMessage(record)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if found := request_id.get():
            fields["request_id"] = found
        if isinstance(record.msg, AccessRecord):
            fields["message"] = f"{record.msg.method} {record.msg.path} {record.msg.status}"
            fields |= {name: value for name, value in asdict(record.msg).items() if value is not None}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def configure_logging(level: str, kind: Literal["text", "json"], *, has_access: bool) -> None:
    """Write the records of this level and above, of all libraries, to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter() if kind == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if not has_access:
        access_logger.setLevel(logging.WARNING)
