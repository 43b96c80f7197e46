"""Results of the DashInfer API: queues, statuses, log probabilities, interruption, prefix cache."""

from __future__ import annotations

import asyncio
import math
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import chain
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

import penstock
from penstock.compat.dashinfer.allspark import result_queue
from penstock.compat.dashinfer.allspark.engine import Engine, RequestStatInfo
from penstock.compat.dashinfer.allspark.enums import AsStatus, GenerateRequestStatus
from penstock.compat.dashinfer.allspark.errors import AsError
from support import hooks
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import bytes_of_blocks, start_python, wait_until
from support.compat.dashinfer import GREEDY, NAME, PROMPT, SUCCESS, generate, held, install, native, start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from penstock.compat.dashinfer.allspark.result_queue import GeneratedElements, ResultQueue

ENDS = (GenerateRequestStatus.GenerateFinished, GenerateRequestStatus.GenerateInterrupted)
LONG = {**GREEDY, "max_length": 500}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = Engine()
    install(engine, tiny_model)
    yield engine
    engine.stop_model(NAME)
    assert engine.release_model(NAME) is SUCCESS


def ids_of(elements: GeneratedElements | None) -> list[int]:
    return [] if elements is None else elements.ids_from_generate


def read_all(queue: ResultQueue) -> list[int]:
    """The tokens of a queue, read by the loop of the documents."""
    ids = []
    status = queue.GenerateStatus()
    while status not in ENDS:
        ids += ids_of(queue.Get())
        status = queue.GenerateStatus()
    return ids


# ---- reading


def test_tokens_of_a_loop_are_those_of_one_get_after_sync(engine: Engine) -> None:
    expected = generate(engine, config=LONG)
    assert len(expected) == 500 - len(PROMPT)
    _handle, queue = start(engine, config=LONG)
    assert read_all(queue) == expected
    _handle, queue = start(engine, config=LONG)
    assert list(chain.from_iterable(iter_get(queue))) == expected


def iter_get(queue: ResultQueue) -> Iterator[list[int]]:
    while (elements := queue.Get()) is not None:
        yield elements.ids_from_generate


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_documented_loop_loses_no_token_of_a_finished_request(engine: Engine, num_tokens: int) -> None:
    config = {**GREEDY, "max_length": len(PROMPT) + num_tokens}
    handle, queue = start(engine, config=config)
    handle._request.result()  # it ends before the first look at the status
    assert len(read_all(queue)) == num_tokens
    _handle, queue = start(engine, config=config)
    first = ids_of(queue.Get())
    handle._request.result()
    assert len(first + read_all(queue)) == num_tokens


def test_get_after_the_end_returns_none_at_once(engine: Engine) -> None:
    _handle, queue = start(engine)
    read_all(queue)
    for get in (queue.Get, queue.GetNoWait, lambda: queue.GetWithTimeout(0)):
        assert get() is None
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished


def test_empty_queue_gives_none_without_waiting(engine: Engine) -> None:
    with held(engine):
        _handle, queue = start(engine)
        assert queue.GetNoWait() is None
        assert queue.GetWithTimeout(1) is None
        assert queue.GetWithTimeout(1e-9) is None
        assert queue.GenerateStatus() is GenerateRequestStatus.Init
        assert queue.GeneratedLength() == 0
    assert read_all(queue) == generate(engine)


def test_get_with_timeout_waits_for_tokens(engine: Engine) -> None:
    ids = generate(engine)
    numbers = (np.int64(100_000), np.float32(100_000), Fraction(10**9, 3), 10**400)
    for timeout in (100_000, 0, -1, math.inf, 1e300, *numbers):
        _handle, queue = start(engine)
        read = []
        while elements := queue.GetWithTimeout(timeout):  # type: ignore[arg-type]
            read += elements.ids_from_generate
        assert read == ids


@pytest.mark.parametrize("timeout", [math.nan, np.float64("nan"), "1", None, True, 1j])
def test_timeout_of_a_wrong_kind_is_a_typed_error(engine: Engine, timeout: Any) -> None:
    _handle, queue = start(engine)
    with pytest.raises(AsError, match=r"timeout_ms is .*; it must be a number") as raised:
        queue.GetWithTimeout(timeout)
    assert raised.value.status is AsStatus.ALLSPARK_PARAM_ERROR


