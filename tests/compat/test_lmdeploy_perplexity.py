"""`get_ppl`, `get_logits` and `get_generator` of the LMDeploy API."""

from __future__ import annotations

import math
import re
import threading
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from penstock.compat.lmdeploy.errors import ArgumentError
from penstock.compat.lmdeploy.messages import EngineOutput, ResponseType
from support.api.engines import assert_at_rest
from support.api.running import compute_logits, random_prompt
from support.compat.lmdeploy import GREEDY, LONG, PROMPT, config, expected_ids, open_pipeline
from support.parity.oracle import import_torch, load_model, load_oracle

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from penstock.compat.lmdeploy import Pipeline


@pytest.fixture(scope="module")
def pipe(tiny_model: Path) -> Iterator[Pipeline]:
    with open_pipeline(tiny_model) as pipe:
        yield pipe


def windows(pipe: Pipeline, ids: list[int], width: int) -> float:
    """The mean of windows of `width` tokens, each of which counts the tokens that are new."""
    values: list[float] = []
    for begin in range(0, len(ids), width // 2):
        scores = pipe.engine.blocking.score(ids[begin : begin + width]).logprobs
        values += [score for score in scores[begin and width // 2 :] if score is not None]
        if begin + width >= len(ids):
            break
    assert len(values) == len(ids) - 1
    return -sum(values) / len(values)


def test_perplexity_is_the_mean_cross_entropy(pipe: Pipeline) -> None:
    texts = [random_prompt(length, seed=length) for length in (2, 30, 512)]
    found = pipe.get_ppl(texts)
    for ids, value in zip(texts, found, strict=True):
        assert value == pytest.approx(math.log(pipe.engine.blocking.score(ids).perplexity or 0))
        assert pipe.get_ppl(ids) == [value]


@pytest.mark.parametrize("length", [513, 700, 1024, 1300])
def test_perplexity_of_a_long_text_has_half_windows(length: int, pipe: Pipeline) -> None:
    ids = random_prompt(length)
    assert pipe.get_ppl(ids) == [pytest.approx(windows(pipe, ids, 512))]


@pytest.mark.oracle
@pytest.mark.parametrize("length", [100, 512, 900])
def test_perplexity_equals_that_of_transformers(length: int, tiny_model: Path, pipe: Pipeline) -> None:
    ids = random_prompt(length)
    expected = load_oracle(tiny_model).perplexity(ids, 512)
    assert pipe.get_ppl(ids) == [pytest.approx(expected, rel=1e-4)]


@pytest.mark.torch
def test_logits_are_tensors_of_torch_with_memory_of_their_own(tiny_model: Path, pipe: Pipeline) -> None:
    torch = import_torch()
    ids = random_prompt(50)
    logits = pipe.get_logits([ids, ids[:20]])
    assert logits.shape == (2, 50, 512)
    with torch.no_grad():
        expected = load_model(tiny_model)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(logits[0], expected, rtol=1e-3, atol=1e-3)
    assert not logits[1, 20:].any()
    logits[0] = 0
    whole = pipe.infer("ab", config(output_logits="all"), do_preprocess=False)
    whole.logits[0] = 0
    assert whole.logits[-8:].argmax(dim=1).tolist() == whole.token_ids


@pytest.mark.needs("hooks")
def test_logits_are_those_of_all_positions(
    tiny_model: Path, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Any] = []

    class Torch:
        class nn:  # noqa: N801
            class utils:  # noqa: N801
                class rnn:  # noqa: N801
                    pad_sequence = staticmethod(lambda found, **_: rows.extend(found))

        from_dlpack = staticmethod(np.from_dlpack)

    for module in ("outputs", "scores"):
        monkeypatch.setattr(f"penstock.compat.lmdeploy.{module}.torch", lambda: Torch)
    texts = [random_prompt(20), random_prompt(7)]
    pipe.get_logits(texts)
    for ids, found in zip(texts, rows, strict=True):
        assert np.allclose(found, compute_logits(tiny_model, ids), atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "part"),
    [
        ([], ""),
        ([1], ""),
        ([[1, 2], [3]], "[1]"),
        ("ab", ""),
        (None, ""),
        ([1.5, 2.0], "[0]"),
        ([[1, 2], 3], "[1]"),
        ([1, True], "[1]"),
        ([[1, 2], [3, -1]], "[1][1]"),
        ([1, 512], "[1]"),
        ([1, 2**70], "[1]"),
    ],
)
def test_perplexity_of_other_values_is_refused(ids: object, part: str, pipe: Pipeline) -> None:
    with pytest.raises(ArgumentError, match=f"^{re.escape('input_ids' + part)} is "):
        pipe.get_ppl(ids)


@pytest.mark.parametrize("name", ["get_ppl", "get_logits"])
def test_texts_are_computed_together(name: str, pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.compat.lmdeploy.scores.torch", mock.MagicMock)
    monkeypatch.setattr("penstock.compat.lmdeploy.scores.to_torch", lambda tensor: tensor)
    texts = [random_prompt(20, seed=seed) for seed in range(12)]
    expected = [-sum(pipe.engine.blocking.score(ids).logprobs[1:]) / 19 for ids in texts]  # type: ignore[arg-type]
    before = pipe.engine.stats().steps
    values = getattr(pipe, name)(texts)
    assert pipe.engine.stats().steps - before < len(texts)
    if name == "get_ppl":
        assert values == expected


def test_reward_score_is_refused(pipe: Pipeline) -> None:
    with pytest.raises(ValueError, match="is not a reward model"):
        pipe.get_reward_score([1, 2])


@pytest.mark.anyio
async def test_scores_are_computed_beside_the_event_loop(
    pipe: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await pipe.async_get_ppl([PROMPT]) == pipe.get_ppl([PROMPT])
    monkeypatch.setattr(pipe, "get_logits", lambda ids, **_: (threading.current_thread(), ids))
    thread, ids = await pipe.async_get_logits(PROMPT)
    assert (thread is threading.current_thread(), ids) == (False, PROMPT)


@pytest.mark.anyio
async def test_generator_returns_all_ids_so_far(pipe: Pipeline) -> None:
    generator = await pipe.get_generator(stop=False, session_id=1)
    assert await pipe.get_generator(stop=True, session_id=1) is not None
    expected = expected_ids(pipe, PROMPT)
    for stream in (True, False):
        outputs = [
            output
            async for output in generator.async_stream_infer(
                1, PROMPT, GREEDY, sequence_end=True, stream_output=stream
            )
        ]
        assert outputs[-1] == (ResponseType.FINISH, expected, 8)
        assert all(state is ResponseType.SUCCESS for state, _, _ in outputs[:-1])
        assert all(ids == expected[:count] for _, ids, count in outputs)
    assert isinstance(outputs[-1], EngineOutput)
    assert (outputs[-1].status, outputs[-1].num_token) == (ResponseType.FINISH, 8)
    assert generator.infer(2, PROMPT, GREEDY) == outputs[-1]
    assert generator.infer(2, [5], GREEDY, sequence_start=False)[1] == expected_ids(
        pipe, [*PROMPT, *expected, 5]
    )
    generator.end(2)
    with pytest.raises(ValueError, match="gen_config is "):
        generator.infer(2, PROMPT, {"top_k": 1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gen_config is "):
        generator.async_stream_infer(2, PROMPT, {"top_k": 1})  # type: ignore[arg-type]
    assert generator.infer(2, [5], sequence_start=False) == (ResponseType.SESSION_NOT_EXIST, [], 0)
    last = None
    for output in generator.stream_infer(3, PROMPT, LONG):
        last = output
        await generator.async_cancel(3)
    assert last is not None
    assert last[0] is ResponseType.CANCEL
    assert last[2] < 400
    assert [*generator.stream_infer(3, PROMPT, stop=True)] == [(ResponseType.CANCEL, [], 0)]
    await generator.async_end(3)
    assert pipe.sessions.length(3) == 0
    await assert_at_rest(pipe.engine)
