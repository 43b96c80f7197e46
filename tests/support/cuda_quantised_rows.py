"""Rows of 8-bit integers with scales: their values, and the layout of ``cuda/quantised.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from support.cuda import Array

BLOCK, HALF = 64, 32
#: The order of four integers.
ORDER = [0, 2, 1, 3]


class QuantisedRowsArgument(ctypes.Structure):
    """``QuantisedRows`` of ``cuda/quantised.cuh``."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("span", ctypes.c_int),
    )


@dataclass
class QuantisedRows:
    """Rows of integers with the scale of each column. ``span`` is 0 if a row is a span."""

    integers: Array
    scales: Array
    span: int

    def __len__(self) -> int:
        return len(self.integers)

    def __getitem__(self, rows: slice) -> QuantisedRows:
        return QuantisedRows(self.integers[rows], self.scales[rows], self.span)

    @property
    def span_shift(self) -> int:
        """As products read it."""
        return self.span.bit_length() - 1 if self.span else 31

    def values(self) -> Array:
        """In float64."""
        result: Array = self.scales.astype(np.float64) * self.integers
        return result

    def packed(self) -> Array:
        """The bytes of each row."""
        rows, columns = self.integers.shape
        blocks = -(-columns // BLOCK)
        integers = np.zeros((rows, blocks * BLOCK), np.int8)
        integers[:, :columns] = self.integers
        span = self.span or blocks * BLOCK
        starts = np.arange(0, blocks * BLOCK, HALF) // span * span
        scales = np.where(starts < columns, self.scales[:, np.minimum(starts, columns - 1)], np.float32(0))
        sums = integers.reshape(rows, -1, HALF).sum(axis=2, dtype=np.int32).astype(np.float32)
        spans = np.stack([scales, scales * sums], axis=2).reshape(rows, blocks, 4)
        fours = integers.reshape(rows, blocks, -1, 4)[..., ORDER].reshape(rows, blocks, BLOCK)
        parts = [np.ascontiguousarray(fours).view(np.uint8), np.ascontiguousarray(spans).view(np.uint8)]
        return np.concatenate(parts, axis=2).reshape(rows, -1)


def quantised(x: Array, span: int) -> QuantisedRows:
    """Rows of float32 as integers: the rule of the CPU, ``rust/kernels/src/generic/grid/quantise.rs``."""
    rows, columns = x.shape
    width = span or columns
    padded = np.zeros((rows, -(-columns // width) * width), np.float32)
    padded[:, :columns] = x
    largest = np.abs(padded.reshape(rows, -1, width)).max(axis=2)
    is_zero = largest < 1e-30
    with np.errstate(all="ignore"):
        factors = np.where(is_zero, np.float32(0), np.float32(127) / largest).astype(np.float32)
        scales = np.where(is_zero, np.float32(0), largest / np.float32(127)).astype(np.float32)
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
        by_column = [np.repeat(values, width, axis=1)[:, :columns] for values in (factors, scales)]
        integers = np.rint(x * by_column[0])
    integers = np.clip(np.nan_to_num(integers, nan=-127), -127, 127).astype(np.int8)
    return QuantisedRows(integers, by_column[1], span)


def random_rows(rows: int, columns: int, span: int) -> QuantisedRows:
    """Rows of random numbers."""
    rng = np.random.default_rng([rows, columns])
    return quantised(rng.standard_normal((rows, columns)).astype(np.float32), span)
