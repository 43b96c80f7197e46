//! The Hadamard transform of queries and outputs, and the scores, for rotated keys and values (see [`crate::rotated`]).
//!
//! ```text
//! query of a row     transform of q[d] ~ unit * int[d]     int: 16 bits, unit = max |transform| / limit
//! score of token t   sum over the two parts of unit * scale[t] * (int . k[t] - levels / 2 * sum of int)
//! acc                the transform of the weighted sum of values, transformed back in the output
//! ```

use super::products::{add_pair, add_panel, units};
use super::{AttentionShape, Pass, SPLIT};
use crate::panel::LANES;
use crate::quantiser::WORD_BYTES;
use crate::rotated::{GROUP, GROUP_WORDS, KeyParts, SLOW_LEVELS, ScaleField, block_of};
use crate::simd::Simd;

/// Half the levels of values and of the fast part of keys, and of the slow part.
pub(super) const MIDDLE: f32 = 7.5;
const SLOW_MIDDLE: f32 = 15.5;

/// `SIGNS[n][i]`: -1 where bit n of i is set, else 1.
static SIGNS: [[f32; LANES]; 4] = [signs(1), signs(2), signs(4), signs(8)];

const fn signs(half: usize) -> [f32; LANES] {
    let mut signs = [1.0; LANES];
    let mut i = 0;
    while i < LANES {
        if i & half != 0 {
            signs[i] = -1.0;
        }
        i += 1;
    }
    signs
}

/// One stage of the transform inside a vector: lanes i and i + `HALF` become their sum and their difference.
#[inline(always)]
fn stage<S: Simd, const HALF: usize>(s: S, v: S::V) -> S::V {
    let signs = &SIGNS[HALF.trailing_zeros() as usize];
    // SAFETY: 16 floats. The products are exact.
    s.mul_add(v, unsafe { s.load(signs.as_ptr()) }, s.exchange(v, HALF))
}

/// The Hadamard transform of `count` floats, in place, in blocks of the largest power of two that divides `count`; the
/// same transform as that of keys and values, up to rounding.
///
/// # Safety
/// `count` padded to 16 is readable and writable at `x`; the padding is finite.
#[inline(always)]
pub(super) unsafe fn transform<S: Simd>(s: S, x: *mut f32, count: usize) {
    let block = block_of(count);
    let unit = s.splat(1.0 / (block as f32).sqrt());
    let mut at = 0;
    while at < count {
        // SAFETY: the padded floats are readable.
        let mut v = s.mul(unsafe { s.load(x.add(at)) }, unit);
        if block > 1 {
            v = stage::<S, 1>(s, v);
        }
        if block > 2 {
            v = stage::<S, 2>(s, v);
        }
        if block > 4 {
            v = stage::<S, 4>(s, v);
        }
        if block > 8 {
            v = stage::<S, 8>(s, v);
        }
        // SAFETY: the padded floats are writable.
        unsafe { s.store(x.add(at), v) };
        at += LANES;
    }
    let mut half = LANES;
    while half < block {
        at = 0;
        while at < count {
            // SAFETY: blocks of more than 16 divide `count`, so both vectors lie inside it.
            unsafe {
                let (low, high) = (s.load(x.add(at)), s.load(x.add(at + half)));
                s.store(x.add(at), s.add(low, high));
                s.store(x.add(at + half), s.sub(low, high));
            }
            at += LANES;
            if at & half != 0 {
                at += half;
            }
        }
        half *= 2;
    }
}

/// The three floats after the integers of a query: the unit, and it times the sums of both parts times half the levels.
#[inline(always)]
fn query_units(query: *mut f32, head_dim: usize) -> *mut f32 {
    query.wrapping_add(head_dim.next_multiple_of(LANES) / 2)
}

