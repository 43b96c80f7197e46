"""Rates of an engine on the device: start-up, prefill, decode, throughput."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rows import Row, Rows

import penstock

if TYPE_CHECKING:
    from pathlib import Path

    from shapes import Shape

#: Seconds between two looks at the statistics, by default, and parts of a window of decoding.
INTERVAL, PARTS = 0.005, 8
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass(frozen=True)
class Load:
    """Lengths of what is measured."""

    batches: tuple[int, ...] = (1, 8, 64, 256)
    context: int = 1000
    decoded: int = 256
    prompt: int = 8192
    prompts: int = 5
    requests: int = 512
    budget: int = 8192  # tokens of a step
    seconds: float = 25  # the most for one row
    starts: int = 2


class Sample(NamedTuple):
    """The time, and the steps, generated tokens, prompt tokens and ended requests until then."""

    time: float
    steps: int
    tokens: int
    prompts: int
    ended: int


@dataclass(frozen=True)
class Variant:
    """An engine: its options, and the goals of its rows."""

    name: str
    options: dict[str, Any]
    goals: dict[str, str]
    bits: float = 16  # of a weight
    kv: str = "bfloat16"


BF16_GOALS = {
    "second start-up to the first token": "<= 5 s",
    "decode, batch 1, context 1000": ">= 272 tok/s",
    "decode, batch 256, context 1000": ">= 17000 tok/s",
}
VARIANTS = {
    "bf16": Variant("bf16", {}, BF16_GOALS),
    "varying": Variant("bf16, deterministic=False", {"deterministic": False}, {}),
    "int8-kv": Variant("int8 KV", {}, {"decode, batch 256, context 1000": ">= 24000 tok/s"}, kv="int8"),
    "int4": Variant(
        "int4", {"quantization": "w4a16"}, {"decode, batch 1, context 1000": ">= 700 tok/s"}, bits=4.25
    ),
}
TINY_LOAD = Load((1, 2), context=20, decoded=12, prompt=40, prompts=2, requests=3, budget=32, seconds=60)
HOST_LOAD = Load((256,), context=16, decoded=512, prompt=16, requests=0)


class Measured:
    """An open engine. The row of its start has a name of its own."""

    #: Seconds between two looks at the statistics.
    interval = INTERVAL

    def __init__(
        self, shape: Shape, path: Path, variant: Variant, load: Load, rows: Rows, *, start: str = "start-up"
    ) -> None:
        self.shape, self.variant, self.load, self.rows = shape, variant, load, rows
        self.random = random.Random(0)  # noqa: S311 - prompts
        begin = time.perf_counter()
        self.engine = penstock.Engine(
            path,
            device="cuda",
            max_num_seqs=max(load.batches),
            max_num_batched_tokens=load.budget,
            max_model_len=max(load.prompt, 2 * load.context) + load.decoded * 4,
            memory_ratio=0.9,
            kv_cache_dtype=variant.kv,
            prefix_cache=False,
            **variant.options,
        )
        self.engine.blocking.start()
        if self.engine.info.deterministic != self.engine.config.deterministic:
            raise RuntimeError("deterministic=False changes nothing: the log has the reason")
        self.engine.blocking.generate(self.prompt(16), max_tokens=1, **GREEDY)
        self.add(f"{start} to the first token", [time.perf_counter() - begin])
        print(f"  {self.engine.info.memory}")

    def prompt(self, length: int) -> list[int]:
        """Random tokens."""
        return self.random.choices(range(300, self.shape.vocabulary), k=length)

    def add(self, name: str, seconds: list[float], **work: Any) -> None:
        """Append a row."""
        goal = self.variant.goals.get(name, "")
        self.rows.add(Row(f"{self.variant.name}: {name}", seconds, goal=goal, **work))

    def prefill(self) -> None:
        """The time to the first token of a long prompt, alone."""
        length, times = self.load.prompt, []
        end = time.perf_counter() + self.load.seconds
        while len(times) < self.load.prompts and (not times or time.perf_counter() < end):
            timings = self.engine.blocking.generate(self.prompt(length), max_tokens=1, **GREEDY).timings
            times.append(timings.first_token or timings.total)
        work = {
            "bytes": self.shape.weight_bytes(self.variant.bits),
            "flops": self.shape.flops(length, 1, length / 2),
        }
        self.add(f"prefill of {length}", times, tokens=length, **work)

    def decode(self, batch: int, name: str = "") -> None:
        """The time of a step of a batch, while all sequences decode. The row may have another name."""
        load, shape = self.load, self.shape
        times, visible = self.steps(batch)
        if not times:
            return
        work = {
            "bytes": shape.weight_bytes(self.variant.bits)
            + batch * visible * shape.kv_bytes(self.variant.kv),
            "flops": shape.flops(batch, batch, visible),
        }
        self.add(name or f"decode, batch {batch}, context {load.context}", times, tokens=batch, **work)

    def steps(self, batch: int) -> tuple[list[float], float]:
        """The times of a step in parts of the time in which all sequences decode, and the mean context."""
        load = self.load
        prefill = -(-batch * load.context // load.budget)
        samples = self.watch(batch, load.context, load.decoded + prefill)
        # The prompts are computed, and no request has ended.
        whole = [sample for sample in samples if sample.prompts >= batch * load.context and not sample.ended]
        times, visible = [], []
        for first, last in itertools.pairwise(whole[:: max(1, len(whole) // PARTS)]):
            if last.steps > first.steps:
                times.append((last.time - first.time) / (last.steps - first.steps))
                visible.append(load.context + (first.tokens + last.tokens) / 2 / batch)
        if not times:
            print(f"  batch {batch}: not all sequences decoded at the same time within {load.seconds} s")
            return [], 0
        return times, sum(visible) / len(visible)

    def throughput(self) -> None:
        """Output tokens per second of requests with prompts and outputs of the same length."""
        load, shape, batch = self.load, self.shape, max(self.load.batches)
        samples = self.watch(load.requests, load.context, load.context)
        first, last = samples[0], samples[-1]
        seconds, tokens, prompts = last.time - first.time, last.tokens, last.prompts
        if not tokens:
            print(f"  no output within {load.seconds} s")
            return
        steps = tokens / batch
        cached = 1.5 * load.context * batch * shape.kv_bytes(self.variant.kv)
        work = {
            "bytes": steps * (shape.weight_bytes(self.variant.bits) + cached),
            "flops": shape.flops(prompts, prompts / load.context, load.context / 2),
        }
        name = f"throughput {load.context}/{load.context}"
        self.add(name, [seconds], tokens=tokens, serial=True, **work)
        if last.ended < load.requests:
            print(f"  {last.ended} of {load.requests} requests had ended")

    def watch(self, requests: int, prompt: int, outputs: int) -> list[Sample]:
        """Run requests until they end or the time is over."""
        prompts = [self.prompt(prompt) for _ in range(requests)]
        return asyncio.run(self._watch(prompts, outputs))

    async def _watch(self, prompts: list[list[int]], outputs: int) -> list[Sample]:
        before, samples = self.engine.stats(), []
        end = time.perf_counter() + self.load.seconds
        tasks = [
            asyncio.create_task(self.engine.generate(prompt, max_tokens=outputs, **GREEDY))
            for prompt in prompts
        ]
        while not samples or (samples[-1].ended < len(tasks) and samples[-1].time < end):
            now = self.engine.stats()
            samples.append(
                Sample(
                    time.perf_counter(),
                    now.steps - before.steps,
                    now.generation_tokens - before.generation_tokens,
                    now.prompt_tokens - before.prompt_tokens,
                    now.requests_finished - before.requests_finished,
                )
            )
            await asyncio.sleep(self.interval)
            for task in tasks:
                if task.done() and task.exception():
                    raise RuntimeError("a request has failed") from task.exception()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return samples


def measure(shape: Shape, path: Path, variant: Variant, load: Load, rows: Rows) -> None:
    """Open an engine and append its rows."""
    measured = Measured(shape, path, variant, load, rows)
    with measured.engine:
        for batch in load.batches:
            measured.decode(batch)
        measured.prefill()
        if load.requests:
            measured.throughput()
    if load.starts > 1:  # the kernels are compiled, and the weights are in the page cache
        Measured(shape, path, variant, load, rows, start="second start-up").engine.blocking.close()


def measure_host(shape: Shape, path: Path, load: Load, rows: Rows) -> None:
    """Append the time of a step of the largest batch with a model of one small layer."""
    batch = max(load.batches)
    name = f"step of batch {batch}"
    measured = Measured(shape, path, Variant("one small layer", {}, {name: "<= 150 us"}), load, rows)
    with measured.engine:
        times, _ = measured.steps(batch)
        if times:
            measured.add(name, times)
