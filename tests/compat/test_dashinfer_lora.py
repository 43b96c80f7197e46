"""LoRA adapters in the DashInfer API: serialisation, loading, requests, and the status of each error."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import penstock
from penstock.compat.dashinfer.allspark import HuggingFaceModel, ModelSerializerException
from penstock.compat.dashinfer.allspark.adapters import LoraSettings
from penstock.compat.dashinfer.allspark.engine import Engine
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from penstock.compat.dashinfer.allspark.model_files import ModelFiles
from support.api.adapters import write_adapter, write_merged
from support.api.checkpoints import make_config, make_weights, write_checkpoint
from support.compat.aliases import ALIASES
from support.compat.aliases import run as run_python
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, held, native, refusal, start

if TYPE_CHECKING:
    from collections.abc import Iterator

CONFIG = make_config("llama")
PARAM_ERROR = AsStatus.ALLSPARK_PARAM_ERROR
IO_ERROR = AsStatus.ALLSPARK_IO_ERROR
INVALID_CALL = AsStatus.ALLSPARK_INVALID_CALL_ERROR
NOT_FOUND = AsStatus.ALLSPARK_LORA_NOT_FOUND
ALREADY_LOADED = AsStatus.ALLSPARK_LORA_ALREADY_LOADED
IN_USE = AsStatus.ALLSPARK_LORA_IN_USE
TOO_MANY = AsStatus.ALLSPARK_LORA_NUM_EXCEED_LIMIT_ERROR
RANK_EXCEEDED = AsStatus.ALLSPARK_LORA_RANK_EXCEED_LIMIT_ERROR
#: A request of 400 tokens.
LONG = {**GREEDY, "max_length": 404}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), CONFIG)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of four adapters: `lora-1` and `lora-2`, `wide` with rank 33, and `broken`."""
    root = tmp_path_factory.mktemp("loras")
    write_adapter(root / "lora-1", CONFIG, rank=8, seed=1)
    write_adapter(root / "lora-2", CONFIG, rank=4, seed=2)
    write_adapter(root / "wide", CONFIG, rank=33, seed=3)
    write_adapter(root / "broken", CONFIG, use_dora=True)
    return root


def serialise(model: Path, output: Path, **options: Any) -> HuggingFaceModel:
    return HuggingFaceModel(model, NAME).load_model().serialize_to_path(None, output, **options).free_model()


def lora_cfg(folders: Path, *names: str, **values: Any) -> dict[str, Any]:
    return {"input_base_dir": str(folders), "lora_names": list(names), **values}


