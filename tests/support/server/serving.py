"""A server on a real socket, in a thread of the test process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

import penstock
import penstock.server
from support.api.engines import make_engine, wait_until
from support.server import scripted

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path


class Served:
    """An application that uvicorn serves, and requests to it."""

    def __init__(self, application: Any, port: int) -> None:
        self.application = application
        self.port = port
        self.url = f"http://127.0.0.1:{port}"

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """The status, the decoded body and the headers of a response; the names are in lower case."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        content = body if isinstance(body, bytes) else None if body is None else json.dumps(body)
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(
            method or ("GET" if body is None else "POST"), path, content, {**kind, **(headers or {})}
        )
        response = connection.getresponse()
        text = response.read()
        connection.close()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type") == "application/json"
        return response.status, json.loads(text) if is_json else text, found

    def events(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The events of a stream; `[DONE]` is the string, a comment begins with a colon."""
        status, text, headers = self.ask(path, {**body, "stream": True})
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        parts = text.decode().split("\n\n")
        assert parts.pop() == ""
        return [_event(part) for part in parts]

    def send(self, data: bytes) -> socket.socket:
        """A new connection, on which these bytes were sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        connection.sendall(data)
        return connection


def _event(part: str) -> Any:
    if part.startswith(":"):
        return part
    assert part.startswith("data: ")
    data = part.removeprefix("data: ")
    return data if data == "[DONE]" else json.loads(data)


def post(path: str, body: object, length: int | None = None) -> bytes:
    """The bytes of a request; `length` is another content length than that of the body."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(content) if length is None else length}",
    )
    return "\r\n".join((*lines, "", "")).encode() + content


@contextmanager
def serving(application: Any, **config: Any) -> Iterator[Served]:
    """Serve an application until the block is left."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        settings: dict[str, Any] = {"log_level": "error", "lifespan": "off", **config}
        server = uvicorn.Server(uvicorn.Config(application, **settings))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Served(application, listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def scripted_server(model: Path, folder: Path, pieces: Sequence[str]) -> Iterator[Served]:
    """A server with a model that answers `scripted.MESSAGES` with these texts, one a token.

    The request needs the seed, the temperature 2 and `ignore_eos`. The format of calls is that of Hermes.
    """
    model = scripted.showing_tools(model, folder / "model")
    script = scripted.find_script(model, folder / "tokenizer.json")
    texts = dict(zip(script.token_ids, pieces, strict=False))
    tokenizer = scripted.write_tokenizer(folder / "tokenizer.json", 512, texts)
    parsers = {"tool_parser": "hermes", "reasoning_parser": "think"}
    with make_engine(model, tokenizer=tokenizer, **parsers) as engine:
        application: Any = penstock.server.app(engine)
        application.script = script
        with serving(application) as server:
            yield server


@contextmanager
def held(engine: penstock.Engine) -> Iterator[None]:
    """Hold the engine in a step: no request gets a token until the block is left."""
    is_held, may_continue = threading.Event(), threading.Event()

    def wait(_token_ids: list[int], _logits: penstock.Tensor) -> None:
        is_held.set()
        may_continue.wait(60)

    with engine.blocking.stream([1], max_tokens=1, logits_processors=[wait]) as request:
        assert is_held.wait(60)
        try:
            yield
        finally:
            may_continue.set()
        request.result()


def at_rest(engine: penstock.Engine) -> bool:
    """Whether the engine has no request and no block in use."""
    stats = engine.stats()
    return (stats.running, stats.waiting, stats.paused, stats.blocks_used) == (0, 0, 0, 0)
