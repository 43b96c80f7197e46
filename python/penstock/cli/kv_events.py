"""The options of `penstock serve` for KV events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.options import JsonObject

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["kv_event_settings", "kv_events_config"]

#: Fields of vLLM's `KVEventsConfig` with the only value that is accepted, the default.
_FIXED = {"buffer_steps": 10_000, "hwm": 100_000, "max_queue_size": 100_000}
_FIELDS = ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "topic", *_FIXED)

#: `--kv-events-config`.
kv_events_config: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--kv-events-config",
    type=JsonObject(),
    help="The same as --kv-events, with the fields of vLLM. The endpoint is tcp://127.0.0.1:5557 by default.",
)


def kv_event_settings(settings: Mapping[str, Any], config: Mapping[str, Any] | None) -> dict[str, Any]:
    """The settings of the engine, with the events of `--kv-events-config`."""
    if config is None:
        return dict(settings)
    if "kv_events" in settings:
        raise click.UsageError("--kv-events excludes --kv-events-config.")
    for name, value in config.items():
        if name not in _FIELDS:
            raise click.UsageError(
                f"--kv-events-config: {name!r} is no field; the fields are {', '.join(_FIELDS)}."
            )
        if name in _FIXED and value != _FIXED[name]:
            raise click.UsageError(f"--kv-events-config: {name}={value!r} must be {_FIXED[name]}.")
    is_enabled = config.get("enable_kv_cache_events", False)
    publisher = config.get("publisher", "zmq" if is_enabled else "null")
    if not isinstance(is_enabled, bool) or publisher not in ("zmq", "null"):
        raise click.UsageError(
            "--kv-events-config: enable_kv_cache_events must be true or false, and publisher zmq or null."
        )
    if not is_enabled or publisher == "null":
        return dict(settings)
    events = {name: config[name] for name in ("replay_endpoint", "topic") if config.get(name) is not None}
    return {**settings, "kv_events": {"endpoint": config.get("endpoint", "5557"), **events}}