def test_hundred_threads_get_the_tokens_of_their_requests(engine: Engine) -> None:
    prompts = [[seed, 2 * seed, 3 * seed] for seed in range(1, 101)]
    expected = [generate(engine, ids) for ids in prompts]
    barrier = threading.Barrier(len(prompts))

    def run(ids: list[int]) -> list[int]:
        barrier.wait()
        _handle, queue = start(engine, ids)
        return read_all(queue)

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(run, prompts)) == expected


def test_several_readers_divide_the_tokens(engine: Engine) -> None:
    expected = generate(engine, config=LONG)
    with ThreadPoolExecutor(8) as pool:
        with held(engine):
            _handle, queue = start(engine, config=LONG)
            readers = [pool.submit(lambda: list(iter_get(queue))) for _ in range(8)]
            assert queue.GetNoWait() is None  # also while another thread waits
            assert queue.GetWithTimeout(1) is None
            assert queue.GenerateStatus() is GenerateRequestStatus.Init
        parts = [part for reader in readers for part in reader.result()]
    assert sorted(chain.from_iterable(parts)) == sorted(expected)


@pytest.mark.needs("signals")
def test_ctrl_c_interrupts_get_and_sync(tiny_model: Path) -> None:
    code = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from penstock.compat.dashinfer.allspark.engine import Engine
from support.compat.dashinfer import NAME, held, install, start
engine = Engine()
install(engine, Path(sys.argv[1]))
with held(engine):
    handle, queue = start(engine)
    for wait in (queue.Get, lambda: engine.sync_request(NAME, handle), lambda: queue.GetWithTimeout(100_000)):
        try:
            print("waiting", flush=True)
            wait()
        except KeyboardInterrupt:
            print("interrupted", flush=True)