/// Writes the transform of a query, times the scale: `[head_dim padded to 16]` i16, then three floats.
///
/// # Safety
/// As for [`super::KvFormat::copy_query`].
#[inline(always)]
pub(super) unsafe fn copy_query<S: Simd>(s: S, shape: &AttentionShape, from: *const f32, to: *mut f32) {
    let head_dim = shape.layout.head_dim;
    let parts = KeyParts::new(head_dim);
    let padded = head_dim.next_multiple_of(LANES);
    let mut at = 0;
    for range in parts.dimensions() {
        // SAFETY: the ranges lie inside the head, and are as long as the head in total.
        unsafe { std::ptr::copy_nonoverlapping(from.add(range.start), to.add(at), range.len()) };
        at += range.len();
    }
    while at < padded {
        // SAFETY: `to` is padded.
        unsafe { *to.add(at) = 0.0 };
        at += 1;
    }
    // SAFETY: both parts are padded; the fast part is a multiple of 16.
    unsafe {
        transform(s, to, parts.fast);
        transform(s, to.add(parts.fast), parts.slow());
    }
    let scale = s.splat(shape.scale);
    let (mut least, mut largest, mut non_finite) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
    at = 0;
    while at < padded {
        // SAFETY: inside the padded query.
        let q = s.mul(unsafe { s.load(to.add(at)) }, scale);
        (least, largest) = (s.min(q, least), s.max(q, largest));
        non_finite = s.add(non_finite, s.sub(q, q)); // NaN if q is not finite
        at += LANES;
    }
    let most = i32::MAX as usize / (SLOW_LEVELS as usize * head_dim);
    let limit = most.min(i16::MAX as usize) as f32;
    let (unit, inverse) = units(s.largest(s.max(largest, s.sub(s.splat(0.0), least))), limit);
    let (mut fast, mut slow) = (s.splat(0.0), s.splat(0.0));
    at = 0;
    while at < padded {
        // SAFETY: inside the padded query. The integers of 16 floats end before the next 16 floats.
        unsafe {
            let q = s.mul(s.load(to.add(at)), scale);
            let integers = s.round(s.mul(q, s.splat(inverse)));
            if at < parts.fast {
                fast = s.add(fast, integers);
            } else {
                slow = s.add(slow, integers);
            }
            s.store_i16(to.cast::<i16>().add(at), integers);
        }
        at += LANES;
    }
    let unit = unit + s.sum(non_finite);
    // SAFETY: the second half of `to` has at least 8 floats.
    unsafe {
        let units = query_units(to, head_dim);
        *units = unit;
        *units.add(1) = MIDDLE * s.sum(fast);
        *units.add(2) = SLOW_MIDDLE * s.sum(slow);
    }
}

/// Scores of `T` rows with one tile of positions.
///
/// # Safety
/// `pass` has these rows and this tile.
#[inline(always)]
pub(super) unsafe fn score<S: Simd, const DOT_PAIRS: bool, const T: usize>(
    s: S,
    pass: &Pass<'_>,
    tile: usize,
) {
    let (layout, params) = (pass.layout, pass.tiles[tile]);
    let stride = layout.head_dim.next_multiple_of(LANES);
    let parts = KeyParts::new(layout.head_dim);
    let (words, groups) = parts.words_and_groups();
    if pass.index == 0 {
        s.prefetch(pass.next_tiles[tile]);
    }
    let mut prefetch = pass.line_prefetch(tile, layout.params_bytes(), words + groups * GROUP_WORDS);
    // SAFETY: the K panel follows the tile's quantisation parameters; each row has 16 scores for the tile. A query has
    // room for twice its padded length in integers, which is at least its fast part and the whole groups of the slow
    // part; what follows its own integers is multiplied by 0.
    unsafe {
        let panel = params.add(layout.params_bytes());
        let queries = pass.queries.cast::<i16>();
        let mut acc = [s.zeros(); T];
        add_panel::<S, 4, DOT_PAIRS, T>(s, &mut acc, queries, 2 * stride, panel, words, prefetch);
        let scale = s.load_bits(params, ScaleField::FAST.left, ScaleField::FAST.mask);
        for (t, acc) in acc.into_iter().enumerate() {
            let units = query_units(pass.queries.add(t * stride).cast_mut(), layout.head_dim);
            let sum = s.sub(s.to_f32(acc), s.splat(*units.add(1)));
            s.store(pass.scores.add(t * SPLIT + tile * LANES), s.mul(sum, scale));
        }
        prefetch.address = prefetch.address.wrapping_add(words * prefetch.advance);
        let (mut group, queries) = (panel.add(words * WORD_BYTES), queries.add(parts.fast));
        let mut acc = [s.zeros(); T];
        for index in 0..groups {
            let mut last = s.zeros();
            for word in 0..GROUP_WORDS {
                s.prefetch(prefetch.address);
                prefetch.address = prefetch.address.wrapping_add(prefetch.advance);
                let values = s.load_words(group);
                group = group.add(WORD_BYTES);
                last = s.add_top_bits(values, last);
                for pair in 0..3 {
                    let halves = s.halves(values, 5 * pair as u32, SLOW_LEVELS as u16);
                    let pair = index * (GROUP / 2) + 3 * word + pair;
                    for (t, acc) in acc.iter_mut().enumerate() {
                        *acc = add_pair::<S, DOT_PAIRS>(s, queries.add(t * 2 * stride), pair, halves, *acc);
                    }
                }
            }
            for (t, acc) in acc.iter_mut().enumerate() {
                let pair = (index + 1) * (GROUP / 2) - 1;
                *acc = add_pair::<S, DOT_PAIRS>(s, queries.add(t * 2 * stride), pair, last, *acc);
            }
        }
        let scale = s.load_bits(params, ScaleField::SLOW.left, ScaleField::SLOW.mask);
        for (t, acc) in acc.into_iter().enumerate() {
            let units = query_units(pass.queries.add(t * stride).cast_mut(), layout.head_dim);
            let at = pass.scores.add(t * SPLIT + tile * LANES);
            let sum = s.sub(s.to_f32(acc), s.splat(*units.add(2)));
            s.store(at, s.mul(s.mul_add(sum, scale, s.load(at)), s.splat(*units)));
        }
    }
}
