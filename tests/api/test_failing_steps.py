"""A failing step ends the requests in it with an error; other requests continue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

import penstock
from support import hooks
from support.api.engines import LONG, PROMPT, SHORT, assert_at_rest, assert_at_rest_blocking, make_engine

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.needs("hooks")

FAILING_TOKEN = 77
POISON = [*PROMPT, FAILING_TOKEN]


def make_failing_engine(model: Path, **options: object) -> penstock.Engine:
    """An open engine whose steps fail if they compute `FAILING_TOKEN`."""
    engine = make_engine(model, **options)
    engine._session.adopt(hooks.failing_engine(model, engine.config, FAILING_TOKEN))
    return engine


@pytest.mark.anyio
async def test_failed_step_raises_for_every_way_of_reading(tiny_model: Path) -> None:
    async with make_failing_engine(tiny_model) as engine:
        request = await engine.start_request(POISON, SHORT)
        with pytest.raises(penstock.GenerationError, match="token 77 was to fail its step"):
            await request.result()
        with pytest.raises(penstock.GenerationError, match="token 77"):
            await anext(request)
        with pytest.raises(penstock.GenerationError, match="token 77"):
            await request.result()
        assert request.finish_reason == "error"
        with pytest.raises(penstock.RequestError):
            await engine.generate(POISON, SHORT)
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_failed_choice_ends_alone_and_raises_at_the_end(tiny_model: Path) -> None:
    params = LONG.replace(max_tokens=40, temperature=1.0, n=100)
    async with make_engine(tiny_model) as engine:
        choices = (await engine.generate(PROMPT, params)).choices
    fails = [FAILING_TOKEN in choice.token_ids[:-1] for choice in choices]
    middle = next(index for index in range(1, 99) if fails[index - 1 : index + 2] == [False, True, False])
    async with make_failing_engine(tiny_model, max_num_seqs=1) as engine:
        request = await engine.start_request(PROMPT, params, n=3, seed=choices[middle - 1].seed)
        tokens: list[tuple[int, ...]] = [(), (), ()]

        async def read() -> None:
            async for chunk in request:
                tokens[chunk.index] += chunk.token_ids

        with pytest.raises(penstock.GenerationError, match="token 77 was to fail its step"):
            await read()
        assert tokens[0] == choices[middle - 1].token_ids
        assert tokens[1] == choices[middle].token_ids[: choices[middle].token_ids.index(FAILING_TOKEN) + 1]
        assert tokens[2] == choices[middle + 1].token_ids
        assert request.finish_reason == "error"
        with pytest.raises(penstock.GenerationError, match="token 77"):
            await request.result()
        await assert_at_rest(engine)


@pytest.mark.anyio
async def test_waiting_request_completes_after_a_failed_step(tiny_model: Path) -> None:
    expected: list[penstock.Result] = []
    outcomes: dict[int, object] = {}
    async with make_engine(tiny_model) as engine:
        for seed in range(12):
            expected.append(await engine.generate(PROMPT, LONG, max_tokens=20, seed=seed))
            if FAILING_TOKEN in expected[-1].token_ids[:-1]:
                expected.pop()  # it would fail, too
    assert len(expected) > 6
    async with make_failing_engine(tiny_model, max_num_seqs=1) as engine:

        async def ask(number: int) -> None:
            result = expected[number // 2]
            prompt = POISON if number % 2 else PROMPT
            try:
                answer = await engine.generate(prompt, LONG, max_tokens=20, seed=result.seed)
                outcomes[number] = answer.token_ids == result.token_ids
            except penstock.GenerationError:
                outcomes[number] = "failed"

        async with anyio.create_task_group() as group:
            for number in range(2 * len(expected)):
                group.start_soon(ask, number)
        assert [outcomes[number] for number in sorted(outcomes)] == [True, "failed"] * len(expected)
        await assert_at_rest(engine)


async def read_into(tokens: list[int], request: penstock.Request) -> None:
    async for chunk in request:
        tokens += chunk.token_ids


@pytest.mark.anyio
async def test_mid_stream_failure_is_raised_after_the_output(tiny_model: Path) -> None:
    """The step fails for every request in it, also for a stream without the failing token."""
    async with make_failing_engine(tiny_model, max_num_seqs=2) as engine:
        bystander = await engine.start_request(PROMPT, LONG)
        tokens = list((await anext(bystander)).token_ids)
        failing = await engine.start_request(POISON, SHORT)
        with pytest.raises(penstock.GenerationError):
            await failing.result()
        with pytest.raises(penstock.GenerationError):
            await read_into(tokens, bystander)
        assert 0 < len(tokens) < 400
        await assert_at_rest(engine)
    async with make_engine(tiny_model) as engine:
        whole = await engine.generate(PROMPT, LONG)
    assert tuple(tokens) == whole.token_ids[: len(tokens)]


def test_failed_step_raises_in_a_blocking_request(tiny_model: Path) -> None:
    with make_failing_engine(tiny_model) as engine:
        with pytest.raises(penstock.GenerationError, match="token 77"):
            engine.blocking.generate(POISON, SHORT)
        with engine.blocking.stream(POISON, SHORT) as request:
            with pytest.raises(penstock.GenerationError):
                list(request)
            assert request.finish_reason == "error"
        assert_at_rest_blocking(engine)
