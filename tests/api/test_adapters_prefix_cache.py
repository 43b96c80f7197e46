"""Blocks of the prefix cache are used by requests with the same load of the same adapter and salt only."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

import penstock
from support.api.adapters import write_adapter
from support.api.checkpoints import make_config
from support.api.engines import bits_of, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = make_config("llama")
PROMPT = random_prompt(100)
#: Number of full blocks before the last token, which is always computed.
CACHED = (len(PROMPT) - 1) // 16 * 16
PARAMS = penstock.SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Adapters of the same shape with distinct weights."""
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / str(seed), CONFIG, seed=seed) for seed in range(3)]


@pytest.fixture(scope="module")
def expected(tiny_model: Path, folders: list[Path]) -> dict[int | None, Any]:
    """The output with each adapter, and with none, from an engine without a prefix cache."""
    with make_engine(tiny_model, max_adapters=3, prefix_cache=False) as engine:
        for index, folder in enumerate(folders):
            engine.blocking.load_adapter(str(index), folder)
        outputs = {
            index: bits_of(engine.blocking.generate(PROMPT, PARAMS, adapter=name))
            for index, name in ((0, "0"), (1, "1"), (2, "2"), (None, None))
        }
    assert len({output[:2] for output in outputs.values()}) == 4
    return outputs


def run(engine: penstock.Engine, adapter: str | None, **options: Any) -> tuple[Any, int]:
    """The output and the number of cached tokens."""
    result = engine.blocking.generate(PROMPT, PARAMS, adapter=adapter, **options)
    return bits_of(result), result.usage.cached_tokens


def test_adapters_base_and_salts_share_no_blocks(
    engine: penstock.Engine, folders: list[Path], expected: dict[int | None, Any]
) -> None:
    engine.blocking.load_adapter("a", folders[0])
    engine.blocking.load_adapter("b", folders[1])
    engine.blocking.load_adapter("same files as a", folders[0])
    # A salt that is the name or the number of an adapter is another namespace.
    salts = (None, "a", "b", "0", "1", "2", "a\0", "None")
    names = {"a": 0, "b": 1, "same files as a": 0, None: None}
    pairs = [(name, salt) for salt in salts for name in names]
    for cached in (0, CACHED):
        for name, salt in pairs:
            assert run(engine, name, cache_salt=salt) == (expected[names[name]], cached), (name, salt)


def test_reset_of_a_salt_includes_its_adapters(engine: penstock.Engine, folders: list[Path]) -> None:
    engine.blocking.load_adapter("a", folders[0])
    pairs = [(name, salt) for name in ("a", None) for salt in ("tenant", None)]
    for name, salt in pairs:
        run(engine, name, cache_salt=salt)
    engine.reset_prefix_cache(cache_salt="tenant")
    cached = {(name, salt): run(engine, name, cache_salt=salt)[1] for name, salt in pairs}
    assert cached == {(name, salt): 0 if salt else CACHED for name, salt in pairs}


@pytest.mark.parametrize("change", ["other weights", "same weights"])
def test_unloaded_adapter_leaves_no_blocks(
    change: str,
    engine: penstock.Engine,
    folders: list[Path],
    expected: dict[int | None, Any],
    tmp_path: Path,
) -> None:
    """The second adapter has the name and the path of the first."""
    folder, new = tmp_path / "adapter", 1 if change == "other weights" else 0
    shutil.copytree(folders[0], folder)
    engine.blocking.load_adapter("a", folder)
    assert run(engine, "a") == (expected[0], 0)
    assert run(engine, "a") == (expected[0], CACHED)
    engine.blocking.unload_adapter("a")
    shutil.copytree(folders[new], folder, dirs_exist_ok=True)
    engine.blocking.load_adapter("a", folder)
    assert run(engine, "a") == (expected[new], 0)
    assert run(engine, "a") == (expected[new], CACHED)


def test_replaced_adapter_leaves_no_blocks(
    engine: penstock.Engine, folders: list[Path], expected: dict[int | None, Any]
) -> None:
    for index, folder in enumerate(folders):
        engine.blocking.load_adapter("a", folder, replace=True)
        assert run(engine, "a") == (expected[index], 0)
        assert run(engine, "a") == (expected[index], CACHED)
    assert run(engine, None) == (expected[None], 0)