print(len(queue.Get().ids_from_generate) > 0, flush=True)
"""
    process = start_python(code, tiny_model)
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        for _ in range(3):
            assert process.stdout.readline() == b"waiting\n"
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"interrupted\n"
        # The last line may be in the buffer already, of which `communicate` knows nothing.
        assert (process.stdout.read(), process.stderr.read()) == (b"True\n", b"")


# ---- statuses


def test_polled_status_goes_forward_to_the_end(engine: Engine) -> None:
    with held(engine):
        _handle, queue = start(engine, config=LONG)
        seen = [queue.GenerateStatus()]
    while seen[-1] not in ENDS:
        seen.append(queue.GenerateStatus())
    assert seen[0] is GenerateRequestStatus.Init
    assert seen == sorted(seen)
    assert len(read_all(queue)) == 0
    assert len(ids_of(queue.Get())) == queue.GeneratedLength() == 500 - len(PROMPT)


def test_status_is_generating_after_one_token(engine: Engine) -> None:
    _handle, queue = start(engine, config={**GREEDY, "max_length": len(PROMPT) + 1})
    queue._request.result()
    assert queue.GenerateStatus() is GenerateRequestStatus.Generating
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished


def test_status_after_sync_is_the_end(engine: Engine) -> None:
    handle, queue = start(engine)
    assert engine.sync_request(NAME, handle) is SUCCESS
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished
    assert len(ids_of(queue.Get())) == queue.GeneratedLength()


def test_status_calls_of_another_thread_lose_no_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_queue, "_clock", lambda: 0.0)
    handle, queue = start(engine)
    handle._request.result()
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            pool.submit(queue.GenerateStatus).result()
        assert pool.submit(engine.sync_request, NAME, handle).result() is SUCCESS
    assert len(read_all(queue)) == queue.GeneratedLength()


def test_end_is_reported_to_a_reader_once_all_is_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_queue, "_clock", lambda: 0.0)
    handle, queue = start(engine, config=LONG)
    first = ids_of(queue.Get())
    handle._request.result()
    are_all_read = len(first) == queue.GeneratedLength()
    for _ in range(5):  # as another task of this thread polls
        assert (queue.GenerateStatus() in ENDS) == are_all_read
    assert len(first) + len(read_all(queue)) == 500 - len(PROMPT)


def test_end_is_reported_to_all_a_second_after_the_last_read(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(result_queue, "_clock", lambda: now[0])
    handle, queue = start(engine, config=LONG)
    num_read = len(ids_of(queue.Get()))
    handle._request.result()
    assert num_read < queue.GeneratedLength()
    reports = []
    for seconds in (0.0, 0.9, 0.2):
        now[0] += seconds
        with ThreadPoolExecutor(1) as thread:
            reports.append(thread.submit(queue.GenerateStatus).result() in ENDS)
    assert reports == [False, False, True]
    assert num_read + len(ids_of(queue.Get())) == 500 - len(PROMPT)


def test_new_thread_is_not_taken_for_one_that_polled(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_queue, "_clock", lambda: 0.0)
    handle, queue = start(engine)
    handle._request.result()
    statuses: list[GenerateRequestStatus] = []
    for _ in range(20):
        thread = threading.Thread(target=lambda: statuses.append(queue.GenerateStatus()))
        thread.start()
        thread.join()
    assert statuses == [GenerateRequestStatus.Generating] * 20


def test_tasks_that_read_and_poll_one_thread_lose_no_token(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(result_queue, "_clock", lambda: 0.0)
    has_read, has_polled = asyncio.Event(), asyncio.Event()

    async def read(queue: ResultQueue) -> int:
        num_read = 0
        while True:
            num_read += len(ids_of(await asyncio.to_thread(queue.GetWithTimeout, 1)))
            has_read.set()
            await has_polled.wait()
            has_polled.clear()
            if queue.GenerateStatus() in ENDS:
                return num_read

    async def poll(queue: ResultQueue) -> None:
        while True:
            await has_read.wait()
            has_read.clear()
            queue.GenerateStatus()
            has_polled.set()

    async def run() -> None:
        for _ in range(10):
            _handle, queue = start(engine)
            polling = asyncio.create_task(poll(queue))
            assert await read(queue) == 40
            polling.cancel()

    asyncio.run(run())


# ---- stopping and releasing


def test_stopped_request_finishes_and_keeps_its_tokens(engine: Engine) -> None:
    expected = generate(engine, config=LONG)
    handle, queue = start(engine, config=LONG)
    first = ids_of(queue.Get())
    assert engine.stop_request(NAME, handle) is SUCCESS
    assert engine.stop_request(NAME, handle) is SUCCESS
    ids = first + read_all(queue)
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished
    assert ids == expected[: len(ids)]
    assert engine.sync_request(NAME, handle) is SUCCESS


def test_stopped_request_that_waits_has_no_tokens(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, max_num_seqs=1)
    with held(engine):
        handle, queue = start(engine)
        assert engine.stop_request(NAME, handle) is SUCCESS
    assert read_all(queue) == []
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished


def test_queue_is_readable_after_its_request_was_released(engine: Engine) -> None:
    expected = generate(engine, config=LONG)
    handle, queue = start(engine, config=LONG)
    first = ids_of(queue.Get())
    assert engine.release_request(NAME, handle) is SUCCESS
    ids = first + read_all(queue)
    assert ids == expected[: len(ids)]
    assert queue.RequestStatInfo()["generated_token_length"] == queue.GeneratedLength() == len(ids)


def test_queue_is_readable_after_its_model_was_released(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model)
    expected = generate(engine)
    _handle, queue = start(engine)
    assert engine.stop_model(NAME) is SUCCESS
    assert engine.release_model(NAME) is SUCCESS
    del engine
    assert read_all(queue) == expected


def test_release_wakes_a_blocked_reader(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool, held(engine):
        handle, queue = start(engine)
        reading = pool.submit(queue.Get)
        assert engine.release_request(NAME, handle) is SUCCESS
        assert reading.result() is None


@pytest.mark.parametrize("call", ["stop_request", "release_request", "sync_request"])
def test_unknown_handle_is_refused_with_its_status(engine: Engine, tiny_model: Path, call: str) -> None:
    other = Engine()
    install(other, tiny_model)
    foreign, _queue = start(other)
    released, _queue = start(engine)
    assert engine.release_request(NAME, released) is SUCCESS
    method: Callable[..., AsStatus] = getattr(engine, call)
    for handle in (foreign, released, 7, "handle", [1]):
        assert method(NAME, handle) is AsStatus.ALLSPARK_ILLEGAL_REQUEST_ID
    for name in ("other", None, [1]):
        assert method(name, foreign) is AsStatus.ALLSPARK_PARAM_ERROR
    if call == "sync_request":
        assert method(NAME, None) is SUCCESS
    else:
        assert method(NAME, None) is AsStatus.ALLSPARK_EMPTY_REQUEST


# ---- waiting


def test_sync_with_none_waits_for_all_requests(engine: Engine) -> None:
    queues = [start(engine, config={**GREEDY, "seed": seed})[1] for seed in range(8)]
    assert engine.sync_request(NAME, None) is SUCCESS
    assert all(queue.GenerateStatus() is GenerateRequestStatus.GenerateFinished for queue in queues)
    assert [ids_of(queue.GetNoWait()) for queue in queues] == [generate(engine)] * 8


def test_sync_blocks_no_call_of_another_thread(engine: Engine) -> None:
    with ThreadPoolExecutor(2) as pool, held(engine):
        handle, _queue = start(engine)
        waits = [pool.submit(engine.sync_request, NAME, wanted) for wanted in (handle, None)]
        other, _queue = start(engine)
        assert engine.get_as_engine_stat(NAME).pendding_request >= 0
        assert engine.stop_model("other") is AsStatus.ALLSPARK_PARAM_ERROR
        assert engine.release_request(NAME, other) is SUCCESS
        assert not any(wait.done() for wait in waits)
        assert engine.stop_request(NAME, handle) is SUCCESS
    assert [wait.result() for wait in waits] == [SUCCESS, SUCCESS]


# ---- details


def test_log_probabilities_are_those_of_the_processed_logits(engine: Engine) -> None:
    config = {**GREEDY, "logprobs": True, "top_logprobs": 3, "repetition_penalty": 1.5}
    handle, queue = start(engine, config=config)
    engine.sync_request(NAME, handle)
    elements = queue.Get()
    assert elements is not None
    ids, rows = elements.ids_from_generate, elements.log_probs_list
    assert len(ids) == len(rows) == len(elements.token_logprobs_list)
    for token, row, logprob in zip(ids, rows, elements.token_logprobs_list, strict=True):
        assert row[0] == (token, logprob)
        assert len(row) == 3
    result = native(engine).blocking.generate(
        PROMPT,
        max_tokens=40,
        ignore_eos=True,
        temperature=0.0,
        repetition_penalty=1.5,
        logprobs=True,
        logprobs_mode="processed",
    )
    assert tuple(elements.token_logprobs_list) == result.logprobs


def test_details_that_were_not_requested_are_empty(engine: Engine) -> None:
    handle, queue = start(engine)
    engine.sync_request(NAME, handle)
    elements = queue.Get()
    assert elements is not None
    assert (elements.log_probs_list, elements.token_logprobs_list) == ([], [])
    assert elements.tensors_from_model_inference == []
    handle, queue = start(engine, config={**GREEDY, "logprobs": True})
    engine.sync_request(NAME, handle)
    elements = queue.Get()
    assert elements is not None
    assert elements.log_probs_list == [[]] * len(elements.ids_from_generate)


@pytest.mark.parametrize("is_synced", [False, True])
def test_tensors_are_capsules_of_each_token(engine: Engine, *, is_synced: bool) -> None:
    handle, queue = start(engine, config={**GREEDY, "enable_tensors_from_model_inference": True})
    if is_synced:
        engine.sync_request(NAME, handle)
    ids: list[int] = []
    rows: dict[str, list[Any]] = {"inputs_embedding": [], "hidden_states": []}
    while (elements := queue.Get()) is not None:
        assert len(elements.tensors_from_model_inference) == len(elements.ids_from_generate)
        ids += elements.ids_from_generate
        for tensors in elements.tensors_from_model_inference:
            assert tensors.keys() == rows.keys()
            for key, capsule in tensors.items():
                rows[key].append(np.from_dlpack(Capsule(capsule)))
    result = native(engine).blocking.generate(
        PROMPT,
        max_tokens=40,
        ignore_eos=True,
        temperature=0.0,
        output_embeddings="all",
        output_hidden_states="all",
    )
    assert result.token_ids == tuple(ids)
    expected = {"inputs_embedding": result.embeddings, "hidden_states": result.hidden_states}
    for key, parts in rows.items():
        assert [len(part) for part in parts] == [len(PROMPT), *[1] * (len(ids) - 1)]
        assert np.concatenate(parts).tobytes() == np.asarray(expected[key]).tobytes()


class Capsule:
    """A DLPack capsule, as an object that numpy reads."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


