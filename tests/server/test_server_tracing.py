"""Traces: spans that a collector receives over OTLP/HTTP."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import penstock.server
from penstock.cli import main
from penstock.server.tracing import endpoint_of_environment
from support import hooks
from support.api.engines import make_engine, wait_until
from support.server.process import started
from support.server.serving import Served, held, post, serving

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/completions"
SHORT = {"prompt": "Hidden", "max_tokens": 3, "ignore_eos": True, "temperature": 0.5, "top_p": 0.9, "n": 2}
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TOKEN = 78
#: Bytes after which a collector that answers without end gives up: a client without bounds reads them all.
MOST_BYTES = 1 << 30
INTERIM = b"HTTP/1.1 100 Continue\r\nX: " + bytes(30_000).replace(b"\0", b"x") + b"\r\n\r\n"


class Collector:
    """A collector on a socket of this machine."""

    def __init__(self, port: int, received: list[tuple[str, bytes]]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        #: The paths and the bodies of the requests.
        self.received = received

    def spans(self) -> list[Span]:
        """All spans so far."""
        found = []
        for path, body in self.received:
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                names = {item.key: item.value.string_value for item in resource.resource.attributes}
                assert names["service.name"] == "penstock"
                found += [span for scope in resource.scope_spans for span in scope.spans]
        return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    received: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.headers["Content-Type"] == "application/x-protobuf"
            received.append((self.path, body))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield Collector(server.server_address[1], received)
        server.shutdown()
        thread.join()


@contextmanager
def traced(engine: penstock.Engine, collector: Collector, path: str = "/v1/traces") -> Iterator[Served]:
    """A server with this collector, to which all spans have been sent when the block is left."""
    settings = penstock.server.ServerSettings(otlp_traces_endpoint=collector.url + path)
    application = penstock.server.app({"tiny": engine}, settings)
    with serving(application) as server:
        yield server
    assert application.tracer is not None
    assert application.tracer.flush()
    application.tracer.close()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def attributes_of(span: Span) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        assert kind is not None
        value = getattr(item.value, kind)
        found[item.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return found


@pytest.mark.parametrize("streams", [False, True])
def test_request_is_a_span_in_the_trace_of_the_client(
    engine: penstock.Engine,
    collector: Collector,
    streams: bool,  # noqa: FBT001
) -> None:
    with traced(engine, collector) as server:
        headers = {"traceparent": PARENT, "tracestate": "vendor=1"}
        status, answer, _ = server.ask(PATH, {**SHORT, "stream": streams}, headers=headers)
    [span] = collector.spans()
    assert (status, span.name, span.kind) == (200, "llm_request", 2)  # of a server
    assert span.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent_span_id.hex() == "b7ad6b7169203331"
    assert span.trace_state == "vendor=1"
    found = attributes_of(span)
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    request_id = found.pop("gen_ai.request.id")
    assert request_id.startswith("cmpl-")
    if not streams:
        assert request_id == answer["id"]
    assert found == {
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.n": 2,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.prompt_tokens": len(engine.encode("Hidden")),
        "gen_ai.usage.completion_tokens": 6,
        "http.response.status_code": 200,
    }
    total, queue, first, prefill, decode, inference = (
        latencies.pop(f"gen_ai.latency.{name}")
        for name in (
            "e2e",
            "time_in_queue",
            "time_to_first_token",
            "time_in_model_prefill",
            "time_in_model_decode",
            "time_in_model_inference",
        )
    )
    assert latencies == {}
    assert 0 <= queue < first < total
    assert prefill == pytest.approx(first - queue)
    assert decode == pytest.approx(total - first)
    assert inference == pytest.approx(prefill + decode)
    assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 >= total
    assert not any(b"Hidden" in body for _, body in collector.received)


def test_request_without_a_trace_begins_one(engine: penstock.Engine, collector: Collector) -> None:
    with traced(engine, collector, path="") as server:
        for headers in ({}, {"traceparent": "00-broken"}):
            server.ask(PATH, SHORT, headers=headers)
    spans = collector.spans()
    assert [span.parent_span_id for span in spans] == [b"", b""]
    assert len({span.trace_id for span in spans}) == 2


def test_long_headers_of_traces_are_not_read(
    engine: penstock.Engine, collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    state = ",".join(f"vendor{index}={index:040}" for index in range(20))
    with traced(engine, collector) as server:
        for headers in (
            {"traceparent": PARENT, "tracestate": state},
            {
                "traceparent": PARENT,
                "tracestate": state[:500].rpartition(",")[0],
                "baggage": "a" + " " * 8000,
            },
        ):
            assert server.ask(PATH, SHORT, headers=headers)[0] == 200
    first, second = collector.spans()
    assert {span.parent_span_id.hex() for span in (first, second)} == {"b7ad6b7169203331"}
    assert (len(first.trace_state), len(second.trace_state) > 400) == (0, True)
    assert [record for record in caplog.records if record.name.startswith("opentelemetry")] == []


def test_unsampled_trace_has_no_span(engine: penstock.Engine, collector: Collector) -> None:
    with traced(engine, collector) as server:
        server.ask(PATH, SHORT, headers={"traceparent": PARENT[:-1] + "0"})
    assert collector.spans() == []


def test_only_generating_requests_are_spans(engine: penstock.Engine, collector: Collector) -> None:
    with traced(engine, collector) as server:
        for path in ("/health", "/v1/models", "/none"):
            server.ask(path)
        server.ask("/tokenize", {"prompt": "a"})
        server.ask(PATH, {"prompt": 7})
    assert collector.spans() == []


@pytest.mark.needs("hooks")
@pytest.mark.parametrize("streams", [False, True])
def test_failed_request_is_a_span_with_an_error(
    tiny_model: Path,
    collector: Collector,
    streams: bool,  # noqa: FBT001
) -> None:
    with make_engine(tiny_model) as engine:
        engine._session.adopt(hooks.failing_engine(tiny_model, engine.config, TOKEN))
        with traced(engine, collector) as server:
            server.ask(PATH, {"prompt": [TOKEN], "max_tokens": 1, "stream": streams})
    [span] = collector.spans()
    assert (span.status.code, span.status.message) == (2, "")
    found = attributes_of(span)
    assert found["error.type"] == "generation_failed"
    assert found["http.response.status_code"] == (200 if streams else 500)


def test_disconnected_request_is_a_span(engine: penstock.Engine, collector: Collector) -> None:
    with traced(engine, collector) as server, held(engine):
        with server.send(post(PATH, {"prompt": [1, 2], "max_tokens": 500})):
            wait_until(lambda: engine.stats().running == 2)
        wait_until(lambda: not server.application.state.calls.generations)
    [span] = collector.spans()
    found = attributes_of(span)
    assert (found["gen_ai.usage.prompt_tokens"], found["gen_ai.usage.completion_tokens"]) == (2, 0)
    assert "http.response.status_code" not in found
    assert "gen_ai.latency.time_to_first_token" not in found


@pytest.mark.needs("signals")
def test_process_sends_all_spans_before_its_end(
    tiny_model: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with started(tiny_model) as server:
        for _ in range(3):
            assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 200
        assert collector.spans() == []
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
    assert len(collector.spans()) == 3


@pytest.mark.needs("signals")
def test_missing_collector_delays_the_end_for_a_timeout(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.2")
    with started(tiny_model, "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces") as server:
        assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 200
        server.process.send_signal(signal.SIGTERM)
        server.process.communicate(timeout=20)
        assert server.process.returncode == 0


class HostileCollector:
    """A collector that answers each request with these bytes, then with a piece again and again."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self._answer = (head, piece)
        #: By the connections, the number of bytes that were sent.
        self.counts: list[int] = []
        self._connections: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with suppress(OSError), ExitStack() as stack:
            while True:
                connection = stack.enter_context(self._listener.accept()[0])
                self._connections.append(connection)
                self.counts.append(0)
                self._write(connection)

    def _write(self, connection: socket.socket) -> None:
        head, piece = self._answer
        with suppress(OSError):  # the client closes the connection
            connection.sendall(head)
            while piece and self.counts[-1] < MOST_BYTES:
                connection.sendall(piece)
                self.counts[-1] += len(piece)

    def close(self) -> None:
        """Close the listener and the connections."""
        for found in (self._listener, *self._connections):
            with suppress(OSError):  # it has ended
                found.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        pytest.param(b"HTTP/1.1 200 OK\r\n\r\n", bytes(100_000), id="body"),
        pytest.param(b"", INTERIM, id="interim responses"),
    ],
)
def test_endless_answer_of_a_collector_is_ended(
    monkeypatch: pytest.MonkeyPatch, engine: penstock.Engine, head: bytes, piece: bytes
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "0.5")
    with closing(HostileCollector(head, piece)) as collector:
        settings = penstock.server.ServerSettings(otlp_traces_endpoint=collector.url)
        application = penstock.server.app({"tiny": engine}, settings)
        with serving(application) as server:
            assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 200
        assert application.tracer is not None
        application.tracer.flush()
        application.tracer.close()
    assert len(collector.counts) == 1
    assert collector.counts[0] < MOST_BYTES