def test_same_contents_again_keep_the_blocks(
    engine: penstock.Engine, folders: list[Path], tmp_path: Path
) -> None:
    copy = shutil.copytree(folders[0], tmp_path / "copy")
    engine.blocking.load_adapter("a", folders[0])
    run(engine, "a")
    for folder in (folders[0], copy):
        for replace in (False, True):
            assert engine.blocking.load_adapter("a", folder, replace=replace).path == str(folders[0])
            assert run(engine, "a")[1] == CACHED


@pytest.mark.anyio
async def test_replacement_affects_new_requests_only(
    engine: penstock.Engine, folders: list[Path], expected: dict[int | None, Any]
) -> None:
    long = PARAMS.replace(max_tokens=400)  # pauses if it is not read
    await engine.load_adapter("a", folders[0])
    whole = bits_of(await engine.generate(PROMPT, long, adapter="a"))
    old = await engine.start_request(PROMPT, long, adapter="a")
    await anext(aiter(old))
    await engine.load_adapter("a", folders[1], replace=True)
    new = await engine.generate(PROMPT, PARAMS, adapter="a")
    assert (bits_of(new), new.usage.cached_tokens) == (expected[1], 0)
    assert old.finish_reason is None
    assert bits_of(await old.result()) == whole
    # The blocks that the old request added meanwhile are not used either.
    again = await engine.generate(PROMPT, PARAMS, adapter="a")
    assert (bits_of(again), again.usage.cached_tokens) == (expected[1], CACHED)


@pytest.mark.anyio
async def test_waiting_requests_keep_the_adapter_that_they_named(
    tiny_model: Path, folders: list[Path], expected: dict[int | None, Any]
) -> None:
    async with make_engine(tiny_model, max_adapters=2, max_num_seqs=1) as engine:
        await engine.load_adapter("a", folders[0])
        running = await engine.start_request(PROMPT, PARAMS, max_tokens=400)
        waiting = await engine.start_request(PROMPT, PARAMS, adapter="a")
        await engine.load_adapter("a", folders[1], replace=True)
        newer = await engine.start_request(PROMPT, PARAMS, adapter="a")
        running.cancel()
        assert bits_of(await waiting.result()) == expected[0]
        assert bits_of(await newer.result()) == expected[1]


def test_host_tier_keeps_the_blocks_of_adapters_apart(
    tiny_model: Path, folders: list[Path], expected: dict[int | None, Any]
) -> None:
    """A KV cache for one request, so that the blocks of the others are in the host tier."""
    limits: dict[str, Any] = {"kv_cache_blocks": 8, "host_cache_blocks": 64, "max_model_len": 128}
    with make_engine(tiny_model, max_adapters=2, **limits) as engine:
        engine.blocking.load_adapter("a", folders[0])
        engine.blocking.load_adapter("b", folders[1])
        for _ in range(3):
            for name, index in (("a", 0), ("b", 1), (None, None)):
                assert run(engine, name)[0] == expected[index]
        engine.blocking.unload_adapter("a")
        engine.blocking.load_adapter("a", folders[2])
        assert run(engine, "a") == (expected[2], 0)


@pytest.mark.anyio
async def test_score_uses_no_blocks_of_another_adapter(tiny_model: Path, folders: list[Path]) -> None:
    async with make_engine(tiny_model, max_adapters=1) as engine:
        await engine.load_adapter("a", folders[0])
        adapted = await engine.score(PROMPT, adapter="a")
        base = await engine.score(PROMPT)
        assert adapted.logprobs != base.logprobs
        cached = (await engine.generate(PROMPT, PARAMS)).usage.cached_tokens
        assert cached == CACHED
        result = await engine.generate(PROMPT, PARAMS)
    async with make_engine(tiny_model) as engine:
        assert bits_of(await engine.generate(PROMPT, PARAMS)) == bits_of(result)
        assert (await engine.score(PROMPT)).logprobs == base.logprobs
