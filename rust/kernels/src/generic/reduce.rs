//! Reductions of one row, each in one fixed order, and the soft-max helpers of the sampler.
//!
//! Sums take 16 lanes over 512 floats at a time in f32, the sum of those lanes is added to an f64: as accurate as
//! f64 throughout for the purpose, at the speed of f32.

use super::math;
use crate::element::LANES;
use crate::simd::Simd;

/// Floats that are summed in f32 before the sum goes to f64, or searched before the best is looked at.
const CHUNK: usize = 512;

/// Calls `$body` with each vector `$v` of `$x`, the last one filled up with `$rest`. A macro for want of closures
/// that inherit target features.
macro_rules! for_vectors {
    ($s:expr, $x:expr, $rest:expr, $v:ident => $body:expr) => {
        let (s, x): (S, &[f32]) = ($s, $x);
        let whole = x.len() / LANES * LANES;
        let mut i = 0;
        while i < whole {
            // SAFETY: 16 floats from i on are inside the slice.
            let $v = unsafe { s.load(x.as_ptr().add(i)) };
            $body;
            i += LANES;
        }
        if whole < x.len() {
            // SAFETY: the rest of the slice.
            let $v = unsafe { s.load_part(x.as_ptr().add(whole), x.len() - whole, $rest) };
            $body;
        }
    };
}

/// The largest element; -inf of nothing. A NaN counts as -inf.
#[inline(always)]
pub(crate) fn max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    for_vectors!(s, x, f32::NEG_INFINITY, v => best = s.max(v, best));
    s.largest(best)
}

/// The lowest index of the largest element; 0 if there is none but NaN.
#[inline(always)]
pub(crate) fn argmax<S: Simd>(s: S, x: &[f32]) -> usize {
    let (mut best, mut chunk) = (f32::NEG_INFINITY, 0);
    let mut start = 0;
    while start < x.len() {
        let largest = max(s, &x[start..x.len().min(start + CHUNK)]);
        if largest > best {
            (best, chunk) = (largest, start);
        }
        start += CHUNK;
    }
    let mut i = chunk;
    while i < x.len() {
        if x[i] == best {
            return i;
        }
        i += 1;
    }
    0
}

/// The sum of squares.
#[inline(always)]
pub(crate) fn sum_of_squares<S: Simd>(s: S, x: &[f32]) -> f64 {
    let mut total = 0.0;
    let mut start = 0;
    while start < x.len() {
        let end = x.len().min(start + CHUNK);
        let mut sum = s.splat(0.0);
        for_vectors!(s, &x[start..end], 0.0, v => sum = s.mul_add(v, v, sum));
        total += f64::from(s.sum(sum));
        start = end;
    }
    total
}

/// The sum of exp(x - shift).
#[inline(always)]
pub(crate) fn sum_of_exp<S: Simd>(s: S, x: &[f32], shift: f32) -> f64 {
    let mut total = 0.0;
    let mut start = 0;
    while start < x.len() {
        let end = x.len().min(start + CHUNK);
        let mut sum = s.splat(0.0);
        for_vectors!(s, &x[start..end], f32::NEG_INFINITY,
            v => sum = s.add(sum, math::exp(s, s.sub(v, s.splat(shift)))));
        total += f64::from(s.sum(sum));
        start = end;
    }
    total
}

/// ln of the sum of exp; -inf of nothing.
#[inline(always)]
pub(crate) fn log_sum_exp<S: Simd>(s: S, x: &[f32]) -> f32 {
    let shift = max(s, x);
    if shift.is_infinite() {
        return shift;
    }
    (f64::from(shift) + sum_of_exp(s, x, shift).ln()) as f32
}

/// `x = exp(x - max) / sum`.
#[inline(always)]
pub(crate) fn softmax<S: Simd>(s: S, x: &mut [f32]) {
    let shift = max(s, x);
    let factor = (1.0 / sum_of_exp(s, x, shift)) as f32;
    let mut i = 0;
    while i < x.len() {
        let count = LANES.min(x.len() - i);
        // SAFETY: `count` floats from i on are inside the slice.
        unsafe {
            let at = x.as_mut_ptr().add(i);
            let v = s.sub(s.load_part(at, count, 0.0), s.splat(shift));
            s.store_part(at, count, s.mul(math::exp(s, v), s.splat(factor)));
        }
        i += LANES;
    }
}
