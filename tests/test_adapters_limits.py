"""Names of adapters, their memory, and the limits of their number, with the numbers in the errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

import penstock
from api_support import bits_of, make_engine
from support.adapters import write_adapter
from support.checkpoints import make_config, tensor_shapes
from support.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CONFIG = make_config("llama")
PROMPT = random_prompt(30)
PARAMS = penstock.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters with distinct weights."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), CONFIG, seed=seed) for seed in range(4)]


@pytest.fixture
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, max_adapters=3) as engine:
        yield engine


def output(engine: penstock.Engine, adapter: str | None) -> Any:
    return bits_of(engine.blocking.generate(PROMPT, PARAMS, adapter=adapter))


@pytest.mark.parametrize("name", ["", ",", "a,b", "a\nb", "\0", "\x7f", "x" * 257])
def test_invalid_name_is_refused(name: str, engine: penstock.Engine, folders: list[Path]) -> None:
    with pytest.raises(penstock.ConfigError, match="1 to 256 characters without commas") as caught:
        engine.blocking.load_adapter(name, folders[0])
    assert caught.value.field == "name"
    assert engine.adapters == {}


@pytest.mark.parametrize("name", ["a", "x" * 256, "org/name@v1", "ü ß 語", "a b", "😀" * 256])
def test_valid_name_is_accepted(name: str, engine: penstock.Engine, folders: list[Path]) -> None:
    engine.blocking.load_adapter(name, folders[0])
    assert engine.blocking.generate(PROMPT, PARAMS, adapter=name).adapter == name
    engine.blocking.unload_adapter(name)
    assert engine.adapters == {}


def test_unknown_name_lists_those_that_are_loaded(engine: penstock.Engine, folders: list[Path]) -> None:
    with pytest.raises(penstock.AdapterNotFoundError, match="no adapter is loaded"):
        output(engine, "a")
    engine.blocking.load_adapter("b", folders[0])
    engine.blocking.load_adapter("c", folders[1])
    with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are b, c") as caught:
        output(engine, "a")
    assert (caught.value.field, caught.value.value) == ("adapter", "a")
    with pytest.raises(penstock.AdapterNotFoundError, match="the loaded adapters are b, c"):
        engine.blocking.unload_adapter("a")


def test_limit_of_loaded_adapters_names_its_number(tiny_model: Path, folders: list[Path]) -> None:
    with make_engine(tiny_model, max_adapters=1, max_cpu_adapters=2) as engine:
        engine.blocking.load_adapter("a", folders[0])
        engine.blocking.load_adapter("b", folders[1])
        with pytest.raises(penstock.AdapterLimitError, match=r"2 adapters are loaded.*max_cpu_adapters"):
            engine.blocking.load_adapter("c", folders[2])
        assert list(engine.adapters) == ["a", "b"]
        engine.blocking.unload_adapter("a")
        engine.blocking.load_adapter("c", folders[3])
        assert list(engine.adapters) == ["b", "c"]


def test_replacement_needs_no_free_place(tiny_model: Path, folders: list[Path]) -> None:
    with make_engine(tiny_model, max_adapters=1) as engine:
        for folder in folders:
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


def test_engine_without_adapters_refuses_them(tiny_model: Path, folders: list[Path]) -> None:
    with make_engine(tiny_model) as engine:
        with pytest.raises(penstock.ConfigError, match="max_adapters") as caught:
            engine.blocking.load_adapter("a", folders[0])
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


def test_engine_that_is_not_open_loads_nothing(tiny_model: Path, folders: list[Path]) -> None:
    engine = make_engine(tiny_model, max_adapters=1)
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.load_adapter("a", folders[0])
    with pytest.raises(penstock.EngineStoppedError):
        engine.blocking.unload_adapter("a")
    with pytest.raises(penstock.EngineStoppedError):
        _ = engine.adapters
