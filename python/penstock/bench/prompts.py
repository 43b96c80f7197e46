"""Makes the requests of a benchmark: random ones, those of a file, or one prompt."""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import penstock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.bench.settings import BenchSettings

    Prompt = str | list[int] | list[dict[str, Any]]

__all__ = ["Body", "bodies"]

#: Words that are one token, with the blank before it, in the usual vocabularies.
_WORDS = """
about again also am another are as at back because before being best big both by came change come
country did do done each earth end even example face far feel find follow for found from girl go
great grow hand has head help here him home how if in is just kind land last learn left letter light
line little long made man may mean might more mother move must name need new night not number off
old once only or our over page part place play put quick real river said saw school second seem set
should side so something soon spell state stop study take tell that their then these thing this
thought through to too tree turn under up use walk was water we went what where while who will
without work would year young
"""


class Body(NamedTuple):
    """The body of a request, and the number of tokens that it asks for."""

    content: bytes
    max_tokens: int
    #: Whether an earlier request had the same prompt, because there are fewer prompts than requests.
    is_repeated: bool = False


def bodies(settings: BenchSettings, model: str) -> Iterator[Body]:
    """The requests, without end. Raises `ConfigError` for a dataset that cannot be used."""
    is_chat = settings.endpoint == "chat"
    common = {
        "model": model,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if settings.ignore_eos else {}),
    }
    prompts, size = _prompts(settings)

    def make(index: int, row: tuple[Prompt, int]) -> Body:
        prompt, max_tokens = row
        if is_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        fields = {**common, ("messages" if is_chat else "prompt"): prompt, "max_tokens": max_tokens}
        fields |= settings.extra_body or {}
        return Body(json.dumps(fields).encode(), max_tokens, is_repeated=index >= size)

    return itertools.starmap(make, enumerate(prompts))


def _prompts(settings: BenchSettings) -> tuple[Iterator[tuple[Prompt, int]], float]:
    """Prompts without end, each with the number of tokens to generate; and the number of different ones."""
    if settings.prompt is not None:
        return itertools.repeat((settings.prompt, settings.output_len)), 1
    if settings.dataset_path is not None:
        rows = _rows(Path(settings.dataset_path), settings)
        return itertools.cycle(rows), len(rows)
    return _random(settings), math.inf


def _random(settings: BenchSettings) -> Iterator[tuple[Prompt, int]]:
    chance = random.Random(settings.seed)  # noqa: S311 - prompts
    is_text = settings.random_text or settings.endpoint == "chat"
    vocabulary: Any = _WORDS.split() if is_text else range(settings.random_vocab_size)

    def length(mean: int) -> int:
        spread = int(mean * settings.random_range_ratio)
        return chance.randint(mean - spread, mean + spread)

    prefix = chance.choices(vocabulary, k=settings.random_prefix_len)
    while True:
        tokens = prefix + chance.choices(vocabulary, k=length(settings.input_len))
        yield " ".join(tokens) if is_text else tokens, max(length(settings.output_len), 1)


def _rows(file: Path, settings: BenchSettings) -> list[tuple[Prompt, int]]:
    """The prompts of a file: a JSON array, or an object per line."""
    try:
        text = file.read_text(encoding="utf-8")
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.splitlines() if line.strip()]
        )
    except ValueError as error:
        raise _unusable(file, f"not JSON: {error}") from None
    prompts = [_row(row, settings, f"{file}, entry {number}") for number, row in enumerate(rows, start=1)]
    if not prompts:
        raise _unusable(file, "no entries")
    return prompts


def _row(row: Any, settings: BenchSettings, place: str) -> tuple[Prompt, int]:
    """A row of vLLM's custom dataset, of ShareGPT's, or with `messages`."""
    if not isinstance(row, dict):
        raise _unusable(place, "not an object")
    prompt: Any = row.get("prompt", row.get("messages"))
    if prompt is None:
        try:
            prompt = row["conversations"][0]["value"]
        except (LookupError, TypeError):
            raise _unusable(place, "no prompt, messages or conversations") from None
    is_chat = settings.endpoint == "chat"
    if not isinstance(prompt, (str, list)) or not prompt:
        raise _unusable(place, "the prompt is neither a text nor a list")
    if isinstance(prompt, list) and isinstance(prompt[0], dict) != is_chat:
        raise _unusable(place, f"a prompt of this type does not fit the endpoint {settings.endpoint}")
    max_tokens = row.get("output_tokens", settings.output_len)
    if not isinstance(max_tokens, int) or max_tokens < 1:
        raise _unusable(place, f"output_tokens is {max_tokens!r}")
    return prompt, max_tokens


def _unusable(place: object, cause: str) -> penstock.ConfigError:
    return penstock.ConfigError(f"{place}: {cause}", "dataset_path")
