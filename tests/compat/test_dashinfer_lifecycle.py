"""The life of an engine and its models in the DashInfer API, and the status of each misuse."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import penstock
from penstock.compat.dashinfer.allspark import engine as engine_module
from penstock.compat.dashinfer.allspark.engine import Engine, RequestHandle
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError, as_error
from penstock.compat.dashinfer.allspark.runtime_config import AsModelConfig
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import engine_threads, resources, wait_until, yield_processor
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, held, install, native, start

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PARAM_ERROR = AsStatus.ALLSPARK_PARAM_ERROR
INVALID_CALL = AsStatus.ALLSPARK_INVALID_CALL_ERROR
DENIED = AsStatus.ALLSPARK_REQUEST_DENIED


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine()
    install(engine, tiny_model)
    yield engine
    for name in list(engine._models):
        engine.stop_model(name)
        engine.release_model(name)


def status_of_start(engine: Engine, name: str = NAME) -> AsStatus:
    """The status of a request that is refused."""
    status, handle, queue = engine.start_request_ids(name, None, list(PROMPT), GREEDY)
    assert (handle, queue) == (None, None)
    return status


# ---- models


def test_model_takes_requests_only_while_it_runs(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, start=False)
    assert status_of_start(engine) is DENIED
    assert engine.start_model(NAME) is SUCCESS
    ids = generate(engine)
    assert engine.stop_model(NAME) is SUCCESS
    assert status_of_start(engine) is DENIED
    assert engine.start_model(NAME) is SUCCESS
    assert generate(engine) == ids
    assert engine.stop_model(NAME) is SUCCESS
    assert engine.release_model(NAME) is SUCCESS
    assert status_of_start(engine) is PARAM_ERROR


def test_calls_in_the_wrong_state_return_invalid_call(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, start=False)
    assert engine.stop_model(NAME) is INVALID_CALL  # before start
    assert engine.start_model(NAME) is SUCCESS
    assert engine.start_model(NAME) is INVALID_CALL
    assert engine.release_model(NAME) is INVALID_CALL
    assert engine.stop_model(NAME) is SUCCESS
    assert engine.stop_model(NAME) is INVALID_CALL
    assert engine.release_model(NAME) is SUCCESS


@pytest.mark.parametrize("name", ["other", "", None, 7, ["tiny"]])
def test_calls_with_an_unknown_model_return_param_error(engine: Engine, name: Any) -> None:
    for call in (engine.start_model, engine.stop_model, engine.release_model):
        assert call(name) is PARAM_ERROR
    for question in (
        engine.get_as_engine_stat,
        engine.get_model_info,
        engine.get_op_profiling_info,
        engine.unload_device_mem,
        engine.load_device_mem,
    ):
        with pytest.raises(AsError, match="no installed model of this name") as raised:
            question(name)
        assert raised.value.status is PARAM_ERROR


def test_released_model_is_unknown_to_every_call(engine: Engine) -> None:
    handle, _queue = start(engine)
    assert engine.stop_model(NAME) is SUCCESS
    assert engine.release_model(NAME) is SUCCESS
    assert engine.release_model(NAME) is PARAM_ERROR
    assert engine.stop_model(NAME) is PARAM_ERROR
    for call in (engine.stop_request, engine.release_request, engine.sync_request):
        assert call(NAME, handle) is PARAM_ERROR


@pytest.mark.needs("proc")
def test_installed_model_can_be_released_without_a_start(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, start=False)
    assert engine.release_model(NAME) is SUCCESS
    assert resources().threads == []


def test_another_model_can_follow_in_the_same_engine(engine: Engine, tmp_path: Path) -> None:
    ids = generate(engine)
    engine.stop_model(NAME)
    engine.release_model(NAME)
    install(engine, write_checkpoint(tmp_path, make_config("qwen3"), seed=1))
    assert generate(engine) != ids


def test_two_models_serve_requests_at_once(engine: Engine, tmp_path: Path) -> None:
    install(engine, write_checkpoint(tmp_path, make_config("qwen3"), seed=1), "other")
    expected = {name: generate(engine, name=name) for name in (NAME, "other")}
    assert expected[NAME] != expected["other"]
    started = [(name, *start(engine, name=name)) for name in (NAME, "other") * 4]
    for name, handle, queue in started:
        assert engine.sync_request(name, handle) is SUCCESS
        elements = queue.Get()
        assert elements is not None
        assert elements.ids_from_generate == expected[name]
    assert engine.stop_model(NAME) is SUCCESS
    assert generate(engine, name="other") == expected["other"]


def test_stop_waits_for_running_requests_and_refuses_new_ones(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool, held(engine):
        _handle, queue = start(engine)
        stops = [pool.submit(engine.stop_model, NAME) for _ in range(2)]
        wait_until(lambda: state(engine) == "stopping")
        assert status_of_start(engine) is DENIED
        assert engine.release_model(NAME) is INVALID_CALL
        assert not any(stop.done() for stop in stops)
    assert [stop.result() for stop in stops] == [SUCCESS, SUCCESS]
    assert queue.GeneratedLength() == 40
    assert engine.release_model(NAME) is SUCCESS


def test_stop_waits_for_the_requests_of_a_later_stop(engine: Engine) -> None:
    wait, is_first = RequestHandle.wait, True

    def wait_and_restart(handle: RequestHandle) -> bool:
        nonlocal is_first
        result = wait(handle)
        if is_first:  # another thread stops the model, starts it again, and stops it once more
            is_first = False
            assert engine.stop_model(NAME) is SUCCESS
            assert engine.start_model(NAME) is SUCCESS
            stack.enter_context(held(engine))
            start(engine)
            stops.append(pool.submit(engine.stop_model, NAME))
            wait_until(lambda: state(engine) == "stopping")
            restarted.set()
        return result

    restarted = threading.Event()
    start(engine)
    patched = mock.patch.object(RequestHandle, "wait", wait_and_restart)
    with ThreadPoolExecutor(2) as pool, ExitStack() as stack, patched:
        stops = [pool.submit(engine.stop_model, NAME)]
        assert restarted.wait(60)
        for _ in range(100):
            assert state(engine) == "stopping"
            yield_processor()
        assert not any(stop.done() for stop in stops)
        stack.close()
        assert [stop.result() for stop in stops] == [SUCCESS, SUCCESS]
    assert state(engine) == "stopped"


def test_wait_for_requests_that_ended_builds_no_result(engine: Engine) -> None:
    handles = [start(engine)[0] for _ in range(3)]
    assert engine.sync_request(NAME, None) is SUCCESS
    with mock.patch.object(penstock.BlockingRequest, "result", side_effect=AssertionError):
        assert engine.sync_request(NAME, None) is SUCCESS
        assert engine.sync_request(NAME, handles[0]) is SUCCESS
        assert engine.stop_model(NAME) is SUCCESS


def test_numbers_of_an_engine_that_stopped_are_a_typed_error(engine: Engine) -> None:
    stopped = mock.PropertyMock(side_effect=penstock.EngineStoppedError("stopped"))
    with mock.patch.object(penstock.Engine, "info", stopped):
        for question in (engine.get_as_engine_stat, engine.get_model_info):
            with pytest.raises(AsError, match="stopped") as raised:
                question(NAME)
            assert raised.value.status is DENIED
    assert engine.get_as_engine_stat(NAME).model_name == NAME


def state(engine: Engine) -> str:
    model = engine._models[NAME]
    assert model is not None
    return model.state


@pytest.mark.needs("proc")
def test_released_model_frees_threads_and_descriptors(tiny_model: Path) -> None:
    before = None
    for _ in range(3):
        engine = Engine()
        install(engine, tiny_model)
        generate(engine)
        start(engine)
        engine.stop_model(NAME)
        engine.release_model(NAME)
        del engine
        wait_until(lambda: not engine_threads())
        before = before or resources()
        assert resources() == before


@pytest.mark.needs("proc")
def test_dropped_engine_releases_its_models(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model)
    _handle, queue = start(engine, config={**GREEDY, "max_length": 500})
    del engine
    gc.collect()
    wait_until(lambda: not engine_threads())
    while queue.Get() is not None:
        pass
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
    assert queue.error == "the model was closed before the request ended"


def test_request_of_a_closed_model_has_failed(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    install(engine, tiny_model, max_num_seqs=1)
    started = [start(engine, config={**GREEDY, "max_length": 500}) for _ in range(20)]
    native(engine).close()
    handle, queue = started[-1]
    assert engine.sync_request(NAME, handle) is AsStatus.ALLSPARK_RUNTIME_ERROR
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
    assert queue.error == "the model was closed before the request ended"
    assert caplog.messages == [f"request {handle._request.id} failed: {queue.error}"]
    assert engine.stop_request(NAME, handle) is SUCCESS  # too late to change the status
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
    assert engine.stop_model(NAME) is SUCCESS


def test_process_ends_cleanly_without_releasing_a_model(tiny_model: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from penstock.compat.dashinfer.allspark.engine import Engine
from support.compat.dashinfer import GREEDY, install, start
engine = Engine()
install(engine, Path({str(tiny_model)!r}))
handle, queue = start(engine, config={{**GREEDY, "max_length": 500}})
"""
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# ---- installing


