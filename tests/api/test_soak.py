"""Random requests of all kinds for a long time: `pytest tests/api/test_soak.py --soak-waves 5000`.

5000 waves are about 200,000 requests and take half an hour on two cores; `--timeout 0` lifts pytest's limit.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import penstock
from support.api.engines import assert_at_rest, bytes_of_blocks, make_engine, resident_bytes, resources
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.needs("proc")

#: Prompt and output of most requests.
MAX_LEN = 160
#: A request of this length pauses if it is not read.
MAX_MODEL_LEN = 320
#: Memory growth allowed per run: allocators round, and caches of the interpreter fill.
SLACK = 8 << 20


class Requests:
    """Starts random requests and counts them by kind and finish reason."""

    def __init__(self, engine: penstock.Engine, chance: random.Random) -> None:
        self.engine = engine
        self.chance = chance
        self.kinds: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()

    def _prompt(self) -> list[int]:
        """A prompt of at most 120 tokens, which may begin as another one did."""
        topic = random_prompt(self.chance.randint(1, 100), seed=self.chance.randrange(6))
        return [*topic, *random_prompt(self.chance.randint(1, 20), seed=self.chance.randrange(1 << 30))]

    def _options(self, prompt: Sequence[int]) -> dict[str, Any]:
        chance = self.chance
        shares = chance.random() < 0.9
        return {
            "max_tokens": chance.randint(1, MAX_LEN - len(prompt)),
            "temperature": 1.0,
            "ignore_eos": True,
            "priority": chance.randint(-1, 1),
            "cache_salt": chance.choice([None, None, "tenant"]) if shares else None,
            "use_prefix_cache": shares,
        }

    async def ask(self) -> None:
        """Run one request of a random kind."""
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._plain: 12,
            self._cancelled: 6,
            self._dropped: 2,
            self._choices: 3,
            self._beams: 1,
            self._reports: 3,
            self._processed: 1,
            self._structured: 2,
            self._chat: 2,
            self._stopped_by_text: 2,
            self._scored: 2,
            self._refused: 1,
            self._timed_out: 2,
            self._polled: 2,
            self._unread: 2,
            self._in_thread: 1,
            self._batch: 1,
        }
        [kind] = self.chance.choices(list(kinds), list(kinds.values()))
        self.kinds[kind.__name__.strip("_")] += 1
        await kind()

    def _count(self, result: penstock.Result) -> None:
        self.finish_reasons.update(choice.finish_reason for choice in result.choices)

    async def _plain(self) -> None:
        prompt = self._prompt()
        result = await self.engine.generate(prompt, **self._options(prompt))
        assert len(result.token_ids) == result.usage.completion_tokens
        assert result.finish_reason == "length"
        self._count(result)

    async def _cancelled(self) -> None:
        prompt = self._prompt()
        request = await self.engine.start_request(prompt, **self._options(prompt))
        for _ in range(self.chance.randrange(3)):
            await anext(aiter(request), None)
        request.cancel()
        self._count(await request.result())

    async def _dropped(self) -> None:
        prompt = self._prompt()
        async with self.engine.stream(prompt, **self._options(prompt)) as request:
            await anext(aiter(request), None)

    async def _timed_out(self) -> None:
        prompt = self._prompt()
        with anyio.move_on_after(self.chance.random() * 0.02):
            self._count(await self.engine.generate(prompt, **self._options(prompt)))

    async def _polled(self) -> None:
        prompt = self._prompt()
        options = {**self._options(prompt), "n": 2, "unread": "keep"}
        request = await self.engine.start_request(prompt, **options)
        reasons: list[str] = []
        while len(reasons) < 2:
            chunk = request.poll()
            if chunk is None:
                await anyio.lowlevel.checkpoint()
            elif chunk.finish_reason is not None:
                reasons.append(chunk.finish_reason)
        self._count(await request.result())

    async def _unread(self) -> None:
        """Pauses once its queue is full, until it is cancelled or read."""
        request = await self.engine.start_request([7], max_tokens=MAX_MODEL_LEN - 1, ignore_eos=True)
        while not self.engine.stats().paused:
            await anyio.lowlevel.checkpoint()
        if self.chance.random() < 0.5:
            request.cancel()
        self._count(await request.result())

    async def _choices(self) -> None:
        prompt = self._prompt()
        num_choices = self.chance.randint(2, 6)
        options = {
            **self._options(prompt),
            "n": num_choices,
            "best_of": num_choices + self.chance.randrange(3),
        }
        result = await self.engine.generate(prompt, **options)
        assert len(result.choices) == num_choices
        self._count(result)

    async def _beams(self) -> None:
        prompt = self._prompt()
        self._count(await self.engine.generate(prompt, num_beams=3, n=2, max_tokens=6, ignore_eos=True))

    async def _reports(self) -> None:
        prompt = self._prompt()
        options = {**self._options(prompt), "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 1}
        options["max_tokens"] = min(8, options["max_tokens"])
        options.update(output_logits="all", output_hidden_states="generation")
        result = await self.engine.generate(prompt, **options)
        assert result.choices[0].logits is not None
        self._count(result)

    async def _processed(self) -> None:
        def no_zero(_: Sequence[int], logits: Any) -> None:
            view: Any = memoryview(logits)
            view[0] = -30.0

        prompt = self._prompt()
        options = {**self._options(prompt), "max_tokens": 4}
        self._count(await self.engine.generate(prompt, logits_processors=[no_zero], **options))

    async def _structured(self) -> None:
        choices = [f"{self.chance.randrange(20)} a", "b"]
        result = await self.engine.generate("Q", choice=choices, max_tokens=20)
        assert result.text in choices
        self._count(result)

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": f"Hi {self.chance.randrange(9)}"}]
        self._count(await self.engine.generate(messages, max_tokens=5, ignore_eos=True))

    async def _stopped_by_text(self) -> None:
        prompt = self._prompt()
        self._count(await self.engine.generate(prompt, stop=["e", "t", "0"], **self._options(prompt)))

    async def _scored(self) -> None:
        prompt = self._prompt()
        assert len((await self.engine.score(prompt)).token_ids) == len(prompt)

    async def _refused(self) -> None:
        with pytest.raises(penstock.InvalidRequestError):
            await self.engine.generate([1] * (MAX_MODEL_LEN + 1))

    async def _in_thread(self) -> None:
        prompt = self._prompt()
        ask = partial(self.engine.blocking.generate, prompt, **self._options(prompt))
        self._count(await anyio.to_thread.run_sync(ask))

    async def _batch(self) -> None:
        prompts = [self._prompt() for _ in range(5)]
        async with self.engine.generate_many(prompts, max_tokens=3, ignore_eos=True, concurrency=2) as items:
            async for item in items:
                assert item.result is not None
                self._count(item.result)


async def wave(requests: Requests) -> None:
    """Run requests of every kind concurrently until the engine is idle."""
    async with anyio.create_task_group() as group:
        for _ in range(requests.chance.randint(1, 40)):
            group.start_soon(requests.ask)
            if requests.chance.random() < 0.3:
                await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("preemption_mode", ["recompute", pytest.param("swap", marks=pytest.mark.rare)])
def test_soak_counters_balance_and_memory_is_flat(
    preemption_mode: str, tiny_model: Path, request: pytest.FixtureRequest
) -> None:
    num_waves: int = request.config.getoption("--soak-waves")
    chance = random.Random(11)
    before = resources()
    block_bytes = bytes_of_blocks(tiny_model, 1)
    resident: list[int] = []

    async def main() -> None:
        async with make_engine(
            tiny_model,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=12,
            max_num_batched_tokens=48,
            kv_cache_bytes=30 * block_bytes,
            host_cache_bytes=40 * block_bytes,
            prefix_cache_ttl=0.05,
            preemption_mode=preemption_mode,
        ) as engine:
            requests = Requests(engine, chance)
            for index in range(num_waves):
                await wave(requests)
                await assert_at_rest(engine)
                if chance.random() < 0.05:
                    engine.reset_prefix_cache()
                if index >= num_waves // 3:
                    resident.append(resident_bytes())
            stats = engine.stats()
            assert stats.preemptions > 0
            assert stats.prefix_hit_tokens > 0
            assert stats.blocks_cached <= stats.blocks_total
            assert {"length", "cancelled", "stop"} <= requests.finish_reasons.keys()
            print(f"{requests.kinds.total()} calls: {dict(requests.kinds)}; {dict(requests.finish_reasons)}")
            sizes = f"{min(resident) >> 10} to {max(resident) >> 10} KiB"
            print(f"{stats.preemptions} preemptions; resident: {sizes}")

    anyio.run(main)
    assert max(resident[len(resident) // 2 :]) < max(resident[: len(resident) // 2]) + SLACK
    assert resources() == before
