//! The weights of a split, the merge of splits, and the output: what all formats of keys and values share.

use penstock_types::KvDtype;

use super::{AttentionJob, AttentionShape, MAX_ROWS, Pass, SPLIT, Visible, partial_floats, rotated};
use crate::generic::math;
use crate::generic::row_ops::store as store_lanes;
use crate::panel::LANES;
use crate::simd::Simd;

/// Sets the (max, sum, acc) of a row to those of no positions.
///
/// # Safety
/// `floats` floats, a multiple of 16, are writable at `partial`.
#[inline(always)]
pub(super) unsafe fn clear<S: Simd>(s: S, partial: *mut f32, floats: usize) {
    let mut i = 0;
    while i < floats {
        // SAFETY: inside the row.
        unsafe { s.store(partial.add(i), s.splat(0.0)) };
        i += LANES;
    }
    // SAFETY: as above.
    unsafe { *partial = f32::NEG_INFINITY };
}

/// Replaces the scores of the rows of `pass` that have a visible position by weights, and writes their max and sum. The
/// steps of all rows alternate, because each waits for the one before it.
///
/// # Safety
/// The scores of each row are set for the tiles that have a position visible to it.
#[inline(always)]
pub(super) unsafe fn weights<S: Simd>(s: S, softcap: f32, pass: &Pass<'_>) {
    let floats = partial_floats(pass.layout.head_dim);
    let mut vectors = [s.splat(f32::NEG_INFINITY); MAX_ROWS];
    for (row, (seen, best)) in pass.visible.iter().zip(&mut vectors).enumerate() {
        let scores = pass.scores.wrapping_add(row * SPLIT);
        let mut i = seen.start / LANES * LANES;
        while i < seen.end {
            // SAFETY: inside the row's 256 scores.
            unsafe {
                let mut score = s.load(scores.add(i));
                if softcap > 0.0 {
                    score = s.mul(math::tanh(s, s.div(score, s.splat(softcap))), s.splat(softcap));
                    s.store(scores.add(i), score);
                }
                if let Some(lanes) = seen.lanes(i) {
                    score = s.select(lanes, score, s.splat(f32::NEG_INFINITY));
                    s.store(scores.add(i), score);
                }
                *best = s.max(score, *best);
            }
            i += LANES;
        }
    }
    let mut maxima = [0.0; MAX_ROWS];
    for (max, best) in maxima.iter_mut().zip(&vectors[..pass.visible.len()]) {
        *max = s.largest(*best);
    }
    for (row, seen) in pass.visible.iter().enumerate() {
        let scores = pass.scores.wrapping_add(row * SPLIT);
        let max = s.splat(maxima[row]);
        let mut sum = s.splat(0.0);
        let mut i = seen.start / LANES * LANES;
        while i < seen.end {
            // SAFETY: as above.
            unsafe {
                let weight = math::exp_of_nonpositive(s, s.sub(s.load(scores.add(i)), max));
                s.store(scores.add(i), weight);
                sum = s.add(sum, weight);
            }
            i += LANES;
        }
        vectors[row] = sum;
    }
    for (row, seen) in pass.visible.iter().enumerate() {
        if seen.start < seen.end {
            // SAFETY: the row is writable.
            unsafe {
                let partial = pass.partial.add(row * floats);
                *partial = maxima[row];
                *partial.add(1) = s.sum(vectors[row]);
            }
        }
    }
}

/// Merges one split into the totals of the rows with a visible position in it.
///
/// # Safety
/// `partial` and `total` have the job's rows; [`attend_split`](super::attend_split) has written `partial`.
#[inline(always)]
pub(crate) unsafe fn merge<S: Simd>(
    s: S,
    shape: &AttentionShape,
    job: &AttentionJob<'_>,
    split: usize,
    partial: *const f32,
    total: *mut f32,
) {
    let floats = partial_floats(shape.layout.head_dim);
    for row in 0..job.rows.len() {
        let seen = Visible::inside(shape.visible(job.start, job.rows.start + row), split);
        if seen.start >= seen.end {
            continue;
        }
        // SAFETY: all of it lies inside this row of `partial` and `total`.
        unsafe {
            let (from, to) = (partial.add(row * floats), total.add(row * floats));
            let max = if *from > *to { *from } else { *to };
            let mut factors = [f32::NEG_INFINITY; LANES];
            factors[0] = *to - max;
            factors[1] = *from - max;
            let factors = s.to_array(math::exp(s, s.vector(factors)));
            *to = max;
            *to.add(1) = *to.add(1) * factors[0] + *from.add(1) * factors[1];
            let (old, new) = (s.splat(factors[0]), s.splat(factors[1]));
            let mut i = LANES;
            while i < floats {
                let scaled = s.mul(s.load(to.add(i)), old);
                s.store(to.add(i), s.mul_add(s.load(from.add(i)), new, scaled));
                i += LANES;
            }
        }
    }
}

/// Writes the output of a job; the totals of rotated values are rotated back in place.
///
/// # Safety
/// `total` has the job's rows, each with at least one split merged; no other thread accesses their output.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd>(s: S, shape: &AttentionShape, job: &AttentionJob<'_>, total: *mut f32) {
    let head_dim = shape.layout.head_dim;
    let floats = partial_floats(head_dim);
    for (index, row) in job.rows.clone().enumerate() {
        let head = job.kv_head * shape.group + row % shape.group;
        // SAFETY: this is the head of this query's output, and the row's total.
        unsafe {
            let out =
                shape.out.add((job.first_query + row / shape.group) * shape.out_stride + head * head_dim);
            let from = total.add(index * floats);
            if shape.layout.dtype == KvDtype::Uint4 {
                rotated::transform(s, from.add(LANES), head_dim);
            }
            let factor = s.splat(1.0 / *from.add(1));
            let mut d = 0;
            while d < head_dim {
                let v = s.mul(s.load(from.add(LANES + d)), factor);
                store_lanes(s, out.add(d), LANES.min(head_dim - d), v);
                d += LANES;
            }
        }
    }
}
