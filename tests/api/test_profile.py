"""`Engine(profile=True)` and `engine.profile()`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.api.engines import PROMPT, bits_of, make_engine

if TYPE_CHECKING:
    from pathlib import Path

NUM_TOKENS = 8


@pytest.mark.anyio
async def test_profile_counts_the_operations_of_each_step(tiny_model: Path) -> None:
    async with make_engine(tiny_model, profile=True) as engine:
        assert engine.profile() == []  # the warm-up does not count
        result = await engine.generate(PROMPT, max_tokens=NUM_TOKENS, seed=1, logprobs=True)
    rows = {row.operation: row for row in engine.profile()}
    assert len(result.token_ids) == NUM_TOKENS
    assert rows["embed"].calls >= NUM_TOKENS
    assert rows["linear"].calls > rows["attention"].calls >= rows["embed"].calls
    assert rows["admit_slot"].calls == 1
    for row in rows.values():
        assert row.seconds > 0
        average, rounding = row.seconds / row.calls, 1 + 1e-9
        assert 0 < row.min_seconds <= average * rounding
        assert average <= row.max_seconds * rounding
        assert row.max_seconds <= row.seconds
        assert row.bytes > 0
        assert (row.flops is not None) == (row.operation in {"linear", "attention"})
    async with make_engine(tiny_model) as engine:
        plain = await engine.generate(PROMPT, max_tokens=NUM_TOKENS, seed=1, logprobs=True)
    assert bits_of(result) == bits_of(plain)


def test_profile_of_a_closed_engine_is_the_last_one(tiny_model: Path) -> None:
    with make_engine(tiny_model, profile=True) as engine:
        engine.blocking.generate(PROMPT, max_tokens=NUM_TOKENS)
    rows = engine.profile()
    assert rows
    assert engine.profile() == rows


def test_profile_of_an_engine_without_profiling_is_an_error(tiny_model: Path) -> None:
    with (
        make_engine(tiny_model) as engine,
        pytest.raises(RuntimeError, match=r"^profile\(\) requires Engine\(profile=True\)$"),
    ):
        engine.profile()
