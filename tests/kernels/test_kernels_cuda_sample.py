"""The CUDA kernels of sampling, on the host, against the rules in numpy."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from support.kernels import cuda
from support.kernels.sampling import Outcome, Position, Request, Sampler

if TYPE_CHECKING:
    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


# ----------------------------------------------------------------------------------------------- the rules


def uniform(seed: int, index: int) -> float:
    """Philox4x32-10 (Salmon et al. 2011)."""
    counter, key = [index, 0, 0, 0], [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(10):
        first, second = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [
            second >> 32 ^ counter[1] ^ key[0],
            second & 0xFFFFFFFF,
            first >> 32 ^ counter[3] ^ key[1],
            first & 0xFFFFFFFF,
        ]
        key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return float((counter[1] << 32 | counter[0]) >> 11) / 2**53


def processed_scores(
    logits: Array, request: Request, generated: tuple[int, ...], position: Position
) -> Array:
    """Bias, penalties and masks."""
    scores = (logits if position.processed is None else position.processed).astype(np.float32)
    vocabulary, tokens = len(scores), (*request.prompt, *generated)
    for token, bias in request.logit_bias:
        scores[token] += np.float32(bias)
    counts = Counter(generated)
    for token in set(tokens) if request.is_penalised else ():
        if counts[token] or request.repetition_penalty_scope == "all":
            penalty = np.float32(request.repetition_penalty)
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
        if counts[token]:
            scores[token] -= np.float32(request.frequency_penalty) * np.float32(counts[token])
            scores[token] -= np.float32(request.presence_penalty)
    banned = set(request.bad_token_ids)
    if position.index < request.min_tokens:
        banned |= set(request.stop_token_ids)
    for *rest, last in request.bad_token_sequences:
        if tokens[len(tokens) - len(rest) :] == tuple(rest):
            banned.add(last)
    if size := request.no_repeat_ngram_size:
        run = tokens[len(tokens) - size + 1 :]
        ends = range(size - 1, len(tokens))
        banned |= {
            tokens[end] for end in ends if tokens[end - size + 1 : end] == run and len(run) == size - 1
        }
    if request.allowed_token_ids is not None:
        banned |= set(range(vocabulary)) - set(request.allowed_token_ids)
    scores[sorted(banned)] = -np.inf
    if position.mask is not None:
        scores[~position.mask] = -np.inf
    return scores


def shortest_prefix(order: Array, masses: Array, wanted: float) -> Array:
    sums = np.cumsum(masses[order])
    return order[: np.searchsorted(sums, wanted * (1 - 1e-9)) + 1]


def filtered(scores: Array, request: Request) -> Array:
    """The probabilities of the candidates, up to a factor."""
    ids, x = np.arange(len(scores)), np.where(np.isnan(scores), -np.inf, scores).astype(np.float64)
    logs = (x - x.max()) * float(request.factor)
    weights = np.exp(logs)
    if request.top_n_sigma > 0:
        numbers = x[x > -np.inf]
        weights[x < x.max() - request.top_n_sigma * numbers.std()] = 0
    if request.top_k > 0:
        weights[np.lexsort((ids, -x))[request.top_k :]] = 0
    for share, is_typical in [(request.top_p, False), (request.min_p, None), (request.typical_p, True)]:
        if is_typical is None:
            weights[weights < np.float32(share)] = 0
        elif share < 1:
            left = np.flatnonzero(weights)
            mean = np.sum(weights[left] * logs[left]) / weights.sum()
            key = np.abs(logs - mean) if is_typical else -weights
            order = left[np.lexsort((left, key[left]))]
            kept = shortest_prefix(order, weights, float(np.float32(share)) * weights.sum())
            weights[np.setdiff1d(ids, kept)] = 0
    least = float(np.float32(request.epsilon_cutoff)) * weights.sum()
    weights[weights < min(least, weights.max())] = 0
    result: Array = weights
    return result


def token_of(scores: Array, request: Request, index: int) -> int | None:
    numbers = np.where(np.isnan(scores), -np.inf, scores)
    best = numbers.max()
    if best == -np.inf:
        return int(np.flatnonzero(np.isnan(scores))[0]) if np.isnan(scores).any() else None
    if request.is_greedy or request.top_k == 1 or best == np.inf:
        return int(np.argmax(numbers))
    sums = np.cumsum(filtered(scores, request))
    return int(np.searchsorted(sums, uniform(request.seed, index) * sums[-1], side="right"))


def log_softmax(scores: Array, factor: float) -> Array:
    x = np.where(np.isnan(scores), -np.inf, scores).astype(np.float64) * factor
    result: Array = x - x.max() - np.log(np.sum(np.exp(x - x.max())))
    return result


def check(
    logits: Array, request: Request, outcome: Outcome, position: Position, generated: tuple[int, ...]
) -> None:
    """An outcome follows the rules."""
    scores = processed_scores(logits, request, generated, position)
    token = position.given if position.given is not None else token_of(scores, request, position.index)
    if token is None:
        assert outcome.outcome == "no candidates"
        return
    assert (outcome.outcome, outcome.token) == ("token", token)
    if request.logprobs is None:
        return
    top, is_processed = request.logprobs
    raw = not is_processed or position.given is not None
    logprobs = log_softmax(logits, 1) if raw else log_softmax(scores, float(request.factor))
    assert outcome.logprob == pytest.approx(logprobs[token], abs=2e-6, rel=1e-6)
    order = np.lexsort((np.arange(len(logits)), -(logits if raw else scores)))[:top]
    order = order[np.isfinite(logprobs[order])]
    assert [token for token, _ in outcome.top] == list(order)
    assert [value for _, value in outcome.top] == pytest.approx(logprobs[order], abs=2e-6, rel=1e-6)


# --------------------------------------------------------------------------------------------------- tests


def some_logits(rng: np.random.Generator, rows: int, vocabulary: int, width: float = 3) -> Array:
    return (rng.standard_normal((rows, vocabulary)) * width).astype(np.float32)


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.9},
    {"top_p": 0.1},
    {"min_p": 0.05},
    {"typical_p": 0.3},
    {"typical_p": 0.95},
    {"top_n_sigma": 1.5},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.02, "typical_p": 0.9, "top_n_sigma": 2.0, "temperature": 1.3},
    {"epsilon_cutoff": 0.005},
    {"epsilon_cutoff": 0.9},
    {"top_k": 50, "min_p": 0.02, "typical_p": 0.9, "epsilon_cutoff": 0.03, "temperature": 1.3},
]


@pytest.mark.parametrize("vocabulary", [1, 100, 129, 333, 1333])
def test_filters_and_draws_follow_the_rules(kernels: cuda.HostKernels, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    requests = [
        Request(seed=int(rng.integers(2**63)), logprobs=(3, n % 2 == 0), **FILTERS[n % len(FILTERS)])
        for n in range(3 * len(FILTERS))
    ]
    logits = some_logits(rng, len(requests), vocabulary)
    positions = [Position(slot, slot * 7) for slot in range(len(requests))]
    outcomes = Sampler(kernels, vocabulary, requests).sample(logits, positions)
    for row, request, outcome, position in zip(logits, requests, outcomes, positions, strict=True):
        check(row, request, outcome, position, ())


@pytest.mark.parametrize("vocabulary", [50, 300, 4200])
def test_scores_follow_the_rules(kernels: cuda.HostKernels, vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)

    def ids(count: int, limit: int = vocabulary) -> tuple[int, ...]:
        return tuple(int(token) for token in rng.integers(0, limit, count))

    requests, positions = [], []
    for slot in range(40):
        options: dict[str, Any] = FILTERS[slot % len(FILTERS)]
        generated = ids(int(rng.integers(12)), 9)
        chances = rng.random(10) < 0.4
        if chances[0]:
            options = options | {
                "logit_bias": tuple((token, float(rng.normal() * 5)) for token in sorted(set(ids(9))))
            }
        if chances[1]:
            options = options | {
                "repetition_penalty": 1.7,
                "repetition_penalty_scope": ("all", "output")[slot % 2],
            }
        if chances[2]:
            options = options | {"frequency_penalty": 0.4, "presence_penalty": -0.7}
        if chances[3]:
            options = options | {"no_repeat_ngram_size": int(rng.integers(1, 4))}
        if chances[4]:
            options = options | {"allowed_token_ids": tuple(sorted(set(ids(30))))}
        if chances[5]:
            options = options | {"bad_token_ids": ids(20)}
        if chances[6]:
            last = generated[-1:] or (3,)
            options = options | {"bad_token_sequences": ((ids(1)[0],), (*last, 4), (5, *last, 5), (8, 8))}
        if chances[7]:
            options = options | {"stop_token_ids": ids(5), "min_tokens": len(generated) + slot % 2}
        mask = rng.random(vocabulary) < 0.5 if chances[8] else None
        processed = some_logits(rng, 1, vocabulary)[0] if chances[9] else None
        logprobs = (4, bool(slot % 2))
        request = Request(seed=slot, prompt=ids(20, 9), generated=generated, logprobs=logprobs, **options)
        requests.append(request)
        positions.append(Position(slot, len(generated), mask=mask, processed=processed))
    logits = some_logits(rng, len(requests), vocabulary)
    outcomes = Sampler(kernels, vocabulary, requests).sample(logits, positions)
    for row, request, outcome, position in zip(logits, requests, outcomes, positions, strict=True):
        check(row, request, outcome, position, request.generated)


def test_equal_scores_keep_the_lowest_ids(kernels: cuda.HostKernels) -> None:
    vocabulary = 1000
    logits = np.full((1, vocabulary), -3, np.float32)
    logits[0, [700, 20, 400, 999]] = 2
    cases: list[tuple[dict[str, Any], set[int]]] = [
        ({"top_k": 3}, {20, 400, 700}),
        ({"top_p": 0.5, "top_k": 4}, {20, 400}),
        ({"top_k": 6}, {20, 400, 700, 999, 0, 1}),
        ({"typical_p": 0.5, "top_k": 4}, {20, 400}),
        ({"min_p": 1.0}, {20, 400, 700, 999}),
        ({"epsilon_cutoff": 0.9}, {20, 400, 700, 999}),
    ]
    for options, expected in cases:
        requests = [Request(seed=seed, temperature=9.0, **options) for seed in range(60)]
        sampler = Sampler(kernels, vocabulary, requests)
        positions = [Position(slot, 0) for slot in range(60)]
        outcomes = sampler.sample(np.repeat(logits, 60, axis=0), positions)
        assert {outcome.token for outcome in outcomes} == expected


def test_epsilon_cutoff_keeps_the_heaviest_that_are_left(kernels: cuda.HostKernels) -> None:
    # A third of the probability is on one id, which is not typical.
    logits = np.zeros((60, 1001), np.float32)
    logits[:, 500] = np.log(500)
    requests = [Request(seed=seed, typical_p=0.3703, epsilon_cutoff=0.999) for seed in range(60)]
    outcomes = Sampler(kernels, 1001, requests).sample(logits, [Position(slot, 0) for slot in range(60)])
    assert {outcome.outcome for outcome in outcomes} == {"token"}
    tokens = {outcome.token for outcome in outcomes}
    assert len(tokens) > 40
    assert max(tokens) <= 556
    assert 500 not in tokens


def test_most_likely_ids_are_lowest_first_among_equals(kernels: cuda.HostKernels) -> None:
    logits = np.zeros((1, 700), np.float32)
    logits[0, [650, 3, 200]] = 1
    (outcome,) = Sampler(kernels, 700, [Request(temperature=0, logprobs=(5, False))]).sample(
        logits, [Position(0, 0)]
    )
    assert [token for token, _ in outcome.top] == [3, 200, 650, 0, 1]
    (outcome,) = Sampler(kernels, 700, [Request(logprobs=(9999, False))]).sample(logits, [Position(0, 0)])
    assert [token for token, _ in outcome.top] == [3, 200, 650, *np.flatnonzero(logits[0] == 0)]


def test_numbers_that_are_not_finite(kernels: cuda.HostKernels) -> None:
    vocabulary, nan, inf = 300, np.nan, np.inf
    rows: dict[str, tuple[Array, int | None]] = {
        "nothing": (np.full(vocabulary, -inf), None),
        "nan only": (np.where(np.arange(vocabulary) < 150, -inf, nan), 150),
        "all nan": (np.full(vocabulary, nan), 0),
        "infinity": (np.where(np.isin(np.arange(vocabulary), [299, 130]), inf, 1.0), 130),
        "one number": (np.where(np.arange(vocabulary) == 222, -50.0, nan), 222),
        "zeros": (
            np.where(np.arange(vocabulary) == 2, -0.0, np.where(np.arange(vocabulary) == 5, 0.0, -9e9)),
            2,
        ),
    }
    cases: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"top_p": 0.4},
        {"top_k": 3, "top_p": 0.3},
        {"typical_p": 0.2},
    ]
    for options in cases:
        requests = [Request(logprobs=(2, True), **options) for _ in rows]
        logits = np.array([row for row, _ in rows.values()], np.float32)
        positions = [Position(slot, 0) for slot in range(len(rows))]
        outcomes = Sampler(kernels, vocabulary, requests).sample(logits, positions)
        for (name, (_, token)), outcome in zip(rows.items(), outcomes, strict=True):
            found = outcome.token if outcome.outcome == "token" else None
            assert found == token, (name, options)
        assert str(outcomes[3].logprob) == "nan"
        assert outcomes[4].logprob == 0


def test_bounds_are_written_without_a_finite_score(kernels: cuda.HostKernels) -> None:
    logits = np.array([[np.nan] * 300, [-np.inf] * 300, [np.inf] * 300], np.float32)
    sampler = Sampler(kernels, 300, [Request(top_k=3), Request(top_n_sigma=1.0), Request(top_k=2)])
    sampler.sample(logits, [Position(slot, 0) for slot in range(3)])
    assert (sampler.bounds.view(np.float32)[:, 0] == -np.inf).all()
    assert (sampler.bounds[:, 1] == 2**32 - 1).all()


@pytest.mark.parametrize("options", [{}, {"top_k": 128}, {"min_p": 1e-8}], ids=["all", "top_k", "min_p"])
def test_remainder_of_rounding_draws_the_last_candidate(
    kernels: cuda.HostKernels, options: dict[str, Any]
) -> None:
    # A tile has a weight of 1 and others, which are slightly more than half of its last bit. They share a
    # chain of float32, in which each is rounded up. In float64, the sum is lower by more than the draw is
    # below 1.
    seed, first, vocabulary = 7_624_765, 40 * 128, 150_000
    logits = np.full((1, vocabulary), -np.inf, np.float32)
    logits[0, first] = 0
    logits[0, first + 16 : first + 128 : 16] = np.log(0.51) - 23 * np.log(2)
    weights = np.exp(logits[0].astype(np.float64))
    chain = np.float32(0)
    for weight in weights[first : first + 128 : 16]:
        chain += np.float32(weight)
    assert uniform(seed, 0) * float(chain) > weights.sum()
    (outcome,) = Sampler(kernels, vocabulary, [Request(seed=seed, **options)]).sample(
        logits, [Position(0, 0)]
    )
    assert (outcome.outcome, outcome.token) == ("token", first + 112)


def test_given_tokens_leave_the_slot_as_it_is(kernels: cuda.HostKernels) -> None:
    rng = np.random.default_rng(3)
    request = Request(seed=5, logprobs=(2, True), repetition_penalty=1.5, generated=(3, 4))
    sampler = Sampler(kernels, 200, [request, request])
    logits = some_logits(rng, 3, 200)
    positions = [Position(0, 0, given=17), Position(0, 0, given=0), Position(1, 2)]
    outcomes = sampler.sample(logits, positions)
    for row, outcome, position in zip(logits, outcomes, positions, strict=True):
        check(row, request, outcome, position, request.generated)
    assert list(sampler.arrays["generated"]) == [2, 3]
    assert list(sampler.arrays["last_tokens"]) == [4, outcomes[2].token]


CHAINS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 3.0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "top_k": 20},
    {"bad_token_sequences": ((1, 2), (2, 1), (0,)), "top_p": 0.9},
    {"stop_token_ids": (1,)},
    {"temperature": 0.0, "stop_token_ids": (2, 3), "min_tokens": 4},
]


@pytest.mark.parametrize("is_split", [False, True])
def test_drafts_give_the_tokens_of_single_steps(kernels: cuda.HostKernels, *, is_split: bool) -> None:
    rng = np.random.default_rng(0)
    vocabulary, steps = 6, 5
    requests = [
        Request(seed=n, prompt=(1, 2, 0), generated=(1,), **CHAINS[n % len(CHAINS)]) for n in range(42)
    ]
    logits = some_logits(rng, len(requests) * steps, vocabulary, 1).reshape(len(requests), steps, vocabulary)
    plain = Sampler(kernels, vocabulary, requests)
    singles = [
        plain.sample(logits[:, step], [Position(slot, step + 1) for slot in range(len(requests))])
        for step in range(steps)
    ]
    verified = Sampler(kernels, vocabulary, requests)
    positions, expected = [], []
    for slot, request in enumerate(requests):
        tokens = [step[slot].token for step in singles]
        drafts = [token if rng.random() < 0.8 else int(rng.integers(vocabulary)) for token in tokens]
        is_right = True
        for step in range(steps):
            if step:
                outcome = singles[step - 1][slot]
                is_right &= outcome.outcome == "token" and drafts[step - 1] == tokens[step - 1]
                is_right &= tokens[step - 1] not in request.stop_token_ids
            positions.append(Position(slot, step + 1, draft=drafts[step - 1] if step else None))
            expected.append(singles[step][slot] if is_right else Outcome(0, "rejected"))
    rows = logits.reshape(-1, vocabulary)
    # The second call begins in the middle of the drafts of a slot.
    middle = steps * 20 + 3 if is_split else len(rows)
    outcomes = verified.sample(rows[:middle], positions[:middle])
    if is_split:
        outcomes += verified.sample(rows[middle:], positions[middle:])
    found = [(o.outcome, o.token if o.outcome == "token" else 0) for o in outcomes]
    assert found == [(o.outcome, o.token if o.outcome == "token" else 0) for o in expected]
    assert {outcome for outcome, _ in found} == {"token", "rejected", "no candidates"}
    for slot, request in enumerate(requests):
        tokens = [
            o.token
            for o, p in zip(outcomes, positions, strict=True)
            if (p.slot, o.outcome) == (slot, "token")
        ]
        assert verified.arrays["generated"][slot] == 1 + len(tokens)
        assert verified.arrays["last_tokens"][slot] == [1, *tokens][-1]
        if request.is_recorded:
            length = verified.arrays["lengths"][slot]
            assert list(verified.arrays["history"][slot, :length]) == [1, 2, 0, 1, *tokens]
        if request.is_penalised:
            counts = np.bincount([1, *tokens], minlength=vocabulary)
            assert list(verified.arrays["counts"][slot] & 0x7FFFFFFF) == list(counts)


def test_bits_do_not_depend_on_the_batch(kernels: cuda.HostKernels) -> None:
    rng = np.random.default_rng(8)
    requests = [Request(seed=n, logprobs=(5, True), logit_bias=((3, 1.5),), **FILTERS[n]) for n in range(16)]
    logits = some_logits(rng, 16, 700)
    together = Sampler(kernels, 700, requests).sample(logits, [Position(slot, 1) for slot in range(16)])
    for slot in (0, 2, 9, 12, 15):
        alone = Sampler(kernels, 700, requests).sample(logits[slot : slot + 1], [Position(slot, 1)])
        assert alone == together[slot : slot + 1]


def test_history_is_full_behind_the_longest_sequence(kernels: cuda.HostKernels) -> None:
    request = Request(no_repeat_ngram_size=2, repetition_penalty=1.1, prompt=(1, 2, 3))
    sampler = Sampler(kernels, 40, [request, request], positions=4)
    history = sampler.arrays["history"][1].copy()
    for index in range(3):
        sampler.sample(np.zeros((1, 40), np.float32), [Position(0, index)])
    assert (sampler.arrays["history"][1] == history).all()
    assert sampler.arrays["generated"][0] == 3
