"""Random requests for a long time: `pytest tests/test_soak.py --soak-waves 2000`."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import anyio
import pytest

from api_support import bytes_of_blocks, check_stats, make_engine, resident_bytes, resources
from support.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

    import penstock

MAX_LEN = 160
#: Memory growth allowed per run: allocators round, and caches of the interpreter fill.
SLACK = 8 << 20


async def wave(engine: penstock.Engine, chance: random.Random) -> set[str]:
    """Run requests of every kind concurrently until the engine is idle; returns their finish reasons."""
    reasons: set[str] = set()

    async def ask(seed: int) -> None:
        topic = random_prompt(chance.randint(1, 100), seed=chance.randrange(6))
        prompt = [*topic, *random_prompt(chance.randint(1, 20), seed=seed)]
        shares = chance.random() < 0.9
        request = await engine.start_request(
            prompt,
            max_tokens=chance.randint(1, MAX_LEN - len(prompt)),
            temperature=1.0,
            ignore_eos=True,
            priority=chance.randint(-1, 1),
            cache_salt=chance.choice([None, None, "tenant"]) if shares else None,
            use_prefix_cache=shares,
        )
        if chance.random() < 0.3:
            for _ in range(chance.randrange(3)):
                await anext(aiter(request), None)
            request.cancel()
        result = await request.result()
        assert result.finish_reason == "cancelled" or len(result.token_ids) == request.params.max_tokens
        reasons.add(result.finish_reason)

    async with anyio.create_task_group() as group:
        for _ in range(chance.randint(1, 40)):
            group.start_soon(ask, chance.randrange(1 << 30))
            if chance.random() < 0.3:
                await anyio.lowlevel.checkpoint()
    return reasons


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
def test_soak_counters_balance_and_memory_is_flat(
    preemption_mode: str, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    num_waves: int = request.config.getoption("--soak-waves")
    chance = random.Random(11)
    before = resources()
    block_bytes = bytes_of_blocks(tiny_model, 1)
    seen: set[str] = set()
    resident: list[int] = []

    async def main() -> None:
        async with make_engine(
            tiny_model,
            max_model_len=MAX_LEN,
            max_num_seqs=12,
            max_num_batched_tokens=48,
            kv_cache_bytes=30 * block_bytes,
            host_cache_bytes=40 * block_bytes,
            prefix_cache_ttl=0.05,
            preemption_mode=preemption_mode,
        ) as engine:
            for index in range(num_waves):
                seen.update(await wave(engine, chance))
                check_stats(engine)
                if chance.random() < 0.05:
                    engine.reset_prefix_cache()
                if index >= num_waves // 3:
                    resident.append(resident_bytes())
            stats = engine.stats()
            assert stats.preemptions > 0
            assert stats.prefix_hit_tokens > 0
            assert stats.blocks_cached <= stats.blocks_total

    anyio.run(main)
    assert seen == {"length", "cancelled"}
    assert max(resident[len(resident) // 2 :]) < max(resident[: len(resident) // 2]) + SLACK
    assert resources() == before
