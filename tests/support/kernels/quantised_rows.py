"""Rows of 8-bit integers or e4m3 with scales: their values, and the layout of ``cuda/quantised_rows.cuh``."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from support.kernels.quantised_matrix import e4m3_values

if TYPE_CHECKING:
    from support.kernels.cuda import Array

BLOCK, HALF = 64, 32
#: The order of four numbers.
ORDER = [0, 2, 1, 3]
#: The largest number of each type.
LARGEST = {"int8": np.float32(127), "fp8": np.float32(448)}


class QuantisedRowsArgument(ctypes.Structure):
    """``QuantisedRows`` of ``cuda/quantised_rows.cuh``."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("columns", ctypes.c_int),
        ("group", ctypes.c_int),
    )


@dataclass
class QuantisedRows:
    """Rows of codes with the scale of each column. ``group`` is 0 if a row is a group."""

    dtype: str  # int8 or fp8
    codes: Array
    scales: Array
    group: int

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: slice) -> QuantisedRows:
        return QuantisedRows(self.dtype, self.codes[rows], self.scales[rows], self.group)

    @property
    def group_shift(self) -> int:
        """As products read it."""
        return self.group.bit_length() - 1 if self.group else 31

    def values(self) -> Array:
        """In float64."""
        numbers = self.codes.view(np.int8) if self.dtype == "int8" else e4m3_values()[self.codes]
        result: Array = self.scales.astype(np.float64) * numbers
        return result

    def packed(self) -> Array:
        """The bytes of each row."""
        rows, columns = self.codes.shape
        blocks = -(-columns // BLOCK)
        codes = np.zeros((rows, blocks * BLOCK), np.uint8)
        codes[:, :columns] = self.codes
        group = self.group or blocks * BLOCK
        starts = np.arange(0, blocks * BLOCK, HALF) // group * group
        scales = np.where(starts < columns, self.scales[:, np.minimum(starts, columns - 1)], np.float32(0))
        sums = codes.view(np.int8).reshape(rows, -1, HALF).sum(axis=2, dtype=np.int32)
        sums *= self.dtype == "int8"
        row_scales = np.stack([scales, scales * sums.astype(np.float32)], axis=2).reshape(rows, blocks, 4)
        fours = codes.reshape(rows, blocks, -1, 4)[..., ORDER].reshape(rows, blocks, BLOCK)
        return np.concatenate([fours, np.ascontiguousarray(row_scales).view(np.uint8)], axis=2).reshape(
            rows, -1
        )


def nearest_codes(values: Array) -> Array:
    """The codes of the nearest numbers of e4m3, of two the even one."""
    numbers = e4m3_values()[:127]
    magnitudes = np.abs(values)
    above = np.searchsorted(numbers, magnitudes).clip(1, 126)
    to_upper, to_lower = numbers[above] - magnitudes, magnitudes - numbers[above - 1]
    is_upper = (to_upper < to_lower) | ((to_upper == to_lower) & (above % 2 == 0))
    codes: Array = (above - 1 + is_upper).astype(np.uint8)
    codes |= np.signbit(values).astype(np.uint8) << 7
    return codes


def quantised(x: Array, group: int, dtype: str = "int8") -> QuantisedRows:
    """Rows of float32 as numbers: the rule of the CPU, ``rust/kernels/src/generic/grid/quantise.rs``."""
    rows, columns = x.shape
    width, most = group or columns, LARGEST[dtype]
    padded = np.zeros((rows, -(-columns // width) * width), np.float32)
    padded[:, :columns] = x
    largest = np.abs(padded.reshape(rows, -1, width)).max(axis=2)
    is_zero = largest < 1e-30
    with np.errstate(all="ignore"):
        factors = np.where(is_zero, np.float32(0), most / largest).astype(np.float32)
        scales = np.where(is_zero, np.float32(0), largest / most).astype(np.float32)
        scales = np.where(np.isfinite(largest), scales, np.float32(np.nan))
        factors, scales = (np.repeat(each, width, axis=1)[:, :columns] for each in (factors, scales))
        products: Array = x * factors
        numbers = np.clip(np.where(np.isnan(products), -most, products), -most, most)
    codes = np.rint(numbers).astype(np.int8).view(np.uint8) if dtype == "int8" else nearest_codes(numbers)
    return QuantisedRows(dtype, codes, scales, group)
