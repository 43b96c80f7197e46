"""Several engines in one process: shared threads, turns, and one account of the memory."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from support.api.engines import PROMPT, bits_of, engine_threads, make_engine, wait_until

if TYPE_CHECKING:
    from pathlib import Path

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "logprobs": True}
#: More threads than half of the CPUs: two pools do not fit.
ALL_THREADS = os.cpu_count() or 1


def num_workers() -> int:
    return sum(name.startswith("penstock-worker") for name in engine_threads())


@pytest.mark.anyio
async def test_engines_run_together_with_the_bits_of_one(tiny_model: Path) -> None:
    results: dict[tuple[int, int], penstock.Result] = {}

    async def run(index: int, engine: penstock.Engine, seed: int) -> None:
        prompt = [seed + 1, *PROMPT]
        results[index, seed] = await engine.generate(prompt, max_tokens=40, **GREEDY)

    async with (
        make_engine(tiny_model, threads=2, dtype="float32") as first,
        make_engine(tiny_model, threads=2, dtype="float32", quantization="int8") as second,
        anyio.create_task_group() as tasks,
    ):
        for index, engine in enumerate((first, second)):
            for seed in range(6):
                tasks.start_soon(run, index, engine, seed)
    for index, quantization in enumerate((None, "int8")):
        with make_engine(tiny_model, threads=2, dtype="float32", quantization=quantization) as alone:
            for seed in range(6):
                expected = alone.blocking.generate([seed + 1, *PROMPT], max_tokens=40, **GREEDY)
                assert bits_of(results[index, seed]) == bits_of(expected)


@pytest.mark.needs("proc")
def test_engines_share_threads_unless_their_hosts_differ(tiny_model: Path) -> None:
    own = ALL_THREADS - 1
    with make_engine(tiny_model, threads=ALL_THREADS) as first:
        wait_until(lambda: num_workers() == own)  # a thread sets its name when it first runs
        with make_engine(tiny_model, threads=ALL_THREADS) as second:
            second.blocking.generate(PROMPT, max_tokens=2)
            assert (num_workers(), first.host) == (own, second.host)
        with make_engine(tiny_model, threads=ALL_THREADS, host=penstock.Host()) as third:
            wait_until(lambda: num_workers() == 2 * own)
            assert third.host != first.host
        with make_engine(tiny_model, threads=ALL_THREADS + 1):
            wait_until(lambda: num_workers() == 2 * own + 1)  # a pool of its own
        first.blocking.generate(PROMPT, max_tokens=2)


@pytest.mark.anyio
async def test_short_request_ends_before_long_ones_of_another_engine(demo_model: Path) -> None:
    options: dict[str, Any] = {"threads": ALL_THREADS, "max_model_len": 512}
    async with (
        make_engine(demo_model, **options) as busy,
        make_engine(demo_model, **options) as other,
    ):
        long = [await busy.start_request(PROMPT, max_tokens=400, **GREEDY) for _ in range(4)]
        for request in long:
            await anext(request)
        result = await other.generate(PROMPT, max_tokens=8, **GREEDY)
        assert len(result.token_ids) == 8
        assert [request.finish_reason for request in long] == [None] * 4
        for request in long:
            request.cancel()


def test_processor_can_wait_for_another_engine(tiny_model: Path) -> None:
    is_called, other_is_done = threading.Event(), threading.Event()
    waits = []

    def wait(_token_ids: list[int], _logits: penstock.Tensor) -> None:
        is_called.set()
        waits.append(other_is_done.wait(20))

    def use(engine: penstock.Engine) -> None:
        is_called.wait(20)
        engine.blocking.generate(PROMPT, max_tokens=3, **GREEDY)
        other_is_done.set()

    with (
        make_engine(tiny_model, threads=ALL_THREADS) as engine,
        make_engine(tiny_model, threads=ALL_THREADS) as other,
    ):
        user = threading.Thread(target=use, args=(other,))
        user.start()
        engine.blocking.generate(PROMPT, max_tokens=2, logits_processors=[wait], **GREEDY)
        user.join()
    assert waits == [True, True]


def test_memory_counts_when_it_is_reserved(tiny_model: Path) -> None:
    host = penstock.Host()
    with make_engine(tiny_model, host=host, kv_cache_bytes=8 << 20) as engine:
        one = host.reserved_bytes
        assert one >= engine.info.memory.weights + engine.info.memory.kv_cache
        with make_engine(tiny_model, host=host, kv_cache_bytes=8 << 20):
            assert host.reserved_bytes == 2 * one
        assert host.reserved_bytes == one
        engine.blocking.sleep()
        assert host.reserved_bytes == 0
        engine.blocking.wake()
        assert host.reserved_bytes == one
    assert host.reserved_bytes == 0


def test_memory_beyond_that_of_other_engines_is_refused(tiny_model: Path) -> None:
    with make_engine(tiny_model, host=penstock.Host(), kv_cache_bytes=4 << 20, max_num_seqs=64) as engine:
        needed = engine.host.reserved_bytes
    host = penstock.Host(memory_bytes=3 * needed // 2)
    with make_engine(tiny_model, host=host, kv_cache_bytes=4 << 20, memory_ratio=1.0) as first:
        with pytest.raises(penstock.OutOfMemoryError, match="other engines have reserved") as caught:
            make_engine(tiny_model, host=host, kv_cache_bytes=4 << 20, memory_ratio=1.0).blocking.start()
        assert f"memory_bytes={3 * needed // 2}" in str(caught.value)
        assert (host.reserved_bytes, host.memory_bytes) == (needed, 3 * needed // 2)
        assert len(first.blocking.generate(PROMPT, max_tokens=3, **GREEDY).token_ids) == 3
    with make_engine(tiny_model, host=host, kv_cache_bytes=4 << 20, memory_ratio=1.0) as second:
        assert len(second.blocking.generate(PROMPT, max_tokens=3, **GREEDY).token_ids) == 3


def test_available_memory_is_what_another_engine_may_take(tiny_model: Path) -> None:
    assert (
        1 << 20 < penstock.Host().available_bytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    host = penstock.Host(memory_bytes=64 << 20)
    assert host.available_bytes == 64 << 20
    with make_engine(tiny_model, host=host, kv_cache_bytes=4 << 20):
        assert host.available_bytes == (64 << 20) - host.reserved_bytes
    assert host.available_bytes == 64 << 20


def test_second_engine_is_shorter_or_refused_in_a_small_host(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make_engine(tiny_model, host=penstock.Host(), kv_cache_bytes=4 << 20) as engine:
        needed, cache = engine.host.reserved_bytes, engine.info.memory.kv_cache
    full = engine.info.max_model_len * cache // engine.info.num_blocks // engine.info.block_size
    host = penstock.Host(memory_bytes=2 * needed - cache + full // 2)
    options: dict[str, Any] = {"host": host, "memory_ratio": 1.0}
    with make_engine(tiny_model, kv_cache_bytes=4 << 20, **options):
        length = engine.info.max_model_len
        with pytest.raises(penstock.OutOfMemoryError, match=f"max_model_len={length} .*memory_bytes="):
            make_engine(tiny_model, max_model_len=length, **options).blocking.start()
        with make_engine(tiny_model, **options) as second:
            assert 0 < second.info.max_model_len < length
            assert second.blocking.generate(PROMPT, max_tokens=3, **GREEDY).finish_reason == "length"
    (record,) = (record for record in caplog.records if "max_model_len" in record.getMessage())
    assert record.getMessage().startswith(f"max_model_len reduced from {length} to ")
    assert record.getMessage().endswith(" to fit the KV cache, which has all memory that remains")
    with pytest.raises(penstock.OutOfMemoryError, match="memory_bytes=4096") as caught:
        make_engine(tiny_model, host=penstock.Host(memory_bytes=4096)).blocking.start()
    assert "other engines" not in str(caught.value)


def test_engines_that_open_together_do_not_share_bytes(tiny_model: Path) -> None:
    with make_engine(tiny_model, host=penstock.Host(), kv_cache_bytes=4 << 20) as engine:
        needed = engine.host.reserved_bytes
    for _ in range(5):
        host = penstock.Host(memory_bytes=3 * needed // 2)
        both = threading.Barrier(2)

        def start(
            _: int, host: penstock.Host = host, both: threading.Barrier = both
        ) -> penstock.Engine | None:
            engine = make_engine(tiny_model, host=host, kv_cache_bytes=4 << 20, memory_ratio=1.0)
            both.wait()
            try:
                engine.blocking.start()
            except penstock.OutOfMemoryError:
                return None
            return engine

        with ThreadPoolExecutor(2) as threads:
            opened = [engine for engine in threads.map(start, range(2)) if engine is not None]
        assert (len(opened), host.reserved_bytes) == (1, needed)
        opened[0].close()


def test_mapped_weights_count(tiny_model: Path, tmp_path: Path) -> None:
    converted = penstock.convert(tiny_model, tmp_path / "converted")
    sizes = []
    for model in (tiny_model, converted):
        host = penstock.Host()
        with make_engine(model, host=host, kv_cache_bytes=4 << 20):
            sizes.append(host.reserved_bytes)
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)


@pytest.mark.needs("fork")
def test_engine_uses_the_host_of_its_process_after_a_fork(tiny_model: Path) -> None:
    engine = make_engine(tiny_model)
    given = make_engine(tiny_model, host=penstock.Host())
    process = os.fork()
    if process == 0:  # pragma: no cover - the child
        status = 1
        try:
            with engine:
                same = engine.blocking.generate(PROMPT, max_tokens=3, **GREEDY).token_ids
            try:
                given.blocking.start()
            except penstock.ConfigError as error:
                status = 0 if len(same) == 3 and str(error).startswith("host=Host()") else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    with given:
        assert len(given.blocking.generate(PROMPT, max_tokens=3, **GREEDY).token_ids) == 3


@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 1 << 63])
def test_invalid_memory_is_refused(value: Any) -> None:
    with pytest.raises(penstock.ConfigError, match="memory_bytes="):
        penstock.Host(memory_bytes=value)


def test_host_has_a_representation_and_a_type() -> None:
    assert (repr(penstock.Host()), repr(penstock.Host(memory_bytes=5))) == ("Host()", "Host(memory_bytes=5)")
    with pytest.raises(TypeError, match="expected Host or None for `host`, not str"):
        penstock.Engine("model", host="here")  # type: ignore[arg-type]
