"""Answers of a server with OpenAI's API, for `penstock chat --url`; the standard library is the client."""

from __future__ import annotations

import http.client
import json
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from penstock._options import FILTERS, EngineOptions
from penstock.cli.chat import Reply
from penstock.cli.options import given

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import closing
    from typing import IO, TextIO

    from penstock.cli.chat import Messages

__all__ = ["RemoteError", "RemoteModel", "check_source"]

#: Seconds without a byte after which a server counts as lost.
_TIMEOUT = 300
_MAX_LINE = 16 << 20
_MAX_ERROR = 64 << 10
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
#: Sampling parameters that are one field of the API, as vLLM has it.
_CONSTRAINTS = ("regex", "choice", "grammar")
#: Sampling parameters that select tokens.
_SELECTION = ("temperature", *FILTERS)


#: Control characters but tab and line feed: a server must not control the terminal.
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {0x09, 0x0A})


class RemoteError(click.ClickException):
    """The server cannot be reached, or does not answer as OpenAI's API does."""

    def __init__(self, message: str) -> None:
        super().__init__(message.translate(_CONTROLS))


class _SameServer(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error: the API key is for one server."""

    def redirect_request(self, *_arguments: object) -> None:
        return None


class RemoteModel:
    """A model of a server. `fields` are the sampling parameters of its requests.

    Without one that selects tokens, those of `chat_sampling` apply, which the server may list for the model.
    """

    def __init__(self, url: str, name: str | None, api_key: str | None, fields: Mapping[str, Any]) -> None:
        try:
            parts = urlsplit(url)
            host, _ = parts.hostname, parts.port
            is_valid = url.isascii() and parts.scheme in ("http", "https") and host
        except ValueError:
            is_valid = False
        if not is_valid:
            raise click.UsageError(f"--url {url!r}: an address such as http://127.0.0.1:8000 is expected.")
        self._root = url.rstrip("/").removesuffix("/v1") + "/v1/"
        proxies = [urllib.request.ProxyHandler({})] if host in _LOOPBACK else []
        self._opener = urllib.request.build_opener(_SameServer, *proxies)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        constraints = {name: fields[name] for name in _CONSTRAINTS if name in fields}
        self._fields = {name: value for name, value in fields.items() if name not in _CONSTRAINTS}
        if constraints:
            self._fields["structured_outputs"] = constraints
        self.chat_sampling: dict[str, float] = {}
        selects = not fields.keys().isdisjoint(_SELECTION)
        if name is None:
            card = next(iter(self._cards()), {})
            if not isinstance(card.get("id"), str):
                raise RemoteError("the server lists no model: use --model")
            name = card["id"]
        elif not selects:
            card = self._card(name)
        self._name: str = name
        if not selects:
            self.chat_sampling = _chat_sampling_of(card)

    @property
    def label(self) -> str:
        """The name of the model without control characters."""
        return self._name.translate(_CONTROLS)

    def answer(self, messages: Messages, *, is_silent: bool = False) -> Reply:
        """Stream the answer to standard output, and the reasoning to standard error.

        Ctrl-C after the first text ends the request and returns the answer so far.
        """
        body = {
            **self.chat_sampling,
            **self._fields,
            "model": self._name,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = Reply()
        begin = time.perf_counter()
        with self._open("chat/completions", body) as response:
            try:
                for event in _events(response, reply):
                    text, reasoning = _read(event, reply)
                    if (text or reasoning) and reply.first_token is None:
                        reply.first_token = time.perf_counter() - begin
                    reply.content += text
                    reply.reasoning += reasoning
                    if reasoning and not is_silent:
                        click.echo(click.style(_shown(reasoning, sys.stderr), dim=True), nl=False, err=True)
                    if text and not is_silent:
                        click.echo(_shown(text, sys.stdout), nl=False)
            except KeyboardInterrupt:
                if not reply.content:
                    raise
                reply.finish_reason = "cancelled"
            except RemoteError:
                click.echo(err=True)  # ends the line of the answer so far
                raise
        reply.total = time.perf_counter() - begin
        return reply

    def _cards(self) -> list[dict[str, Any]]:
        """The models that the server lists."""
        with self._open("models") as response:
            try:
                cards = json.loads(response.read(_MAX_LINE))["data"]
                return [card for card in cards if isinstance(card, dict)]
            except (LookupError, TypeError, ValueError, RecursionError):
                return []
            except (OSError, http.client.HTTPException) as error:
                raise _lost(error) from error

    def _card(self, name: str) -> dict[str, Any]:
        """The entry of a model; empty if the server lists none, because it can have the model still."""
        with suppress(RemoteError):
            return next((card for card in self._cards() if card.get("id") == name), {})
        return {}

    def _open(self, path: str, body: object = None) -> closing[IO[bytes]]:
        data = None if body is None else json.dumps(body).encode()
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        request = urllib.request.Request(self._root + path, data, headers)  # noqa: S310 - the scheme is checked
        try:
            response: closing[IO[bytes]] = self._opener.open(request, timeout=_TIMEOUT)
        except urllib.error.HTTPError as error:
            with error:
                raise RemoteError(_refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise _lost(error) from error
        return response


def _chat_sampling_of(card: Mapping[str, Any]) -> dict[str, float]:
    """The sampling parameters for chats in the entry of a model."""
    found = card.get("chat_sampling")
    if not isinstance(found, dict):
        return {}
    numbers = {name: found[name] for name in _SELECTION if name in found}
    return {name: value for name, value in numbers.items() if type(value) in (int, float)}


def check_source(model: str | None, options: Mapping[str, Any]) -> None:
    """Refuse options of the other source: MODEL has those of an engine, `--url` those of a server."""
    if (model is None) == (options["url"] is None):
        raise click.UsageError(
            "Missing argument 'MODEL', or --url." if model is None else "--url excludes MODEL."
        )
    names = {"served_name": "--model", "api_key": "--api-key", "api_key_file": "--api-key-file"}
    if model is None:
        names = {name: f"--{name.replace('_', '-')}" for name in (*given(EngineOptions, options), "adapter")}
        names["modules"] = "--lora-modules"
    for name, flag in names.items():
        if options[name] not in (None, ()):
            raise click.UsageError(f"{flag} has no effect {'with' if model is None else 'without'} --url.")


def _refusal(error: urllib.error.HTTPError) -> str:
    text = error.read(_MAX_ERROR).decode(errors="replace")
    try:
        message = json.loads(text)["error"]["message"]
    except (LookupError, TypeError, ValueError):
        message = text.strip()[:200] or error.reason
    later = error.headers.get("Retry-After")
    hint = "" if later is None else f" (try again in {later} s)"
    return f"the server refused the request ({error.code}): {message}{hint}"


def _lost(error: Exception) -> RemoteError:
    reason = getattr(error, "reason", error)
    return RemoteError(f"the server cannot be reached: {reason or type(error).__name__}")


def _shown(text: str, stream: TextIO) -> str:
    """The text as it goes to a stream: a terminal gets no control characters."""
    return text.translate(_CONTROLS) if stream.isatty() else text


def _events(response: IO[bytes], reply: Reply) -> Iterator[dict[str, Any]]:
    """The events of a stream up to its last one. Servers may leave out `[DONE]` after a finish reason."""
    while True:
        try:
            line = response.readline(_MAX_LINE)
        except (OSError, http.client.HTTPException) as error:
            raise RemoteError(f"the connection was lost: {error or type(error).__name__}") from error
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]" or (not line and reply.finish_reason is not None):
            return
        if not line.endswith(b"\n"):
            raise RemoteError("the answer ended early" if len(line) < _MAX_LINE else "an event is too long")
        if not line.startswith(b"data:"):
            continue
        try:
            event = json.loads(data)
        except (ValueError, RecursionError):
            event = None
        if not isinstance(event, dict):
            raise RemoteError(f"the server sent an event that is not a JSON object: {data[:80]!r}")
        yield event


def _read(event: dict[str, Any], reply: Reply) -> tuple[str, str]:
    """The text and the reasoning of an event; the rest of it is added to the reply."""
    try:
        if event.get("error"):
            raise RemoteError(f"the answer ended early: {event['error']['message']}")
        if usage := event.get("usage"):
            reply.prompt_tokens, reply.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not event.get("choices"):
            return "", ""
        choice = event["choices"][0]
        reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        delta = choice.get("delta") or {}
        return str(delta.get("content") or ""), str(
            delta.get("reasoning") or delta.get("reasoning_content") or ""
        )
    except (AttributeError, LookupError, TypeError) as error:
        raise RemoteError("the server sent an event that is not one of OpenAI's API") from error
