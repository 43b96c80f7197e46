"""An engine on a real socket that returns what a test gives, and a runtime in front of it."""

from __future__ import annotations

import json
import socket
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.runtime import RuntimeSettings
from penstock.runtime.serve import server
from support.api.engines import wait_until
from support.server.serving import Served, serving

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import uvicorn
    from starlette.types import Receive, Scope, Send


class Call(NamedTuple):
    """A request that the engine got."""

    method: str
    path: str
    body: Any
    headers: dict[str, str]


class Answer(NamedTuple):
    """A response of the engine."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class FakeEngine:
    """An ASGI application with the answers of a test; other paths have status 404."""

    def __init__(self) -> None:
        #: By path; the last one of a list is repeated.
        self.answers: dict[str, list[Answer]] = {}
        self.calls: list[Call] = []
        #: While this is clear, nothing is answered.
        self.may_answer = threading.Event()
        self.may_answer.set()

    def answer(self, path: str, *answers: Answer) -> None:
        """Answer the requests for a path with these, in their order."""
        self.answers[path] = list(answers)

    def show_metrics(self, text: str) -> None:
        """Return this text as metrics."""
        self.answer("/metrics", Answer(body=text.encode()))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        import anyio.to_thread

        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        path = scope["path"]
        self.calls.append(Call(scope["method"], path, json.loads(body) if body else None, headers))
        await anyio.to_thread.run_sync(self.may_answer.wait, abandon_on_cancel=True)
        answers = self.answers.get(path, [Answer(404, b"not found")])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        found = {"content-type": "text/plain", "content-length": str(len(answer.body)), **answer.headers}
        pairs = [(name.encode(), value.encode()) for name, value in found.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": pairs})
        await send({"type": "http.response.body", "body": answer.body})


#: A token of runtimes that start engines.
TOKEN = "operator"  # noqa: S105 - of the tests


def with_token(request: bytes) -> bytes:
    """The bytes of a request with the token."""
    return request.replace(b"\r\nHost:", f"\r\nX-API-Key: {TOKEN}\r\nHost:".encode(), 1)


class Runtime(Served):
    """A runtime on a real socket, with its engine."""

    engine: FakeEngine
    server: uvicorn.Server

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any, dict[str, str]]:
        """As the base class; without headers, with `TOKEN` if that is one of the runtime."""
        state = getattr(self.application, "state", None)  # none of a program
        if headers is None and state is not None and TOKEN in state.settings.tokens:
            headers = {"Authorization": f"Bearer {TOKEN}"}
        return super().ask(path, body, method=method, headers=headers)

    def families(self, text: bytes | None = None) -> dict[str, Any]:
        """The metric families of a scrape by name, of a parser that refuses what Prometheus refuses."""
        from prometheus_client.parser import text_string_to_metric_families as parse

        if text is None:
            status, text, headers = self.ask("/metrics")
            assert (status, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
        assert text is not None
        found: dict[str, Any] = {}
        series = set()
        for family in parse(text.decode()):
            assert family.name not in found, f"two families {family.name}"
            found[family.name] = family
            for sample in family.samples:
                key = (sample.name, tuple(sorted(sample.labels.items())))
                assert key not in series, f"two samples {key}"
                series.add(key)
        return found

    def value(self, name: str, **labels: str) -> float:
        """The value of a sample of a scrape."""
        for family in self.families().values():
            for sample in family.samples:
                if sample.name == name and labels.items() <= sample.labels.items():
                    return float(sample.value)
        raise AssertionError(f"no sample {name} {labels}")


@contextmanager
def running(settings: RuntimeSettings) -> Iterator[Runtime]:
    """A runtime with these settings, with its lifespan and the settings of `penstock runtime`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        found = server(settings)
        thread = threading.Thread(target=found.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_until(lambda: found.started)
            runtime = Runtime(found.config.app, listener.getsockname()[1])
            runtime.server = found
            yield runtime
        finally:
            found.should_exit = True
            thread.join()


@contextmanager
def runtime_of(engine: FakeEngine, /, **settings: Any) -> Iterator[Runtime]:
    """A fake engine and a runtime in front of it."""
    with serving(engine) as served:
        try:
            with running(RuntimeSettings(engine_endpoint=served.url, **settings)) as runtime:
                runtime.engine = engine
                yield runtime
        finally:
            engine.may_answer.set()


def closed_port() -> int:
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    return port


def folders(path: Path) -> dict[str, str]:
    """The settings with the folders of a test."""
    return {name: str(path / name) for name in ("model_dir", "adapter_dir", "secret_dir")}


def files_near(runtime: Runtime) -> set[Path]:
    """The files around the folders of a runtime, but the locks of downloads."""
    folder = Path(runtime.application.state.settings.model_dir).parent.parent
    return {path for path in folder.rglob("*") if path.is_file() and path.name != "lock"}
