"""Names of adapters, their memory, and the limits of their number, with the numbers in the errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config, tensor_shapes, write_checkpoint
from support.api.engines import bits_of, make_engine, resident_bytes
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = make_config("llama")
PROMPT = random_prompt(30)
PARAMS = penstock.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)


def output(engine: penstock.Engine, adapter: str | None) -> Any:
    return bits_of(engine.blocking.generate(PROMPT, PARAMS, adapter=adapter))


@pytest.mark.parametrize("name", ["", ",", "a,b", "a\nb", "\0", "\x7f", "x" * 257])
def test_invalid_name_is_refused(name: str, engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    with pytest.raises(penstock.ConfigError, match="1 to 256 characters without commas") as caught:
        engine.blocking.load_adapter(name, adapter_folders[0])
    assert caught.value.field == "name"
    assert engine.adapters == {}


@pytest.mark.parametrize("name", ["a", "x" * 256, "org/name@v1", "ü ß 語", "a b", "😀" * 256])
def test_valid_name_is_accepted(name: str, engine: penstock.Engine, adapter_folders: list[Path]) -> None:
    engine.blocking.load_adapter(name, adapter_folders[0])
    assert engine.blocking.generate(PROMPT, PARAMS, adapter=name).adapter == name
    engine.blocking.unload_adapter(name)
    assert engine.adapters == {}


def test_unknown_name_lists_those_that_are_loaded(
    engine: penstock.Engine, adapter_folders: list[Path]
) -> None:
    with pytest.raises(penstock.AdapterNotFoundError, match="no adapter is loaded"):
        output(engine, "a")
    engine.blocking.load_adapter("b", adapter_folders[0])
    engine.blocking.load_adapter("c", adapter_folders[1])
    with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are b, c") as caught:
        output(engine, "a")
    assert (caught.value.field, caught.value.value) == ("adapter", "a")
    with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are b, c"):
        engine.blocking.unload_adapter("a")


def test_limit_of_loaded_adapters_names_its_number(tiny_model: Path, adapter_folders: list[Path]) -> None:
    with make_engine(tiny_model, max_adapters=1, max_cpu_adapters=2) as engine:
        engine.blocking.load_adapter("a", adapter_folders[0])
        engine.blocking.load_adapter("b", adapter_folders[1])
        with pytest.raises(penstock.AdapterLimitError, match=r"2 adapters are loaded.*max_cpu_adapters"):
            engine.blocking.load_adapter("c", adapter_folders[2])
        assert list(engine.adapters) == ["a", "b"]
        engine.blocking.unload_adapter("a")
        engine.blocking.load_adapter("c", adapter_folders[3])
        assert list(engine.adapters) == ["b", "c"]


def test_bytes_of_loaded_adapters_have_a_limit(tiny_model: Path, adapter_folders: list[Path]) -> None:
    first, second, third = adapter_folders[::4]  # of one size
    with make_engine(tiny_model, max_adapters=1) as engine:
        needed = engine.blocking.load_adapter("a", first).bytes
        assert engine.info.max_cpu_adapter_bytes > engine.info.adapter_cache_bytes
    limits = {"max_cpu_adapters": 4, "max_cpu_adapter_bytes": 2 * needed + 1}
    with make_engine(tiny_model, max_adapters=1, **limits) as engine:
        assert engine.info.max_cpu_adapter_bytes == 2 * needed + 1
        engine.blocking.load_adapter("a", first)
        engine.blocking.load_adapter("b", second)
        message = f"takes {needed} bytes, .* {2 * needed} of max_cpu_adapter_bytes={2 * needed + 1}"
        with pytest.raises(penstock.AdapterLimitError, match=message):
            engine.blocking.load_adapter("c", third)
        assert list(engine.adapters) == ["a", "b"]
        engine.blocking.unload_adapter("a")
        engine.blocking.load_adapter("c", third)


@pytest.mark.needs("proc")
def test_adapters_in_use_take_their_memory_once(tmp_path: Path) -> None:
    config = make_config("llama", hidden_size=512, intermediate_size=1024)
    model = write_checkpoint(tmp_path / "model", config)
    names = [str(index) for index in range(8)]
    for index, name in enumerate(names):
        write_adapter(tmp_path / name, config, rank=64, seed=index)
    with make_engine(model, max_adapters=8, adapter_cache_bytes=1 << 27) as engine:
        output(engine, None)
        engine.blocking.load_adapter("first", tmp_path / names[0])
        output(engine, "first")  # memory that all adapters share
        engine.blocking.unload_adapter("first")
        before = resident_bytes()
        for name in names:
            engine.blocking.load_adapter(name, tmp_path / name)
            output(engine, name)
        size = sum(adapter.bytes for adapter in engine.adapters.values())
        assert all(adapter.on_device for adapter in engine.adapters.values())
        assert size > 25 << 20
        assert resident_bytes() - before < 1.05 * size


def test_replacement_needs_no_free_place(tiny_model: Path, adapter_folders: list[Path]) -> None:
    with make_engine(tiny_model, max_adapters=1) as engine:
        for folder in adapter_folders:
            engine.blocking.load_adapter("a", folder, replace=True)
            assert engine.adapters["a"].path == str(folder)


def test_adapter_beyond_the_memory_names_the_bytes(tiny_model: Path, tmp_path: Path) -> None:
    small = write_adapter(tmp_path / "small", CONFIG, rank=4)
    large = write_adapter(tmp_path / "large", CONFIG, rank=32)
    with make_engine(tiny_model, max_adapters=1) as engine:
        needed = engine.blocking.load_adapter("large", large).bytes
    with make_engine(tiny_model, max_adapters=1, adapter_cache_bytes=needed - 4096) as engine:
        for _ in range(3):
            with pytest.raises(penstock.AdapterLoadError) as caught:
                engine.blocking.load_adapter("large", large)
        assert str(needed) in str(caught.value)
        assert str(engine.info.adapter_cache_bytes) in str(caught.value)
        assert engine.adapters == {}
        engine.blocking.load_adapter("small", small)
        assert output(engine, "small") != output(engine, None)
    with make_engine(tiny_model, max_adapters=1, adapter_cache_bytes=needed) as engine:
        engine.blocking.load_adapter("large", large)
        assert output(engine, "large") != output(engine, None)


def test_engine_without_adapters_refuses_them(tiny_model: Path, adapter_folders: list[Path]) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.ConfigError, match="max_adapters") as caught:
            engine.blocking.load_adapter("a", adapter_folders[0])
        assert caught.value.field == "max_adapters"
        with pytest.raises(penstock.AdapterNotFoundError):
            output(engine, "a")
        with pytest.raises(penstock.AdapterNotFoundError):
            engine.blocking.unload_adapter("a")
        assert engine.adapters == {}
        assert (engine.info.max_adapters, engine.info.memory.adapters) == (0, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rank", [1, 2, 7, 8, 33, 64])
def test_memory_is_that_of_the_real_ranks(rank: int, dtype: str, tiny_model: Path, tmp_path: Path) -> None:
    """The formula of docs/adapters.md; the highest rank does not matter."""
    config, size = make_config("llama"), 4 if dtype == "float32" else 2
    shapes = [shape for name, shape in tensor_shapes(config) if "_proj" in name]
    values = sum(rank * inputs + (rank + rank % 2) * outputs for outputs, inputs in shapes)
    pages = -(-size * values // 4096)
    folder = write_adapter(tmp_path, config, rank=rank, dtype=dtype)
    with make_engine(tiny_model, max_adapters=1, max_adapter_rank=128) as engine:
        assert engine.blocking.load_adapter("a", folder).bytes == 4096 * pages


def test_memory_plan_has_the_adapters_and_a_buffer(tiny_model: Path) -> None:
    limits = {"max_adapter_rank": 24, "adapter_cache_bytes": 1 << 20, "max_num_batched_tokens": 256}
    with make_engine(tiny_model, max_adapters=2, **limits) as engine:
        assert engine.info.adapter_cache_bytes == 1 << 20
        assert engine.info.memory.adapters == (1 << 20) + 12 * 256 * 24


def test_memory_of_adapters_is_reserved_in_the_host(tiny_model: Path) -> None:
    host = penstock.Host(memory_bytes=1 << 30)
    limits = {"max_adapters": 1, "kv_cache_bytes": 1 << 20}
    reserved = []
    for size in (1 << 20, 1 << 26):
        with make_engine(tiny_model, host=host, adapter_cache_bytes=size, **limits) as engine:
            engine.blocking.start()
            reserved.append(host.reserved_bytes)
    assert reserved[1] - reserved[0] == (1 << 26) - (1 << 20)


def test_engine_that_is_not_open_loads_nothing(tiny_model: Path, adapter_folders: list[Path]) -> None:
    engine = make_engine(tiny_model, max_adapters=1)
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.load_adapter("a", adapter_folders[0])
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.unload_adapter("a")
    with pytest.raises(penstock.EngineStoppedError):
        _ = engine.adapters
