"""LMDeploy's sessions: continuing, rewinding, stopping and ending them, and requests that are refused."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest

from penstock.compat.lmdeploy.sessions import SessionTable
from support.api.engines import wait_until
from support.compat.lmdeploy import LONG, PROMPT, config, expected_ids, finished, open_pipeline, read

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.lmdeploy import Pipeline

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Pipeline]:
    with open_pipeline(tiny_model) as pipe:
        yield pipe
        assert finished(pipe.engine.stats())


async def begin(pipe: Pipeline, session_id: int, num_tokens: int = 64) -> list[int]:
    """Start a session; returns its ids."""
    ids = [1 + token % 300 for token in range(session_id, session_id + num_tokens)]
    output, last = await read(pipe, ids, session_id, sequence_end=False)
    assert (last.finish_reason, last.history_token_len, last.input_token_len) == ("length", 0, num_tokens)
    assert pipe.sessions.length(session_id) == num_tokens + 8
    return ids + output


async def test_second_turn_equals_one_stateless_call(pipe: Pipeline) -> None:
    history = await begin(pipe, 1)
    output, last = await read(pipe, PROMPT, 1, sequence_start=False, sequence_end=False)
    assert output == expected_ids(pipe, [*history, *PROMPT])
    assert (last.history_token_len, last.input_token_len, last.generate_token_len) == (72, 4, 8)
    history += [*PROMPT, *output]
    output, last = await read(pipe, [5], 1, sequence_start=False)
    assert output == expected_ids(pipe, [*history, 5])
    assert last.history_token_len == 84
    assert pipe.sessions.length(1) == 0


async def test_later_turn_computes_its_new_tokens_only(pipe: Pipeline) -> None:
    history = await begin(pipe, 2)
    _, last = await read(pipe, PROMPT, 2, sequence_start=False)
    assert last.cached_tokens > len(history) - pipe.engine.info.block_size - 1


async def test_step_below_the_history_rewinds(pipe: Pipeline) -> None:
    history = await begin(pipe, 3)
    for step in (20, 5):
        options: dict[str, Any] = {"sequence_start": False, "sequence_end": False, "step": step}
        output, last = await read(pipe, PROMPT, 3, **options)
        assert output == expected_ids(pipe, [*history[:step], *PROMPT])
        assert last.history_token_len == step
        assert pipe.sessions.length(3) == step + 12
    pipe.end_session(3)


@pytest.mark.parametrize("step", [-1, 0, 1000])
async def test_other_steps_append(step: int, pipe: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    history = await begin(pipe, 4)
    caplog.clear()
    output, _ = await read(pipe, PROMPT, 4, sequence_start=False, step=step)
    assert output == expected_ids(pipe, [*history, *PROMPT])
    assert ("step=1000 is lowered" in caplog.text) == (step == 1000)


async def test_start_of_a_live_session_drops_its_tokens(
    pipe: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    await begin(pipe, 5)
    caplog.set_level(logging.WARNING)
    output, last = await read(pipe, PROMPT, 5, sequence_end=False)
    assert output == expected_ids(pipe, PROMPT)
    assert last.history_token_len == 0
    assert "its 72 tokens are dropped" in caplog.text
    pipe.end_session(5)


@pytest.mark.parametrize("is_ended", [False, True])
async def test_unknown_session_has_an_error_item(is_ended: bool, pipe: Pipeline) -> None:  # noqa: FBT001
    if is_ended:
        await begin(pipe, 6)
        pipe.end_session(6)
    output, last = await read(pipe, PROMPT, 6, sequence_start=False)
    assert (output, last.finish_reason, last.error_code) == ([], "error", "session_not_exist")
    assert last.error_message is not None
    assert "session 6" in last.error_message


async def test_busy_session_refuses_a_second_request(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 7, config(200), input_ids=PROMPT, sequence_end=False)
    output = (await anext(stream)).token_ids or []
    for start in (True, False):
        ids, last = await read(pipe, PROMPT, 7, sequence_start=start)
        assert (ids, last.finish_reason, last.error_code) == ([], "error", "request_conflict")
    async for item in stream:
        output += item.token_ids or []
    assert output == expected_ids(pipe, PROMPT, 200)
    assert pipe.sessions.length(7) == 204
    pipe.end_session(7)


async def test_session_is_idle_when_its_last_item_was_read(pipe: Pipeline) -> None:
    async for item in pipe.generate(None, 8, config(3), input_ids=PROMPT, sequence_end=False):
        if item.finish_reason is not None:
            _, last = await read(pipe, PROMPT, 8, sequence_start=False)
            assert last.finish_reason == "length"


async def test_cancelled_request_leaves_what_was_read(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 9, LONG, input_ids=PROMPT, sequence_end=False)
    output = [token for _ in range(5) for token in (await anext(stream)).token_ids or ()]
    pipe.stop_session(9)
    async for item in stream:
        output += item.token_ids or []
    assert item.finish_reason == "abort"
    assert pipe.sessions.length(9) == 4 + len(output) < 404
    following, _ = await read(pipe, [7], 9, sequence_start=False)
    assert following == expected_ids(pipe, [*PROMPT, *output, 7])


async def test_closed_stream_leaves_what_was_read(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 10, LONG, input_ids=PROMPT, sequence_end=False)
    output = (await anext(stream)).token_ids or []
    await stream.aclose()
    following, last = await read(pipe, [7], 10, sequence_start=False)
    assert following == expected_ids(pipe, [*PROMPT, *output, 7])
    assert last.history_token_len == 4 + len(output)


async def test_stop_is_allowed_at_any_time(pipe: Pipeline) -> None:
    pipe.stop_session(11)
    await pipe.stop_session(11)
    _, last = await read(pipe, PROMPT, 11, sequence_end=False)
    pipe.stop_session(11)
    assert last.finish_reason == "length"
    _, last = await read(pipe, PROMPT, 11, sequence_start=False)
    assert last.finish_reason == "length"
    pipe.stop_session(11)
    await pipe.end_session(11)
    pipe.end_session(11)


async def test_generate_with_stop_cancels_the_session(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 12, LONG, input_ids=PROMPT, sequence_end=False)
    await anext(stream)
    items = [item async for item in pipe.generate("", 12, stop=True)]
    assert [(item.response, item.finish_reason) for item in items] == [("", None)]
    reasons = [item.finish_reason async for item in stream]
    assert reasons[-1] == "abort"
    pipe.end_session(12)


async def test_end_of_a_busy_session_cancels_and_forgets(pipe: Pipeline) -> None:
    stream = pipe.generate(None, 13, LONG, input_ids=PROMPT, sequence_end=False)
    await anext(stream)
    pipe.end_session(13)
    output, _ = await read(pipe, PROMPT, 13, sequence_end=False)
    assert output == expected_ids(pipe, PROMPT)
    assert [item.finish_reason async for item in stream][-1] == "abort"
    assert pipe.sessions.length(13) == 12
    pipe.end_session(13)


async def test_end_of_a_session_frees_its_cached_blocks(tiny_model: Path) -> None:
    with open_pipeline(tiny_model) as pipe:
        await begin(pipe, 1)
        await begin(pipe, 2)
        cached = pipe.engine.stats().blocks_cached
        assert cached >= 2
        pipe.end_session(1)
        wait_until(lambda: pipe.engine.stats().blocks_cached == cached // 2)
        await read(pipe, PROMPT, 2, sequence_start=False)
        wait_until(lambda: pipe.engine.stats().blocks_cached == 0)


async def test_evicted_session_is_computed_again(pipe: Pipeline) -> None:
    history = await begin(pipe, 14)
    pipe.engine.reset_prefix_cache()
    output, last = await read(pipe, PROMPT, 14, sequence_start=False)
    assert output == expected_ids(pipe, [*history, *PROMPT])
    assert last.cached_tokens == 0


async def test_failed_request_leaves_the_session_as_it_was(pipe: Pipeline) -> None:
    history = await begin(pipe, 15)
    options: dict[str, Any] = {"sequence_start": False, "sequence_end": False, "step": 4}
    bad = config(response_format={"type": "regex_schema", "regex_schema": "("}, ignore_eos=False)
    for request, reason in (
        (read(pipe, [100_000], 15, **options), "error"),
        (read(pipe, [-1], 15, **options), "error"),
        (read(pipe, [1 << 40], 15, **options), "error"),
        (read(pipe, PROMPT, 15, bad, **options), "error"),
        (read(pipe, [1] * 600, 15, **options), "length"),
    ):
        output, last = await request
        assert (output, last.finish_reason) == ([], reason)
    assert pipe.sessions.length(15) == len(history)
    output, _ = await read(pipe, PROMPT, 15, sequence_start=False)
    assert output == expected_ids(pipe, [*history, *PROMPT])


async def test_session_that_is_full_has_an_empty_item(pipe: Pipeline) -> None:
    _, last = await read(pipe, [1] * 500, 16, config(None), sequence_end=False)
    assert (last.finish_reason, last.generate_token_len) == ("length", 12)
    output, last = await read(pipe, [1], 16, sequence_start=False)
    assert (output, last.finish_reason, last.generate_token_len) == ([], "length", 0)
    assert last.history_token_len == 512


async def test_max_new_tokens_is_lowered_to_the_session(pipe: Pipeline) -> None:
    await begin(pipe, 17, 480)
    _, last = await read(pipe, [1] * 4, 17, config(100), sequence_start=False)
    assert (last.finish_reason, last.generate_token_len) == ("length", 512 - 480 - 8 - 4)


async def test_sampled_session_without_a_seed_has_its_own(pipe: Pipeline) -> None:
    sampled = config(20, top_k=0, temperature=1.5)
    outputs = [(await read(pipe, PROMPT, number, sampled))[0] for number in (18, 18, 19)]
    assert len({tuple(output) for output in outputs}) == 3
    seeded = config(20, top_k=0, temperature=1.5, random_seed=3)
    outputs = [(await read(pipe, PROMPT, number, seeded))[0] for number in (18, 19)]
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("session_id", [True, "1", 1.0])
def test_session_id_of_a_wrong_type_is_refused(session_id: object, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="session_id is "):
        pipe.generate("a", session_id)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [True, 1.0, None, "1"])
def test_step_of_a_wrong_type_is_refused(step: Any, pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="step is "):
        pipe.generate("a", 1, step=step)


def test_release_while_the_table_is_locked_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the garbage collector drops a stream in the thread that uses the table."""
    forgotten: list[str] = []
    table = SessionTable(forgotten.append)
    first = table.acquire(1, lambda: None, start=True, end=False, step=0)

    def release(bits: int) -> int:
        first.release([5, 6])
        return bits

    monkeypatch.setattr("penstock.compat.lmdeploy.sessions.secrets.randbits", release)
    second = table.acquire(2, lambda: None, start=True, end=False, step=0)
    assert (table.length(1), table.length(2)) == (2, 0)
    second.release(None)
    assert forgotten == [second.salt]


async def test_failed_request_with_sequence_end_keeps_the_session(pipe: Pipeline) -> None:
    history = await begin(pipe, 20)
    for ids in ([-1], [100_000], [2**31]):
        _, last = await read(pipe, ids, 20, sequence_start=False)
        assert (last.finish_reason, pipe.sessions.length(20)) == ("error", len(history))
    output, _ = await read(pipe, PROMPT, 20, sequence_start=False)
    assert output == expected_ids(pipe, [*history, *PROMPT])
    assert pipe.sessions.length(20) == 0


def test_session_that_nothing_can_name_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="session_id is None"):
        pipe.generate("a", sequence_end=False)


def test_prompt_must_be_given_once(pipe: Pipeline) -> None:
    for arguments in ({}, {"messages": "a", "input_ids": [1]}):
        with pytest.raises(ValueError, match="messages is "):
            pipe.generate(session_id=1, **arguments)  # type: ignore[arg-type]
