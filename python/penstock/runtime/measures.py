"""Numbers that the runtime counts for `/metrics`. All labels are of closed sets."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from penstock.server.measures import Distribution

if TYPE_CHECKING:
    from penstock.server.families import Families

__all__ = ["Measures"]

_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_METHODS = frozenset({"DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT"})


class Measures:
    """Counts of requests, and of scrapes of the engine that failed."""

    def __init__(self) -> None:
        #: By method, route and status.
        self._latencies: dict[tuple[str, str, str], Distribution] = {}
        #: By reason.
        self.scrape_errors: Counter[str] = Counter()

    def add(self, method: str, path: str | None, status: int, seconds: float) -> None:
        """Count a request that has ended; `path` is that of its route, if there is one."""
        key = (method if method in _METHODS else "other", path or "none", str(status))
        latency = self._latencies.get(key)
        if latency is None:
            latency = self._latencies[key] = Distribution(_SECONDS)
        latency.add(seconds)

    def write(self, families: Families) -> None:
        """Add the numbers to those of a scrape."""
        for (method, endpoint, status), latency in list(self._latencies.items()):
            labels = {"method": method, "endpoint": endpoint, "status": status}
            text = "HTTP requests to the runtime that have ended."
            families.counter("aibrix:api_request", text, labels, sum(latency.counts))
            text = "Seconds of the HTTP requests to the runtime."
            families.histogram("aibrix:api_request_latency", text, labels, latency)
        for reason, count in list(self.scrape_errors.items()):
            text = "Scrapes of the engine's metrics that failed."
            families.counter("aibrix:engine_scrape_errors", text, {"reason": reason}, count)