STATISTICS = {
    "arrival_time",
    "first_token_time",
    "last_token_time",
    "time_to_first_token",
    "time_in_queue",
    "finished_time",
    "context_token_length",
    "generated_token_length",
    "context_cached_length",
    "context_tps",
    "generate_tps",
}


def test_statistics_of_a_request_are_consistent(engine: Engine) -> None:
    with held(engine):
        handle, queue = start(engine, config=LONG)
        numbers = queue.RequestStatInfo()
        assert numbers.keys() == STATISTICS
        assert (
            numbers["finished_time"] == numbers["first_token_time"] == numbers["generated_token_length"] == 0
        )
    engine.sync_request(NAME, handle)
    numbers = queue.RequestStatInfo()
    assert numbers.keys() == STATISTICS
    assert all(isinstance(value, int) for value in numbers.values())
    assert numbers["context_token_length"] == len(PROMPT)
    assert numbers["generated_token_length"] == queue.GeneratedLength() == 500 - len(PROMPT)
    assert numbers["arrival_time"] <= numbers["first_token_time"] <= numbers["finished_time"]
    assert numbers["last_token_time"] == numbers["finished_time"]
    total = numbers["finished_time"] - numbers["arrival_time"]
    assert 0 <= numbers["time_in_queue"] <= numbers["time_to_first_token"] <= total + 1
    assert numbers["generate_tps"] > 0
    as_attributes = RequestStatInfo(numbers)
    assert as_attributes.finish_time == numbers["finished_time"]
    assert as_attributes.context_tps == numbers["context_tps"]


