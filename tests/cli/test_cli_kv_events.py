"""The options of KV events on the command line."""

from __future__ import annotations

import json
from typing import Any

import click
import pytest

import penstock
from penstock.cli.kv_events import kv_event_settings
from penstock.cli.serve import serve


def parse(*args: str) -> dict[str, Any]:
    return serve.make_context("serve", ["model", *args]).params


@pytest.mark.parametrize(
    ("value", "endpoint"),
    [
        ("5557", "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", "tcp://*:5557"),
        ('{"endpoint": "ipc:///run/kv", "rank": 2}', "ipc:///run/kv"),
    ],
)
def test_option_takes_an_address_or_json(value: str, endpoint: str) -> None:
    given = parse("--kv-events", value)["kv_events"]
    events = penstock.EngineConfig(kv_events=given).kv_events
    assert events is not None
    assert events["endpoint"] == endpoint


def test_config_of_vllm_is_mapped() -> None:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": None,
        "topic": "kv@pod@model",
        "buffer_steps": 10_000,
    }
    given = parse("--kv-events-config", json.dumps(config))["kv_events_config"]
    assert kv_event_settings({"threads": 1}, given) == {
        "threads": 1,
        "kv_events": {"endpoint": "tcp://*:5557", "topic": "kv@pod@model"},
    }
    only_enabled = kv_event_settings({}, {"enable_kv_cache_events": True})
    assert only_enabled == {"kv_events": {"endpoint": "5557"}}
    for disabled in ({}, {"endpoint": "tcp://*:1"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert kv_event_settings({}, disabled) == {}
    assert kv_event_settings({"kv_events": "5557"}, None) == {"kv_events": "5557"}


@pytest.mark.parametrize(
    ("settings", "config", "words"),
    [
        ({"kv_events": "1"}, {}, "excludes"),
        ({}, {"port": 1}, "'port' is no field"),
        ({}, {"hwm": 5}, "hwm=5 must be 100000"),
        ({}, {"publisher": "kafka"}, "publisher zmq or null"),
        ({}, {"enable_kv_cache_events": 1}, "must be true or false"),
    ],
)
def test_config_without_effect_is_refused(
    settings: dict[str, Any], config: dict[str, Any], words: str
) -> None:
    with pytest.raises(click.UsageError, match=words):
        kv_event_settings(settings, config)


def test_events_of_several_models_are_refused() -> None:
    args = ["--model", "a=x", "--model", "b=y", "--kv-events", "5557"]
    with pytest.raises(click.UsageError, match="one model"):
        serve.main(args, standalone_mode=False)
