"""Numbers of a model and of a request, with DashInfer's names, and the text of a profile."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from penstock import ModelInfo, ProfileRow, Stats, Timings, Usage

__all__ = ["AsEngineStat", "RequestStatInfo", "StatRecorder", "profile_text", "request_stat_info"]

Texts: TypeAlias = dict[str, str]

#: Rates are averages over at least this time, in seconds.
_RATE_INTERVAL = 1.0


@dataclass(frozen=True)
class AsEngineStat:
    """A snapshot of the numbers of a model. Counters begin at 0 when the model is installed."""

    model_name: str = ""
    """Name of the model."""
    total_token: int = 0
    """Size of the KV cache in tokens."""
    free_token: int = 0
    """Tokens of the KV cache that running requests do not use; cached prefixes count as free."""
    pendding_request: int = 0
    """Requests that wait; the spelling is DashInfer's, `pending_request` is the same."""
    running_request: int = 0
    """Requests that are computed."""
    total_generated_token: int = 0
    """Tokens generated."""
    total_prefill_token: int = 0
    """Prompt tokens computed."""
    generate_token_persec: float = 0.0
    """Tokens generated per second since an earlier snapshot, at least one second before."""
    process_token_persec: float = 0.0
    """Prompt tokens computed per second, likewise."""
    total_device_memory_pool_size: int = 0
    """Memory of the model in bytes: weights, activations and KV cache."""
    used_device_memory_pool_size: int = 0
    """The same, with the used blocks of the KV cache only."""
    prefix_cache_hit_token: int = 0
    """Prompt tokens that the prefix cache had."""
    prefix_cache_miss_token: int = 0
    """Prompt tokens that it had not."""
    prefix_cache_hit_rate: float = 0.0
    """Share of the prompt tokens that the prefix cache had, from 0 to 1; 0 before the first prompt."""
    prefix_cache_miss_rate: float = 0.0
    """Share that it had not; 0 before the first prompt."""
    span_size: int = 0
    """Tokens in a block of the KV cache."""

    @property
    def pending_request(self) -> int:
        """Requests that wait."""
        return self.pendding_request

    @property
    def total_span(self) -> int:
        """Blocks of the KV cache."""
        return self.total_token // self.span_size if self.span_size else 0

    @property
    def free_span(self) -> int:
        """Blocks that running requests do not use."""
        return self.free_token // self.span_size if self.span_size else 0

    @property
    def used_span(self) -> int:
        """Blocks that running requests use."""
        return self.total_span - self.free_span

    @property
    def token_usage_percentage(self) -> float:
        """Share of the KV cache that running requests use, from 0 to 1."""
        return 1.0 - self.free_token / self.total_token if self.total_token else 0.0

    def dict(self) -> Texts:
        """All numbers as text, without the name of the model."""
        numbers = {key: value for key, value in asdict(self).items() if key != "model_name"}
        for key in ("total_span", "used_span", "free_span", "token_usage_percentage"):
            numbers[key] = getattr(self, key)
        return {key: str(value) for key, value in numbers.items()}

    def ToString(self) -> str:  # noqa: N802 - DashInfer's name
        """The name of the model and all numbers, as one line of text."""
        numbers = ", ".join(f"{key}: {value}" for key, value in self.dict().items())
        return f"model_name: {self.model_name}, {numbers}"