def test_install_of_a_wrong_type_is_a_param_error() -> None:
    configs: tuple[Any, ...] = (None, {}, "model")
    for config in configs:
        with pytest.raises(AsError, match="expected an AsModelConfig, got ") as raised:
            Engine().install_model(config)
        assert raised.value.status is PARAM_ERROR


def test_second_model_of_a_name_is_a_param_error(engine: Engine, tiny_model: Path) -> None:
    with pytest.raises(AsError, match="model_name is 'tiny'; a model of this name is installed") as raised:
        install(engine, tiny_model)
    assert raised.value.status is PARAM_ERROR
    assert len(generate(engine)) == 40


@pytest.mark.parametrize(
    ("model", "options", "status"),
    [
        ("missing", {}, AsStatus.ALLSPARK_IO_ERROR),
        ("", {"kv_cache_bytes": 1 << 60}, AsStatus.ALLSPARK_MEMORY_ERROR),
        ("", {"max_num_seqs": 0}, PARAM_ERROR),
    ],
)
def test_failed_install_has_a_status_and_can_be_repeated(
    tiny_model: Path, model: str, options: dict[str, Any], status: AsStatus
) -> None:
    engine = Engine()
    with pytest.raises(AsError, match=f"^{status.name}: ") as raised:
        install(engine, tiny_model / model, **options)
    assert raised.value.status is status
    assert isinstance(raised.value.__cause__, penstock.PenstockError)
    assert engine.start_model(NAME) is PARAM_ERROR
    install(engine, tiny_model)
    assert len(generate(engine)) == 40


