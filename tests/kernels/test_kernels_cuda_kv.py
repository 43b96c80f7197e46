"""The CUDA kernel between the product of q, k and v and attention, on the host: norms, rotation, pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest

from emu import build
from support.kernels import cuda, kv_cpu, kv_pages
from support.kernels.kv_pages import KvLayout

if TYPE_CHECKING:
    from support.kernels.cuda import Array

pytestmark = pytest.mark.timeout(600)  # the first test builds the kernels

EXTRA = 1 << 31


@pytest.fixture(scope="module")
def kernels() -> cuda.HostKernels:
    return cuda.host_kernels()


@dataclass
class Step:
    """The inputs of a call, and the expected queries, keys and values."""

    layout: KvLayout
    heads: int
    angles: int
    norms: bool
    query_scales: bool
    rows: int = 7
    seed: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        layout, rows, dim = self.layout, self.rows, self.layout.head_dim
        self.qkv = rng.standard_normal((rows, self.heads + 2 * layout.kv_heads, dim)).astype(np.float32)
        self.qkv[..., dim // 2 + 3] *= 12  # keys have dimensions that are far larger than the others
        self.weights = rng.uniform(0.5, 2, (2, dim)).astype(np.float32)
        angles = rng.uniform(0, 6, (20, self.angles))
        self.table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
        self.positions = rng.integers(0, 15, rows).astype(np.uint32)
        self.positions[::3] = EXTRA | rng.integers(0, 5, len(self.positions[::3])).astype(np.uint32)
        self.scales = rng.uniform(0.5, 2, rows).astype(np.float32)
        places = rng.permutation(4 * layout.block_size)[:rows]
        self.blocks = (places // layout.block_size).astype(np.uint32)
        self.offsets = (places % layout.block_size).astype(np.uint32)

    def run(self, kernels: cuda.HostKernels, rows: slice = slice(None)) -> tuple[Array, Array]:
        """The queries and the cache of four blocks."""
        layout = self.layout
        qkv, cache = self.qkv[rows].copy(), np.full(4 * layout.block_bytes, 0xA5, np.uint8)
        arrays = [self.positions[rows], self.scales[rows], self.blocks[rows], self.offsets[rows]]
        positions, scales, blocks, offsets = (cuda.constant(array.copy()) for array in arrays)
        extra = self.table[15:].copy()
        call = kv_pages.RopeWriteKv(
            *cuda.addresses(
                qkv,
                self.weights[0] if self.norms else None,
                self.weights[1] if self.norms else None,
                self.table,
                extra,
                positions,
                scales if self.query_scales else None,
                blocks,
                offsets,
            ),
            layout.argument(cache),
            self.heads,
            self.angles,
            self.epsilon,
        )
        groups = -(-(self.heads + 2 * layout.kv_heads) // 4)
        shared = 8 * 4 * layout.head_dim
        kernels.launch(f"rope_write_kv_{layout.dtype}", [len(qkv), groups], 128, call, shared=shared)
        return qkv[:, : self.heads], cache

    def expected(self) -> tuple[Array, Array, Array]:
        """The queries, keys and values in float64, by head and row."""
        x = self.qkv.astype(np.float64)
        q, k, v = np.split(x, [self.heads, self.heads + self.layout.kv_heads], axis=1)
        if self.norms:
            q, k = (
                part / np.sqrt(np.mean(part**2, axis=-1, keepdims=True) + self.epsilon) * weight
                for part, weight in zip((q, k), self.weights, strict=True)
            )
        index = np.where(self.positions >= EXTRA, 15 + (self.positions ^ EXTRA), self.positions)
        rotations = self.table[index][:, None, :].astype(np.float64)
        q, k = (rotate(part, rotations) for part in (q, k))
        return q * self.scales[:, None, None] if self.query_scales else q, k, v


def rotate(x: Array, rotations: Array) -> Array:
    n = rotations.shape[-1] // 2
    cos, sin = rotations[..., :n], rotations[..., n:]
    a, b, rest = x[..., :n], x[..., n : 2 * n], x[..., 2 * n :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def rotate_parts(x: Array, layout: KvLayout) -> Array:
    """Heads as the product with rotated keys takes them."""
    heads = x.reshape(-1, layout.head_dim)
    parts = [[kv_pages.hadamard(head[part]) for part in layout.parts] for head in heads]
    return np.array([np.concatenate(part) for part in parts]).reshape(x.shape)


SHAPES = [
    # kv heads, query heads, head_dim, angles, block size
    (2, 1, 8, 4, 16),
    (1, 2, 24, 8, 48),
    (1, 3, 32, 16, 16),
    (2, 2, 64, 32, 16),
    (1, 5, 96, 48, 32),
    (3, 6, 128, 32, 16),
    (1, 1, 160, 80, 16),
    (1, 2, 256, 128, 16),
]


@pytest.mark.parametrize("dtype", kv_pages.DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("options", ["plain", "norms and scales"])
def test_heads_are_normed_rotated_and_written(
    kernels: cuda.HostKernels, dtype: str, shape: tuple[int, ...], options: str
) -> None:
    kv_heads, heads, head_dim, angles, block_size = shape
    layout = KvLayout(dtype, kv_heads, head_dim, block_size)
    all_options = options != "plain"
    step = Step(layout, heads, angles, norms=all_options, query_scales=all_options)
    queries, cache = step.run(kernels)
    q, k, v = step.expected()
    if dtype == "uint4":
        q = rotate_parts(q, layout)
    assert np.allclose(queries, q, rtol=1e-5, atol=3e-5)
    for row, (block, offset) in enumerate(zip(step.blocks, step.offsets, strict=True)):
        for head in range(kv_heads):
            page = layout.page(cache, block, head)
            page.check(offset, k[row, head], v[row, head])


@pytest.mark.parametrize("magnitude", [1e-25, 1e25])
def test_heads_of_extreme_values_are_normed(kernels: cuda.HostKernels, magnitude: float) -> None:
    step = Step(KvLayout("f32", 1, 64, 16), 2, 32, norms=True, query_scales=False, epsilon=0)
    step.qkv[:, :3] *= np.float32(magnitude)
    queries, _ = step.run(kernels)
    assert np.allclose(queries, step.expected()[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", kv_pages.DTYPES)
def test_only_the_bytes_of_the_tokens_are_written(kernels: cuda.HostKernels, dtype: str) -> None:
    layout = KvLayout(dtype, 2, 64, 16)
    step = Step(layout, 2, 32, norms=False, query_scales=False)
    _, all_rows = step.run(kernels)
    merged = np.full_like(all_rows, 0xA5)
    changed = np.zeros(all_rows.shape, np.int64)
    for row in range(step.rows):
        _, alone = step.run(kernels, slice(row, row + 1))
        written = alone != 0xA5
        assert written.sum() <= 2 * layout.token_bytes
        changed += written
        merged[written] = alone[written]
    assert changed.max() == 1
    assert np.array_equal(merged, all_rows)


@pytest.mark.parametrize("dtype", ["int8", "uint4"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_restored_as_nan(
    kernels: cuda.HostKernels, dtype: str, bad: float
) -> None:
    layout = KvLayout(dtype, 1, 64, 16)
    step = Step(layout, 1, 32, norms=False, query_scales=False)
    step.qkv[0, 1:, 5] = bad
    with np.errstate(invalid="ignore"):
        _, cache = step.run(kernels)
    page = layout.page(cache, step.blocks[0], 0)
    k, v = page.restored(step.offsets[0])
    fast = layout.parts[0] if dtype == "uint4" else slice(None)
    assert np.isnan(k[fast]).all()
    assert np.isnan(v).all()
    k, v = layout.page(cache, step.blocks[1], 0).restored(step.offsets[1])
    assert np.isfinite([k, v]).all()


@pytest.mark.parametrize(
    ("dtype", "bad"),
    [("f32", np.inf), ("bf16", np.nan), ("bf16", np.inf), ("f16", -np.inf), ("f16", 7e4)],
)
def test_token_with_a_bad_value_has_a_key_of_nan(kernels: cuda.HostKernels, dtype: str, bad: float) -> None:
    layout = KvLayout(dtype, 2, 64, 16)
    step = Step(layout, 1, 32, norms=False, query_scales=False)
    expected = step.run(kernels)[1]
    step.qkv[0, 3, 5] = bad  # the value of the first head
    _, cache = step.run(kernels)
    block, offset = step.blocks[0], step.offsets[0]
    k, v = layout.page(cache, block, 0).restored(offset)
    assert np.isnan(k).all()
    assert not v.any()
    for part, head in ((0, 1), (1, 1)):
        now, before = (layout.page(array, block, head).restored(offset)[part] for array in (cache, expected))
        assert np.array_equal(now, before)


@pytest.mark.parametrize("dtype", ["int8", "uint4"])
def test_extreme_values_are_restored(kernels: cuda.HostKernels, dtype: str) -> None:
    layout = KvLayout(dtype, 1, 64, 16)
    step = Step(layout, 1, 32, norms=False, query_scales=False, rows=5)
    step.positions[:] = 0
    step.table[0] = [1] * 32 + [0] * 32
    magnitudes = np.array([0, 1e-40, 1e-30, 1e30, 1], np.float32)
    step.qkv[:, 1:] *= magnitudes[:, None, None]
    _, cache = step.run(kernels)
    _, k, v = step.expected()
    for row in range(5):
        page = layout.page(cache, step.blocks[row], 0)
        if row < 2 and dtype == "uint4":
            assert not np.array(page.restored(step.offsets[row])).any()
        else:
            page.check(step.offsets[row], k[row, 0], v[row, 0])


@pytest.fixture(scope="module", params=["plain", "contracted"])
def kernels_of_bits(request: pytest.FixtureRequest) -> cuda.HostKernels:
    """Kernels without fused operations, and those in which the compiler uses them as NVRTC does."""
    if request.param == "plain":
        return cuda.host_kernels()
    if cuda.CHECKED or cuda.ON_GPU:
        pytest.skip("runs on the host without a driver")
    return cuda.HostKernels(build.build_contracted("rope_kv"))


def unrotated(dtype: str, head_dim: int) -> Step:
    """Many rows at position 0, where the rotation changes nothing."""
    step = Step(KvLayout(dtype, 1, head_dim, 64), 1, 4, norms=False, query_scales=False, rows=250, seed=1)
    step.positions[:] = 0
    step.table[0] = [1] * 4 + [0] * 4
    return step


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_bits_of_int8_are_those_of_the_cpu(kernels_of_bits: cuda.HostKernels, head_dim: int) -> None:
    step = unrotated("int8", head_dim)
    _, cache = step.run(kernels_of_bits)
    for row in range(step.rows):
        page = step.layout.page(cache, step.blocks[row], 0)
        for part in range(2):
            expected = kv_cpu.Int8.of(step.qkv[row, 1 + part])
            steps, scale, offset = page.encoded(part, step.offsets[row])
            assert np.array_equal(steps, expected.steps)
            assert (scale, offset) == (expected.scale, expected.offset)


def between_levels(count: int, levels: int, scale: float) -> Array:
    """A part of multiples of the scale plus half of it, and of two values in the middle of two levels.

    Their products with the inverse of the scale are rounded to the middle, unless they are a part of a fused
    operation.
    """
    steps = np.random.default_rng(2).integers(0, levels + 1, count) - levels / 2
    steps[:3] = [levels / 2, 1 - levels // 2, -(levels // 2)]
    return kv_cpu.transform((steps * scale).astype(np.float32))


@pytest.mark.parametrize("head_dim", [32, 96, 128])
def test_bits_of_uint4_are_those_of_the_cpu(kernels_of_bits: cuda.HostKernels, head_dim: int) -> None:
    step = unrotated("uint4", head_dim)
    fast, slow = step.layout.parts
    if len(slow) == 64:  # its transform is exact
        for eighth in range(8):
            step.qkv[eighth, 1, slow] = between_levels(64, 31, 1 + eighth / 8)
    _, cache = step.run(kernels_of_bits)
    other_scales = 0
    for row in range(step.rows):
        page = step.layout.page(cache, step.blocks[row], 0)
        k, v = step.qkv[row, 1:]
        (keys, values), fifth, scales = page.quantised(step.offsets[row])
        for x, scale, steps, rule in (
            (k[fast], scales[0], keys[: len(fast)], (15, 22, 2)),
            (k[slow], scales[1], keys[len(fast) :] + 16 * fifth, (31, 20, 4)),
            (v, scales[2], values, (15, 20, 4)),
        ):
            if len(x) == 0:
                continue
            part = kv_cpu.Part.of(x, *rule)
            assert np.array_equal(steps, part.steps(np.float32(scale)))
            # The errors are added in another order, so scales with nearly the same error may be confused.
            errors = part.scales()
            assert errors[scale] <= min(errors.values()) * (1 + 1e-5)
            other_scales += errors[scale] != min(errors.values())
    assert other_scales <= 2


def test_scales_of_int8_are_rounded_up(kernels: cuda.HostKernels) -> None:
    layout = KvLayout("int8", 1, 64, 16)
    step = Step(layout, 1, 32, norms=False, query_scales=False)
    step.positions[:] = 0
    step.table[0] = [1] * 32 + [0] * 32
    step.qkv[0, 1:, 0] = 255
    step.qkv[0, 1:, 1:] = -1e-9  # the range is above 255 by less than half a unit of float32
    _, cache = step.run(kernels)
    for row in range(step.rows):
        page = layout.page(cache, step.blocks[row], 0)
        for part, x in enumerate(step.qkv[row, 1:].astype(np.float64)):
            scale, exact = page.scale(part, step.offsets[row]), (x.max() - x.min()) / 255
            assert exact <= scale < exact * (1 + 2**-7)
