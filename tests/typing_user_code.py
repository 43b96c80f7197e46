"""Typical code of users, for the type checker: `make lint` checks it, and nothing runs it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any, Literal, Unpack

import pydantic

import penstock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

WEATHER: Mapping[str, Any] = {"type": "function", "function": {"name": "weather"}}


class Service:
    """A wrapper that forwards options."""

    def __init__(self, model: str, **options: Unpack[penstock.EngineOptions]) -> None:
        """Pass engine options on."""
        self.engine = penstock.Engine(model, **options)

    async def stream(
        self, prompt: penstock.Prompt, **options: Unpack[penstock.SamplingOptions]
    ) -> AsyncIterator[str]:
        """Yield the text of an output."""
        async with self.engine.stream(prompt, **options) as request:
            async for chunk in request:
                yield chunk.text
                if chunk.finish_reason == "length":
                    yield " [cut]"


def configure(dtype: Literal["auto", "float32"], **changes: int) -> penstock.EngineConfig:
    return penstock.EngineConfig(dtype=dtype).replace(**changes)


async def chat(engine: penstock.Engine, question: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    biases: dict[str, float] = json.loads('{"7": 1.0}')
    params = penstock.SamplingParams(max_tokens=64, tools=[WEATHER], logit_bias=biases)
    result = await engine.generate(messages, params, temperature=0.7, stop=["\n\n"])
    while result.finish_reason == "tool_calls":
        messages.append({"role": "assistant", "content": result.content, "tool_calls": result.tool_calls})
        answers = [{"role": "tool", "tool_call_id": call.id, "content": "22"} for call in result.tool_calls]
        result = await engine.generate([*messages, *answers], params)
    return result.content


class Message(pydantic.BaseModel):
    """A message of a service's own schema."""

    role: Literal["system", "user", "assistant"]
    content: str


async def continue_chat(engine: penstock.Engine, messages: list[Message]) -> Message:
    result = await engine.generate(messages, max_tokens=64)
    return Message(role="assistant", content=result.content)


async def batch(engine: penstock.Engine, prompts: list[str]) -> list[dict[str, Any]]:
    results = await asyncio.gather(*(engine.generate(prompt, max_tokens=8) for prompt in prompts))
    return [result.to_dict() for result in results]


async def stream_batch(engine: penstock.Engine, prompts: list[str]) -> dict[int, str]:
    texts = dict.fromkeys(range(len(prompts)), "")
    params = (penstock.SamplingParams(max_tokens=8, seed=seed) for seed in range(len(prompts)))
    async with engine.stream_many(prompts, params, concurrency=4, unread="keep") as items:
        async for item in items:
            if item.chunk is None:
                raise item.error or ValueError
            texts[item.index] += item.chunk.text
    for chunk in engine.blocking.stream_many(iter(prompts), [penstock.SamplingParams()] * len(prompts)):
        texts[chunk.index] += chunk.chunk.text if chunk.chunk else ""
    results = engine.blocking.generate_many(
        prompts, [penstock.SamplingParams()] * len(prompts), ordered=False
    )
    return texts | {item.index: item.result.text for item in results if item.result is not None}


def last_logits(engine: penstock.Engine, token_ids: list[int]) -> memoryview:
    result = engine.blocking.generate(token_ids, max_tokens=1, output_logits="generation")
    assert result.logits is not None
    return memoryview(result.logits)


def count_tokens(model: str, messages: list[Message]) -> int:
    tokenizer = penstock.Tokenizer(model)
    return len(tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False))


def report(engine: penstock.Engine) -> str:
    stats, info = engine.stats(), engine.info
    return json.dumps({"running": engine.is_running, "stats": stats.to_dict(), "info": info.to_dict()})


def is_stuck(engine: penstock.Engine, seconds: float) -> bool:
    health = engine.health()
    return health.state == "open" and health.step_age is not None and health.step_age > seconds


def mean_latency(histogram: penstock.Histogram) -> float:
    cumulative = list(itertools.accumulate(histogram.counts))
    assert cumulative[-1] == histogram.count
    return histogram.sum / max(histogram.count, 1)


async def restart(engine: penstock.Engine) -> None:
    await engine.sleep(drain=10)
    await engine.wake()
    await engine.aclose(drain=0.5)
