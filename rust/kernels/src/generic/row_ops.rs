//! Operations on one row: norms, gated activations, rotary embedding, the sampler's mask.
//!
//! All are elementwise but the sum of squares, whose order `reduce` defines.

use super::{math, reduce};
use crate::panel::LANES;
use crate::simd::Simd;

/// `out = x / sqrt(mean(x^2) + eps) * weight`, for each group of `weight.len()` floats.
///
/// # Safety
/// `x` is readable and `out` writable for `width` floats, a multiple of `weight.len()`; they are equal or do not
/// overlap.
#[inline(always)]
pub(crate) unsafe fn rms_norm<S: Simd>(
    s: S,
    x: *const f32,
    width: usize,
    weight: &[f32],
    eps: f32,
    out: *mut f32,
) {
    let length = weight.len();
    let mut start = 0;
    while start < width {
        // SAFETY: readable by contract; the borrow ends before anything is written.
        let sum = reduce::sum_of_squares(s, unsafe { std::slice::from_raw_parts(x.add(start), length) });
        let factor = s.splat((1.0 / (sum / length as f64 + f64::from(eps)).sqrt()) as f32);
        let mut i = 0;
        while i < length {
            let count = LANES.min(length - i);
            // SAFETY: `count` floats from i on exist in the group and in `weight`.
            unsafe {
                let v = s.mul(load(s, x.add(start + i), count), factor);
                store(s, out.add(start + i), count, s.mul(v, load(s, weight.as_ptr().add(i), count)));
            }
            i += LANES;
        }
        start += length;
    }
}

/// The function applied to the gate.
#[derive(Clone, Copy)]
pub(crate) enum Activation {
    Silu,
    GeluTanh,
}

/// `out = activation(x[..f]) * x[f..]`.
///
/// # Safety
/// `2 f` floats are readable at `x` and `f` writable at `out`, without overlap.
#[inline(always)]
pub(crate) unsafe fn gated<S: Simd>(s: S, activation: Activation, x: *const f32, f: usize, out: *mut f32) {
    let mut i = 0;
    while i < f {
        let count = LANES.min(f - i);
        // SAFETY: `count` floats from i on exist in both halves and in `out`.
        unsafe {
            let v = load(s, x.add(i), count);
            let v = match activation {
                Activation::Silu => math::silu(s, v),
                Activation::GeluTanh => math::gelu_tanh(s, v),
            };
            store(s, out.add(i), count, s.mul(v, load(s, x.add(f + i), count)));
        }
        i += LANES;
    }
}

/// Rotates the first `2 * cos.len()` floats of every `head_dim` of a row: float i with float i + `cos.len()`.
///
/// # Safety
/// `width` floats, a multiple of `head_dim`, are readable and writable at `x`; `2 * cos.len() <= head_dim`; `sin` is
/// as long as `cos`.
#[inline(always)]
pub(crate) unsafe fn rope<S: Simd>(
    s: S,
    x: *mut f32,
    width: usize,
    head_dim: usize,
    cos: &[f32],
    sin: &[f32],
) {
    let half = cos.len();
    let mut head = 0;
    while head < width {
        let mut i = 0;
        while i < half {
            let count = LANES.min(half - i);
            // SAFETY: `count` floats from i on exist in both halves of the head and in `cos` and `sin`.
            unsafe {
                let (at, partner) = (x.add(head + i), x.add(head + half + i));
                let (a, b) = (load(s, at, count), load(s, partner, count));
                let (c, d) = (load(s, cos.as_ptr().add(i), count), load(s, sin.as_ptr().add(i), count));
                store(s, at, count, s.neg_mul_add(b, d, s.mul(a, c)));
                store(s, partner, count, s.mul_add(a, d, s.mul(b, c)));
            }
            i += LANES;
        }
        head += head_dim;
    }
}

/// `x += y` for slices of equal length.
#[inline(always)]
pub(crate) fn add<S: Simd>(s: S, x: &mut [f32], y: &[f32]) {
    let length = x.len().min(y.len());
    let mut i = 0;
    while i < length {
        let count = LANES.min(length - i);
        // SAFETY: `count` floats from i on are inside both slices.
        unsafe {
            let at = x.as_mut_ptr().add(i);
            store(s, at, count, s.add(load(s, at, count), load(s, y.as_ptr().add(i), count)));
        }
        i += LANES;
    }
}

/// `x[i] = -inf` where bit i % 32 of word i / 32 is not set or does not exist.
#[inline(always)]
pub(crate) fn mask<S: Simd>(s: S, x: &mut [f32], words: &[u32]) {
    let out = s.splat(f32::NEG_INFINITY);
    let mut i = 0;
    while i < x.len() {
        let count = LANES.min(x.len() - i);
        let bits = if i / 32 < words.len() { words[i / 32] >> (i % 32) } else { 0 };
        // SAFETY: `count` floats from i on are inside the slice.
        unsafe {
            let at = x.as_mut_ptr().add(i);
            store(s, at, count, s.select(bits, load(s, at, count), out));
        }
        i += LANES;
    }
}

/// # Safety
/// `count` floats, at most 16, are readable at `from`.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd>(s: S, from: *const f32, count: usize) -> S::V {
    // SAFETY: by contract.
    unsafe { if count == LANES { s.load(from) } else { s.load_part(from, count, 0.0) } }
}

/// # Safety
/// `count` floats, at most 16, are writable at `to`.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd>(s: S, to: *mut f32, count: usize, v: S::V) {
    // SAFETY: by contract.
    unsafe { if count == LANES { s.store(to, v) } else { s.store_part(to, count, v) } }
}