class StatRecorder:
    """Makes the snapshots of one model; remembers an earlier one, for the rates."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._base = (time.monotonic(), 0, 0)
        self._rates = (0.0, 0.0)

    def snapshot(self, info: ModelInfo, stats: Stats) -> AsEngineStat:
        """The current numbers."""
        memory, blocks = info.memory, stats.blocks_used + stats.blocks_reserved
        fixed = memory.weights + memory.workspace + memory.inputs
        hits, queries = stats.prefix_hit_tokens, stats.prefix_query_tokens
        generate_rate, process_rate = self._update_rates(stats)
        return AsEngineStat(
            model_name=self._model_name,
            total_token=stats.blocks_total * info.block_size,
            free_token=(stats.blocks_total - blocks) * info.block_size,
            pendding_request=stats.waiting,
            running_request=stats.running,
            total_generated_token=stats.generation_tokens,
            total_prefill_token=stats.prompt_tokens,
            generate_token_persec=generate_rate,
            process_token_persec=process_rate,
            total_device_memory_pool_size=fixed + memory.kv_cache,
            used_device_memory_pool_size=fixed + memory.kv_cache * blocks // max(stats.blocks_total, 1),
            prefix_cache_hit_token=hits,
            prefix_cache_miss_token=queries - hits,
            prefix_cache_hit_rate=stats.prefix_hit_rate,
            prefix_cache_miss_rate=1.0 - stats.prefix_hit_rate if queries else 0.0,
            span_size=info.block_size,
        )

    def _update_rates(self, stats: Stats) -> tuple[float, float]:
        """Tokens generated and prompt tokens computed per second."""
        (before, generated, prefilled), now = self._base, time.monotonic()
        if now - before >= _RATE_INTERVAL:
            # The counters begin at 0 again after the model was unloaded.
            new_tokens = max(stats.generation_tokens - generated, 0), max(stats.prompt_tokens - prefilled, 0)
            self._rates = new_tokens[0] / (now - before), new_tokens[1] / (now - before)
            self._base = (now, stats.generation_tokens, stats.prompt_tokens)
        return self._rates


class RequestStatInfo:
    """The numbers of `ResultQueue.RequestStatInfo()` as attributes; `finished_time` is `finish_time`."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.arrival_time = numbers["arrival_time"]
        self.first_token_time = numbers["first_token_time"]
        self.last_token_time = numbers["last_token_time"]
        self.time_to_first_token = numbers["time_to_first_token"]
        self.time_in_queue = numbers["time_in_queue"]
        self.finish_time = numbers["finished_time"]
        self.context_token_length = numbers["context_token_length"]
        self.generated_token_length = numbers["generated_token_length"]
        self.context_cached_length = numbers["context_cached_length"]
        self.context_tps = numbers["context_tps"]
        self.generate_tps = numbers["generate_tps"]


def request_stat_info(arrival: float, usage: Usage, timings: Timings, *, has_ended: bool) -> dict[str, int]:
    """The numbers of a request that arrived at `arrival`, in seconds of the monotonic clock.

    Times are in milliseconds of the monotonic clock, durations in milliseconds, rates in tokens per second. A
    number that is not known yet is 0.
    """
    first = timings.first_token
    prefill = 0.0 if first is None else first - timings.queued
    decode = 0.0 if first is None else timings.total - first
    end = _milliseconds(arrival + timings.total) if has_ended else 0
    return {
        "arrival_time": _milliseconds(arrival),
        "first_token_time": 0 if first is None else _milliseconds(arrival + first),
        "last_token_time": end,
        "time_to_first_token": 0 if first is None else _milliseconds(first),
        "time_in_queue": _milliseconds(timings.queued),
        "finished_time": end,
        "context_token_length": usage.prompt_tokens,
        "generated_token_length": usage.completion_tokens,
        "context_cached_length": usage.cached_tokens,
        "context_tps": _rate(usage.prompt_tokens, prefill),
        "generate_tps": _rate(usage.completion_tokens - 1, decode),
    }


def _milliseconds(seconds: float) -> int:
    return round(seconds * 1000)


def _rate(count: int, seconds: float) -> int:
    return round(count / seconds) if count > 0 and seconds > 0 else 0


def profile_text(rows: Sequence[ProfileRow]) -> str:
    """A table of the operations of a profile, as `Engine.get_op_profiling_info` returns it."""
    total = sum(row.seconds for row in rows)
    head = "rank opname                count      min_ms      max_ms      ave_ms    total_ms percentage"
    lines = ["*** forward ***", head]
    for row in rows:
        seconds = row.min_seconds, row.max_seconds, row.seconds / row.calls
        times = "".join(f"{value * 1e3:>12.4f}" for value in seconds)
        share = 100 * row.seconds / total if total else 0.0
        lines.append(
            f"{0:4} {row.operation:<20}{row.calls:>7}{times}{row.seconds * 1e3:>12.3f}{share:>10.2f}%"
        )
    return "\n".join([*lines, "*** reshape ***", head, "*** alloc ***", head, ""])
