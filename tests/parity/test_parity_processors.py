"""From logits to probabilities: parity with the processors of transformers, or with naive implementations.

The order is that of its `generate`. There are three differences, each with a test:

- For ties at a cutoff, Penstock keeps the fewest tokens, the lowest ids first: `top_k=5` keeps five tokens.
  transformers keeps all ties in `top_k` and `typical_p`, and arbitrary ones in `top_p`.
- A NaN logit counts as minus infinity; the filters of transformers fail.
- A temperature of 0 is greedy; transformers rejects it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import penstock
from support import hooks
from support.parity import processors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

pytestmark = [pytest.mark.oracle, pytest.mark.needs("hooks")]

VOCABULARY = 1000
#: Neutral values of all parameters, whatever the defaults are.
PLAIN = {"temperature": 1.0, "max_tokens": 64}
#: A history without special cases.
HISTORY = [*range(20), 7, 8, 9, 3, 3, 999]
ENDS = (5, 17, 998)


class Row(NamedTuple):
    """The input of sampling: logits, and the tokens so far."""

    logits: NDArray[np.float32]
    prompt: Sequence[int]
    generated: Sequence[int]

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt, *self.generated]


def random_row(seed: int, *, num_infinite: int = 0, history: Sequence[int] = HISTORY) -> Row:
    """A row with realistic logits, `num_infinite` of them minus infinity."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, VOCABULARY).astype(np.float32)
    logits[random.choice(VOCABULARY, num_infinite, replace=False)] = -np.inf
    generated = [*random.integers(0, VOCABULARY, 6).tolist(), *history[4:7], *history[:3]]
    return Row(logits, history, generated)


def ours(row: Row, *, mask: Any = None, **options: Any) -> NDArray[np.float64]:
    """The probabilities that the engine samples from."""
    params = penstock.SamplingParams(**{**PLAIN, **options})
    raw = hooks.probabilities(
        row.logits.astype("<f4").tobytes(),
        params,
        prompt=row.prompt,
        generated=row.generated,
        mask=mask,
    )
    return np.frombuffer(raw, dtype="<f4").astype(np.float64)


def theirs(row: Row, **options: Any) -> NDArray[np.float64]:
    """The probabilities of transformers."""
    return processors.probabilities(row.logits, row.prompt, row.generated, **options)


def assert_same(got: NDArray[np.float64], expected: NDArray[np.float64], case: str = "") -> None:
    """The same tokens remain, with the same probabilities up to single precision."""
    assert not np.isnan(expected).any(), f"{case}: undefined in transformers"
    # Probabilities that underflow in single precision are equal to 0.
    np.testing.assert_array_equal(got > 1e-30, expected > 1e-30, case)
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=1e-9, err_msg=case)


CASES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "high temperature": {"temperature": 2.0},
    "low temperature": {"temperature": 0.05},
    "bias": {"logit_bias": {0: 3.5, 3: -100.0, 999: 100.0, 500: 0.0}},
    "repetition penalty": {"repetition_penalty": 1.3},
    "repetition bonus": {"repetition_penalty": 0.6},
    "repetition penalty of the output": {
        "repetition_penalty": 1.5,
        "repetition_penalty_scope": "output",
    },
    **{f"no repeated {size}-gram": {"no_repeat_ngram_size": size} for size in (1, 2, 3, 4, 40)},
    "bad words": {
        "bad_token_sequences": [[12], [0, 44], [2, 45], [1, 2, 46], [9, 1, 2, 47], [*range(60), 48]]
    },
    "bad ids": {"bad_token_ids": [0, 31, 999]},
    "ends below the least number": {"stop_token_ids": ENDS, "min_tokens": 13},
    "ends at the least number": {"stop_token_ids": ENDS, "min_tokens": 12},
    **{f"top {count}": {"top_k": count} for count in (1, 2, 50, 999, 1000, 5000)},
    **{f"top {share:.0%}": {"top_p": share} for share in (1e-6, 0.1, 0.5, 0.9, 0.99)},
    **{f"at least {share}": {"min_p": share} for share in (1e-5, 0.05, 0.5, 1.0)},
    **{f"typical {share:.0%}": {"typical_p": share} for share in (1e-6, 0.1, 0.5, 0.9, 0.99)},
    "all cuts": {"top_k": 200, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.8},
}


@pytest.mark.parametrize("num_infinite", [0, 30, 960], ids="{} infinite".format)
@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_each_processor_matches_transformers(options: dict[str, Any], num_infinite: int) -> None:
    for seed in range(3):
        row = random_row(seed, num_infinite=num_infinite)
        row.logits[[20, 21]] = [0.0, 4.0]  # some tokens always remain
        assert_same(ours(row, **options), theirs(row, **options), f"seed {seed}")


