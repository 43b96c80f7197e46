"""Helpers of the tests of the DashInfer API: models without serialised files, and requests."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from penstock.compat.dashinfer.allspark import engine as engine_module
from penstock.compat.dashinfer.allspark.enums import AsStatus
from penstock.compat.dashinfer.allspark.runtime_config import AsModelConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import penstock
    from penstock.compat.dashinfer.allspark.engine import Engine, RequestHandle
    from penstock.compat.dashinfer.allspark.result_queue import ResultQueue

NAME = "tiny"
PROMPT: Sequence[int] = (10, 20, 30, 40)
#: Greedy, and no token ends the output.
GREEDY: Mapping[str, Any] = {"top_k": 1, "early_stopping": False, "max_length": 44}
SUCCESS = AsStatus.ALLSPARK_SUCCESS


def install(engine: Engine, model: Path, name: str = NAME, *, start: bool = True, **options: object) -> None:
    """Install a model with options of `penstock.Engine` instead of a runtime configuration."""
    options = {"threads": 1, "preemption_mode": "interrupt", "block_size": 16, **options}
    with mock.patch.object(engine_module, "engine_options", return_value=(model, options)):
        assert engine.install_model(AsModelConfig(model_name=name, swap_threshold=0)) is SUCCESS
    if start:
        assert engine.start_model(name) is SUCCESS


def start(
    engine: Engine, ids: object = PROMPT, config: Mapping[str, Any] = GREEDY, name: str = NAME
) -> tuple[RequestHandle, ResultQueue]:
    """Start a request that is accepted."""
    status, handle, queue = engine.start_request_ids(name, None, ids, config)
    assert status is SUCCESS
    assert handle is not None
    assert queue is not None
    return handle, queue


def refusal(engine: Engine, config: Mapping[str, Any], ids: object = PROMPT) -> AsStatus:
    """The status of a request that is refused."""
    status, handle, queue = engine.start_request_ids(NAME, None, ids, config)
    assert (handle, queue) == (None, None)
    return status


def generate(
    engine: Engine, ids: object = PROMPT, config: Mapping[str, Any] = GREEDY, name: str = NAME
) -> list[int]:
    """The tokens of a request, by `sync_request` and `Get`."""
    handle, queue = start(engine, ids, config, name)
    assert engine.sync_request(name, handle) is SUCCESS
    elements = queue.Get()
    assert elements is not None
    assert queue.Get() is None
    assert engine.release_request(name, handle) is SUCCESS
    return elements.ids_from_generate


def native(engine: Engine, name: str = NAME) -> penstock.Engine:
    """The `penstock.Engine` of a model."""
    model = engine._models[name]
    assert model is not None
    return model.engine


@contextmanager
def held(engine: Engine, name: str = NAME) -> Iterator[None]:
    """Hold the steps of a model: requests are accepted and not computed until the block is left."""
    entered, released = threading.Event(), threading.Event()

    def hold(*_: object) -> None:
        entered.set()
        released.wait()

    request = native(engine, name).blocking.start_request([1], max_tokens=1, logits_processors=[hold])
    entered.wait()
    try:
        yield
    finally:
        released.set()
        request.result()
