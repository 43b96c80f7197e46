"""Requests with several choices (`n`)."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, bits_of, make_engine, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.anyio

DRAWN = LONG.replace(temperature=1.0, logprobs=True)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


def by_choice(chunks: Sequence[penstock.Chunk]) -> dict[int, list[penstock.Chunk]]:
    """The chunks of each choice, in order."""
    sorted_chunks = defaultdict(list)
    for chunk in chunks:
        sorted_chunks[chunk.index].append(chunk)
    return sorted_chunks


async def test_each_choice_equals_a_separate_request_with_its_seed(engine: penstock.Engine) -> None:
    result = await engine.generate(PROMPT, DRAWN, n=5)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3, 4]
    assert [choice.seed for choice in result.choices] == [1, 2, 3, 4, 5]
    assert len({choice.token_ids for choice in result.choices}) == 5
    for choice in result.choices:
        alone = await engine.generate(PROMPT, DRAWN, seed=choice.seed)
        assert (choice.token_ids, choice.logprobs, choice.finish_reason) == bits_of(alone)
        assert choice.text == choice.content == alone.text
    await assert_at_rest(engine)


async def test_choices_beyond_max_unfinished_are_refused(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1, max_unfinished=128) as engine:
        async with engine.stream(PROMPT, LONG, n=100):
            message = (
                "100 outputs are unfinished, and the request has 29; the limit is 128, from max_unfinished"
            )
            with pytest.raises(penstock.OverloadedError, match=message):
                await engine.generate(PROMPT, SHORT, n=29)
            result = await engine.generate(PROMPT, SHORT, n=28, priority=-1)
            assert len(result.choices) == 28
        await assert_at_rest(engine)


async def test_result_fields_are_those_of_its_first_choice(engine: penstock.Engine) -> None:
    result = await engine.generate(PROMPT, DRAWN, n=2)
    first = result.choices[0]
    for name in ("text", "token_ids", "logprobs", "finish_reason", "stop_reason", "seed", "content"):
        assert getattr(result, name) == getattr(first, name)
    assert result.cumulative_logprob == first.cumulative_logprob == sum(first.logprobs or ())
    assert result.usage.prompt_tokens == len(PROMPT)
    assert result.usage.completion_tokens == sum(len(choice.token_ids) for choice in result.choices) == 800
    assert (await engine.generate(PROMPT, SHORT)).cumulative_logprob is None
    with pytest.raises(IndexError, match="no choices"):
        _ = penstock.Result(
            choices=(),
            prompt_token_ids=(),
            prompt_logprobs=None,
            prompt_top_logprobs=None,
            adapter=None,
            usage=result.usage,
            timings=result.timings,
        ).text


async def test_joined_chunks_of_a_choice_equal_the_choice(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, DRAWN, n=3)
    chunks = [chunk async for chunk in request]
    result = await request.result()
    assert set(by_choice(chunks)) == {0, 1, 2}
    for choice in result.choices:
        own = by_choice(chunks)[choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert "".join(chunk.content for chunk in own) == choice.content
        assert tuple(token for chunk in own for token in chunk.token_ids) == choice.token_ids
        assert tuple(value for chunk in own for value in chunk.logprobs or ()) == choice.logprobs


async def test_chunks_of_choices_are_taken_round_robin(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, SHORT, n=4, temperature=1.0)
    await request.result()
    chunks = [chunk async for chunk in request]
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3]
    assert [len(chunk.token_ids) for chunk in chunks] == [8, 8, 8, 8]


async def test_stop_string_ends_only_its_own_choice(engine: penstock.Engine) -> None:
    whole = await engine.generate(PROMPT, DRAWN, n=3)
    stop = whole.choices[1].text[100:108]
    assert stop not in whole.choices[0].text
    assert stop not in whole.choices[2].text
    result = await engine.generate(PROMPT, DRAWN, n=3, stop=stop)
    first, second, third = result.choices
    assert (second.finish_reason, second.stop_reason) == ("stop", stop)
    assert second.text == whole.choices[1].text.partition(stop)[0]
    assert (first.finish_reason, third.finish_reason) == ("length", "length")
    assert [first.text, third.text] == [whole.choices[0].text, whole.choices[2].text]
    assert result.finish_reason == "length"
    await assert_at_rest(engine)


async def test_cancel_ends_all_choices(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, DRAWN, n=4)
    chunk = await anext(request)
    request.cancel()
    result = await request.result()
    assert {choice.finish_reason for choice in result.choices} <= {"cancelled", "length"}
    assert result.choices[chunk.index].token_ids[: len(chunk.token_ids)] == chunk.token_ids
    await assert_at_rest(engine)


async def test_dropped_request_ends_all_choices(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, DRAWN, n=4)
    with pytest.warns(ResourceWarning, match="dropped before it finished"):
        del request
    await assert_at_rest(engine)


async def test_cancelled_wait_loses_no_chunk(engine: penstock.Engine) -> None:
    request = await engine.start_request(PROMPT, DRAWN, n=3)
    chunks = []
    while (chunk := await anext(request, None)) is not None:
        chunks.append(chunk)
        with anyio.move_on_after(0):
            chunks.extend([late] if (late := await anext(request, None)) else [])
    result = await request.result()
    for choice in result.choices:
        tokens = (token for chunk in by_choice(chunks)[choice.index] for token in chunk.token_ids)
        assert tuple(tokens) == choice.token_ids


async def test_slow_reader_pauses_every_choice(tiny_model: Path) -> None:
    async with make_engine(tiny_model) as engine:
        request = await engine.start_request(PROMPT, DRAWN, n=2)
        await anyio.to_thread.run_sync(wait_until, lambda: engine.stats().paused == 2)
        assert engine.stats().generation_tokens < 800
        chunks = [chunk async for chunk in request]
        assert all(sum(len(chunk.token_ids) for chunk in own) == 400 for own in by_choice(chunks).values())


def test_blocking_request_returns_all_choices(engine: penstock.Engine) -> None:
    with engine.blocking.stream(PROMPT, DRAWN, n=3) as request:
        chunks = list(request)
        result = request.result()
    for choice in result.choices:
        assert "".join(chunk.text for chunk in by_choice(chunks)[choice.index]) == choice.text
