//! Reductions of one row, each in one fixed order, and the softmax helpers of the sampler.
//!
//! Long sums accumulate 512 floats in 16 lanes of f32 and add the sum of those lanes to an f64: about the accuracy of
//! f64 at the speed of f32.

use super::math;
use crate::panel::LANES;
use crate::simd::Simd;

/// Floats that are summed in f32 before the sum is added to an f64, or searched before the maximum is compared.
const CHUNK: usize = 512;

/// Runs `$body` with each vector `$v` of `$x`, the last one padded with `$rest`. A macro, because a closure would not
/// inherit target features.
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

/// The largest element; -inf for an empty slice. NaN counts as -inf.
#[inline(always)]
pub(crate) fn max<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut best = s.splat(f32::NEG_INFINITY);
    for_vectors!(s, x, f32::NEG_INFINITY, v => best = s.max(v, best));
    s.largest(best)
}

/// The lowest index of the largest element; 0 if every element is NaN.
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

/// The sum of 16 lanes, then of the lanes; for short slices.
#[inline(always)]
pub(crate) fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut sum = s.splat(0.0);
    for_vectors!(s, x, 0.0, v => sum = s.add(sum, v));
    s.sum(sum)
}

/// exp((x - shift) * factor) of 16 lanes, none above `shift`. NaN counts as -inf.
#[inline(always)]
fn exp_weight<S: Simd>(s: S, x: S::V, shift: f32, factor: f32) -> S::V {
    let exponent = s.mul(s.sub(x, s.splat(shift)), s.splat(factor));
    // `max` returns the second argument if the exponent is NaN; its exp is 0.
    math::exp_of_nonpositive(s, s.max(exponent, s.splat(-105.0)))
}

/// `out = exp((x - shift) * factor)` for slices of equal length; returns the sum, in the order of [`sum`].
#[inline(always)]
pub(crate) fn exp_weights<S: Simd>(s: S, x: &[f32], shift: f32, factor: f32, out: &mut [f32]) -> f32 {
    let length = x.len().min(out.len());
    let mut sum = s.splat(0.0);
    let mut i = 0;
    while i < length {
        let count = LANES.min(length - i);
        // SAFETY: `count` floats from i on are inside both slices.
        unsafe {
            let (from, to) = (x.as_ptr().add(i), out.as_mut_ptr().add(i));
            if count == LANES {
                let v = exp_weight(s, s.load(from), shift, factor);
                s.store(to, v);
                sum = s.add(sum, v);
            } else {
                let v = exp_weight(s, s.load_part(from, count, f32::NEG_INFINITY), shift, factor);
                s.store_part(to, count, v);
                sum = s.add(sum, v);
            }
        }
        i += LANES;
    }
    s.sum(sum)
}

/// The sum of exp((x - shift) * factor).
#[inline(always)]
pub(crate) fn sum_of_exp<S: Simd>(s: S, x: &[f32], shift: f32, factor: f32) -> f64 {
    let mut total = 0.0;
    let mut start = 0;
    while start < x.len() {
        let end = x.len().min(start + CHUNK);
        let mut sum = s.splat(0.0);
        for_vectors!(s, &x[start..end], f32::NEG_INFINITY,
            v => sum = s.add(sum, exp_weight(s, v, shift, factor)));
        total += f64::from(s.sum(sum));
        start = end;
    }
    total
}
