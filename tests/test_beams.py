"""The beam search algorithm with table-driven models: results, expanded beams, termination."""

from __future__ import annotations

import itertools
import math
import random
from typing import TYPE_CHECKING

import pytest

from penstock._beams import Beam, ClosedBeam, Ending, Interrupted, Top, search

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

END = 0


def ends_at(*ids: int) -> Callable[[Sequence[int]], Ending | None]:
    return lambda token_ids: ("stop", token_ids[-1]) if token_ids[-1] in ids else None


def random_model(vocabulary_size: int, seed: int) -> Callable[[tuple[int, ...]], list[float]]:
    """A model with random log probabilities of the next token for each prefix."""

    def model(token_ids: tuple[int, ...]) -> list[float]:
        chance = random.Random(f"{seed} {token_ids}")
        weights = [chance.random() ** 3 for _ in range(vocabulary_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return model


def top_of(logprobs: list[float], count: int) -> Top:
    order = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
    return tuple((token, logprobs[token]) for token in order[:count])


def run(
    model: Callable[[tuple[int, ...]], list[float]],
    *,
    num_beams: int,
    max_tokens: int,
    length_penalty: float = 1.0,
    ending_of: Callable[[Sequence[int]], Ending | None] | None = None,
    asked: list[list[Beam]] | None = None,
) -> list[ClosedBeam]:
    steps = search(
        num_beams=num_beams,
        length_penalty=length_penalty,
        max_tokens=max_tokens,
        ending_of=ending_of or ends_at(END),
    )
    try:
        batch = next(steps)
        while True:
            if asked is not None:
                asked.append(batch)
            batch = steps.send([top_of(model(beam.token_ids), 2 * num_beams) for beam in batch])
    except StopIteration as done:
        answers: list[ClosedBeam] = done.value
        return answers


def all_answers(
    model: Callable[[tuple[int, ...]], list[float]], *, max_tokens: int, length_penalty: float
) -> list[tuple[float, tuple[int, ...]]]:
    """All possible sequences with their scores, best first."""
    vocabulary = range(len(model(())))
    answers = []
    for length in range(1, max_tokens + 1):
        for ids in itertools.product(vocabulary, repeat=length):
            if END in ids[:-1] or (length < max_tokens and ids[-1] != END):
                continue
            total = math.fsum(model(ids[:index])[token] for index, token in enumerate(ids))
            answers.append((total / length**length_penalty, ids))
    return sorted(answers, reverse=True)


@pytest.mark.parametrize("seed", range(20))
def test_search_as_wide_as_the_tree_equals_exhaustive_search(seed: int) -> None:
    model = random_model(4, seed)
    best = all_answers(model, max_tokens=4, length_penalty=0.0)
    found = run(model, num_beams=4**4, max_tokens=4, length_penalty=0.0)
    for answer, (score, ids) in zip(found, best, strict=False):
        assert answer.beam.token_ids == ids
        assert answer.score == pytest.approx(score)
    assert len(found) == len(best)


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
def test_score_is_the_sum_over_length_to_the_penalty(length_penalty: float) -> None:
    model = random_model(8, 1)
    for answer in run(model, num_beams=3, max_tokens=6, length_penalty=length_penalty):
        ids = answer.beam.token_ids
        expected = [model(ids[:index])[token] for index, token in enumerate(ids)]
        assert answer.beam.logprobs == tuple(expected)
        assert answer.score == pytest.approx(math.fsum(expected) / len(ids) ** length_penalty)


def test_beams_are_sorted_by_score_and_distinct() -> None:
    for seed in range(20):
        answers = run(random_model(6, seed), num_beams=5, max_tokens=5)
        assert len(answers) == 5
        assert [answer.score for answer in answers] == sorted((a.score for a in answers), reverse=True)
        assert len({answer.beam.token_ids for answer in answers}) == 5


def test_one_beam_is_greedy_decoding() -> None:
    model = random_model(50, 3)
    [answer] = run(model, num_beams=1, max_tokens=10, ending_of=lambda _ids: None)
    ids: tuple[int, ...] = ()
    for _ in range(10):
        ids += (max(range(50), key=model(ids).__getitem__),)
    assert answer.beam.token_ids == ids
    assert answer.ending == ("length", None)


def test_more_beams_find_a_better_sequence_than_greedy() -> None:
    def model(ids: tuple[int, ...]) -> list[float]:
        if ids == ():
            return [math.log(p) for p in (0.0001, 0.5, 0.4999)]
        if ids == (1,):
            return [math.log(p) for p in (0.34, 0.33, 0.33)]
        return [math.log(p) for p in (0.98, 0.01, 0.01)]

    [greedy] = run(model, num_beams=1, max_tokens=2)
    best, _second = run(model, num_beams=2, max_tokens=2)
    assert greedy.beam.token_ids == (1, END)
    assert best.beam.token_ids == (2, END)
    assert best.score > greedy.score


def test_first_step_expands_one_beam_and_later_steps_the_best() -> None:
    asked: list[list[Beam]] = []
    run(random_model(20, 5), num_beams=4, max_tokens=6, ending_of=lambda _ids: None, asked=asked)
    assert asked[0] == [Beam()]
    assert [len(batch) for batch in asked[1:]] == [4] * 5
    for batch in asked[1:]:
        assert [beam.total for beam in batch] == sorted((beam.total for beam in batch), reverse=True)


def test_search_stops_when_the_worst_result_beats_every_beam() -> None:
    def model(_ids: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in (0.9, 0.06, 0.04)]

    asked: list[list[Beam]] = []
    answers = run(model, num_beams=2, max_tokens=1000, length_penalty=0.0, asked=asked)
    assert [answer.beam.token_ids for answer in answers] == [(END,), (1, END)]
    assert len(asked) == 2


def test_finished_beam_ranked_below_num_beams_is_dropped() -> None:
    # The end token ranks third: with two beams it never finishes a beam.
    def model(_ids: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in (0.2, 0.45, 0.35)]

    answers = run(model, num_beams=2, max_tokens=2)
    assert [answer.ending for answer in answers] == [("length", None)] * 2


def test_search_continues_when_all_top_tokens_finish() -> None:
    def model(_ids: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in (0.3, 0.3, 0.2, 0.1, 0.1)]

    asked: list[list[Beam]] = []
    run(model, num_beams=3, max_tokens=2, ending_of=ends_at(0, 1), asked=asked)
    assert [beam.token_ids for beam in asked[1]] == [(2,), (3,), (4,)]


def test_masked_tokens_are_excluded_and_results_can_be_fewer() -> None:
    def model(_ids: tuple[int, ...]) -> list[float]:
        return [-math.inf, 0.0, -math.inf]

    answers = run(model, num_beams=3, max_tokens=4)
    assert [answer.beam.token_ids for answer in answers] == [(1, 1, 1, 1)]


def test_equal_scores_keep_the_first_found() -> None:
    def model(_ids: tuple[int, ...]) -> list[float]:
        return [math.log(0.25)] * 4

    answers = run(model, num_beams=3, max_tokens=2, ending_of=lambda _ids: None)
    assert [answer.beam.token_ids for answer in answers] == [(0, 0), (0, 1), (0, 2)]


def test_top_logprobs_are_kept_for_every_token() -> None:
    model = random_model(9, 7)
    for answer in run(model, num_beams=2, max_tokens=5):
        ids = answer.beam.token_ids
        assert answer.beam.tops == tuple(top_of(model(ids[:index]), 4) for index in range(len(ids)))


def test_interrupted_search_returns_finished_and_running_beams() -> None:
    top = ((END, math.log(0.5)), (1, math.log(0.3)), (2, math.log(0.2)))
    steps = search(num_beams=2, length_penalty=1.0, max_tokens=9, ending_of=ends_at(END))
    assert next(steps) == [Beam()]
    assert [beam.token_ids for beam in steps.send([top])] == [(1,), (2,)]
    with pytest.raises(StopIteration) as stopped:
        steps.send(Interrupted("interrupted"))
    answers: list[ClosedBeam] = stopped.value.value
    assert [(answer.beam.token_ids, answer.ending) for answer in answers] == [
        ((END,), ("stop", END)),
        ((1,), ("interrupted", None)),
        ((2,), ("interrupted", None)),
    ]
    assert [answer.score for answer in answers] == [math.log(share) for share in (0.5, 0.3, 0.2)]
