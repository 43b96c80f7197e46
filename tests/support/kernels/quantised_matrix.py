"""Matrices of quantised weights: random ones, their values, and ``cuda/quantised_matrix.cuh``'s layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from support.kernels import cuda

if TYPE_CHECKING:
    from support.kernels.cuda import Array

BLOCK = 64
OUTER_GROUP = 256

#: Bits and centre of each type of code.
CODES = {"code4": (4, 8), "code5": (5, 16), "code6": (6, 32), "code8": (8, 128), "e4m3": (8, 0)}


@dataclass(frozen=True)
class Format:
    """A format: ``group`` is 0 if a row is a group, ``minimum`` is centred, stored or zero_point."""

    code: str
    group: int
    scales: str  # f32, f16, bf16 or nested
    minimum: str = "centred"

    def __str__(self) -> str:
        return f"{self.code} {self.group} {self.scales} {self.minimum}"

    @property
    def chunk(self) -> int:
        """Columns of the smallest unit with a scale."""
        return min(self.group or BLOCK, BLOCK)

    @property
    def centre(self) -> int:
        """The code of 0 in a centred format."""
        return CODES[self.code][1]

    @property
    def has_minima(self) -> bool:
        """Whether groups have minima or zero points."""
        return self.minimum != "centred"

    def kernels(self, rows: str = "bf16") -> str:
        """The end of the names of kernels for rows of a type: the definition of VARIANT with underscores."""
        scale = {"f32": "scale32", "nested": "nested"}.get(self.scales, "scale16")
        return f"{self.code}_{self.chunk}_{scale}_{'affine' if self.has_minima else 'centred'}_{rows}"

    def groups(self, columns: int) -> int:
        """The number of groups of a row."""
        return -(-columns // self.group) if self.group else 1


#: The formats of the checkpoints and of quantisation.
FORMATS = [
    Format("code4", 32, "f16"),  # Q4_0
    Format("code4", 32, "f16", "stored"),  # Q4_1
    Format("code4", 32, "bf16", "stored"),  # int4
    Format("code4", 32, "nested", "stored"),  # Q4_K
    Format("code4", 128, "bf16"),  # compressed-tensors
    Format("code4", 128, "f16", "zero_point"),  # AWQ, GPTQ
    Format("code4", 64, "bf16", "zero_point"),
    Format("code5", 32, "f16"),  # Q5_0
    Format("code5", 32, "f16", "stored"),  # Q5_1
    Format("code5", 32, "nested", "stored"),  # Q5_K
    Format("code6", 16, "nested"),  # Q6_K
    Format("code8", 32, "f16"),  # Q8_0
    Format("code8", 32, "f16", "zero_point"),
    Format("code8", 128, "bf16"),  # int8
    Format("code8", 128, "bf16", "stored"),
    Format("code8", 0, "f32"),
    Format("e4m3", 128, "bf16"),
    Format("e4m3", 0, "f32"),  # fp8
]


@dataclass
class Matrix:
    """Rows of codes; scales and minima are those of groups, as integers if they are nested."""

    format: Format
    codes: Array
    scales: Array
    minima: Array | None
    outer_scales: Array | None
    outer_minima: Array | None

    def numbers(self) -> Array:
        """The values of the codes, in float32."""
        if self.format.code == "e4m3":
            return e4m3_values()[self.codes]
        return self.codes.astype(np.float32)

    def by_column(self, values: Array, outers: Array | None) -> Array:
        """Values of groups, times those of the outer groups, for each column, in float32."""
        columns = np.arange(self.codes.shape[1])
        group = columns // self.format.group if self.format.group else np.zeros_like(columns)
        result: Array = values[:, group].astype(np.float32)
        if outers is not None:
            result *= outers[:, columns // OUTER_GROUP]
        return result

    def scale_and_minimum(self) -> tuple[Array, Array]:
        """In float32, for each column: ``weight = scale * value + minimum``."""
        scale = self.by_column(self.scales, self.outer_scales)
        if self.format.minimum == "stored":
            assert self.minima is not None
            return scale, self.by_column(self.minima, self.outer_minima)
        return scale, -scale * self.zeros()

    def zeros(self) -> Array:
        """The centre or the zero point of each column, in float32."""
        if self.minima is None:
            return np.full(self.codes.shape, self.format.centre, np.float32)
        return self.by_column(self.minima, None)

    def weights(self) -> Array:
        """The weights in float32, rounded as ``GridRows::dequantize_row`` does."""
        scale, minimum = self.scale_and_minimum()
        is_stored = self.format.minimum == "stored"
        result: Array = scale * (self.numbers() - (0 if is_stored else self.zeros()))
        return result + minimum if is_stored else result


def e4m3_values() -> Array:
    """The number of each code. The two that are not numbers are +-480, as the kernels take them."""
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    magnitude = np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), mantissa / 512)
    return np.where(codes < 128, magnitude, -magnitude).astype(np.float32)


def exact(values: Array, scales: str) -> Array:
    """Values that the type of the scales holds."""
    return cuda.to_floats(cuda.to_bits(values, scales)).astype(np.float32)


def random_matrix(format_: Format, rows: int, columns: int, seed: int = 0) -> Matrix:
    """A matrix with all codes."""
    rng = np.random.default_rng([seed, rows, columns])
    codes = rng.integers(0, 1 << CODES[format_.code][0], (rows, columns)).astype(np.uint8)
    if format_.code == "e4m3":
        codes[codes & 127 == 127] = 0
    groups = (rows, format_.groups(columns))
    outers = (rows, -(-columns // OUTER_GROUP))
    minima = outer_scales = outer_minima = None
    if format_.scales == "nested":
        scales = rng.integers(-128, 128, groups).astype(np.float32)
        outer_scales = exact(rng.standard_normal(outers) / 1000, "f16")
        if format_.has_minima:
            minima = rng.integers(-128, 128, groups).astype(np.float32)
            outer_minima = exact(rng.standard_normal(outers) / 50, "f16")
        return Matrix(format_, codes, scales, minima, outer_scales, outer_minima)
    scales = exact(rng.standard_normal(groups) / 16, format_.scales)
    if format_.minimum == "stored":
        minima = exact(rng.standard_normal(groups), format_.scales)
    elif format_.minimum == "zero_point":
        minima = rng.integers(0, 256, groups).astype(np.float32)
    return Matrix(format_, codes, scales, minima, outer_scales, outer_minima)


def lane_codes(format_: Format, codes: Array) -> Array:
    """The codes of ``[tile, block, lane, mma, register, half]``."""
    lane, m, r, half = np.ix_(range(32), range(4), range(4), range(2))
    quad = lane % 4
    first = 16 * m + 4 * quad if format_.chunk == 16 else 32 * (m // 2) + 8 * quad + 4 * (m % 2)
    tiles = codes.reshape(len(codes) // 16, 16, -1, BLOCK).transpose(0, 2, 1, 3)
    picked: Array = tiles[:, :, lane // 4 + r % 2 * 8, first + r // 2 * 2 + half].astype(np.uint32)
    return picked


def lane_words(format_: Format, codes: Array) -> Array:
    """The words of ``[tile, block, lane]``."""
    bits = CODES[format_.code][0]
    words = np.zeros((*codes.shape[:3], bits), np.uint32)
    for m, r, half in np.ndindex(4, 4, 2):
        code = codes[:, :, :, m, r, half]
        if bits == 8:
            words[..., 2 * m + r % 2] |= code << (8 * (r // 2) + 16 * half)
            continue
        words[..., m] |= (code & 15) << (4 * r + 16 * half)
        if bits == 5:
            words[..., 4] |= code >> 4 << (4 * m + r + 16 * half)
        if bits == 6:
            words[..., 4 + m // 2] |= code >> 4 << (2 * (4 * (m % 2) + r) + 16 * half)
    return words


def pairs_of_rows(values: Array, units: int, chunks: int) -> Array:
    """Values of ``[row, group]`` as ``[tile, unit, group of lanes, chunk, row of the lane]``."""
    padded = np.zeros((-(-len(values) // 16) * 16, units * chunks), np.float32)
    padded[: len(values), : values.shape[1]] = values
    return padded.reshape(-1, 2, 8, units, chunks).transpose(0, 3, 2, 4, 1)


def records(values: list[Array | None], units: int, chunks: int, dtype: str) -> Array:
    """The bytes of the records of each tile."""
    parts = [pairs_of_rows(array, units, chunks) for array in values if array is not None]
    joined = np.concatenate(parts, axis=-1)
    bits = joined.astype(np.int8) if dtype == "nested" else cuda.to_bits(joined, dtype)
    return np.ascontiguousarray(bits).reshape(len(bits), -1).view(np.uint8)


def tile_bytes(format_: Format, columns: int) -> int:
    """Bytes of a tile of 16 rows."""
    blocks, chunks = -(-columns // BLOCK), BLOCK // format_.chunk
    values = 4 if format_.has_minima else 2
    size = blocks * 32 * 4 * CODES[format_.code][0]
    units = blocks if chunks > 1 else format_.groups(columns)
    size += units * 8 * chunks * values * {"f32": 4, "nested": 1}.get(format_.scales, 2)
    if format_.scales == "nested":
        size += -(-columns // OUTER_GROUP) * 8 * values * 2
    return -(-size // 64) * 64


def packed(matrix: Matrix) -> Array:
    """The layout of ``cuda/quantised_matrix.cuh``: the bytes of ``[tile]``."""
    format_, (rows, columns) = matrix.format, matrix.codes.shape
    tiles, blocks = -(-rows // 16), -(-columns // BLOCK)
    codes = np.zeros((tiles * 16, blocks * BLOCK), np.uint8)
    # As in Rust: two's complement of a code minus its centre, which is 0 for e4m3.
    codes[:rows, :columns] = matrix.codes ^ format_.centre
    words = lane_words(format_, lane_codes(format_, codes))
    planes = [words[..., :4], words[..., 4:]]
    parts = [np.concatenate([plane.reshape(tiles, blocks, -1) for plane in planes], axis=-1)]
    parts = [np.ascontiguousarray(parts[0]).reshape(tiles, -1).view(np.uint8)]
    chunks = BLOCK // format_.chunk
    units = blocks if chunks > 1 else format_.groups(columns)
    parts.append(records([matrix.scales, matrix.minima], units, chunks, format_.scales))
    if matrix.outer_scales is not None:
        outers = matrix.outer_scales.shape[1]
        parts.append(records([matrix.outer_scales, matrix.outer_minima], outers, 1, "f16"))
    size = sum(part.shape[1] for part in parts)
    parts.append(np.zeros((tiles, tile_bytes(format_, columns) - size), np.uint8))
    return np.concatenate(parts, axis=1)


def numbered_matrix(format_: Format, rows: int, columns: int) -> Matrix:
    """A matrix of numbers that follow from their index, as a test of ``penstock-device`` makes it."""

    def indices(columns: int) -> Array:
        return np.arange(rows * columns).reshape(rows, columns)

    codes, groups = indices(columns), indices(format_.groups(columns))
    outers = indices(-(-columns // OUTER_GROUP))
    codes = (codes * 7 + codes // 11) & ((1 << CODES[format_.code][0]) - 1)
    is_nested = format_.scales == "nested"
    scales = groups * 5 % 256 - 128 if is_nested else (groups % 61 - 30) / 64
    minima = None
    if format_.minimum == "zero_point":
        minima = groups * 3 % 256
    elif format_.minimum == "stored":
        minima = groups * 3 % 256 - 128 if is_nested else (groups % 53 - 26) / 32
    outer_scales = (outers % 13 + 1) / 1024 if is_nested else None
    outer_minima = (outers % 11 - 5) / 256 if is_nested and format_.has_minima else None
    return Matrix(format_, codes.astype(np.uint8), scales, minima, outer_scales, outer_minima)


def fnv1a(data: bytes) -> int:
    """The hash FNV-1a of 64 bits."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value


def hash_lines() -> list[str]:
    """The lines of ``tests/data/cuda_quantised.txt``: hashes of packed bytes, for the packing in Rust."""
    rows, columns = 37, 328
    return [
        f"{format_} {rows} {columns} {fnv1a(packed(numbered_matrix(format_, rows, columns)).tobytes()):016x}"
        for format_ in FORMATS
    ]


if __name__ == "__main__":
    print(*hash_lines(), sep="\n")