@pytest.fixture(scope="module")
def loader(model: Path, folders: Path, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceModel:
    """A serialised model with all adapters."""
    names = ("lora-1", "lora-2", "wide", "broken")
    return serialise(model, tmp_path_factory.mktemp("output"), lora_cfg=lora_cfg(folders, *names))


def run(loader: HuggingFaceModel, **fields: Any) -> Engine:
    """An engine with a running model."""
    builder = loader.create_reference_runtime_config_builder(NAME, "cpu", [0], 8)
    fields = {"kv_cache_span_size": 16, "num_threads": 1, "lora_max_num": 3, "lora_max_rank": 32, **fields}
    engine = Engine()
    engine.install_model(builder.update_from_dict(fields).build())
    assert engine.start_model(NAME) is SUCCESS
    return engine


def end(engine: Engine) -> None:
    engine.stop_model(NAME)
    assert engine.release_model(NAME) is SUCCESS


@pytest.fixture
def engine(loader: HuggingFaceModel) -> Iterator[Engine]:
    engine = run(loader)
    yield engine
    end(engine)


def with_adapter(name: str, config: dict[str, Any] = dict(GREEDY)) -> dict[str, Any]:  # noqa: B006 - not changed
    return {**config, "lora_name": name}


# ---- outputs


def test_outputs_are_those_of_the_native_api(engine: Engine, model: Path, folders: Path) -> None:
    config = {**GREEDY, "logprobs": True, "top_logprobs": 2}
    found = {}
    for name in ("lora-1", "lora-2", ""):
        if name:
            assert engine.load_lora(NAME, name) is SUCCESS
        handle, queue = start(engine, config=with_adapter(name, config))
        assert engine.sync_request(NAME, handle) is SUCCESS
        elements = queue.Get()
        assert elements is not None
        found[name] = (elements.ids_from_generate, elements.token_logprobs_list)
        engine.release_request(NAME, handle)
    with penstock.Engine(model, threads=1, max_adapters=2) as other:
        for name, (ids, logprobs) in found.items():
            if name:
                other.blocking.load_adapter(name, folders / name)
            result = other.blocking.generate(
                list(PROMPT),
                max_tokens=40,
                temperature=0,
                ignore_eos=True,
                logprobs=True,
                adapter=name or None,
            )
            assert (ids, logprobs) == (list(result.token_ids), list(result.logprobs or ()))
    assert len({tuple(ids) for ids, _ in found.values()}) == 3


def test_output_is_that_of_merged_weights(engine: Engine, tmp_path: Path) -> None:
    engine.load_lora(NAME, "lora-1")
    with penstock.Engine(write_merged(tmp_path, CONFIG, rank=8, seed=1), threads=1) as merged:
        result = merged.blocking.generate(list(PROMPT), max_tokens=40, temperature=0, ignore_eos=True)
    assert generate(engine, config=with_adapter("lora-1")) == list(result.token_ids)


def test_mixed_batch_has_the_outputs_of_each_alone(engine: Engine) -> None:
    for name in ("lora-1", "lora-2"):
        engine.load_lora(NAME, name)
    names = ("lora-1", "", "lora-2", "lora-1")
    alone = [generate(engine, config=with_adapter(name)) for name in names]
    with held(engine):
        requests = [start(engine, config=with_adapter(name)) for name in names]
    together = []
    for handle, queue in requests:
        assert engine.sync_request(NAME, handle) is SUCCESS
        elements = queue.Get()
        assert elements is not None
        together.append(elements.ids_from_generate)
        engine.release_request(NAME, handle)
    assert together == alone


def test_prefix_cache_is_not_shared_by_adapters(engine: Engine) -> None:
    engine.load_lora(NAME, "lora-1")
    prompt = list(range(1, 101))
    lengths = []
    for name in ("", "lora-1", "lora-1", ""):
        handle, queue = start(engine, prompt, {**with_adapter(name), "max_length": 104})
        engine.sync_request(NAME, handle)
        elements = queue.Get()
        assert elements is not None
        lengths.append(elements.prefix_cache_len)
        engine.release_request(NAME, handle)
    assert lengths == [0, 0, 96, 96]


# ---- loading and unloading


def test_load_and_unload_return_the_documented_statuses(engine: Engine, folders: Path) -> None:
    assert refusal(engine, with_adapter("lora-1")) is NOT_FOUND
    assert engine.unload_lora(NAME, "lora-1") is NOT_FOUND
    assert engine.load_lora(NAME, "missing") is IO_ERROR
    assert engine.load_lora(NAME, "broken") is IO_ERROR
    assert engine.load_lora(NAME, "wide") is RANK_EXCEEDED
    assert engine.load_lora(NAME, "lora-1") is SUCCESS
    assert engine.load_lora(NAME, "lora-1") is ALREADY_LOADED
    assert engine.load_lora(NAME, str(folders / "lora-1")) is ALREADY_LOADED
    assert engine.unload_lora(NAME, "lora-1") is SUCCESS
    assert refusal(engine, with_adapter("lora-1")) is NOT_FOUND
    assert engine.load_lora(NAME, "lora-1") is SUCCESS


def test_reasons_name_the_fields_of_the_api(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    engine.load_lora(NAME, "wide")
    assert caplog.messages[-1].endswith("has rank 33; lora_max_rank is 32")
    engine.load_lora(NAME, "lora-1")
    refusal(engine, with_adapter("other"))
    assert caplog.messages[-1].endswith("the loaded adapters are lora-1")


def test_lora_max_num_limits_the_loaded_adapters(
    loader: HuggingFaceModel, caplog: pytest.LogCaptureFixture
) -> None:
    engine = run(loader, lora_max_num=1)
    assert engine.load_lora(NAME, "lora-1") is SUCCESS
    assert engine.load_lora(NAME, "lora-2") is TOO_MANY
    assert "lora_max_num" in caplog.messages[-1]
    assert engine.unload_lora(NAME, "lora-1") is SUCCESS
    assert engine.load_lora(NAME, "lora-2") is SUCCESS
    end(engine)


def test_model_with_lora_max_num_0_takes_no_adapter(loader: HuggingFaceModel) -> None:
    engine = run(loader, lora_max_num=0)
    assert engine.load_lora(NAME, "lora-1") is TOO_MANY
    assert native(engine).info.memory.adapters == 0
    end(engine)


def test_model_without_lora_cfg_has_no_memory_for_adapters(
    model: Path, folders: Path, tmp_path: Path
) -> None:
    engine = run(serialise(model, tmp_path))
    assert native(engine).info.memory.adapters == 0
    assert engine.load_lora(NAME, str(folders / "lora-1")) is INVALID_CALL
    assert refusal(engine, with_adapter("lora-1")) is NOT_FOUND
    end(engine)


@pytest.mark.needs("symlinks")
@pytest.mark.parametrize("suffix", ["", ".aslora"])
def test_absolute_path_names_an_adapter_by_its_last_part(
    engine: Engine, folders: Path, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"mine{suffix}"
    path.symlink_to(folders / "lora-1")
    assert engine.load_lora(NAME, str(path)) is SUCCESS
    ids = generate(engine, config=with_adapter("mine"))
    engine.load_lora(NAME, "lora-1")
    assert ids == generate(engine, config=with_adapter("lora-1"))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../lora-1", "a\0", "/", None, 7, ["a"]])
def test_invalid_name_is_a_param_error(engine: Engine, name: Any) -> None:
    assert engine.load_lora(NAME, name) is PARAM_ERROR
    assert native(engine).adapters == {}


@pytest.mark.needs("symlinks")
def test_name_with_a_comma_is_a_param_error(engine: Engine, folders: Path, tmp_path: Path) -> None:
    path = tmp_path / "a,b.aslora"
    path.symlink_to(folders / "lora-1")
    assert engine.load_lora(NAME, str(path)) is PARAM_ERROR


@pytest.mark.parametrize("name", ["", "/lora-1", None, 7, ["a"]])
def test_unload_of_an_invalid_name_is_a_param_error(engine: Engine, name: Any) -> None:
    assert engine.unload_lora(NAME, name) is PARAM_ERROR


def test_calls_for_an_unknown_model_are_param_errors(engine: Engine) -> None:
    assert engine.load_lora("other", "lora-1") is PARAM_ERROR
    assert engine.unload_lora("other", "lora-1") is PARAM_ERROR


@pytest.mark.parametrize("value", [7, ["lora-1"], b"lora-1"])
def test_lora_name_that_is_not_text_is_a_param_error(engine: Engine, value: Any) -> None:
    assert refusal(engine, {**GREEDY, "lora_name": value}) is PARAM_ERROR


def test_adapter_in_use_is_not_unloaded(engine: Engine) -> None:
    engine.load_lora(NAME, "lora-1")
    with held(engine):
        handle, queue = start(engine, config=with_adapter("lora-1"))
        other, _ = start(engine, config=with_adapter("lora-1"))
        assert engine.unload_lora(NAME, "lora-1") is IN_USE
        assert engine.stop_request(NAME, other) is SUCCESS  # the first still uses it
        assert engine.unload_lora(NAME, "lora-1") is IN_USE
    assert engine.sync_request(NAME, handle) is SUCCESS
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished
    assert engine.unload_lora(NAME, "lora-1") is SUCCESS
    assert native(engine).adapters == {}


@pytest.mark.parametrize("end_request", [Engine.stop_request, Engine.release_request])
def test_adapter_of_a_cancelled_request_is_unloaded(engine: Engine, end_request: Any) -> None:
    for _ in range(20):
        engine.load_lora(NAME, "lora-1")
        handle, _queue = start(engine, config=with_adapter("lora-1", LONG))
        assert end_request(engine, NAME, handle) is SUCCESS
        assert engine.unload_lora(NAME, "lora-1") is SUCCESS


def test_unloaded_name_can_stand_for_other_contents(model: Path, tmp_path: Path) -> None:
    adapters, output = tmp_path / "adapters", tmp_path / "output"
    outputs = []
    write_adapter(adapters / "mine", CONFIG, seed=1)
    mine = serialise(model, output, lora_cfg=lora_cfg(adapters, "mine"))
    engine = run(mine)
    for seed in (1, 2):
        write_adapter(adapters / "mine", CONFIG, seed=seed)
        serialise(model, output, lora_cfg=lora_cfg(adapters, "mine", lora_only=True))
        assert engine.load_lora(NAME, "mine") is SUCCESS
        outputs.append(generate(engine, config=with_adapter("mine")))
        assert engine.unload_lora(NAME, "mine") is SUCCESS
    assert outputs[0] != outputs[1]
    end(engine)


def test_adapters_load_and_unload_while_others_generate(engine: Engine) -> None:
    engine.load_lora(NAME, "lora-1")
    expected = generate(engine, config=with_adapter("lora-1"))
    stop = threading.Event()

    def cycle() -> set[AsStatus]:
        statuses = set()
        while not stop.is_set():
            statuses |= {engine.load_lora(NAME, "lora-2"), engine.unload_lora(NAME, "lora-2")}
        return statuses

    with ThreadPoolExecutor(1) as pool:
        cycles = pool.submit(cycle)
        try:
            for _ in range(10):
                assert generate(engine, config=with_adapter("lora-1")) == expected
        finally:
            stop.set()
        assert cycles.result() == {SUCCESS}


def test_requests_beside_an_unload_are_right_or_refused(engine: Engine) -> None:
    engine.load_lora(NAME, "lora-1")
    expected = generate(engine, config=with_adapter("lora-1"))
    stop = threading.Event()

    def request() -> set[AsStatus]:
        statuses = set()
        while not stop.is_set():
            status, handle, queue = engine.start_request_ids(NAME, None, PROMPT, with_adapter("lora-1"))
            statuses.add(status)
            if handle is not None and queue is not None:
                assert engine.sync_request(NAME, handle) is SUCCESS
                elements = queue.Get()
                assert elements is not None
                assert elements.ids_from_generate == expected
                engine.release_request(NAME, handle)
        return statuses

    with ThreadPoolExecutor(2) as pool:
        requests = [pool.submit(request) for _ in range(2)]
        try:
            for _ in range(50):
                assert engine.unload_lora(NAME, "lora-1") in (SUCCESS, IN_USE)
                assert engine.load_lora(NAME, "lora-1") in (SUCCESS, ALREADY_LOADED)
        finally:
            stop.set()
        assert {status for done in requests for status in done.result()} <= {SUCCESS, NOT_FOUND}


def test_model_needs_the_files_of_its_adapters_to_unload(loader: HuggingFaceModel, tmp_path: Path) -> None:
    engine = run(loader, swap_threshold=0)
    adapter = write_adapter(tmp_path / "mine", CONFIG)
    engine.load_lora(NAME, str(adapter))
    shutil.rmtree(adapter)
    with pytest.raises(AsError, match="mine was deleted, and load_device_mem has to read it") as raised:
        engine.unload_device_mem(NAME)
    assert raised.value.status is IO_ERROR
    generate(engine, config=with_adapter("mine"))
    end(engine)


def test_lost_adapter_is_unloaded_before_the_model_is_loaded(
    loader: HuggingFaceModel, tmp_path: Path
) -> None:
    engine = run(loader, swap_threshold=0)
    adapter = write_adapter(tmp_path / "mine", CONFIG)
    engine.load_lora(NAME, str(adapter))
    engine.unload_device_mem(NAME)
    shutil.rmtree(adapter)
    with pytest.raises(AsError, match="mine") as raised:
        engine.load_device_mem(NAME)
    assert raised.value.status is IO_ERROR
    assert engine.unload_lora(NAME, "mine") is SUCCESS
    engine.load_device_mem(NAME)
    assert generate(engine)
    end(engine)


def test_adapters_stay_beside_a_model_with_a_relative_path(
    model: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = run(serialise(model, Path("output"), lora_cfg=lora_cfg(folders, "lora-1", "lora-2")))
    assert engine.load_lora(NAME, "lora-1") is SUCCESS
    monkeypatch.chdir(folders)
    assert engine.load_lora(NAME, "lora-2") is SUCCESS
    end(engine)


def test_adapters_are_loaded_again_with_the_model(loader: HuggingFaceModel) -> None:
    engine = run(loader, swap_threshold=0)
    engine.load_lora(NAME, "lora-1")
    ids = generate(engine, config=with_adapter("lora-1"))
    engine.unload_device_mem(NAME)
    assert engine.load_lora(NAME, "lora-2") is AsStatus.ALLSPARK_REQUEST_DENIED
    engine.load_device_mem(NAME)
    assert generate(engine, config=with_adapter("lora-1")) == ids
    end(engine)


# ---- the runtime configuration


def test_lora_names_are_loaded_with_the_model(loader: HuggingFaceModel) -> None:
    engine = run(loader, lora_names=["lora-1", "lora-2"])
    assert [*native(engine).adapters] == ["lora-1", "lora-2"]
    end(engine)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"lora_names": ["missing"]}, IO_ERROR),
        ({"lora_names": ["wide"]}, RANK_EXCEEDED),
        ({"lora_names": ["lora-1", "lora-2"], "lora_max_num": 1}, TOO_MANY),
        ({"lora_names": ["a/b"]}, PARAM_ERROR),
    ],
)
def test_model_with_bad_adapter_settings_is_not_installed(
    loader: HuggingFaceModel, fields: dict[str, Any], status: AsStatus
) -> None:
    with pytest.raises(AsError) as raised:
        run(loader, **fields)
    assert raised.value.status is status


