"""Speculation saves steps and changes no token, no bit of a logprob, no text and no finish reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from support.api.engines import assert_at_rest, make_engine
from support.api.running import random_prompt

if TYPE_CHECKING:
    from pathlib import Path

#: Repetitive prompts give drafts that are accepted, others give drafts that are rejected.
REPEATING = [*random_prompt(24)] * 4
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (REPEATING, {"temperature": 0.0}),
    "greedy, from text": ("to be or not to be or not to be or not", {"temperature": 0.0}),
    "seeded": (REPEATING, {"temperature": 0.8, "top_p": 0.9, "seed": 1}),
    "nearly greedy": (REPEATING, {"temperature": 0.1, "seed": 2}),
    "with penalties": (
        REPEATING,
        {"temperature": 0.0, "repetition_penalty": 1.05, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    ),
    "without repeated pairs": (REPEATING, {"temperature": 0.0, "no_repeat_ngram_size": 3}),
    "by a grammar": ("abcabcabc", {"regex": "(abc|abd){20}[0-9]{3}", "temperature": 0.3, "seed": 3}),
    "by a grammar that leaves no choice": ("x", {"regex": "the very same words( and again){6}"}),
    "with top log probabilities": (REPEATING, {"temperature": 0.0, "top_logprobs": 4}),
    "with processed log probabilities": (REPEATING, {"logprobs_mode": "processed", "temperature": 0.3}),
    "with logits": (REPEATING, {"temperature": 0.0, "output_logits": "generation", "max_tokens": 20}),
    "with a stop string": ("to be or not to be or not", {"temperature": 0.0, "stop": ["word3", " o"]}),
    "several answers": (REPEATING, {"n": 3, "temperature": 0.2, "seed": 5}),
    "of one token": (REPEATING, {"max_tokens": 1}),
    "with an end that is not to come yet": (REPEATING, {"temperature": 0.0, "min_tokens": 30}),
}


def params_of(options: dict[str, Any]) -> penstock.SamplingParams:
    return penstock.SamplingParams(**{"max_tokens": 80, "logprobs": True, "seed": 0, **options})


def bits_of(result: penstock.Result) -> list[tuple[Any, ...]]:
    return [
        (
            choice.text,
            choice.token_ids,
            choice.logprobs,
            choice.top_logprobs,
            choice.finish_reason,
            choice.stop_reason,
            None if choice.logits is None else np.asarray(choice.logits).tobytes(),
        )
        for choice in result.choices
    ]


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The results of an engine without speculation."""
    with make_engine(tiny_model) as engine:
        return {
            name: bits_of(engine.blocking.generate(prompt, params_of(options)))
            for name, (prompt, options) in REQUESTS.items()
        }


@pytest.mark.parametrize("num_speculative_tokens", [1, 3, 8])
def test_speculation_changes_no_bit_of_a_request(
    tiny_model: Path, plain: dict[str, list[tuple[Any, ...]]], num_speculative_tokens: int
) -> None:
    with make_engine(
        tiny_model, speculation="ngram", num_speculative_tokens=num_speculative_tokens
    ) as engine:
        for name, (prompt, options) in REQUESTS.items():
            assert bits_of(engine.blocking.generate(prompt, params_of(options))) == plain[name], name


@pytest.mark.anyio
async def test_speculation_changes_no_bit_of_a_batch(
    tiny_model: Path, plain: dict[str, list[tuple[Any, ...]]]
) -> None:
    answers: dict[str, list[tuple[Any, ...]]] = {}
    async with make_engine(tiny_model, speculation="ngram", max_num_seqs=6) as engine:

        async def ask(name: str) -> None:
            prompt, options = REQUESTS[name]
            answers[name] = bits_of(await engine.generate(prompt, params_of(options)))

        async with anyio.create_task_group() as group:
            for name in REQUESTS:
                group.start_soon(ask, name)
        await assert_at_rest(engine)
    assert answers == plain


def count(model: Path, *, max_tokens: int = 100, **config: Any) -> tuple[int, int, int]:
    """Steps, draft tokens and accepted tokens of an output that repeats one token."""
    with make_engine(model, **config) as engine:
        # Only this token is allowed, whatever the weights say.
        engine.blocking.generate(
            REPEATING, temperature=0, max_tokens=max_tokens, ignore_eos=True, allowed_token_ids=[5]
        )
        stats = engine.stats()
        return stats.steps, stats.drafted_tokens, stats.accepted_tokens


def test_accepted_drafts_save_steps(tiny_model: Path) -> None:
    num_plain, *_ = count(tiny_model)
    num_steps, num_drafted, num_accepted = count(tiny_model, speculation="ngram")
    assert num_steps < num_plain / 2
    assert 70 < num_accepted <= num_drafted
    assert num_plain - num_steps == num_accepted, "each accepted token saves one step"


def test_speculation_is_off_by_default(tiny_model: Path) -> None:
    assert penstock.EngineConfig().speculation is None
    assert count(tiny_model, max_tokens=20)[1:] == (0, 0)


def test_grammar_forced_tokens_save_steps_without_speculation(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        before = engine.stats().steps
        result = engine.blocking.generate("x", regex="the very same words( and again){6}")
        assert engine.stats().steps - before < len(result.token_ids) / 2


def test_num_speculative_tokens_requires_speculation() -> None:
    with pytest.raises(penstock.ConfigError) as raised:
        penstock.EngineConfig(num_speculative_tokens=4)
    assert raised.value.field == "num_speculative_tokens"
    with pytest.raises(penstock.ConfigError, match="ngram"):
        penstock.EngineConfig(speculation="magic")  # type: ignore[arg-type]
