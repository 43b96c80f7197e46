"""Requests with a deadline, which a server gives them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

import penstock
from penstock import _client
from support.api.engines import PROMPT, SHORT, Gate, assert_at_rest, make_engine

if TYPE_CHECKING:
    from pathlib import Path


async def seconds_of_full_steps(engine: penstock.Engine, number: int) -> float:
    """The time that the engine takes for prompts that are all there when it begins."""
    gate = Gate()
    held = await engine.start_request(PROMPT, max_tokens=1, logits_processors=[gate])
    requests = []
    for index in range(number):
        prompt = [token % 200 for token in range(index, index + 240)]
        requests.append(await engine.start_request(prompt, max_tokens=1, use_prefix_cache=False))
    begin = time.monotonic()
    gate.opened.set()
    for request in [held, *requests]:
        await request.result()
    return time.monotonic() - begin


@pytest.mark.anyio
async def test_request_that_cannot_end_before_its_deadline_is_refused(tiny_model: Path) -> None:
    async with make_engine(tiny_model, max_num_seqs=1, max_num_batched_tokens=16) as engine:
        number, gate = 8, Gate()
        while await seconds_of_full_steps(engine, number) < 3:  # a rate is that of a second of full steps
            number *= 2
        running = await engine.start_request(PROMPT, SHORT, logits_processors=[gate])
        try:
            _client.deadline.set(time.monotonic())
            with pytest.raises(penstock.DeadlineError, match=r"at least \d+\.\d s, and 0\.0 s are left"):
                await engine.start_request(PROMPT, SHORT)
            with pytest.raises(penstock.DeadlineError):
                await engine.generate(PROMPT, max_tokens=4, num_beams=2)
            errors = [type(item.error) async for item in engine.generate_many([PROMPT] * 2, SHORT)]
            assert errors == [penstock.DeadlineError] * 2, "a batch does not try it again"
            _client.deadline.set(time.monotonic() + 1000)
            waiting = await engine.start_request(PROMPT, SHORT)
        finally:
            gate.opened.set()
        await running.result()
        assert (await waiting.result()).finish_reason == "length"
        await assert_at_rest(engine)
