"""LMDeploy's streams, on event loops and in threads: no request outlives its reader, and no reader hangs."""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from penstock.compat.lmdeploy import sampling
from penstock.compat.lmdeploy.generation import LONG_TEXT, prepare
from support.api.engines import BACKENDS, assert_at_rest, assert_at_rest_blocking, run_in_threads, wait_until
from support.compat.lmdeploy import GREEDY, LONG, PROMPT, config, expected_ids, open_pipeline, read
from support.hooks import failing_engine, losing_engine

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.lmdeploy import Pipeline

pytestmark = [pytest.mark.anyio, pytest.mark.loops]
PROMPTS = ["ab", "cd", "ef"]
RAW: dict[str, Any] = {"do_preprocess": False}


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Pipeline]:
    with open_pipeline(tiny_model, max_batch_size=8) as pipe:
        yield pipe


def assert_cancelled(pipe: Pipeline, steps: int) -> None:
    """No request runs two steps after `steps`, and none has finished by itself."""
    wait_until(lambda: pipe.engine.stats().running == 0)
    assert pipe.engine.stats().steps <= steps + 2


async def test_dropped_generator_frees_its_slot_at_once(pipe: Pipeline) -> None:
    cancelled = pipe.engine.stats().finished_cancelled
    async for item in pipe.generate(None, 1, LONG, input_ids=PROMPT):
        assert item.finish_reason is None
        break
    assert_cancelled(pipe, pipe.engine.stats().steps)
    assert pipe.engine.stats().finished_cancelled == cancelled + 1
    assert pipe.sessions.length(1) == 0
    await assert_at_rest(pipe.engine)


@pytest.mark.parametrize("how", ["drop", "close"])
def test_abandoned_iterator_of_many_frees_its_slots(how: str, pipe: Pipeline) -> None:
    parts = pipe.stream_infer(PROMPTS, gen_config=LONG, **RAW)
    next(parts)
    if how == "close":
        parts.close()  # type: ignore[attr-defined]
    del parts
    assert_cancelled(pipe, pipe.engine.stats().steps)
    assert pipe.batches == set()
    assert_at_rest_blocking(pipe.engine)


async def test_generator_that_is_not_read_starts_nothing(pipe: Pipeline) -> None:
    admitted = pipe.engine.stats().requests_admitted
    stream = pipe.generate(None, 1, LONG, input_ids=PROMPT)
    await stream.aclose()
    assert [item async for item in stream] == []
    del stream
    assert pipe.engine.stats().requests_admitted == admitted


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_last_item_of_a_stream_has_no_logprobs(pipe: Pipeline, logprobs: int | None) -> None:
    gen_config = config(3, logprobs=logprobs)
    *_, last = [item async for item in pipe.generate(None, 1, gen_config, input_ids=PROMPT)]
    assert (last.finish_reason, last.token_ids, last.logprobs) == ("length", [], None)


async def test_generator_has_the_methods_of_one(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 1, LONG, input_ids=PROMPT)
    assert (await stream.asend(None)).finish_reason is None
    with pytest.raises(KeyError):
        await stream.athrow(KeyError("a"))
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await assert_at_rest(pipe.engine)


async def test_cancelled_task_leaves_nothing_in_any_phase(pipe: Pipeline) -> None:
    async with anyio.create_task_group() as first:
        running = [pipe.generate(None, number, LONG, input_ids=PROMPT) for number in range(1, 9)]
        for stream in running:  # the engine is full: the next request waits
            await anext(stream)
        async with anyio.create_task_group() as group:
            for number, prompt in ((20, PROMPT), (21, [1] * 400)):
                group.start_soon(read, pipe, prompt, number, LONG)
            await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        for number in (20, 21):
            ids, last = await read(pipe, [], number, sequence_start=False)
            assert (ids, last.error_code) == ([], "session_not_exist")
        for stream in running:
            await stream.aclose()
        first.cancel_scope.cancel()
    await assert_at_rest(pipe.engine)


