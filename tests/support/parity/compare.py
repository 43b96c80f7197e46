"""Logits and greedy outputs of the oracle, and comparisons with them.

A live result has all logits of all positions. A stored one has those of some positions, at the borders of
blocks and chunks, and two sums over the vocabulary for every position.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Rounding may swap two logits that are closer than this.
TIE = 1e-3
#: Positions that are stored: the first ones, at the borders of blocks and chunks, and the last one.
BORDERS = (0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 255, 256)
#: Sequences that are not longer are stored as a whole.
SHORT = 20
#: Of a larger vocabulary, every 31st token is stored: each place in the tiles of a kernel is one of them.
LARGE_VOCABULARY, STRIDE = 1024, 31


@dataclass(frozen=True)
class Logits:
    """Values of the oracle for each position; `rows` are those at `positions` and `columns`."""

    shape: tuple[int, ...]
    positions: NDArray[np.int64]
    columns: NDArray[np.int64]
    rows: NDArray[np.float32]
    #: For each position, two sums with random signs, divided by the root of the size.
    sums: NDArray[np.float32]
    #: The largest absolute value.
    peak: float

    @classmethod
    def all_of(cls, values: NDArray[np.float32]) -> Logits:
        """All values."""
        length, size = values.shape
        rows = np.arange(length), np.arange(size)
        return cls(values.shape, *rows, values, signed_sums(values), float(np.abs(values).max()))

    @classmethod
    def of_result(cls, result: dict[str, Any]) -> Logits:
        """The stored part of values."""
        length, size = result["shape"]
        positions, columns = stored_positions(length), stored_columns(size)
        return cls((length, size), positions, columns, result["rows"], result["sums"], result["peak"])

    def result(self) -> dict[str, Any]:
        """The stored part of all values."""
        length, size = self.shape
        rows = self.rows[np.ix_(stored_positions(length), stored_columns(size))]
        return {"shape": [length, size], "rows": rows, "sums": self.sums, "peak": self.peak}


@dataclass(frozen=True)
class Greedy:
    """The greedy output of the oracle."""

    token_ids: list[int]
    logprobs: NDArray[np.float32]
    #: From the logit of each token to the next smaller one.
    gaps: NDArray[np.float32]
    #: The largest absolute logit.
    peak: float

    @property
    def is_unambiguous(self) -> bool:
        """Whether rounding cannot change a token."""
        return bool(self.gaps.min() >= TIE)

    @classmethod
    def of_logits(cls, token_ids: Sequence[int], rows: NDArray[np.float32]) -> Greedy:
        """The output whose tokens have these logits; a token that is not the best one has a negative gap."""
        wide = rows.astype(np.float64)
        steps = np.arange(len(token_ids))
        chosen = wide[steps, token_ids]
        others = wide.copy()
        others[steps, token_ids] = -np.inf
        logprobs = chosen - np.logaddexp.reduce(wide, axis=1)
        gaps = chosen - others.max(axis=1)
        peak = float(np.abs(rows[np.isfinite(rows)]).max())
        return cls(list(token_ids), logprobs.astype(np.float32), gaps.astype(np.float32), peak)


def stored_positions(length: int) -> NDArray[np.int64]:
    """The positions that are stored."""
    if length <= SHORT:
        return np.arange(length)
    return np.array([*(border for border in BORDERS if border < length - 1), length - 1])


def stored_columns(size: int) -> NDArray[np.int64]:
    """The tokens that are stored."""
    return np.arange(0, size, STRIDE if size > LARGE_VOCABULARY else 1)


def signed_sums(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """`[positions, 2]`: two sums over the vocabulary, in which each token has a random sign.

    Divided by the root of the size, a sum differs about as much as a single value does.
    """
    size = values.shape[1]
    raw = hashlib.shake_256(b"signs").digest(2 * size // 8 + 1)
    bits = np.unpackbits(np.frombuffer(raw, np.uint8))[: 2 * size].reshape(size, 2)
    signs = (2.0 * bits - 1) / math.sqrt(size)
    sums = [chunk.astype(np.float64) @ signs for chunk in np.array_split(values, len(values) // 64 + 1)]
    return np.concatenate(sums).astype(np.float32)


def assert_close(ours: NDArray[np.float32], theirs: Logits, *, relative: float = 1e-4) -> None:
    """Check that no logit differs by more than `relative` times the largest one."""
    assert ours.shape == theirs.shape
    limit = relative * theirs.peak
    errors = np.abs(ours[np.ix_(theirs.positions, theirs.columns)] - theirs.rows)
    row, column = np.unravel_index(np.argmax(errors), errors.shape)
    assert errors.max() <= limit, (
        f"position {theirs.positions[row]}, token {theirs.columns[column]}: "
        f"off by {errors.max():.2e}, allowed {limit:.2e}"
    )
    errors = np.abs(signed_sums(ours) - theirs.sums)
    assert errors.max() <= limit, (
        f"position {errors.max(axis=1).argmax()}, sum: off by {errors.max():.2e}, allowed {limit:.2e}"
    )


def assert_greedy(
    token_ids: Sequence[int], logprobs: Sequence[float], theirs: Greedy, *, relative: float = 1e-4
) -> None:
    """Check that the output has the oracle's tokens and their logprobs.

    No token of `theirs` may be so close to the next one that rounding chooses between them.
    """
    step = int(theirs.gaps.argmin())
    assert theirs.is_unambiguous, f"token {step}: a gap of {theirs.gaps[step]:.1e}; use another prompt"
    assert len(token_ids) == len(theirs.token_ids)
    limit = relative * theirs.peak
    pairs = zip(token_ids, logprobs, theirs.token_ids, theirs.logprobs, strict=True)
    for position, (token, logprob, best, expected) in enumerate(pairs):
        assert token == best, f"token {position}: chose {token}, the oracle {best}"
        assert abs(logprob - expected) <= limit, f"token {position}: logprob {logprob}, the oracle {expected}"