def random_options(random: np.random.Generator) -> dict[str, Any]:
    """A random set of processors."""

    def ids(count: int) -> list[int]:
        return [int(token) for token in random.integers(0, VOCABULARY, count)]

    def share() -> float:
        return float(random.uniform(0.05, 0.98))

    choices = {
        "logit_bias": {token: float(random.uniform(-10, 10)) for token in {*ids(5), *HISTORY[:3]}},
        "repetition_penalty": float(random.uniform(0.5, 2)),
        "no_repeat_ngram_size": int(random.integers(1, 5)),
        "bad_token_sequences": [ids(1), [2, *ids(1)], [1, 2, *ids(1)], ids(3)],
        "bad_token_ids": ids(20),
        "min_tokens": int(random.integers(0, 30)),
        "temperature": float(random.uniform(0.1, 2)),
        "top_k": int(random.integers(1, 300)),
        "top_p": share(),
        "min_p": share() ** 4,
        "typical_p": share(),
    }
    options = {name: value for name, value in choices.items() if random.random() < 0.5}
    if "min_tokens" in options:
        options["stop_token_ids"] = ENDS
    if "repetition_penalty" in options and random.random() < 0.5:
        options["repetition_penalty_scope"] = "output"
    return options


def test_mixed_processors_apply_in_the_order_of_transformers() -> None:
    for seed in range(100):
        random = np.random.default_rng(seed)
        row, options = random_row(seed, num_infinite=int(random.integers(0, 500))), random_options(random)
        assert_same(ours(row, **options), theirs(row, **options), f"seed {seed}: {options}")


def test_min_length_counts_from_the_prompt() -> None:
    row = random_row(1)
    for missing in (0, 1):
        minimum = len(row.generated) + missing
        expected = theirs(row, min_length=len(row.prompt) + minimum, stop_token_ids=ENDS)
        assert_same(ours(row, min_tokens=minimum, stop_token_ids=ENDS), expected)
        assert (expected[list(ENDS)] == 0).all() == bool(missing)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_logit_is_banned_like_any_other(value: float) -> None:
    row = random_row(2)
    row.logits[[4, 77, 998]] = value
    assert_same(ours(row, bad_token_ids=[4, 77, 998]), theirs(row, bad_token_ids=[4, 77, 998]))
    row = random_row(2)
    row.logits[row.history] = value
    assert_same(ours(row, no_repeat_ngram_size=1, top_p=0.9), theirs(row, no_repeat_ngram_size=1, top_p=0.9))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_nan_logit_counts_as_minus_infinity(options: dict[str, Any]) -> None:
    row = random_row(3)
    no_numbers = [2, 30, 31, 32, 600]
    row.logits[no_numbers] = np.nan
    got = ours(row, **options)
    row.logits[no_numbers] = -np.inf
    assert_same(got, theirs(row, **options))


def test_temperature_0_takes_the_first_of_equal_maxima() -> None:
    row = random_row(4)
    row.logits[[200, 300, 400]] = 50.0
    assert ours(row, temperature=0.0).nonzero()[0].tolist() == [200]
    assert ours(row, temperature=0.0, bad_token_ids=[200]).nonzero()[0].tolist() == [300]


def tied_row(seed: int) -> Row:
    """A row with many equal logits."""
    row = random_row(seed)
    return row._replace(logits=np.minimum(np.round(row.logits), 7))


def assert_first_of_equals(got: NDArray[np.float64], row: Row) -> None:
    """Among the least likely tokens that remain, all lower ids remain, too."""
    last = row.logits[got > 0].min()
    kept = got[row.logits == last] > 0
    assert (np.sort(kept)[::-1] == kept).all(), "a higher id remains and a lower one does not"


@pytest.mark.parametrize("count", [1, 2, 10, 57, 300])
def test_top_k_keeps_exactly_k_among_ties(count: int) -> None:
    row = tied_row(count)
    got, expected = ours(row, top_k=count), theirs(row, top_k=count)
    assert np.count_nonzero(got) == count < np.count_nonzero(expected)
    assert_first_of_equals(got, row)
    kept = got > 0
    assert_same(got, np.where(kept, expected, 0) / expected[kept].sum())


@pytest.mark.parametrize("share", [0.01, 0.3, 0.7, 0.95])
def test_top_p_keeps_the_fewest_and_first_among_ties(share: float) -> None:
    row = tied_row(6)
    got, expected = ours(row, top_p=share), theirs(row, top_p=share)
    assert_first_of_equals(got, row)
    assert_same(np.sort(got), np.sort(expected))


