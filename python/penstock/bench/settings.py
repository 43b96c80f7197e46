"""`BenchSettings`: the server, the load and the requests of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import penstock

__all__ = ["BENCH_GROUPS", "GOALS", "BenchSettings", "Load"]

Endpoint = Literal["completions", "chat"]
#: The latencies that can have a goal, by vLLM's names.
GOALS = ("ttft", "tpot", "e2el")

BENCH_GROUPS = {
    "Server": ("model", "endpoint", "timeout", "keep_alive"),
    "Load": ("concurrency", "request_rate", "burstiness", "num_prompts", "duration", "num_warmups"),
    "Requests": (
        "dataset_path",
        "prompt",
        "input_len",
        "output_len",
        "random_range_ratio",
        "random_prefix_len",
        "random_vocab_size",
        "random_text",
        "ignore_eos",
        "extra_body",
        "seed",
    ),
    "Report": ("metric_percentiles",),
}


@dataclass(frozen=True)
class Load:
    """One load point: a number of requests in flight (closed loop), or a rate of arrivals (open loop)."""

    concurrency: int | None = None
    request_rate: float = math.inf

    def __str__(self) -> str:
        if self.concurrency is not None:
            return f"{self.concurrency} in flight"
        return "all at once" if math.isinf(self.request_rate) else f"{self.request_rate:g} req/s"


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The server, the load and the requests. Times are in seconds.

    The string of each field is its help text on the command line of `penstock bench serve`. Raises
    `ConfigError` for a field that is out of range, and for fields that exclude each other.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    model: Annotated[str | None, "Name of the model. Default: the first of /v1/models."] = None
    endpoint: Annotated[Endpoint, "Route of the requests."] = "completions"
    timeout: Annotated[float, "Time after which a request counts as failed."] = 600.0
    keep_alive: Annotated[bool, "Use a connection for several requests; each has its own without it."] = False

    concurrency: Annotated[
        Sequence[int], "Closed loop: number of requests in flight. Several numbers make a curve."
    ] = ()
    request_rate: Annotated[
        Sequence[float],
        "Open loop: requests per second; inf starts all at once. Latencies count from the scheduled start. "
        "Several rates make a curve.",
    ] = ()
    burstiness: Annotated[
        float,
        "Shape of the gamma distribution of the intervals of an open loop: 1 is a Poisson process, less has "
        "more bursts, inf has equal intervals.",
    ] = 1.0
    num_prompts: Annotated[
        int | None, "Number of requests of a load point. Default: 100, or no bound with --duration."
    ] = None
    duration: Annotated[
        float | None, "Time in which a load point starts requests; those in flight still finish."
    ] = None
    num_warmups: Annotated[
        int, "Number of concurrent requests before the first load point, which are not measured."
    ] = 1

    dataset_path: Annotated[
        str | None, "JSON Lines or JSON file of requests, with prompt, messages or conversations."
    ] = None
    prompt: Annotated[str | None, "One prompt for all requests."] = None
    input_len: Annotated[int, "Random prompts: number of tokens, after the shared prefix."] = 1024
    output_len: Annotated[int, "max_tokens of each request, unless the dataset has another."] = 128
    random_range_ratio: Annotated[
        float, "Random prompts: both lengths are uniform between (1 - r) and (1 + r) times their number."
    ] = 0.0
    random_prefix_len: Annotated[int, "Random prompts: number of tokens at the beginning that all share."] = 0
    random_vocab_size: Annotated[int, "Random prompts: token ids are below this number."] = 10000
    random_text: Annotated[
        bool, "Random prompts of words in place of token ids, as chats always have; about one token each."
    ] = False
    ignore_eos: Annotated[bool, "Generate exactly max_tokens tokens, on servers that know ignore_eos."] = (
        False
    )
    extra_body: Annotated[
        Mapping[str, Any] | None, "JSON object of more fields of each request; they replace others."
    ] = None
    seed: Annotated[int, "Seed of the prompts and of the intervals."] = 0

    metric_percentiles: Annotated[Sequence[float], "Percentiles that are printed and stored."] = (50, 90, 99)
    goodput: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise _invalid("url", self.url, "an http or https URL")
        if self.endpoint not in get_args(Endpoint):
            raise _invalid("endpoint", self.endpoint, " or ".join(get_args(Endpoint)))
        rates = ("timeout", "burstiness", "duration", "request_rate")
        _check(self, rates, lambda value: value > 0, "above 0")
        counts = ("concurrency", "num_prompts", "output_len", "random_vocab_size")
        _check(self, counts, lambda value: value > 0, "1 or more")
        _check(self, ("num_warmups", "input_len", "random_prefix_len"), lambda value: value >= 0, "0 or more")
        _check(self, ("random_range_ratio",), lambda value: 0 <= value < 1, "in 0 to below 1")
        _check(self, ("metric_percentiles",), lambda value: 0 <= value <= 100, "in 0 to 100")  # noqa: PLR2004
        if self.concurrency and self.request_rate:
            raise _invalid("request_rate", self.request_rate, "left out if there is a concurrency")
        is_unbounded = self.duration is not None and self.num_prompts is None
        if is_unbounded and any(
            load.concurrency is None and math.isinf(load.request_rate) for load in self.loads
        ):
            raise _invalid("num_prompts", None, "set if the request rate is inf")
        if self.prompt is not None and self.dataset_path is not None:
            raise _invalid("prompt", self.prompt, "left out if there is a dataset")
        for name, limit in self.goodput.items():
            if name not in GOALS or not limit > 0:
                raise _invalid(
                    "goodput", f"{name}:{limit:g}", f"one of {', '.join(GOALS)} and milliseconds above 0"
                )

    @property
    def shown_url(self) -> str:
        """The URL without user and password."""
        scheme, _, rest = self.url.partition("://")
        host, slash, path = rest.partition("/")
        return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"

    @property
    def loads(self) -> list[Load]:
        """The load points, in order."""
        if self.concurrency:
            return [Load(concurrency) for concurrency in self.concurrency]
        return [Load(request_rate=rate) for rate in self.request_rate or (math.inf,)]


def _check(settings: BenchSettings, names: Sequence[str], is_valid: Any, limit: str) -> None:
    """Raise `ConfigError` for the first of these fields with a number that is not valid."""
    for name in names:
        value = getattr(settings, name)
        for number in value if isinstance(value, Sequence) else (value,):
            if number is not None and not is_valid(number):
                raise _invalid(name, number, limit)


def _invalid(name: str, value: object, limit: str) -> penstock.ConfigError:
    return penstock.ConfigError(f"{name}={value!r} is not allowed: it must be {limit}", name, value, limit)
