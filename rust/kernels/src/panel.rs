//! The order of the floats of a weight matrix or of the KV cache inside a panel.
//!
//! A *panel* is 16 lanes by `k` steps. For a weight matrix the lanes are output rows and the steps are columns; for
//! keys the lanes are tokens and the steps are dimensions; for values the lanes are dimensions and the steps are
//! tokens. One microkernel multiplies all three.
//!
//! ```text
//! F32, F16   [k][16]         one step is 16 consecutive values
//! Bf16       [k/2][16][2]    one 32-bit lane holds step k (low half) and step k + 1 (high half)
//! ```
//!
//! A shift or a mask widens bf16 to f32, so a pair in one lane costs one cheap operation per step and no shuffle;
//! dot-product instructions over bf16 pairs (AVX512-BF16, AMX, NEON) need the same order. f16 needs a conversion
//! instruction, which reads 8 consecutive values into 8 lanes (`vcvtph2ps ymm, m128`); a paired order would add two
//! shuffles per step.

use half::{bf16, f16};
use penstock_types::Dtype;

/// Lanes of a panel.
pub(crate) const LANES: usize = 16;

/// Bytes of a panel of `steps` steps, rounded up to an even number so that panels are whole cache lines.
pub(crate) const fn panel_bytes(dtype: Dtype, steps: usize) -> usize {
    steps.next_multiple_of(2) * LANES * dtype.bytes()
}

/// The index of step `k` of `lane` in a panel, in floats.
pub(crate) const fn panel_index(dtype: Dtype, k: usize, lane: usize) -> usize {
    match dtype {
        Dtype::F32 | Dtype::F16 => k * LANES + lane,
        Dtype::Bf16 => (k / 2) * (2 * LANES) + lane * 2 + k % 2,
    }
}

/// The float at `index`.
#[inline]
pub(crate) fn read_float(dtype: Dtype, bytes: &[u8], index: usize) -> f32 {
    let at = index * dtype.bytes();
    match dtype {
        Dtype::F32 => f32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]),
        Dtype::F16 => f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
        Dtype::Bf16 => bf16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32(),
    }
}

/// Rounds `count` floats to `dtype` and writes them to `bytes`; `entry(dtype, i)` is the index and the value of float
/// i. The dtype is an argument of `entry` so that it is a constant inside the loops.
#[inline(always)]
pub(crate) fn write_floats(
    dtype: Dtype,
    bytes: &mut [u8],
    count: usize,
    entry: impl Fn(Dtype, usize) -> (usize, f32),
) {
    match dtype {
        Dtype::F32 => {
            for i in 0..count {
                let (index, value) = entry(Dtype::F32, i);
                bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes());
            }
        }
        Dtype::F16 => {
            for i in 0..count {
                let (index, value) = entry(Dtype::F16, i);
                bytes[2 * index..][..2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
            }
        }
        Dtype::Bf16 => {
            for i in 0..count {
                let (index, value) = entry(Dtype::Bf16, i);
                bytes[2 * index..][..2].copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
        }
    }
}