def test_model_is_unknown_while_it_is_installed(tiny_model: Path) -> None:
    engine, statuses = Engine(), []
    open_engine = penstock.Blocking.start

    def look(blocking: penstock.Blocking) -> None:
        statuses.extend([engine.start_model(NAME), status_of_start(engine)])
        with pytest.raises(AsError, match="a model of this name is installed"):
            install(engine, tiny_model)
        open_engine(blocking)

    with mock.patch.object(penstock.Blocking, "start", look):
        install(engine, tiny_model)
    assert statuses == [PARAM_ERROR, PARAM_ERROR]
    assert len(generate(engine)) == 40


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (penstock.ConfigError("a"), PARAM_ERROR),
        (penstock.InvalidRequestError("a"), PARAM_ERROR),
        (penstock.ModelLoadError("a"), AsStatus.ALLSPARK_IO_ERROR),
        (penstock.OutOfMemoryError("a"), AsStatus.ALLSPARK_MEMORY_ERROR),
        (penstock.OverloadedError("a"), DENIED),
        (penstock.EngineStoppedError("a"), DENIED),
        (penstock.GenerationError("a"), AsStatus.ALLSPARK_RUNTIME_ERROR),
    ],
)
def test_each_error_of_penstock_has_a_status(error: penstock.PenstockError, status: AsStatus) -> None:
    assert as_error(error).status is status
    assert str(as_error(error)) == f"{status.name}: a"


