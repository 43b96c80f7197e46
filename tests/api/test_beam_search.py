"""Beam search in an engine: parity with transformers, finish reasons, cancellation."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

import anyio
import pytest

import penstock
from support.api.checkpoints import make_config, write_checkpoint
from support.api.engines import PROMPT, assert_at_rest, assert_at_rest_blocking, make_engine
from support.api.running import random_prompt
from support.parity.oracle import load_oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("num_beams", "n", "length_penalty", "max_tokens"),
    [(2, 1, 1.0, 12), (4, 4, 1.0, 20), (5, 2, 0.0, 24), (3, 3, 2.0, 16), (8, 5, -1.0, 10), (32, 8, 0.6, 6)],
)
def test_beam_search_matches_transformers_sequences_and_scores(
    family: str, num_beams: int, n: int, length_penalty: float, max_tokens: int, tmp_path: Path
) -> None:
    # Enough end tokens that beams finish before max_tokens.
    ends = [258, *range(0, 256, 9)][:num_beams]
    checkpoint = write_checkpoint(tmp_path, make_config(family, eos_token_id=ends))
    (checkpoint / "generation_config.json").write_text("{}")
    prompt = random_prompt(21)
    theirs = load_oracle(checkpoint).beam_search(
        prompt,
        ends=ends,
        num_beams=num_beams,
        num_results=n,
        length_penalty=length_penalty,
        max_new_tokens=max_tokens,
    )
    with make_engine(checkpoint) as engine:
        ours = engine.blocking.generate(
            prompt,
            num_beams=num_beams,
            n=n,
            length_penalty=length_penalty,
            max_tokens=max_tokens,
            stop_token_ids=ends,
            ignore_eos=True,
        )
    for choice, (expected, score) in zip(ours.choices, theirs, strict=True):
        assert list(choice.token_ids) == expected
        # A negative length penalty multiplies the sum of log probabilities, and its error.
        assert choice.score == pytest.approx(score, rel=1e-5, abs=1e-4)


@pytest.mark.anyio
async def test_blocking_and_async_beam_search_agree_in_any_batch(engine: penstock.Engine) -> None:
    options: dict[str, Any] = {"num_beams": 4, "n": 4, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    alone = engine.blocking.generate(PROMPT, **options)
    results: list[penstock.Result] = []

    async def ask() -> None:
        results.append(await engine.generate(PROMPT, **options))

    async def disturb() -> None:
        await engine.generate(random_prompt(30), max_tokens=100, ignore_eos=True)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(ask)
            group.start_soon(disturb)
    assert [result.choices for result in results] == [alone.choices] * 3
    await assert_at_rest(engine)


def test_beam_choice_reports_the_fields_of_a_plain_choice(engine: penstock.Engine) -> None:
    result = engine.blocking.generate(
        "to be", num_beams=3, n=2, max_tokens=9, logprobs=True, top_logprobs=2, length_penalty=0.5
    )
    for index, choice in enumerate(result.choices):
        assert choice.index == index
        assert choice.logprobs is not None
        assert choice.top_logprobs is not None
        assert choice.score is not None
        assert choice.cumulative_logprob == pytest.approx(math.fsum(choice.logprobs))
        assert choice.score == pytest.approx(math.fsum(choice.logprobs) / len(choice.token_ids) ** 0.5)
        assert [len(top) for top in choice.top_logprobs] == [2] * len(choice.token_ids)
        is_stopped = choice.finish_reason == "stop"
        assert choice.text == engine.decode(choice.token_ids[:-1] if is_stopped else choice.token_ids)
    score = engine.blocking.score([*result.prompt_token_ids, *result.token_ids])
    assert score.logprobs[len(result.prompt_token_ids) :] == result.logprobs
    assert result.usage.prompt_tokens == len("to be")
    assert result.usage.completion_tokens == sum(len(choice.token_ids) for choice in result.choices)


def test_beam_step_reuses_the_cached_blocks_of_the_step_before(tiny_model: Path) -> None:
    with make_engine(tiny_model) as engine:
        prompt = random_prompt(320)
        engine.blocking.generate(prompt, num_beams=4, max_tokens=8, ignore_eos=True)
        computed = engine.stats().prompt_tokens
        # The prompt is computed once; each of the 4 * 7 later prompts computes less than two blocks.
        assert 320 <= computed < 320 + 4 * 7 * 32
        assert_at_rest_blocking(engine)


def test_stop_string_finishes_a_beam(engine: penstock.Engine) -> None:
    free = engine.blocking.generate("to be", num_beams=4, n=4, max_tokens=12, ignore_eos=True)
    stop = free.text[3:5]
    result = engine.blocking.generate("to be", num_beams=4, n=4, max_tokens=12, ignore_eos=True, stop=stop)
    stopped = [choice for choice in result.choices if choice.finish_reason == "stop"]
    assert stopped
    for choice in result.choices:
        assert stop not in choice.text
    for choice in stopped:
        assert choice.stop_reason == stop
        whole = engine.decode(choice.token_ids)
        assert whole == choice.text + stop
    kept = engine.blocking.generate(
        "to be", num_beams=4, n=4, max_tokens=12, ignore_eos=True, stop=stop, include_stop_str_in_output=True
    )
    assert [choice.token_ids for choice in kept.choices] == [choice.token_ids for choice in result.choices]
    assert all(choice.text.endswith(stop) for choice in kept.choices if choice.finish_reason == "stop")


def test_stop_sequence_and_stop_token_finish_a_beam(engine: penstock.Engine) -> None:
    free = engine.blocking.generate("to be", num_beams=3, max_tokens=12, ignore_eos=True)
    pair = free.token_ids[4:6]
    result = engine.blocking.generate(
        "to be", num_beams=3, n=3, max_tokens=12, ignore_eos=True, stop_token_sequences=[pair]
    )
    ended = [choice for choice in result.choices if choice.finish_reason == "stop"]
    assert ended
    for choice in ended:
        assert choice.token_ids[-2:] == pair
        assert choice.text == engine.decode(choice.token_ids[:-2])
    options: dict[str, Any] = {"num_beams": 3, "n": 3, "max_tokens": 12, "stop_token_ids": [pair[0]]}
    early = engine.blocking.generate("to be", **options)
    assert any(choice.stop_reason == pair[0] for choice in early.choices)
    late = engine.blocking.generate("to be", min_tokens=9, **options)
    assert all(len(choice.token_ids) > 9 for choice in late.choices)
    assert all(pair[0] not in choice.token_ids[:9] for choice in late.choices)


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
@pytest.mark.parametrize("kept", ["kept", ""])
@pytest.mark.parametrize("stops", ["sequence", "string", "both", "long"])
def test_single_possible_beam_ends_like_a_plain_request(
    engine: penstock.Engine, min_tokens: int, kept: str, stops: str
) -> None:
    letter = next(token for token in range(256) if engine.decode([token]) == "A")
    options: dict[str, Any] = {"min_tokens": min_tokens, "include_stop_str_in_output": bool(kept)}
    options |= {"allowed_token_ids": [letter], "ignore_eos": True, "max_tokens": 9}
    if stops in ("sequence", "both"):
        options["stop_token_sequences"] = [[7], [letter, letter]]
    if stops != "sequence":
        options["stop"] = ["AAA", "AAAA"] if stops == "long" else ["B", "AA"]
    plain = engine.blocking.generate(PROMPT, temperature=0, **options).choices[0]
    beam = engine.blocking.generate(PROMPT, num_beams=3, **options).choices[0]
    assert plain.finish_reason == "stop"
    assert (beam.text, beam.finish_reason, beam.stop_reason) == (plain.text, "stop", plain.stop_reason)
    assert len(beam.token_ids) == {"sequence": max(2, min_tokens), "long": 3}.get(stops, 2)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "wrong", [itertools.repeat(1), b"abc", {1: 2}, 3, None, [], "", [1.5], [512], [-1], "\ud800", [1] * 600]
)
async def test_beam_search_prompt_is_tokenised_like_any_other(engine: penstock.Engine, wrong: Any) -> None:
    errors = []
    for num_beams in (1, 2):
        with pytest.raises(penstock.InvalidRequestError) as raised:
            await engine.generate(wrong, num_beams=num_beams)
        errors.append((raised.value.field, raised.value.limit, str(raised.value)))
        with pytest.raises(penstock.InvalidRequestError) as raised:
            engine.blocking.generate(wrong, num_beams=num_beams)
        errors.append((raised.value.field, raised.value.limit, str(raised.value)))
    assert errors[0][0] == "prompt"
    assert errors == errors[:1] * 4


def test_banned_tokens_are_banned_in_every_beam(engine: penstock.Engine) -> None:
    allowed = list(range(30, 60))
    result = engine.blocking.generate(
        PROMPT,
        num_beams=4,
        n=4,
        max_tokens=15,
        ignore_eos=True,
        allowed_token_ids=allowed,
        bad_token_ids=[33],
        no_repeat_ngram_size=2,
    )
    for choice in result.choices:
        ids = choice.token_ids
        assert set(ids) <= set(allowed) - {33}
        pairs = list(itertools.pairwise(ids))
        assert len(pairs) == len(set(pairs))
    few = engine.blocking.generate(PROMPT, num_beams=4, n=4, max_tokens=1, allowed_token_ids=[3, 4])
    assert sorted(choice.token_ids for choice in few.choices) == [(3,), (4,)]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("length_penalty", {"length_penalty": 33.0}),
        ("temperature", {"temperature": 0.5}),
        ("top_k", {"top_k": 3}),
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("regex", {"regex": "a+"}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("output_logits", {"output_logits": "all"}),
        ("echo", {"echo": True}),
        ("logits_processors", {"logits_processors": [print]}),
    ],
)
async def test_parameters_unsupported_by_beam_search_are_rejected(
    engine: penstock.Engine, field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(penstock.InvalidRequestError) as raised:
        await engine.generate(PROMPT, num_beams=2, **options)
    assert raised.value.field == field


@pytest.mark.anyio
async def test_cancelled_task_cancels_every_beam(engine: penstock.Engine) -> None:
    async def search() -> None:
        await engine.generate(PROMPT, num_beams=8, max_tokens=400, ignore_eos=True)

    async with anyio.create_task_group() as group:
        group.start_soon(search)
        while engine.stats().running < 8:
            await anyio.lowlevel.checkpoint()
        group.cancel_scope.cancel()
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_closed_engine_ends_a_beam_search(tiny_model: Path) -> None:
    ends: list[str] = []
    async with make_engine(tiny_model) as engine, anyio.create_task_group() as group:

        async def search() -> None:
            with pytest.raises(penstock.EngineStoppedError, match="closed"):
                await engine.generate(PROMPT, num_beams=4, n=2, max_tokens=400, ignore_eos=True)
            ends.append("stopped")

        group.start_soon(search)
        while engine.stats().running < 4:
            await anyio.lowlevel.checkpoint()
        await engine.aclose()
    assert ends == ["stopped"]