@pytest.mark.parametrize("share", [0.1, 0.3, 0.7, 0.95])
def test_typical_p_keeps_the_fewest_and_first_among_ties(share: float) -> None:
    row = tied_row(7)
    got, expected, all_of_it = ours(row, typical_p=share), theirs(row, typical_p=share), theirs(row)
    kept = got > 0
    assert (expected[kept] > 0).all(), "more tokens remain than in transformers"
    assert_same(got, np.where(kept, expected, 0) / expected[kept].sum())
    (left_out,) = np.nonzero((expected > 0) & ~kept)
    cutoff = np.unique(row.logits[left_out])
    assert len(cutoff) == 1, "the other tokens that transformers keeps are ties"
    (equals,) = np.nonzero(kept & (row.logits == cutoff))
    assert equals.max(initial=-1) < left_out.min()
    mass = all_of_it[kept].sum()
    assert mass - all_of_it[equals[0]] < share <= mass


def test_min_p_keeps_all_ties_like_transformers() -> None:
    row = tied_row(8)
    for share in (0.01, 0.2, 1.0):
        assert_same(ours(row, min_p=share), theirs(row, min_p=share))


@pytest.mark.parametrize("least", [1e-4, 0.005, 0.05, 0.9])
@pytest.mark.parametrize("case", ["nothing", "temperature", "top 90%", "typical 10%", "all cuts"])
def test_epsilon_cutoff_follows_the_filters_of_transformers(case: str, least: float) -> None:
    """The rule of its `EpsilonLogitsWarper`, applied to its results after the filters before it."""
    for num_infinite, seed in itertools.product((0, 30, 960), range(3)):
        row = random_row(seed, num_infinite=num_infinite)
        row.logits[[20, 21]] = [0.0, 4.0]
        expected = theirs(row, **CASES[case])
        expected[(expected < least) & (expected < expected.max())] = 0
        assert_same(ours(row, epsilon_cutoff=least, **CASES[case]), expected / expected.sum(), f"seed {seed}")


# ---- processors that transformers does not have


def naive(row: Row, *, presence: float = 0, frequency: float = 0, allowed: Any = None) -> NDArray[np.float64]:
    """Penalties as defined by OpenAI, then a list of allowed ids."""
    scores = row.logits.astype(np.float64)
    for token in set(row.generated):
        scores[token] -= presence + frequency * list(row.generated).count(token)
    if allowed is not None:
        scores[np.setdiff1d(np.arange(VOCABULARY), list(allowed))] = -np.inf
    weights = np.exp(scores - scores.max())
    probabilities: NDArray[np.float64] = weights / weights.sum()
    return probabilities


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0), (0, 0.75), (2, 2), (-2, -0.5)])
def test_presence_and_frequency_penalties_count_output_tokens(presence: float, frequency: float) -> None:
    row = random_row(9)._replace(generated=[1, 1, 1, 50, 999, 50, 700])
    got = ours(row, presence_penalty=presence, frequency_penalty=frequency)
    assert_same(got, naive(row, presence=presence, frequency=frequency))


@pytest.mark.parametrize("count", [0.05, 1.0, 1.5, 3.0, 40.0])
@pytest.mark.parametrize("num_infinite", [0, 30, 960], ids="{} infinite".format)
def test_top_n_sigma_keeps_logits_near_the_highest(count: float, num_infinite: int) -> None:
    row = random_row(12, num_infinite=num_infinite)
    logits = row.logits.astype(np.float64)
    deviation = logits[np.isfinite(logits)].std()
    logits[logits < logits.max() - count * deviation] = -np.inf
    for temperature in (0.5, 1.0, 2.0):
        got = ours(row, top_n_sigma=count, temperature=temperature)
        assert_same(got, naive(Row((logits / temperature).astype(np.float32), [], [])))


@pytest.mark.parametrize("allowed", [[0], [999], [3, 1, 2, 3], range(0, 1000, 7), range(1000)])
def test_allowed_ids_mask_all_others(allowed: Sequence[int]) -> None:
    row = random_row(10)
    assert_same(ours(row, allowed_token_ids=allowed), naive(row, allowed=allowed))


@pytest.mark.parametrize("num_words", [1, 20, 31, 32])
def test_mask_keeps_the_ids_of_its_bits(num_words: int) -> None:
    row = random_row(11)
    words = np.random.default_rng(num_words).integers(0, 2**32, num_words, dtype=np.uint64)
    allowed = [token for token in range(num_words * 32) if int(words[token // 32]) >> (token % 32) & 1]
    allowed = [token for token in allowed if token < VOCABULARY]
    assert_same(ours(row, mask=words.tolist()), naive(row, allowed=allowed))


def test_penalties_precede_bans_and_bans_precede_temperature() -> None:
    row = random_row(12)._replace(generated=[4, 4, 6])
    options: dict[str, Any] = {"presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 0.5}
    got = ours(row, allowed_token_ids=[4, 5, 6, 8], bad_token_ids=[6], **options)
    expected = naive(row, presence=-2.0, frequency=-2.0, allowed=[4, 5, 8]) ** 2
    assert_same(got, expected / expected.sum())


def test_all_banned_row_has_no_probabilities() -> None:
    assert not ours(random_row(13), allowed_token_ids=[40], mask=[2**32 - 1]).any()