# ---- serialisation


def test_serialised_adapter_is_a_copy_beside_the_model(loader: HuggingFaceModel, folders: Path) -> None:
    directory = loader._serialized().weights.parent
    names = ("tiny.asgraph", "tiny.asparam", "lora-1.aslora", "lora-2.aslora", "wide.aslora", "broken.aslora")
    assert {path.name for path in directory.iterdir()} == {*names}
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (directory / "lora-1.aslora" / file).read_bytes() == (folders / "lora-1" / file).read_bytes()


def test_lora_only_writes_no_model(model: Path, folders: Path, tmp_path: Path) -> None:
    serialise(model, tmp_path, lora_cfg=lora_cfg(folders, "lora-1", lora_only=True))
    assert [path.name for path in tmp_path.iterdir()] == ["lora-1.aslora"]


def test_skipped_serialisation_adds_the_adapters(model: Path, folders: Path, tmp_path: Path) -> None:
    serialise(model, tmp_path, lora_cfg={})
    first = (tmp_path / "tiny.asparam").stat().st_ino
    serialise(model, tmp_path, lora_cfg=lora_cfg(folders, "lora-1"), skip_if_exists=True)
    assert (tmp_path / "tiny.asparam").stat().st_ino == first
    assert (tmp_path / "lora-1.aslora").is_dir()
    serialise(model, tmp_path, skip_if_exists=True)
    assert (tmp_path / "tiny.asparam").stat().st_ino != first  # it takes no adapters