# ---- failures and interruptions

FAILING_TOKEN = 499


@pytest.mark.needs("hooks")
def test_failed_request_is_interrupted_and_has_its_reason(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def open_failing(blocking: penstock.Blocking) -> None:
        session = blocking._session
        session.adopt(hooks.failing_engine(tiny_model, session.config, FAILING_TOKEN))

    engine = Engine()
    with mock.patch.object(penstock.Blocking, "start", open_failing):
        install(engine, tiny_model)
    handle, queue = start(engine, [*PROMPT, FAILING_TOKEN])
    assert engine.sync_request(NAME, handle) is AsStatus.ALLSPARK_RUNTIME_ERROR
    assert engine.sync_request(NAME, None) is AsStatus.ALLSPARK_RUNTIME_ERROR
    assert queue.Get() is None
    assert queue.GenerateStatus() is GenerateRequestStatus.GenerateInterrupted
    assert queue.error is not None
    assert "token 499 was to fail its step" in queue.error
    failures = [message for message in caplog.messages if message.startswith("request ")]
    assert failures == [f"request {handle._request.id} failed: {queue.error}"]
    assert engine.release_request(NAME, handle) is SUCCESS
    _handle, queue = start(engine)
    assert len(read_all(queue)) == 40
    assert queue.error is None
    assert engine.stop_model(NAME) is SUCCESS


def test_small_kv_cache_interrupts_requests_that_keep_output(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, max_model_len=256, kv_cache_blocks=24, prefix_cache=False)
    config = {**GREEDY, "max_length": 200}
    expected = [generate(engine, [seed] * 8, config) for seed in range(1, 11)]
    with held(engine):
        started = [start(engine, [seed] * 8, config) for seed in range(1, 11)]
    assert engine.sync_request(NAME, None) is SUCCESS
    statuses = [queue.GenerateStatus() for _handle, queue in started]
    finished = statuses.count(GenerateRequestStatus.GenerateFinished)
    interrupted = statuses.count(GenerateRequestStatus.GenerateInterrupted)
    assert finished > 0
    assert interrupted > 1
    assert finished + interrupted == 10
    for (_handle, queue), ids, status in zip(started, expected, statuses, strict=True):
        partial = ids_of(queue.Get())
        assert partial == ids[: len(partial)]
        assert (status is ENDS[0]) == (partial == ids)
        assert queue.error is None
    statistics = engine.get_as_engine_stat(NAME)  # the memory is free without a release
    assert statistics.free_token == statistics.total_token
    assert engine.stop_model(NAME) is SUCCESS


def test_longest_running_request_is_interrupted(tiny_model: Path) -> None:
    engine = Engine()
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_blocks": 24, "prefix_cache": False}
    install(engine, tiny_model, preemption_victim="longest", **options)
    with held(engine):
        lengths = (150, 100, 20, 20)  # prompts and 60 new tokens need more than 24 blocks
        queues = [start(engine, [1] * count, {**GREEDY, "max_length": count + 60})[1] for count in lengths]
    assert engine.sync_request(NAME, None) is SUCCESS
    statuses = [queue.GenerateStatus() for queue in queues]
    assert statuses == [
        GenerateRequestStatus.GenerateInterrupted,
        *[GenerateRequestStatus.GenerateFinished] * 3,
    ]


# ---- prefix cache


def lengths_of_prefix(engine: Engine, ids: list[int]) -> tuple[int, int, int]:
    """`prefix_cache_len`, `prefix_len_gpu` and `prefix_len_cpu` of a request."""
    handle, queue = start(engine, ids, {**GREEDY, "max_length": len(ids) + 2})
    engine.sync_request(NAME, handle)
    elements = queue.Get()
    assert elements is not None
    engine.release_request(NAME, handle)
    assert queue.RequestStatInfo()["context_cached_length"] == elements.prefix_cache_len
    return elements.prefix_cache_len, elements.prefix_len_gpu, elements.prefix_len_cpu


def test_repeated_prompt_is_read_from_the_prefix_cache(engine: Engine) -> None:
    ids = [7 + index % 400 for index in range(480)]
    assert lengths_of_prefix(engine, ids) == (0, 0, 0)
    total, device, host = lengths_of_prefix(engine, ids)
    assert total % 16 == 0
    assert total > 0.9 * len(ids)
    assert (device, host) == (total, 0)
    statistics = engine.get_as_engine_stat(NAME)
    assert statistics.prefix_cache_hit_token >= total


def test_prefix_length_is_known_with_the_first_token(engine: Engine) -> None:
    ids = [9 + index % 300 for index in range(200)]
    lengths_of_prefix(engine, ids)
    _handle, queue = start(engine, ids, {**GREEDY, "max_length": 500})
    elements = queue.Get()
    assert elements is not None
    assert elements.prefix_cache_len == queue.RequestStatInfo()["context_cached_length"] == 192
    assert len(read_all(queue)) + len(elements.ids_from_generate) == 300


def test_prefix_length_is_zero_without_the_prefix_cache(tiny_model: Path) -> None:
    engine = Engine()
    install(engine, tiny_model, prefix_cache=False)
    assert [lengths_of_prefix(engine, [5] * 200) for _ in range(2)] == [(0, 0, 0)] * 2


def test_repeated_long_prompt_computes_only_its_last_span(tmp_path: Path) -> None:
    engine = Engine()
    model = write_checkpoint(tmp_path, make_config("llama", max_position_embeddings=4096))
    install(engine, model, block_size=128)
    ids = [3 + index % 450 for index in range(4000)]
    assert lengths_of_prefix(engine, ids) == (0, 0, 0)
    before = engine.get_as_engine_stat(NAME)
    total, device, host = lengths_of_prefix(engine, ids)
    after = engine.get_as_engine_stat(NAME)
    assert (total, device, host) == (3968, 3968, 0)
    assert total % after.span_size == 0
    assert total > 0.9 * len(ids)
    assert after.total_prefill_token - before.total_prefill_token == len(ids) - total
    assert after.prefix_cache_hit_token - before.prefix_cache_hit_token == total
    assert after.prefix_cache_miss_token - before.prefix_cache_miss_token == len(ids) - total


def test_prefix_in_the_host_tier_is_counted_and_changes_nothing(tmp_path: Path) -> None:
    # Computing a block is far slower than loading it: 7 million weights, 16 KiB of keys and values.
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_key_value_heads": 1}
    model = write_checkpoint(tmp_path, make_config("llama", **sizes))
    engine = Engine()
    install(
        engine,
        model,
        max_model_len=256,
        kv_cache_bytes=bytes_of_blocks(model, 16),
        host_cache_bytes=bytes_of_blocks(model, 64),
    )
    tier = native(engine).info.host_tier
    assert tier is not None
    assert tier.keeps_prefixes
    config = {**GREEDY, "max_length": 250}
    prompts = [[seed] * 200 for seed in (1, 2, 3)]
    first = [generate(engine, ids, config) for ids in prompts]
    assert [generate(engine, ids, config) for ids in prompts] == first
    total, device, host = lengths_of_prefix(engine, prompts[0])
    assert host > 0
    assert device + host == total


def test_dropped_queue_and_handle_do_not_end_the_request(engine: Engine) -> None:
    before = native(engine).stats()
    start(engine)
    assert engine.sync_request(NAME, None) is SUCCESS
    wait_until(lambda: native(engine).stats().finished_length == before.finished_length + 1)