@pytest.mark.needs("signals")
def test_silent_collector_delays_the_end_for_one_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    num_requests = 10
    with closing(HostileCollector(b"", b"")) as collector:
        with started(tiny_model, "--otlp-traces-endpoint", collector.url) as server:
            for _ in range(num_requests):
                assert server.ask(PATH, {"prompt": [1], "max_tokens": 1})[0] == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.end() == 0
        assert 0 < len(collector.counts) < num_requests


@pytest.mark.parametrize(
    ("variables", "endpoint"),
    [
        ({}, None),
        ({"ENDPOINT": "http://a:4318/"}, "http://a:4318/v1/traces"),
        ({"ENDPOINT": "http://a:4318", "TRACES_ENDPOINT": "http://b/x"}, "http://b/x"),
    ],
)
def test_endpoint_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], endpoint: str | None
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    assert endpoint_of_environment() == endpoint
    for name, off in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patch:
            patch.setenv(name, off)
            assert endpoint_of_environment() is None


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "/v1/traces"])
def test_endpoint_that_is_no_http_url_is_refused(tiny_model: Path, endpoint: str) -> None:
    settings = penstock.server.ServerSettings(otlp_traces_endpoint=endpoint)
    with pytest.raises(penstock.ConfigError, match="must be a URL such as"):
        penstock.server.app(make_engine(tiny_model), settings)
    result = CliRunner().invoke(main, ["serve", str(tiny_model), "--otlp-traces-endpoint", endpoint])
    assert result.exit_code == 2
    assert "--otlp-traces-endpoint" in result.output


def test_other_protocol_is_refused(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc")
    settings = penstock.server.ServerSettings(otlp_traces_endpoint="http://localhost:4317")
    with pytest.raises(penstock.ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL is 'grpc'"):
        penstock.server.app(make_engine(tiny_model), settings)


def test_missing_extra_is_named(tiny_model: Path) -> None:
    code = (
        "import sys; sys.modules['opentelemetry'] = None; from penstock.cli import main; main(sys.argv[1:])"
    )
    arguments = ["serve", str(tiny_model), "--otlp-traces-endpoint", "http://localhost:4318"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert 'needs opentelemetry: install the extra "tracing" of penstock-llm' in result.stderr
