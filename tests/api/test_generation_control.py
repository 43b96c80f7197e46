"""All request parameters mixed in one batch: no output depends on the other requests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import PROMPT, assert_at_rest, bytes_of_blocks, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

TEXT = "Twelve monkeys typed: to be or not to be, to be or not"
CHAT = [{"role": "user", "content": "Say something."}]
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PERSON}}]


def halve(token_ids: Sequence[int], logits: penstock.Tensor) -> None:
    """A processor that reads its arguments and changes the logits in place."""
    view = np.asarray(logits)
    view[: 256 - len(token_ids)] /= 2
    view[token_ids[-1]] -= 3


def double(token_ids: Sequence[int], logits: penstock.Tensor) -> Any:
    """A processor that returns a new array."""
    return np.asarray(logits) * np.float32(2 if len(token_ids) % 2 else 1)


#: Thirty-two requests with different parameters.
MIXES: list[tuple[Any, dict[str, Any]]] = [
    (PROMPT, {"temperature": 0.0}),
    (TEXT, {"temperature": 1.3, "top_k": 40, "seed": 1}),
    (TEXT, {"top_p": 0.8, "min_p": 0.01, "seed": 2, "top_logprobs": 5}),
    (TEXT, {"typical_p": 0.7, "seed": 3}),
    (random_prompt(90), {"temperature": 0.0, "repetition_penalty": 1.3}),
    (random_prompt(90), {"repetition_penalty": 0.8, "repetition_penalty_scope": "output", "seed": 4}),
    (TEXT, {"presence_penalty": 1.5, "frequency_penalty": 0.5, "seed": 5}),
    (TEXT, {"temperature": 0.0, "frequency_penalty": -2.0, "top_logprobs": 20}),
    (TEXT, {"temperature": 0.0, "no_repeat_ngram_size": 2}),
    (PROMPT, {"logit_bias": {7: 100, 9: -100, 300: 5.5}, "seed": 6, "logprobs_mode": "processed"}),
    (PROMPT, {"allowed_token_ids": list(range(40, 90)), "seed": 7}),
    (TEXT, {"bad_token_ids": list(range(0, 512, 2)), "seed": 8}),
    (TEXT, {"bad_words": [" to", "be", "e"], "temperature": 0.0}),
    (TEXT, {"stop": ["e", "zz"], "seed": 9, "max_tokens": 60}),
    (TEXT, {"stop_token_ids": list(range(100)), "min_tokens": 5, "seed": 10}),
    (PROMPT, {"stop_token_sequences": [[a, b] for a in range(5) for b in range(12)], "seed": 11}),
    (TEXT, {"stop": "a", "include_stop_str_in_output": True, "seed": 12}),
    (TEXT, {"n": 3, "seed": 13, "top_logprobs": 2}),
    (random_prompt(120), {"n": 2, "temperature": 0.0}),
    (TEXT, {"prompt_logprobs": 4, "seed": 14}),
    (TEXT, {"prompt_logprobs": 0, "logprobs_mode": "processed", "temperature": 0.7, "seed": 15}),
    (TEXT, {"echo": True, "prompt_logprobs": 1, "seed": 16}),
    (PROMPT, {"output_logits": "generation", "max_tokens": 5, "seed": 17}),
    (TEXT, {"output_hidden_states": "all", "max_tokens": 3, "seed": 18}),
    (TEXT, {"output_embeddings": "all", "max_tokens": 9, "seed": 18}),
    (TEXT, {"output_logits": "prompt", "max_tokens": 2, "temperature": 0.0}),
    (TEXT, {"logits_processors": [halve, double], "seed": 19}),
    (TEXT, {"regex": "[a-f]{3,9}(-[0-9]+)?", "seed": 20}),
    (TEXT, {"choice": ["yes", "no", "not at all"], "temperature": 0.0, "top_logprobs": 3}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}, "seed": 21}),
    (CHAT, {"response_format": {"type": "json_object"}, "presence_penalty": 0.5, "seed": 22}),
    (CHAT, {"tools": TOOLS, "tool_choice": "required", "seed": 23, "max_tokens": 60}),
    (TEXT, {"grammar": 'start: "to" (" be" | " go"){3,9}', "repetition_penalty": 1.2, "seed": 24}),
]
ENDLESS = {
    "stop",
    "stop_token_ids",
    "stop_token_sequences",
    "regex",
    "choice",
    "response_format",
    "tools",
    "grammar",
}


def params_of(options: dict[str, Any]) -> penstock.SamplingParams:
    """The parameters, without early stops where possible, so that outputs are long enough to compare."""
    return penstock.SamplingParams(
        **{
            "max_tokens": 24,
            "seed": 0,
            "logprobs": True,
            "ignore_eos": not ENDLESS & options.keys(),
            **options,
        }
    )


def bits_of(result: penstock.Result) -> tuple[Any, ...]:
    """All fields of a result that must be equal; ids of tool calls are random."""
    choices = tuple(
        (
            choice.index,
            choice.text,
            choice.token_ids,
            choice.logprobs,
            choice.top_logprobs,
            choice.cumulative_logprob,
            choice.finish_reason,
            choice.stop_reason,
            choice.seed,
            choice.content,
            choice.reasoning,
            tuple((call.name, call.arguments) for call in choice.tool_calls),
            bytes_of(choice.logits),
            bytes_of(choice.hidden_states),
            bytes_of(choice.embeddings),
        )
        for choice in result.choices
    )
    return choices, result.prompt_token_ids, result.prompt_logprobs, result.prompt_top_logprobs


def bytes_of(tensor: Any) -> bytes | None:
    return None if tensor is None else np.asarray(tensor).tobytes()


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model, tool_parser="hermes") as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: penstock.Engine) -> list[tuple[Any, ...]]:
    """The result of each request alone, without a prefix cache."""
    results = []
    for prompt, options in MIXES:
        engine.reset_prefix_cache()
        results.append(bits_of(engine.blocking.generate(prompt, params_of(options))))
    return results


async def together(engine: penstock.Engine, seed: int) -> list[tuple[Any, ...]]:
    """The results of all requests, started concurrently in random order."""
    results: dict[int, tuple[Any, ...]] = {}

    async def ask(index: int) -> None:
        prompt, options = MIXES[index]
        results[index] = bits_of(await engine.generate(prompt, params_of(options)))

    order = list(range(len(MIXES)))
    random.Random(seed).shuffle(order)
    async with anyio.create_task_group() as group:
        for index in order:
            group.start_soon(ask, index)
    return [results[index] for index in range(len(MIXES))]


def assert_same(results: list[tuple[Any, ...]], expected: list[tuple[Any, ...]]) -> None:
    for (_prompt, options), ours, theirs in zip(MIXES, results, expected, strict=True):
        assert ours == theirs, options


@pytest.mark.anyio
async def test_mixed_parameters_in_a_batch_of_32_keep_their_bits(
    engine: penstock.Engine, alone: list[tuple[Any, ...]]
) -> None:
    engine.reset_prefix_cache()
    assert_same(await together(engine, 1), alone)
    hits = engine.stats().prefix_hit_tokens
    assert_same(await together(engine, 2), alone)
    assert engine.stats().prefix_hit_tokens > hits
    await assert_at_rest(engine)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_seqs": 3},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"threads": 2, "prefix_cache": False},
    ],
    ids=["three slots", "short chunks", "two threads"],
)
async def test_output_is_independent_of_slots_chunks_and_threads(
    tiny_model: Path, alone: list[tuple[Any, ...]], config: dict[str, Any]
) -> None:
    async with make_engine(tiny_model, tool_parser="hermes", **config) as engine:
        assert_same(await together(engine, 3), alone)
        assert_same(await together(engine, 4), alone)
        await assert_at_rest(engine)


@pytest.mark.anyio
@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
async def test_output_is_independent_of_preemption(
    tiny_model: Path, alone: list[tuple[Any, ...]], preemption_mode: str
) -> None:
    num_bytes = bytes_of_blocks(tiny_model, 16)
    async with make_engine(
        tiny_model,
        tool_parser="hermes",
        max_model_len=240,
        kv_cache_bytes=num_bytes,
        preemption_mode=preemption_mode,
    ) as engine:
        for seed in range(20):  # until the requests arrive fast enough to need more memory
            assert_same(await together(engine, seed), alone)
            if engine.stats().preemptions > 0:
                break
        assert engine.stats().preemptions > 0
        await assert_at_rest(engine)


def test_reused_slot_keeps_no_state_of_its_last_request(
    tiny_model: Path, alone: list[tuple[Any, ...]]
) -> None:
    with make_engine(tiny_model, tool_parser="hermes", max_num_seqs=1, prefix_cache=False) as engine:
        for seed in range(2):
            order = list(range(len(MIXES)))
            random.Random(seed).shuffle(order)
            for index in order:
                prompt, options = MIXES[index]
                assert bits_of(engine.blocking.generate(prompt, params_of(options))) == alone[index], options


# ---- several choices


@pytest.mark.anyio
async def test_n_choices_equal_n_requests_with_consecutive_seeds(
    engine: penstock.Engine,
) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "logprobs": True, "top_logprobs": 3, "temperature": 1.0}
    result = await engine.generate(TEXT, n=5, seed=40, **options)
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3, 4]
    assert [choice.seed for choice in result.choices] == [40, 41, 42, 43, 44]
    for choice in result.choices:
        single = await engine.generate(TEXT, seed=choice.seed, **options)
        assert bits_of(single)[0][0][1:] == bits_of(result)[0][choice.index][1:]
    assert result.text == result.choices[0].text
    assert result.usage.prompt_tokens == len(result.prompt_token_ids)
    assert result.usage.completion_tokens == sum(len(choice.token_ids) for choice in result.choices)


@pytest.mark.anyio
async def test_chunks_of_several_choices_have_their_index(engine: penstock.Engine) -> None:
    async with engine.stream(TEXT, n=4, seed=7, max_tokens=16, logprobs=True) as request:
        texts, token_ids = [""] * 4, [()] * 4
        async for chunk in request:
            texts[chunk.index] += chunk.text
            token_ids[chunk.index] += chunk.token_ids  # type: ignore[assignment]
        result = await request.result()
    assert [choice.text for choice in result.choices] == texts
    assert [choice.token_ids for choice in result.choices] == token_ids


@pytest.mark.anyio
async def test_best_of_selects_the_highest_mean_logprob(
    engine: penstock.Engine,
) -> None:
    options: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "seed": 3}
    every = await engine.generate(TEXT, n=9, logprobs=True, **options)
    best = await engine.generate(TEXT, n=3, best_of=9, **options)

    def mean(choice: penstock.Choice) -> float:
        assert choice.logprobs is not None
        return sum(choice.logprobs) / len(choice.logprobs)

    expected = sorted(every.choices, key=mean, reverse=True)[:3]
    assert [choice.token_ids for choice in best.choices] == [choice.token_ids for choice in expected]
    assert [choice.seed for choice in best.choices] == [choice.seed for choice in expected]
    assert [choice.score for choice in best.choices] == [mean(choice) for choice in expected]
    assert [choice.index for choice in best.choices] == [0, 1, 2]
    assert best.logprobs is None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    blocking = engine.blocking.generate(TEXT, n=3, best_of=9, **options)
    assert blocking.choices == best.choices


@pytest.mark.anyio
async def test_best_of_cannot_be_streamed(engine: penstock.Engine) -> None:
    for field, options in (
        ("best_of", {"best_of": 2}),
        ("best_of", {"best_of": 1}),
        ("num_beams", {"num_beams": 2}),
    ):
        with pytest.raises(penstock.InvalidRequestError) as raised:
            await engine.start_request(TEXT, **options)  # type: ignore[arg-type]
        assert raised.value.field == field
        with pytest.raises(penstock.InvalidRequestError):
            engine.blocking.start_request(TEXT, **options)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_cancel_frees_all_choices_of_a_request(engine: penstock.Engine) -> None:
    request = await engine.start_request(TEXT, n=8, max_tokens=400, ignore_eos=True)
    async for _chunk in request:
        break
    request.cancel()
    result = await request.result()
    assert {choice.finish_reason for choice in result.choices} == {"cancelled"}
    with anyio.move_on_after(0):
        await engine.generate(TEXT, n=8, max_tokens=400, ignore_eos=True)
    await assert_at_rest(engine)


# ---- lengths, echo


@pytest.mark.anyio
@pytest.mark.parametrize("max_tokens", [1, 2, 17])
async def test_max_tokens_is_exact(engine: penstock.Engine, max_tokens: int) -> None:
    result = await engine.generate(TEXT, max_tokens=max_tokens, ignore_eos=True)
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason == "length"
    by_length = await engine.generate(PROMPT, max_length=len(PROMPT) + max_tokens, ignore_eos=True)
    assert len(by_length.token_ids) == max_tokens


@pytest.mark.anyio
async def test_echo_prepends_the_prompt(engine: penstock.Engine) -> None:
    options: dict[str, Any] = {"max_tokens": 8, "seed": 5, "n": 2}
    plain = await engine.generate(TEXT, **options)
    echoed = await engine.generate(TEXT, echo=True, **options)
    assert [choice.text for choice in echoed.choices] == [TEXT + choice.text for choice in plain.choices]
    async with engine.stream(TEXT, echo=True, **options) as request:
        texts = ["", ""]
        async for chunk in request:
            texts[chunk.index] += chunk.text
    assert texts == [choice.text for choice in echoed.choices]
