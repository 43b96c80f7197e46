"""The pages of the KV cache of CUDA kernels, read and checked by plain numpy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from .cuda import Array, addresses, to_floats

DTYPES = ("f32", "bf16", "f16", "int8", "uint4")
#: The bits of float32 that the floats keep.
PRECISION = {"f32": 24, "bf16": 8, "f16": 11}


class KvCache(ctypes.Structure):
    """``KvCache`` of ``cuda/kv_page.cuh``."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("kv_heads", ctypes.c_int),
        ("block_size", ctypes.c_int),
        ("head_dim", ctypes.c_int),
    )


class RopeWriteKv(ctypes.Structure):
    """``RopeWriteKv`` of ``cuda/rope_kv.cu``."""

    _fields_ = (
        *((f"pointer_{i}", ctypes.c_void_p) for i in range(9)),
        ("cache", KvCache),
        ("heads", ctypes.c_int),
        ("angles", ctypes.c_int),
        ("epsilon", ctypes.c_float),
    )


@dataclass(frozen=True)
class KvLayout:
    """The cache of a layer."""

    dtype: str
    kv_heads: int
    head_dim: int
    block_size: int

    @property
    def bits(self) -> int:
        """Bits of a value."""
        return {"f32": 32, "int8": 8, "uint4": 4}.get(self.dtype, 16)

    @property
    def parts(self) -> tuple[Array, Array]:
        """The dimensions of the fast and the slow part of a ``uint4`` key, in their order."""
        dim, half = self.head_dim, self.head_dim // 2
        slow = dim if dim < 64 else half // 32 * 32
        quarter = (dim - slow) // 2
        order = np.arange(half)
        fast = np.concatenate([order[:quarter], half + order[:quarter]])
        return fast, np.concatenate([order[quarter:], half + order[quarter:]])

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's key and value in a page."""
        extra = {"int8": 12, "uint4": 6 + len(self.parts[1]) // 8}.get(self.dtype, 0)
        return 2 * self.head_dim * self.bits // 8 + extra

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of the layer."""
        return self.kv_heads * self.block_size * self.token_bytes

    def argument(self, cache: Array) -> KvCache:
        """The argument of a kernel."""
        return KvCache(*addresses(cache), self.kv_heads, self.block_size, self.head_dim)

    def page(self, cache: Array, block: int, head: int) -> Page:
        """The page of a block and head."""
        size = self.block_size * self.token_bytes
        return Page(self, cache[(int(block) * self.kv_heads + head) * size :][:size])


@dataclass(frozen=True)
class Page:
    """The page of a block and head."""

    layout: KvLayout
    data: Array

    def _array(self, start: int, dtype: str, *shape: int) -> Array:
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self.data[start : start + count].view(dtype).reshape(shape)

    def _rows(self) -> tuple[Array, Array, int]:
        """The rows of keys and values, and the byte behind them."""
        size, width = self.layout.block_size, self.layout.head_dim * self.layout.bits // 8
        rows = self._array(0, "u1", 2, size, width)
        return rows[0], rows[1], rows.size

    def scale(self, part: int, token: int) -> float:
        """``int8``: the scale of a token's key (part 0) or value (1)."""
        end = self._rows()[2]
        return float(to_floats(self._array(end, "u2", 2, self.layout.block_size))[part, token])

    def encoded(self, part: int, token: int) -> tuple[Array, int, np.float32]:
        """``int8``: the quantised values of a token's key (part 0) or value (1), scale in bits, offset."""
        size = self.layout.block_size
        *rows, end = self._rows()
        scales, offsets = self._array(end, "u2", 2, size), self._array(end + 4 * size, "f4", 2, size)
        return rows[part][token], int(scales[part, token]), offsets[part, token]

    def restored(self, token: int) -> tuple[Array, Array]:
        """The key and the value of a token, in float64."""
        layout, size = self.layout, self.layout.block_size
        keys, values, end = self._rows()
        if layout.dtype in PRECISION:
            kind = {"f32": "f4", "bf16": "u2", "f16": "f2"}[layout.dtype]
            return to_floats(keys[token].view(kind)), to_floats(values[token].view(kind))
        if layout.dtype == "int8":
            scales = to_floats(self._array(end, "u2", 2, size))[:, token]
            offsets = self._array(end + 4 * size, "f4", 2, size)[:, token].astype(np.float64)
            k, v = (offsets[i] + scales[i] * row[token] for i, row in enumerate((keys, values)))
            return k, v
        fast, slow = layout.parts
        steps, fifth, scales = self.quantised(token)
        x = np.empty(layout.head_dim)
        x[fast] = hadamard(scales[0] * (steps[0][: len(fast)] - 7.5))
        x[slow] = hadamard(scales[1] * (steps[0][len(fast) :] + 16.0 * fifth - 15.5))
        return x, hadamard(scales[2] * (steps[1] - 7.5))

    def quantised(self, token: int) -> tuple[list[Array], Array, Array]:
        """``uint4``: the low bits of key and value, the fifth bits of the slow part, and the scales."""
        layout, size = self.layout, self.layout.block_size
        keys, values, end = self._rows()
        width = len(layout.parts[1]) // 8
        fifth = np.unpackbits(self._array(end, "u1", size, width)[token], bitorder="little")
        scales = to_floats(self._array(end + size * width, "u2", 3, size))[:, token]
        steps = [np.stack([row[token] & 15, row[token] >> 4], axis=1).ravel() for row in (keys, values)]
        return steps, fifth, scales

    def check(self, token: int, k: Array, v: Array) -> None:
        """Checks that a token's key and value are encoded as well as they can be."""
        layout = self.layout
        restored = self.restored(token)
        if layout.dtype in PRECISION:
            step = 2.0 ** -PRECISION[layout.dtype]
            for x, exact in zip(restored, (k, v), strict=True):
                assert np.allclose(x, exact, rtol=1.01 * step + 2e-6, atol=1e-5 * step + 2e-6)
        elif layout.dtype == "int8":
            for x, exact in zip(restored, (k, v), strict=True):
                scale = (exact.max() - exact.min()) / 255
                limit = 0.5 * scale * (1 + 2**-7) + 2e-5 * np.abs(exact).max() + 1e-40
                assert np.abs(x - exact).max() <= limit
        else:
            fast, slow = layout.parts
            scales = self.quantised(token)[2]
            for part, x, exact, scale in (
                ((15, 22, 2), restored[0][fast], k[fast], scales[0]),
                ((31, 20, 4), restored[0][slow], k[slow], scales[1]),
                ((15, 20, 4), restored[1], v, scales[2]),
            ):
                if len(exact) > 0:
                    best_scale, best = best_of_scales(hadamard(exact), *part)
                    assert scale == best_scale
                    assert np.sum((x - exact) ** 2) <= best * (1 + 1e-4)


def hadamard(x: Array) -> Array:
    """The transform in blocks of the largest power of two that divides the length, by its matrix."""
    block = len(x) & -len(x)
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (x.reshape(-1, block) @ matrix / np.sqrt(block)).ravel() if block else x


def best_of_scales(x: Array, levels: int, dropped: int, candidates: int) -> tuple[float, float]:
    """The representable scale of least squared error, and that error."""
    exact = np.float32(np.abs(x).max() / (0.5 * levels))
    first = (int(exact.view(np.uint32)) + (1 << dropped) - 1) >> dropped << dropped
    errors = []
    for candidate in range(candidates):
        scale = float(np.uint32(first - (candidate << dropped)).view(np.float32))
        q = np.clip(np.round(x / scale + 0.5 * levels), 0, levels)
        errors.append((float(np.sum((scale * (q - 0.5 * levels) - x) ** 2)), scale))
    error, scale = min(errors, key=lambda pair: pair[0])
    return scale, error
