"""The load of a model as a response header, for load balancers that read ORCA reports."""

from __future__ import annotations

import penstock
from penstock.server.sse import json_bytes

__all__ = ["FORMAT", "load_header"]

#: The request header that asks for a report, in the format `TEXT` or `JSON`.
FORMAT = "endpoint-load-metrics-format"


def load_header(kind: str, engine: penstock.Engine) -> list[tuple[bytes, bytes]]:
    """The header in a format, with the names of vLLM.

    There is none in an unknown format, and none if the engine was never open.
    """
    try:
        stats = engine.stats()
    except penstock.EngineStoppedError:
        return []
    load = {
        "kv_cache_usage_perc": stats.blocks_used / max(stats.blocks_total, 1),
        "num_requests_waiting": stats.waiting,
    }
    kind = kind.strip().upper()
    if kind == "TEXT":
        report = ", ".join(f"named_metrics.{name}={value}" for name, value in load.items()).encode()
    elif kind == "JSON":
        report = json_bytes({"named_metrics": load})
    else:
        return []
    return [(b"endpoint-load-metrics", kind.encode() + b" " + report)]
