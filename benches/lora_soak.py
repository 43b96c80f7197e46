"""Loads and unloads adapters while requests run; checks outputs, memory and the gaps between tokens.

    python benches/lora_soak.py [--cycles 1000] [--streams 4] [--rank 16] [--slack 16] [--gaps 2] PATH

PATH is a safetensors directory, for instance one with random weights. Streams with the base and with an
adapter that stays loaded run all the time. Each cycle runs a short request, at first with adapters that are
loaded; then each cycle loads an adapter, runs a request with it and unloads it, sometimes by force. The
verdict is "passed", with exit status 0, if each output is that of the same request alone, nothing is left of
the adapters, the memory grew by less than `--slack` MiB from the first to the last quarter, and the 99th
percentile of the gaps between the tokens of a stream is at most `--gaps` times that without loads (0: any).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from adapters import write_adapter

import penstock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

PROMPT = list(range(10, 26))
NUM_FOLDERS, NUM_SAMPLES = 4, 40
SHORT = penstock.SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
LONG = SHORT.replace(max_tokens=100)
KEPT = "kept"
#: The factor of the updates with which each adapter has its own outputs.
GAIN = 100


class Soak:
    """The engine, the expected outputs and the observations."""

    def __init__(self, engine: penstock.Engine, folders: list[Path]) -> None:
        self.engine = engine
        self.folders = folders
        self.expected: dict[str | None, tuple[int, ...]] = {}
        self.gaps = array("d")
        self.memory: list[int] = []
        self.errors: list[str] = []
        self.is_over = False

    async def prepare(self) -> None:
        """Compute the expected outputs, each alone."""
        await self.engine.load_adapter(KEPT, self.folders[0])
        for name in (None, KEPT):
            self.expected[name] = (await self.engine.generate(PROMPT, LONG, adapter=name)).token_ids
        for folder in self.folders[1:]:
            await self.engine.load_adapter("churn", folder)
            result = await self.engine.generate(PROMPT, SHORT, adapter="churn")
            self.expected[folder.name] = result.token_ids
            await self.engine.unload_adapter("churn")
        shortened = {token_ids[: SHORT.max_tokens] for token_ids in self.expected.values()}
        if len(shortened) < len(self.expected):
            self.errors.append("adapters have the same outputs; a comparison shows nothing")

    async def stream(self, adapter: str | None) -> None:
        """Run requests one after the other, and note the gaps between their tokens."""
        while not self.is_over:
            token_ids: list[int] = []
            last = None
            async with self.engine.stream(PROMPT, LONG, adapter=adapter, use_prefix_cache=False) as request:
                async for chunk in request:
                    now = time.perf_counter()
                    if last is not None:
                        self.gaps.append(now - last)
                    last = now
                    token_ids += chunk.token_ids
            self.compare(adapter, tuple(token_ids))

    def compare(self, name: str | None, token_ids: tuple[int, ...]) -> None:
        """Note an output that is not the one of the same request alone."""
        if token_ids != self.expected[name]:
            self.errors.append(f"{name}: {token_ids} instead of {self.expected[name]}")

    async def request(self, number: int) -> None:
        """Run a request with an adapter that is loaded."""
        await self.engine.generate(PROMPT, SHORT, adapter=(None, KEPT)[number % 2], use_prefix_cache=False)

    async def cycle(self, number: int) -> None:
        """Load an adapter, use it and unload it."""
        folder = self.folders[1 + number % (len(self.folders) - 1)]
        name = f"churn {number % 2}"
        await self.engine.load_adapter(name, folder)
        if number % 3:
            result = await self.engine.generate(PROMPT, SHORT, adapter=name)
            self.compare(folder.name, result.token_ids)
            await self.engine.unload_adapter(name)
            return
        request = await self.engine.start_request(PROMPT, LONG, adapter=name)
        await self.engine.unload_adapter(name, force=True)
        with suppress(penstock.GenerationError):
            await request.result()
            self.errors.append("a forced unload left its request")

    async def run(self, work: Callable[[int], Awaitable[None]], cycles: int, num_streams: int) -> float:
        """Run cycles of `work` beside streams; returns the 99th percentile of the gaps."""
        del self.gaps[:]
        self.is_over = False
        streams = [asyncio.create_task(self.stream((None, KEPT)[index % 2])) for index in range(num_streams)]
        durations = []
        try:
            for number in range(cycles):
                start = time.perf_counter()
                await work(number)
                durations.append(time.perf_counter() - start)
                if number % max(1, cycles // NUM_SAMPLES) == 0:
                    self.memory.append(resident_bytes())
        finally:
            self.is_over = True
            await asyncio.gather(*streams)
        cuts = statistics.quantiles(self.gaps, n=100)
        shown = [f"{1e3 * seconds:.2f}" for seconds in (statistics.median(durations), cuts[49], cuts[98])]
        print(f"{work.__name__}: {shown[0]} ms each; gaps of {shown[1]} ms, p99 {shown[2]} ms", flush=True)
        return cuts[98]


def resident_bytes() -> int:
    """Memory of this process that is not shared with files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


async def soak(options: argparse.Namespace, folders: list[Path]) -> list[str]:
    """All phases; returns the problems."""
    limits = {"max_adapters": 4, "max_num_seqs": options.streams + 4}
    async with penstock.Engine(options.path, threads=options.threads, **limits) as engine:
        soak = Soak(engine, folders)
        await soak.prepare()
        expected = await soak.run(soak.request, max(20, options.cycles // 4), options.streams)
        soak.memory.clear()
        found = await soak.run(soak.cycle, options.cycles, options.streams)
        quarter = max(1, len(soak.memory) // 4)
        grown = statistics.median(soak.memory[-quarter:]) - statistics.median(soak.memory[:quarter])
        print(f"memory {soak.memory[-1] / 2**20:.1f} MiB, grown by {grown / 2**20:.1f} MiB")
        stats = engine.stats()
        problems = soak.errors[:5]
        if set(engine.adapters) != {KEPT} or engine.adapters[KEPT].running:
            problems.append(f"adapters are left: {engine.adapters}")
        if stats.running or stats.waiting or stats.blocks_used:
            problems.append(f"requests are left: {stats}")
        if grown > options.slack * 2**20:
            problems.append(f"the memory grew by {grown / 2**20:.1f} MiB")
        if options.gaps and found > options.gaps * expected:
            problems.append(
                f"the 99th percentile of the gaps is {found / expected:.2f} times that without loads"
            )
        return problems


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slack", type=float, default=16)
    parser.add_argument("--gaps", type=float, default=2)
    options = parser.parse_args()
    model = json.loads((options.path / "config.json").read_text())
    with tempfile.TemporaryDirectory() as root:
        folders = [Path(root) / str(seed) for seed in range(NUM_FOLDERS)]
        for seed, folder in enumerate(folders):
            write_adapter(folder, model, options.rank, seed)
            config = json.loads((folder / "adapter_config.json").read_text())
            config["lora_alpha"] *= GAIN
            (folder / "adapter_config.json").write_text(json.dumps(config))
        problems = asyncio.run(soak(options, folders))
    print("\n".join(problems) or "passed")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