def test_error_names_the_field_of_the_documents() -> None:
    error = as_error(penstock.ConfigError("max_model_len=9 is not allowed; or memory_ratio=0.5"))
    assert error.reason == "engine_max_length=9 is not allowed; or BFC_MEM_RATIO=0.5"


# ---- unloading


@pytest.mark.needs("proc")
def test_unloaded_model_frees_memory_and_continues_equally(engine: Engine) -> None:
    ids = generate(engine)
    assert engine.unload_device_mem(NAME) is SUCCESS
    assert resources().threads == []
    assert status_of_start(engine) is DENIED
    assert engine.unload_device_mem(NAME) is SUCCESS
    assert engine.load_device_mem(NAME) is SUCCESS
    assert engine.load_device_mem(NAME) is SUCCESS
    assert generate(engine) == ids


def test_unload_waits_for_running_requests(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, held(engine):
        _handle, queue = start(engine)
        unload = pool.submit(engine.unload_device_mem, NAME)
        wait_until(lambda: not native(engine).is_running)
        assert not unload.done()
    assert unload.result() is SUCCESS
    assert queue.GeneratedLength() == 40


def test_unload_is_refused_if_the_files_were_deleted(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "model", make_config("llama"))
    engine = Engine()
    install(engine, model)
    ids = generate(engine)
    model.rename(tmp_path / "moved")
    with pytest.raises(AsError, match="was deleted, and load_device_mem has to read it") as raised:
        engine.unload_device_mem(NAME)
    assert raised.value.status is AsStatus.ALLSPARK_IO_ERROR
    assert generate(engine) == ids


def test_unload_is_refused_without_a_swap_threshold(engine: Engine) -> None:
    model = engine._models[NAME]
    assert model is not None
    model.config.swap_threshold = -1
    with pytest.raises(AsError, match="swap_threshold is -1; it must be at least 0"):
        engine.unload_device_mem(NAME)
    assert len(generate(engine)) == 40


# ---- deprecated names


def test_deprecated_names_work_with_a_warning(tiny_model: Path) -> None:
    engine = Engine()
    options = (tiny_model, {"threads": 1})
    with (
        mock.patch.object(engine_module, "engine_options", return_value=options),
        pytest.warns(DeprecationWarning, match="is deprecated; use install_model"),
    ):
        assert engine.build_model_from_config_struct(AsModelConfig(model_name=NAME)) is SUCCESS
    engine.start_model(NAME)
    handle, queue = start(engine)
    engine.sync_request(NAME, handle)
    with pytest.warns(DeprecationWarning, match="use ResultQueue.GenerateStatus"):
        assert engine.get_request_status(NAME, queue) is GenerateRequestStatus.GenerateFinished
    with pytest.warns(DeprecationWarning, match="use ResultQueue.Get"):
        assert len(engine.get_wait(NAME, queue)) == 40
    with pytest.warns(DeprecationWarning, match="use ResultQueue.GetNoWait"):
        assert engine.get_no_wait(NAME, queue) == []
    for read in (engine.get_request_status, engine.get_wait, engine.get_no_wait):
        with (
            pytest.warns(DeprecationWarning, match="deprecated"),
            pytest.raises(AsError, match="must be a ResultQueue"),
        ):
            read(NAME, None)  # type: ignore[arg-type]
