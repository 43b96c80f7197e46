"""The encodings of keys and values by the rules of the CPU, each operation in the same order and precision.

They are those of `rust/kernels/src/quantiser.rs` and `rotated.rs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .cuda import Array

#: Added to a float in 0..2^22, it leaves the nearest integer, ties to even.
ROUND = np.float32(1.5 * (1 << 23))
#: Sums have a lane for each element of this many.
LANES = 16


@dataclass(frozen=True)
class Int8:
    """A head of ``int8``: the quantised values, the bits of the scale in bf16, and the offset."""

    steps: Array
    scale: int
    offset: np.float32

    @classmethod
    def of(cls, x: Array) -> Int8:
        """The encoding of a head of finite values."""
        least, largest = x.min(), x.max()
        exact = (np.float64(largest) - np.float64(least)) / 255
        nearest = np.float32(exact)
        bits = int(nearest.view(np.uint32)) + int(np.float64(nearest) < exact)
        scale = (bits + 0xFFFF) >> 16
        half_scale = np.float32(0.5) * np.uint32(scale << 16).view(np.float32)
        offset = least + np.float32(0)
        steps = (np.float32(0.5) * x - np.float32(0.5) * offset) / half_scale + ROUND
        return cls(steps.view(np.uint32).astype(np.uint8), scale, offset)


@dataclass(frozen=True)
class Part:
    """A part of a head of ``uint4``, transformed; the scale is one of a few representable ones."""

    x: Array
    levels: int
    dropped: int
    candidates: int

    @classmethod
    def of(cls, x: Array, levels: int, dropped: int, candidates: int) -> Part:
        """The part from its values before the transform."""
        return cls(transform(x), levels, dropped, candidates)

    def steps(self, scale: np.float32) -> Array:
        """The quantised values."""
        return self._quantised(scale)[1].astype(np.uint8)

    def scales(self) -> dict[float, float]:
        """The squared error of each representable scale."""
        exact = np.abs(self.x).max() / np.float32(0.5 * self.levels)
        unit = 1 << self.dropped
        first = (int(exact.view(np.uint32)) + unit - 1) & ~(unit - 1)
        errors = {}
        for candidate in range(self.candidates):
            scale = np.uint32(first - candidate * unit).view(np.float32)
            ratio = scale / exact
            errors[float(scale)] = float(self._squared_error(scale) * ratio * ratio)
        return errors

    def _quantised(self, scale: np.float32) -> tuple[Array, Array]:
        levels = np.float32(self.levels)
        exact = self.x * (np.float32(1) / scale) + np.float32(0.5) * levels
        return exact, (np.clip(exact, np.float32(0), levels) + ROUND) - ROUND

    def _squared_error(self, scale: np.float32) -> np.float32:
        exact, steps = self._quantised(scale)
        squares = (exact - steps) * (exact - steps)
        lanes = np.zeros(LANES, np.float32)
        for start in range(0, len(squares), LANES):
            chunk = squares[start : start + LANES]
            lanes[: len(chunk)] += chunk
        total = np.float32(0)
        for lane in lanes:
            total += lane
        return total


def transform(x: Array) -> Array:
    """The Hadamard transform in blocks of the largest power of two that divides the length."""
    block = len(x) & -len(x)
    x = x.reshape(-1, block) * (np.float32(1) / np.sqrt(np.float32(block)))
    half = 1
    while half < block:
        pairs = x.reshape(-1, block // (2 * half), 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([low + high, low - high], axis=2).reshape(-1, block)
        half *= 2
    result: Array = x.ravel()
    assert result.dtype == np.float32
    return result