async def test_task_cancelled_while_a_thread_prepares_starts_nothing(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        has_begun.set()
        may_end.wait()
        try:
            return prepare(*arguments)
        finally:
            has_ended.set()

    monkeypatch.setattr("penstock.compat.lmdeploy.generation.prepare", slow)
    admitted = pipe.engine.stats().requests_admitted
    async with anyio.create_task_group() as group:
        stream = pipe.generate("a " * LONG_TEXT, 1, LONG, **RAW)
        group.start_soon(anext, stream)
        while not has_begun.is_set():
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    assert 1 not in pipe.sessions._states
    may_end.set()
    await anyio.to_thread.run_sync(has_ended.wait)
    assert [item async for item in stream] == []
    assert pipe.engine.stats().requests_admitted == admitted
    await assert_at_rest(pipe.engine)


async def test_timeout_of_an_item_ends_the_request(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 1, LONG, input_ids=PROMPT)
    await anext(stream)
    with anyio.CancelScope() as scope:
        scope.cancel()
        while True:  # items that are there already may come first
            await anext(stream)
    assert [item async for item in stream] == []
    await assert_at_rest(pipe.engine)


async def test_second_reader_of_a_generator_is_refused(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 1, config(20), input_ids=PROMPT)
    errors = []

    async def drain() -> None:
        try:
            async for _ in stream:
                pass
        except RuntimeError as error:
            errors.append(str(error))

    async with anyio.create_task_group() as group:
        group.start_soon(drain)
        group.start_soon(drain)
    assert errors == ["the stream is already being read by another task"]


async def test_sixty_tasks_get_the_outputs_of_single_calls(pipe: Pipeline) -> None:
    outputs: dict[int, list[int]] = {}

    async def run(number: int) -> None:
        outputs[number] = (await read(pipe, [number, 2, 3]))[0]

    async with anyio.create_task_group() as group:
        for number in range(60):
            group.start_soon(run, number)
    assert all(output == expected_ids(pipe, [number, 2, 3]) for number, output in outputs.items())


def test_two_event_loops_and_threads_share_a_pipeline(pipe: Pipeline) -> None:
    expected = expected_ids(pipe, PROMPT, 30)
    text = pipe.infer("ab", config(30), **RAW).text

    async def run() -> None:
        for _ in range(3):
            assert (await read(pipe, PROMPT, None, config(30)))[0] == expected

    def use(number: int) -> None:
        if number < 4:
            anyio.run(run, **BACKENDS[number % 3])
        else:
            assert pipe.infer("ab", config(30), **RAW).text == text

    run_in_threads(use, range(8))
    assert_at_rest_blocking(pipe.engine)


async def test_calls_work_in_a_running_event_loop(pipe: Pipeline) -> None:
    assert [response.generate_token_len for response in pipe(PROMPTS, GREEDY, **RAW)] == [8, 8, 8]
    *_, last = pipe.stream_infer("ab", gen_config=GREEDY, **RAW)
    assert (last.index, last.generate_token_len, last.finish_reason) == (0, 8, "length")


def test_parts_of_prompts_are_interleaved(pipe: Pipeline) -> None:
    parts = list(pipe.stream_infer(PROMPTS, gen_config=LONG, **RAW))
    indexes = [part.index for part in parts]
    assert indexes != sorted(indexes)
    for index, prompt in enumerate(PROMPTS):
        own = [part for part in parts if part.index == index]
        reasons = [part.finish_reason for part in own]
        assert reasons == [None] * (len(own) - 1) + ["length"]
        counts = [part.generate_token_len for part in own]
        assert counts == sorted(counts)
        whole = pipe.infer(prompt, LONG, **RAW)
        assert "".join(part.text for part in own) == whole.text
        assert [token for part in own for token in part.token_ids] == whole.token_ids


def test_finished_prompts_of_a_list_are_not_cancelled(pipe: Pipeline) -> None:
    parts = pipe.stream_infer(["ab", "cd"] * 10, gen_config=config(1), **RAW)
    for _ in zip(range(30), parts, strict=False):
        pass
    (batch,) = pipe.batches
    assert batch._jobs._cancelled == set()
    parts.close()  # type: ignore[attr-defined]


def test_stream_without_parts_has_text_and_end(pipe: Pipeline) -> None:
    parts = list(pipe.stream_infer(PROMPTS, gen_config=GREEDY, stream_response=False, **RAW))
    for index, whole in enumerate(pipe.infer(PROMPTS, GREEDY, **RAW)):
        text, last = (part for part in parts if part.index == index)
        assert (text.text, text.finish_reason) == (whole.text, None)
        assert (last.text, last.finish_reason, last.generate_token_len) == ("", "length", 8)


def test_session_of_a_stream_can_be_aborted(pipe: Pipeline) -> None:
    sessions = [pipe.session() for _ in PROMPTS]
    reasons = {}
    for part in pipe.stream_infer(PROMPTS, sessions, LONG, **RAW):
        if part.index == 1 and part.generate_token_len >= 3:
            sessions[1].abort()
        if part.finish_reason is not None:
            reasons[part.index] = part.finish_reason
    assert reasons == {0: "length", 1: "abort", 2: "length"}
    assert_at_rest_blocking(pipe.engine)


async def test_stop_all_ends_what_runs_and_what_waits(pipe: Pipeline) -> None:
    reasons: list[str | None] = []

    async def run(number: int) -> None:
        reasons.append((await read(pipe, PROMPT, number, LONG))[1].finish_reason)

    def run_list() -> None:
        reasons.extend(response.finish_reason for response in pipe(["ab"] * 30, LONG, **RAW))

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, run_list)
        for number in range(1, 13):
            group.start_soon(run, number)
        while pipe.engine.stats().running < 8 or not pipe.batches:
            await anyio.lowlevel.checkpoint()
        pipe.stop_all_session()
    assert reasons == ["abort"] * 42
    assert (await read(pipe, PROMPT))[1].finish_reason == "length"
    await assert_at_rest(pipe.engine)


