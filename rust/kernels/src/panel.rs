//! How a number of a weight matrix or of the KV cache is stored, and where it lies inside a panel.
//!
//! A *panel* is 16 lanes by `k` steps. For a weight matrix the lanes are output rows and the steps are columns; for
//! keys the lanes are tokens and the steps are dimensions; for values the lanes are dimensions and the steps are
//! tokens. One microkernel multiplies all three.
//!
//! ```text
//! F32, F16   [k][16]         one step is one run of 16 numbers
//! Bf16       [k/2][16][2]    one 32-bit lane holds step k (low half) and step k + 1 (high half)
//! ```
//!
//! bf16 widens to f32 by a shift or by a mask, so a pair in one lane costs one cheap operation per step and no
//! shuffle; dot-product instructions over bf16 pairs (AVX512-BF16, AMX, NEON) want the very same order. f16 needs a
//! conversion instruction, and that takes 8 neighbours of memory into 8 lanes (`vcvtph2ps ymm, m128`): a paired
//! order would add two shuffles per step for nothing.

use half::{bf16, f16};
use penstock_types::Dtype;

/// Lanes of a panel.
pub(crate) const LANES: usize = 16;

/// Bytes of a panel of `steps` steps: the steps are rounded up to even, so that panels stay whole cache lines.
pub(crate) const fn panel_bytes(dtype: Dtype, steps: usize) -> usize {
    steps.next_multiple_of(2) * LANES * dtype.bytes()
}

/// The index of step `k` of `lane` in a panel, in numbers.
pub(crate) const fn panel_index(dtype: Dtype, k: usize, lane: usize) -> usize {
    match dtype {
        Dtype::F32 | Dtype::F16 => k * LANES + lane,
        Dtype::Bf16 => (k / 2) * (2 * LANES) + lane * 2 + k % 2,
    }
}

/// Number `index` of `bytes`.
#[inline]
pub(crate) fn read_number(dtype: Dtype, bytes: &[u8], index: usize) -> f32 {
    let at = index * dtype.bytes();
    match dtype {
        Dtype::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
        Dtype::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
    }
}

/// Rounds `count` numbers to `dtype` and writes them to `bytes`: number i is `place(dtype, i).1` and goes to index
/// `place(dtype, i).0`. The dtype is passed back so that it is a constant inside the loops.
#[inline(always)]
pub(crate) fn write_numbers(
    dtype: Dtype,
    bytes: &mut [u8],
    count: usize,
    place: impl Fn(Dtype, usize) -> (usize, f32),
) {
    match dtype {
        Dtype::F32 => {
            for i in 0..count {
                let (index, value) = place(Dtype::F32, i);
                bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        Dtype::F16 => {
            for i in 0..count {
                let (index, value) = place(Dtype::F16, i);
                bytes[2 * index..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            }
        }
        Dtype::Bf16 => {
            for i in 0..count {
                let (index, value) = place(Dtype::Bf16, i);
                bytes[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
        }
    }
}
