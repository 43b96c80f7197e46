"""`engine.score`: logprobs with the same bits as those of generated tokens."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest

import penstock
from penstock._core import score as score_of
from support.api.engines import assert_at_rest, make_engine
from support.api.running import compute_logits, random_prompt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[penstock.Engine]:
    with make_engine(tiny_model) as engine:
        yield engine


@pytest.mark.needs("hooks")
@pytest.mark.anyio
@pytest.mark.parametrize("length", [1, 2, 16, 17, 150])
async def test_score_is_the_log_softmax_of_the_logits(
    engine: penstock.Engine, tiny_model: Path, length: int
) -> None:
    token_ids = random_prompt(length, seed=length)
    score = await engine.score(token_ids)
    assert score.token_ids == tuple(token_ids)
    assert score.logprobs[0] is None
    logits = compute_logits(tiny_model, token_ids).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for position in range(1, length):
        assert score.logprobs[position] == pytest.approx(
            expected[position - 1, token_ids[position]], abs=1e-4
        )
    assert engine.blocking.score(token_ids) == score


@pytest.mark.anyio
async def test_scoring_generated_text_gives_the_same_bits(engine: penstock.Engine) -> None:
    prompt = random_prompt(40)
    result = await engine.generate(
        prompt, max_tokens=60, ignore_eos=True, logprobs=True, temperature=1.0, seed=9
    )
    score = await engine.score([*prompt, *result.token_ids])
    assert score.logprobs[len(prompt) :] == result.logprobs


@pytest.mark.anyio
async def test_scoring_on_the_demo_model_gives_the_same_bits(demo_model: Path) -> None:
    async with penstock.Engine(demo_model, max_model_len=256) as engine:
        result = await engine.generate(
            [{"role": "user", "content": "Name three colours."}], max_tokens=24, temperature=0, logprobs=True
        )
        score = await engine.score([*result.prompt_token_ids, *result.token_ids])
        assert score.logprobs[len(result.prompt_token_ids) :] == result.logprobs
        likely = await engine.score("The capital of France is Paris.")
        unlikely = await engine.score("The capital of France is elbow.")
        assert likely.perplexity is not None
        assert unlikely.perplexity is not None
        assert likely.perplexity < unlikely.perplexity


@pytest.mark.anyio
async def test_perplexity_is_exp_of_mean_and_none_for_one_token(
    engine: penstock.Engine,
) -> None:
    score = await engine.score("to be or not to be")
    known = [logprob for logprob in score.logprobs if logprob is not None]
    assert len(known) == len(score.token_ids) - 1
    assert score.perplexity == pytest.approx(math.exp(-sum(known) / len(known)))
    assert await engine.score([5]) == penstock.Score(token_ids=(5,), logprobs=(None,), perplexity=None)


@pytest.mark.anyio
async def test_concurrent_texts_get_their_own_scores(engine: penstock.Engine) -> None:
    texts = [random_prompt(length, seed=length) for length in range(1, 120, 7)]
    expected = [engine.blocking.score(text) for text in texts]
    scores: dict[int, penstock.Score] = {}

    async def ask(index: int) -> None:
        scores[index] = await engine.score(texts[index], cache_salt="mine", priority=index % 3)

    async with anyio.create_task_group() as group:
        group.start_soon(lambda: engine.generate(texts[3], max_tokens=100, ignore_eos=True))
        for index in range(len(texts)):
            group.start_soon(ask, index)
    assert [scores[index] for index in range(len(texts))] == expected
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_text_of_max_model_len_tokens_can_be_scored(engine: penstock.Engine) -> None:
    length = engine.info.max_model_len
    assert len((await engine.score(random_prompt(length))).logprobs) == length
    with pytest.raises(penstock.InvalidRequestError) as raised:
        await engine.score(random_prompt(length + 1))
    assert raised.value.field == "prompt"


@pytest.mark.anyio
async def test_score_of_invalid_input_is_rejected(engine: penstock.Engine) -> None:
    for wrong in ("", [], [{"role": "user", "content": "x"}], 7):
        with pytest.raises(penstock.InvalidRequestError) as raised:
            await engine.score(wrong)  # type: ignore[arg-type]
        assert raised.value.field == "prompt"
        with pytest.raises(penstock.InvalidRequestError):
            engine.blocking.score(wrong)  # type: ignore[arg-type]


@pytest.mark.anyio
async def test_cancelled_score_leaves_no_resources(engine: penstock.Engine) -> None:
    with anyio.move_on_after(0):
        await engine.score(random_prompt(500))
    await assert_at_rest(engine)


@pytest.mark.anyio
async def test_closed_engine_raises_from_incomplete_scores(tiny_model: Path) -> None:
    engine = make_engine(tiny_model, max_num_batched_tokens=16)
    whole: list[bool] = []
    stopped: list[penstock.EngineStoppedError] = []
    async with engine, anyio.create_task_group() as group:

        async def ask(seed: int) -> None:
            try:
                score = await engine.score(random_prompt(500, seed=seed))
            except penstock.EngineStoppedError as error:
                stopped.append(error)
            else:
                whole.append(len(score.logprobs) == 500)

        for seed in range(20):
            group.start_soon(ask, seed)
        while engine.stats().running < 1:
            await anyio.lowlevel.checkpoint()
        await engine.aclose()
    assert stopped
    assert all(whole)
    assert len(stopped) + len(whole) == 20


@pytest.mark.parametrize(
    ("finish_reason", "error"),
    [("cancelled", penstock.EngineStoppedError), ("interrupted", penstock.GenerationError)],
)
def test_interrupted_text_has_no_score(
    engine: penstock.Engine, finish_reason: str, error: type[penstock.PenstockError]
) -> None:
    prompt = random_prompt(12)
    result = engine.blocking.generate(prompt, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    assert len(score_of(result).logprobs) == 12
    broken = changed(result, choices=[changed(result.choices[0], finish_reason=finish_reason)])
    with pytest.raises(error):
        score_of(broken)
    assert result.prompt_logprobs is not None
    with pytest.raises(penstock.GenerationError, match="5 of the text's 12 tokens"):
        score_of(changed(result, prompt_logprobs=result.prompt_logprobs[:5]))


def changed(value: Any, **changes: object) -> Any:
    """A value object with some fields changed."""
    _none, fields = value.__getnewargs_ex__()
    return type(value)(**{**fields, **changes})
