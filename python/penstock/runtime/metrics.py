"""`/metrics`: the engine's metrics, under their names and the common ones, and the runtime's own.

The engine is scraped for each response; requests at the same time share one scrape. A thread parses and
formats the text.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

import penstock
from penstock.runtime.errors import ApiError
from penstock.runtime.exposition import parsed, with_common_names
from penstock.runtime.rules import rules_of
from penstock.server.disconnects import while_connected
from penstock.server.families import Families

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client.core import Metric
    from starlette.requests import Request

    from penstock.runtime.state import State

__all__ = ["metrics"]

_OK = 200


async def metrics(state: State, request: Request) -> Response:
    """The metrics of the engine and of the runtime."""
    authorization = state.access.authorization(request, "open")
    # Each client without a token can send another header. These clients have a limit of their own.
    name = "own" if authorization == state.access.engine_authorization else "other"
    run = partial(_metrics, state, authorization)
    body = await while_connected(request.receive, partial(state.scrapes.join, name, authorization, run))
    return Response(body, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


async def _metrics(state: State, authorization: str | None) -> bytes:
    text = await _scrape(state, authorization)
    threads = state.metrics_threads
    found: Mapping[str, Metric] | None = None
    if text is not None and not state.settings.raw_metrics:
        found = await anyio.to_thread.run_sync(_parsed, state, text, limiter=threads)
        text = None if found is None else text
    families = _own(state, is_up=text is not None)
    return await anyio.to_thread.run_sync(_body, text or "", found or {}, families, limiter=threads)


async def _scrape(state: State, authorization: str | None) -> str | None:
    """The engine's text, or nothing if it has none within the time and the size."""
    settings = state.settings
    try:
        reply = await state.probes.request(
            "GET",
            settings.scrape_path,
            authorization=authorization,
            timeout=settings.scrape_timeout,
            limit=settings.max_metrics_bytes,
        )
    except ApiError as error:
        state.measures.scrape_errors[error.kind] += 1
        return None
    if reply.status != _OK:
        state.measures.scrape_errors["status"] += 1
        return None
    return reply.body.decode(errors="replace")


def _own(state: State, *, is_up: bool) -> Families:
    families = Families()
    settings = state.settings
    labels = {
        "version": penstock.__version__,
        "engine": settings.engine,
        "engine_version": settings.engine_version,
    }
    families.gauge("aibrix:info_info", "Versions of the runtime and of the engine.", labels, 1)
    text = "Whether the engine returned its metrics to this scrape."
    families.gauge("aibrix:engine_up", text, {}, float(is_up))
    state.measures.write(families)
    state.supervisor.write(families)
    return families


def _parsed(state: State, text: str) -> Mapping[str, Metric] | None:
    """The engine's families, also under common names; nothing for a text that cannot be parsed."""
    try:
        found = parsed(text)
    except Exception:  # noqa: BLE001 - the parser has several errors for an invalid text
        state.measures.scrape_errors["invalid"] += 1
        return None
    return with_common_names(found, rules_of(state.engine.kind)) if state.settings.rename_metrics else found


def _body(text: str, found: Mapping[str, Metric], own: Families) -> bytes:
    """The text of a scrape: the engine's families, or else its text as it is."""
    if found or not text:
        return generate_latest(_Listed({**found, **own.by_name}.values()))
    lines = text if text.endswith("\n") else text + "\n"
    return lines.encode() + generate_latest(_Listed(own.by_name.values()))


class _Listed(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """The families."""
        return self._families