@pytest.mark.needs("symlinks")
def test_adapter_replaces_a_former_one_and_a_file(model: Path, folders: Path, tmp_path: Path) -> None:
    (tmp_path / "lora-1.aslora").write_bytes(b"AllSparky")
    for name in ("lora-1", "lora-2"):
        source = tmp_path / name / "lora-1"
        source.parent.mkdir()
        source.symlink_to(folders / name)
        serialise(model, tmp_path, lora_cfg=lora_cfg(source.parent, "lora-1", lora_only=True))
        expected = (folders / name / "adapter_model.safetensors").read_bytes()
        assert (tmp_path / "lora-1.aslora" / "adapter_model.safetensors").read_bytes() == expected
    assert {path.name for path in tmp_path.iterdir()} == {"lora-1.aslora", "lora-1", "lora-2"}


def test_failed_copy_leaves_the_former_adapter(
    model: Path, folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = lora_cfg(folders, "lora-1", lora_only=True)
    serialise(model, tmp_path, lora_cfg=settings)

    def fail(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("shutil.copyfile", fail)
    with pytest.raises(ModelSerializerException, match="No space left"):
        serialise(model, tmp_path, lora_cfg=settings)
    assert {path.name for path in (tmp_path / "lora-1.aslora").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    assert len([*tmp_path.iterdir()]) == 1


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_without_a_file_is_refused_before_the_model(
    model: Path, tmp_path: Path, missing: str
) -> None:
    (write_adapter(tmp_path / "loras" / "a", CONFIG) / missing).unlink()
    output = tmp_path / "output"
    with pytest.raises(ModelSerializerException, match=f"{missing}: no such file"):
        serialise(model, output, lora_cfg=lora_cfg(tmp_path / "loras", "a"))
    assert not output.exists()


def test_pickled_adapter_is_refused_and_not_executed(model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "a", CONFIG)
    (adapter / "adapter_model.safetensors").unlink()
    bomb = tmp_path / "executed"
    (adapter / "adapter_model.bin").write_bytes(f"cos\nmkdir\n(V{bomb}\ntR.".encode())
    with pytest.raises(ModelSerializerException, match="save the tensors as safetensors"):
        serialise(model, tmp_path / "output", lora_cfg=lora_cfg(tmp_path, "a"))
    assert not bomb.exists()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lora_name": "a"}, "lora_cfg"),
        (["a"], "lora_cfg"),
        ({"lora_names": "lora-1"}, "lora_names"),
        ({"lora_names": ["a/b"]}, "lora_names"),
        ({"lora_names": [".."]}, "lora_names"),
        ({"lora_names": [7]}, "lora_names"),
        ({"input_base_dir": 7}, "input_base_dir"),
        ({"lora_only": "yes"}, "lora_only"),
    ],
)
def test_invalid_lora_cfg_is_a_value_error_that_names_the_field(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"{message} is "):
        LoraSettings.read(value)


def test_adapters_in_memory_outlive_the_serialised_model(model: Path, folders: Path) -> None:
    loader = HuggingFaceModel(model, NAME, in_memory_serialize=True).load_model()
    with pytest.raises(ValueError, match="lora_only is True"):
        loader.serialize(None, lora_cfg=lora_cfg(folders, "lora-1", lora_only=True))
    loader.serialize(None, lora_cfg=lora_cfg(folders, "lora-1"))
    directory = loader._serialized().weights.parent
    engine = run(loader)
    loader.free_memory_serialize_file()
    assert [path.name for path in directory.iterdir()] == ["lora-1.aslora"]
    assert engine.load_lora(NAME, "lora-1") is SUCCESS
    assert generate(engine, config=with_adapter("lora-1")) != generate(engine)
    end(engine)


def test_state_dict_is_serialised_with_adapters(folders: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    state = {name: np.asarray(values) for name, values in make_weights(CONFIG, 0)}
    settings = lora_cfg(folders, "lora-1")
    Engine().serialize_model_from_torch(NAME, "LLaMA_v2", state, CONFIG, save_dir=tmp_path, lora_cfg=settings)
    assert ModelFiles.named(tmp_path, NAME).read().conversion.lora
    assert (tmp_path / "lora-1.aslora").is_dir()


@pytest.mark.needs("sources")
def test_program_with_the_package_dashinfer(model: Path, folders: Path, tmp_path: Path) -> None:
    code = f"""
from dashinfer import allspark
from dashinfer.allspark import AsStatus, TargetDevice
engine = allspark.Engine()
loader = allspark.HuggingFaceModel({str(model)!r}, "m").load_model().serialize_to_path(
    engine, {str(tmp_path)!r}, lora_cfg={lora_cfg(folders, "lora-1", lora_only=False)!r}
).free_model()
builder = loader.create_reference_runtime_config_builder("m", TargetDevice.CPU, [0], max_batch=2)
config = builder.max_length(64).lora_max_num(20).lora_max_rank(64).build()
engine.install_model(config)
engine.start_model("m")
assert engine.load_lora("m", "lora-1") == AsStatus.ALLSPARK_SUCCESS
for name in ("", "lora-1"):
    generation_config = loader.create_reference_generation_config_builder(config)
    generation_config.update({{"top_k": 1, "lora_name": name, "early_stopping": False, "stop_words_ids": []}})
    status, handle, queue = engine.start_request_ids("m", loader, [10, 20, 30, 40], generation_config)
    engine.sync_request("m", handle)
    print(*queue.Get().ids_from_generate)
    engine.release_request("m", handle)
engine.stop_model("m")
engine.release_model("m")
"""
    base, adapted = run_python(code, ALIASES / "dashinfer").splitlines()
    with penstock.Engine(model, threads=1, max_adapters=1) as other:
        other.blocking.load_adapter("lora-1", folders / "lora-1")
        for name, found in ((None, base), ("lora-1", adapted)):
            result = other.blocking.generate(
                list(PROMPT), max_tokens=60, temperature=0, ignore_eos=True, adapter=name
            )
            assert found == " ".join(map(str, result.token_ids))