async def test_close_ends_streams_lists_and_iterators(tiny_model: Path) -> None:
    pipe = open_pipeline(tiny_model, max_batch_size=8)
    stream = pipe.generate(None, 1, LONG, input_ids=PROMPT, sequence_end=False)
    first = await anext(stream)
    parts = pipe.stream_infer(PROMPTS, gen_config=LONG, **RAW)
    begun = next(parts)
    responses: list[Any] = []

    def run_list() -> None:
        responses.extend(pipe(["ab"] * 30, LONG, **RAW))

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, run_list)
        while pipe.engine.stats().waiting < 4:  # all 8 requests of the list have started
            await anyio.lowlevel.checkpoint()
        num_tokens = pipe.engine.stats().generation_tokens
        while pipe.engine.stats().generation_tokens < num_tokens + 40:
            await anyio.lowlevel.checkpoint()
        pipe.close()
        pipe.close()
    items = [first, *[item async for item in stream]]
    assert items[-1].finish_reason == "abort"
    assert items[-1].generate_token_len == sum(len(item.token_ids or ()) for item in items)
    rest = [begun, *parts]
    assert {part.index: part.finish_reason for part in rest} == dict.fromkeys(range(3), "abort")
    assert [response.finish_reason for response in responses] == ["abort"] * 30
    assert sum(response.generate_token_len > 0 for response in responses) >= 4  # those that ran
    for call in (pipe, pipe.stream_infer, pipe.chat, pipe.get_ppl, pipe.get_logits):
        with pytest.raises(penstock.EngineStoppedError, match="closed"):
            call("a")
    with pytest.raises(penstock.EngineStoppedError, match="closed"):
        pipe.generate("a", 1)
    pipe.stop_session(1)
    pipe.end_session(1)


@pytest.mark.needs("hooks")
@pytest.mark.parametrize(
    ("engine_with", "code"), [(losing_engine, "engine_unavailable"), (failing_engine, "internal_error")]
)
async def test_failed_step_gives_every_waiter_an_item(engine_with: Any, code: str, tiny_model: Path) -> None:
    with open_pipeline(tiny_model, max_batch_size=2) as pipe:
        pipe.engine.blocking.sleep()
        native = engine_with(str(tiny_model), penstock.EngineConfig(threads=1, max_num_seqs=2), 200)
        pipe.engine._session.adopt(native)
        ends: list[Any] = []

        async def run(number: int) -> None:
            last = (await read(pipe, [200, 2, number], number, LONG))[1]
            ends.append((last.finish_reason, last.error_code))

        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(run, number)
        assert ends == [("error", code)] * 4
        text = pipe.tokenizer.decode([200])
        assert pipe.tokenizer.encode(text) == [200]
        responses = pipe([text] * 3, LONG, **RAW)
        assert {(response.error_code, response.text) for response in responses} == {(code, "")}


def test_dropped_pipeline_frees_its_threads(tiny_model: Path) -> None:
    before = threading.active_count()
    pipe = open_pipeline(tiny_model)
    native = pipe.engine
    pipe(["ab"], GREEDY, **RAW)
    pipe.sessions.acquire(1, lambda: None, start=True, end=False, step=0).release([1])
    del pipe
    gc.collect()
    assert not native.is_running
    assert threading.active_count() == before


async def test_stream_keeps_a_dropped_pipeline_open(tiny_model: Path) -> None:
    stream = open_pipeline(tiny_model).generate(None, 1, GREEDY, input_ids=PROMPT)
    gc.collect()
    assert [item.finish_reason async for item in stream][-1] == "length"


async def test_close_while_the_request_starts_cancels_it(pipe: Pipeline) -> None:
    stream = pipe.generate("ab", 1, config(400, bad_words=["xyz"]), **RAW)  # prepared in a worker thread
    items: list[Any] = []

    async def drain() -> None:
        items.extend([item async for item in stream])

    async with anyio.create_task_group() as group:
        group.start_soon(drain)
        while 1 not in pipe.sessions._states:
            await anyio.lowlevel.checkpoint()
        stream.close()
    assert items[-1].finish_reason == "abort"
    assert pipe.sessions.length(1) == 0
    await assert_at_rest(pipe.engine)


async def test_template_of_the_program_that_raises_fails_its_prompt(tiny_model: Path) -> None:
    class Broken:
        stop_words = None

        def messages2prompt(self, messages: object, sequence_start: bool = True) -> str:  # noqa: ARG002, FBT001, FBT002
            if messages == "bad":
                message = "no such role"
                raise RuntimeError(message)
            return str(messages)

    with open_pipeline(tiny_model) as pipe:
        pipe.chat_template = Broken()  # type: ignore[assignment]
        responses = pipe(["ab", "bad", "cd"], GREEDY)
        assert [response.error_code for response in responses] == [None, "preprocess_failed", None]
        assert "no such role" in str(responses[1].error_message)
        items = [item async for item in pipe.generate("bad", 1, GREEDY)]
        assert [item.error_code for item in items] == ["preprocess_failed"]


async def test_bad_words_are_prepared_beside_the_event_loop(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []

    def options(*args: Any, **values: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*args, **values)

    made = sampling.options
    monkeypatch.setattr(sampling, "options", options)
    await read(pipe, PROMPT, gen_config=config(1, bad_words=["zebra"]))
    assert threads
    assert threading.current_thread() not in threads
