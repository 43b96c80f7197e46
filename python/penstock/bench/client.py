"""Sends requests and records when their output arrives."""

from __future__ import annotations

import asyncio
import math
import os
import time
from array import array
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

import aiohttp

from penstock.bench.sse import EventReader, StreamError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from types import TracebackType

    from penstock.bench.prompts import Body
    from penstock.bench.settings import BenchSettings

__all__ = ["UNREACHABLE", "Client", "Record"]

#: The kind of a failure to connect.
UNREACHABLE = "unreachable"

#: Servers close idle connections after 5 seconds or more. A request on one that is closed would fail.
_KEEP_ALIVE = 2.0
_MAX_MESSAGE = 4096


@dataclass(slots=True)
class Record:
    """A request. Times are those of `time.perf_counter`; `scheduled` is the time at which it should start."""

    scheduled: float
    sent: float
    max_tokens: int
    #: Whether an earlier request had the same prompt.
    is_repeated: bool = False
    end: float = math.nan
    #: The time of each event with output.
    times: array[float] = field(default_factory=lambda: array("d"))
    input_tokens: int | None = None
    output_tokens: int | None = None
    #: The kind of a failure, and the message of this one.
    error: str | None = None
    message: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first output."""
        return self.times[0] - self.scheduled if self.times else math.nan

    @property
    def e2el(self) -> float:
        """Time to the end of the response."""
        return self.end - self.scheduled

    @property
    def tokens(self) -> int:
        """The number of output tokens that the server reports, else of events."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; NaN if there is none."""
        if self.tokens < 2 or not self.times:  # noqa: PLR2004
            return math.nan
        return (self.times[-1] - self.times[0]) / (self.tokens - 1)


class Client:
    """Connections to a server."""

    def __init__(self, settings: BenchSettings) -> None:
        root = settings.url.rstrip("/").removesuffix("/v1")
        route = "chat/completions" if settings.endpoint == "chat" else "completions"
        self._shown_url = settings.shown_url
        self._models = f"{root}/v1/models"
        self._url = f"{root}/v1/{route}"
        headers = {"Accept-Encoding": "identity"}
        if settings.api_key is not None:
            headers["Authorization"] = f"Bearer {settings.api_key}"
        self._timeout = settings.timeout
        self._session = aiohttp.ClientSession(
            connector=_connector(keep_alive=settings.keep_alive),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The name of the first model of the server. Raises `StreamError`."""
        async with self._limited(), self._session.get(self._models, allow_redirects=False) as response:
            if response.status != 200:  # noqa: PLR2004
                raise await _refusal(response)
            try:
                fields = await response.json(content_type=None)
                return str(fields["data"][0]["id"])
            except (LookupError, TypeError, ValueError, RecursionError):
                raise StreamError("no model", "the response lists no model") from None

    async def send(self, body: Body, scheduled: float) -> Record:
        """Send a request and read its stream to the end."""
        record = Record(scheduled, time.perf_counter(), body.max_tokens, body.is_repeated)
        reader = EventReader()
        record.times = reader.times
        try:
            async with self._limited():
                usage = await self._read(body, reader)
            record.input_tokens = usage.get("prompt_tokens")
            record.output_tokens = usage.get("completion_tokens")
        except StreamError as error:
            record.error, record.message = error.kind, str(error)
        record.end = time.perf_counter()
        return record

    @asynccontextmanager
    async def _limited(self) -> AsyncIterator[None]:
        """Limits the time, and raises errors of the connection as `StreamError`."""
        try:
            async with asyncio.timeout(self._timeout):
                yield
        except TimeoutError:
            raise StreamError("timeout", f"no end within {self._timeout:g} seconds") from None
        except aiohttp.ClientConnectorError as error:
            raise StreamError(
                UNREACHABLE, f"no server at {self._shown_url}: {_reason(error.os_error)}"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise StreamError(type(error).__name__, str(error)) from error

    async def _read(self, body: Body, reader: EventReader) -> dict[str, int]:
        """Send a request and read its stream; returns the usage."""
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self._url, data=body.content, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:  # noqa: PLR2004
                raise await _refusal(response)
            async for data in response.content.iter_any():
                reader.feed(data, time.perf_counter())
        usage = reader.end(time.perf_counter())
        if not reader.times and not usage.get("completion_tokens"):
            raise StreamError("no output", "the response has no text and no tokens")
        return usage


def _reason(error: OSError) -> str:
    """The text of the system, which event loops replace by the address. Unknown names have their own."""
    number = error.errno or 0
    return os.strerror(number) if number > 0 else error.strerror or str(error)


def _connector(*, keep_alive: bool) -> aiohttp.TCPConnector:
    if keep_alive:
        return aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE)
    return aiohttp.TCPConnector(limit=0, force_close=True)


async def _refusal(response: aiohttp.ClientResponse) -> StreamError:
    text = (await response.content.read(_MAX_MESSAGE)).decode(errors="replace")
    return StreamError(f"HTTP {response.status}", text)
