"""OpenTelemetry traces: a span for each generating request, made when it ends. Needs the extra `tracing`.

The names are those of vLLM. No span has a prompt or an output.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import penstock
from penstock._install import missing_extra
from penstock.server.usage import finish_reason

if TYPE_CHECKING:
    from starlette.datastructures import Headers

    from penstock.server.calls import Generation
    from penstock.server.http import Exchange

__all__ = ["Tracer", "endpoint_of_environment"]

_PROTOCOL = "http/protobuf"
_PATH = "/v1/traces"
#: The variables of the exporter for the time of a request, and that time without them, in seconds.
_TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT = 10.0
#: The variables that name a session of the operator, with credentials.
_PROVIDERS = tuple(f"OTEL_PYTHON_EXPORTER_OTLP_HTTP_{kind}CREDENTIAL_PROVIDER" for kind in ("", "TRACES_"))
_PARAMS = ("max_tokens", "temperature", "top_p", "n")
#: The time to parse a header grows with the square of its length. The standard asks for 512 characters.
_MAX_HEADER = 512


def endpoint_of_environment() -> str | None:
    """The endpoint that OpenTelemetry's environment variables name, if they do not turn traces off."""
    value = os.environ.get
    if value("OTEL_SDK_DISABLED", "").lower() == "true" or value("OTEL_TRACES_EXPORTER") == "none":
        return None
    if endpoint := value("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return endpoint
    base = value("OTEL_EXPORTER_OTLP_ENDPOINT")
    return base and base.rstrip("/") + _PATH


class Tracer:
    """Sends spans to a collector, in a thread of OpenTelemetry's SDK, until the server or the process ends.

    The other options are the environment variables of the SDK and of its exporter.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor

            from penstock.server.collector import bounded_session
        except ModuleNotFoundError as error:
            message = missing_extra("otlp_traces_endpoint", error.name, "tracing")
            raise penstock.ConfigError(message, "otlp_traces_endpoint", endpoint, "None") from error
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise _invalid(endpoint, "a URL such as http://localhost:4318/v1/traces")
        for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
            if (protocol := os.environ.get(name, _PROTOCOL)) != _PROTOCOL:
                raise _invalid(endpoint, f"one for {_PROTOCOL}; {name} is {protocol!r}")
        if parts.path in ("", "/"):
            endpoint = parts._replace(path=_PATH).geturl()
        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        self._timeout = _timeout()
        session = None if any(map(os.environ.get, _PROVIDERS)) else bounded_session()
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=self._timeout, session=session)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        atexit.register(self.close)  # for applications
        self._tracer = self._provider.get_tracer("penstock.server", penstock.__version__)

    def add(self, exchange: Exchange, generation: Generation, seconds: float) -> None:
        """Add the span of a request that has ended after this time; a trace of the client is continued."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode

        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=propagate.extract(_trace_headers(exchange.request_headers)),
            kind=SpanKind.SERVER,
            attributes=_attributes(exchange, generation),
            start_time=end - int(seconds * 1e9),
        )
        if exchange.error is not None:
            span.set_attribute("error.type", exchange.error.code or str(exchange.error.status))
            span.set_status(StatusCode.ERROR)
        span.end(end)

    def flush(self) -> bool:
        """Send the spans so far; returns whether the collector has them."""
        return self._provider.force_flush()

    def close(self) -> None:
        """Send the other spans, and wait for that as long as for one request, if it does not end before.

        The SDK alone waits for each of several requests, in some versions without an end.
        """
        atexit.unregister(self.close)
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        try:
            thread.start()
        except RuntimeError:  # while the interpreter ends, no thread begins
            self._provider.shutdown()
        else:
            thread.join(self._timeout)


def _timeout() -> float:
    """The time of a request to the collector in seconds."""
    text = next((text for name in _TIMEOUTS if (text := os.environ.get(name))), "")
    try:
        seconds = float(text)
    except ValueError:
        return _TIMEOUT
    return seconds if 0 < seconds <= threading.TIMEOUT_MAX else _TIMEOUT


def _invalid(endpoint: str, limit: str) -> penstock.ConfigError:
    message = f"otlp_traces_endpoint={endpoint!r} is not allowed: it must be {limit}"
    return penstock.ConfigError(message, "otlp_traces_endpoint", endpoint, limit)


def _trace_headers(headers: Headers) -> dict[str, str]:
    """The headers of the client's trace, without those beyond the limit and baggage, which no span has."""
    from opentelemetry import propagate

    names = propagate.get_global_textmap().fields - {"baggage"}
    found = {name.lower(): headers.get(name, "") for name in names}
    return {name: value for name, value in found.items() if 0 < len(value) <= _MAX_HEADER}


def _attributes(exchange: Exchange, generation: Generation) -> dict[str, Any]:
    requests = generation.requests()
    usage = generation.usage()
    found: dict[str, Any] = {
        "gen_ai.request.id": generation.id,
        "gen_ai.response.model": generation.name,
        "gen_ai.usage.prompt_tokens": usage["prompt_tokens"],
        "gen_ai.usage.completion_tokens": usage["completion_tokens"],
        "http.response.status_code": exchange.status,
    }
    for name in _PARAMS:
        found[f"gen_ai.request.{name}"] = getattr(generation.call.params, name)
    if requests:
        longest = max(requests, key=lambda request: request.timings.total)
        reason = finish_reason(longest.finish_reason)
        found["gen_ai.response.finish_reasons"] = None if reason is None else (reason,)
        found |= _latencies(longest.timings)
    return {name: value for name, value in found.items() if value is not None}


def _latencies(timings: penstock.Timings) -> dict[str, float | None]:
    """The times of a request of the engine, in seconds."""
    found: dict[str, float | None] = {"e2e": timings.total, "time_in_queue": timings.queued}
    if timings.first_token is not None:
        found["time_to_first_token"] = timings.first_token
        found["time_in_model_prefill"] = timings.first_token - timings.queued
        found["time_in_model_decode"] = timings.total - timings.first_token
        found["time_in_model_inference"] = timings.total - timings.queued
    return {f"gen_ai.latency.{name}": value for name, value in found.items()}
