//! Attention over quantised keys and values: both products are sums of integers; the quantisation parameters of the
//! tokens are applied to the sums. Values of 4 bits are rotated, and their offset is a multiple of the scale: see
//! [`rotated`].
//!
//! ```text
//! query of a row     q[d] ~ unit * int[d]                      int: 16 bits, unit = max |q| / limit
//! score of token t   unit * (scale[t] * (int . k[t]) + offset[t] * sum of int)
//! weights of a row   w[t] * scale[t] ~ unit * int[t]           int: 16 bits, unit = max (w * scale) / limit
//! acc of dim d       unit * (int . v[d]) + sum of w[t] * offset[t]
//! ```
//!
//! k and v are the quantised values. They are not expanded to f32: one instruction multiplies and adds two of them in
//! 16-bit halves, twice as many as f32 multiply-adds process. The limits exclude an overflow of the 32-bit sums, so
//! every sum is exact and independent of the order; an invisible position has weight 0, and a quantised value is never
//! NaN.
//!
//! The query is rounded to 16 bits (an error of 2^-16 of its largest value; bf16 keys have 2^-9 of each value), and so
//! are the weights of a split. The rounding error of a weight is carried to the next position of the same lane, so many
//! small weights beside a large one do not vanish: their sum is off by at most half a step per lane, 8 of 32766.

use std::mem::MaybeUninit;
use std::ops::Range;

use super::products::{LinePrefetch, add_panel, quantiser, units};
use super::rotated::{self, MIDDLE};
use super::{AttentionShape, KvFormat, MAX_ROWS, Pass, SPLIT, Visible, partial_floats, tile_rows};
use crate::generic::row_ops::load as load_lanes;
use crate::kv::PARAMS_LINE;
use crate::panel::LANES;
use crate::rotated::ScaleField;
use crate::simd::Simd;

/// Quantised values of `BITS` bits. With `DOT_PAIRS` the CPU has [`Simd::dot_pairs`], which gives the same integers.
#[derive(Clone, Copy)]
pub(crate) struct Quantised<const BITS: u32, const DOT_PAIRS: bool>;

/// The largest weight before a carry of at most a half; the sum of 256 of them times 8-bit values fits an i32.
const WEIGHT_LIMIT: f32 = 32_766.0;
/// The indices, in a row's partial result, of the unit of its weights and of the sum of its weighted offsets.
const UNIT: usize = 2;
const OFFSETS: usize = 3;

/// Calls a function generic over the number of rows.
macro_rules! with_rows {
    ($rows:expr, $function:ident::<$s:ident, $bits:ident, $dot:ident>($($argument:expr),* $(,)?)) => {
        with_rows!($rows, $s, 1 2 3 4 5 6 7 8 9 10 11 12 => T: $function::<$s, $bits, $dot, T>($($argument),*))
    };
    ($rows:expr, $s:ident, $($count:literal)+ => $t:ident: $call:expr) => {
        match $rows {
            $($count if const { $count <= tile_rows::<$s>() } => {
                const $t: usize = $count;
                $call
            })+
            rows => unreachable!("a tile of {rows} rows; this is a bug"),
        }
    };
}

impl<const BITS: u32, const DOT_PAIRS: bool> KvFormat for Quantised<BITS, DOT_PAIRS> {
    /// Writes `[head_dim padded to 16]` i16, then the unit and the unit times the sum of all.
    #[inline(always)]
    unsafe fn copy_query<S: Simd>(s: S, shape: &AttentionShape, from: *const f32, to: *mut f32) {
        if BITS == 4 {
            // SAFETY: by contract.
            return unsafe { rotated::copy_query(s, shape, from, to) };
        }
        let head_dim = shape.layout.head_dim;
        let most = i32::MAX as usize / (quantiser::<BITS>().levels() as usize * head_dim);
        let limit = most.min(i16::MAX as usize) as f32;
        let (mut least, mut largest, mut non_finite) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
        let mut d = 0;
        while d < head_dim {
            // SAFETY: the rest of the head is readable.
            let q = unsafe { load_lanes(s, from.add(d), LANES.min(head_dim - d)) };
            let q = s.mul(q, s.splat(shape.scale));
            (least, largest) = (s.min(q, least), s.max(q, largest));
            non_finite = s.add(non_finite, s.sub(q, q)); // NaN if q is not finite
            d += LANES;
        }
        let (unit, inverse) = units(s.largest(s.max(largest, s.sub(s.splat(0.0), least))), limit);
        let mut sum = s.splat(0.0);
        d = 0;
        while d < head_dim {
            // SAFETY: the rest of the head is readable; two bytes for each padded dimension are half of `to`.
            unsafe {
                let q = load_lanes(s, from.add(d), LANES.min(head_dim - d));
                let integers = s.round(s.mul(s.mul(q, s.splat(shape.scale)), s.splat(inverse)));
                sum = s.add(sum, integers);
                s.store_i16(to.cast::<i16>().add(d), integers);
            }
            d += LANES;
        }
        let unit = unit + s.sum(non_finite);
        // SAFETY: the second half of `to` has at least 8 floats.
        unsafe {
            *query_unit(to, head_dim) = unit;
            *query_unit(to, head_dim).add(1) = unit * s.sum(sum);
        }
    }

    #[inline(always)]
    unsafe fn score<S: Simd>(s: S, pass: &Pass<'_>, tiles: Range<usize>) {
        for tile in tiles {
            // SAFETY: by contract.
            unsafe { with_rows!(pass.visible.len(), score::<S, BITS, DOT_PAIRS>(s, pass, tile)) }
        }
    }

    #[inline(always)]
    unsafe fn sum_values<S: Simd>(s: S, pass: &Pass<'_>, tiles: Range<usize>) {
        let mut weights = MaybeUninit::<[i16; MAX_ROWS * SPLIT]>::uninit();
        let weights = weights.as_mut_ptr().cast::<i16>();
        for row in 0..pass.visible.len() {
            // SAFETY: `weights` has 256 for each row; the rest is the contract.
            unsafe { round_weights::<S, BITS>(s, pass, row, tiles.clone(), weights.add(row * SPLIT)) };
        }
        for panel in 0..pass.layout.head_dim.div_ceil(LANES) {
            // SAFETY: by contract; the weights of these tiles were just written.
            unsafe {
                with_rows!(
                    pass.visible.len(),
                    sum_values::<S, BITS, DOT_PAIRS>(s, pass, tiles.clone(), weights, panel)
                );
            }
        }
    }
}

/// The two floats that [`Quantised::copy_query`] writes.
#[inline(always)]
fn query_unit(query: *mut f32, head_dim: usize) -> *mut f32 {
    query.wrapping_add(head_dim.next_multiple_of(LANES) / 2)
}

impl Pass<'_> {
    /// The prefetches for `words` words at `offset` of tile `tile`: this pass's share of the same words of the next
    /// split.
    #[inline(always)]
    pub(super) fn line_prefetch(&self, tile: usize, offset: usize, words: usize) -> LinePrefetch {
        let address = self.next_tiles[tile];
        if address.is_null() {
            return LinePrefetch { address: self.tiles[tile], advance: 0 };
        }
        let advance = self.line_share;
        LinePrefetch { address: address.wrapping_add(offset + self.index * words * advance), advance }
    }
}

/// Scores of `T` rows with one tile of positions.
///
/// # Safety
/// `pass` has these rows and this tile.
#[inline(always)]
unsafe fn score<S: Simd, const BITS: u32, const DOT_PAIRS: bool, const T: usize>(
    s: S,
    pass: &Pass<'_>,
    tile: usize,
) {
    if BITS == 4 {
        // SAFETY: by contract.
        return unsafe { rotated::score::<S, DOT_PAIRS, T>(s, pass, tile) };
    }
    let (layout, params) = (pass.layout, pass.tiles[tile]);
    let stride = layout.head_dim.next_multiple_of(LANES);
    let words = quantiser::<BITS>().words(layout.head_dim);
    if pass.index == 0 {
        for line in 0..layout.params_bytes() / PARAMS_LINE {
            s.prefetch(pass.next_tiles[tile].wrapping_add(line * PARAMS_LINE));
        }
    }
    let mut acc = [s.zeros(); T];
    let prefetch = pass.line_prefetch(tile, layout.params_bytes(), words);
    // SAFETY: the K panel follows the tile's quantisation parameters; the queries are padded with zeros to whole words;
    // each row has 16 scores for the tile.
    unsafe {
        let panel = params.add(layout.params_bytes());
        add_panel::<S, BITS, DOT_PAIRS, T>(
            s,
            &mut acc,
            pass.queries.cast(),
            2 * stride,
            panel,
            words,
            prefetch,
        );
        let (scale, offset) = (s.load_bf16_low(params), s.load(params.add(PARAMS_LINE).cast()));
        for (t, acc) in acc.into_iter().enumerate() {
            let unit = query_unit(pass.queries.add(t * stride).cast_mut(), layout.head_dim);
            let base = s.mul(offset, s.splat(*unit.add(1)));
            let score = s.mul_add(s.to_f32(acc), s.mul(scale, s.splat(*unit)), base);
            s.store(pass.scores.add(t * SPLIT + tile * LANES), score);
        }
    }
}

/// Rounds the weights of one row to integers, 0 at invisible positions, and writes their unit and the sum of the
/// weighted offsets.
///
/// # Safety
/// `pass` has this row and these tiles; `integers` has 256 elements.
#[inline(always)]
unsafe fn round_weights<S: Simd, const BITS: u32>(
    s: S,
    pass: &Pass<'_>,
    row: usize,
    tiles: Range<usize>,
    integers: *mut i16,
) {
    let seen = pass.visible[row];
    let weights = pass.scores.wrapping_add(row * SPLIT);
    let touched = seen.start / LANES..seen.end.div_ceil(LANES);
    let mut offsets = s.splat(0.0);
    let mut largest = s.splat(0.0);
    for tile in touched.clone() {
        // SAFETY: the tile starts with its quantisation parameters; the row has 16 weights for it.
        unsafe {
            let params = pass.tiles[tile];
            let at = weights.add(tile * LANES);
            let weight = s.load(at);
            let scale = if BITS == 4 {
                s.load_bits(params, ScaleField::VALUES.left, ScaleField::VALUES.mask)
            } else {
                let offset = s.load(params.add(2 * PARAMS_LINE).cast());
                offsets = s.add(offsets, seen.masked(s, tile, s.mul(weight, offset)));
                s.load_bf16_high(params)
            };
            let scaled = seen.masked(s, tile, s.mul(weight, scale));
            largest = s.max(scaled, largest);
            s.store(at, scaled);
        }
    }
    let (unit, inverse) = units(s.largest(largest), WEIGHT_LIMIT);
    let (mut carry, mut sum) = (s.splat(0.0), s.splat(0.0));
    for tile in tiles {
        // SAFETY: 16 integers are writable for every tile; the row has weights for the tiles in `touched`.
        unsafe {
            let mut rounded = s.splat(0.0);
            if touched.contains(&tile) {
                let exact = s.mul_add(s.load(weights.add(tile * LANES)), s.splat(inverse), carry);
                rounded = s.round(exact);
                carry = s.sub(exact, rounded);
                sum = s.add(sum, rounded);
            }
            s.store_i16(integers.add(tile * LANES), rounded);
        }
    }
    // SAFETY: the row's partial result starts with 16 floats.
    unsafe {
        let partial = pass.partial.add(row * partial_floats(pass.layout.head_dim));
        *partial.add(UNIT) = unit;
        *partial.add(OFFSETS) = if BITS == 4 { -MIDDLE * unit * s.sum(sum) } else { s.sum(offsets) };
    }
}

impl Visible {
    /// `v` with 0 in the lanes of `tile` that are not visible.
    #[inline(always)]
    fn masked<S: Simd>(self, s: S, tile: usize, v: S::V) -> S::V {
        match self.lanes(tile * LANES) {
            None => v,
            Some(lanes) => s.select(lanes, v, s.splat(0.0)),
        }
    }
}

/// Sums of the values of `T` rows in one V panel.
///
/// # Safety
/// `pass` has these rows, tiles and panel; `weights` has 256 integers of each row.
#[inline(always)]
unsafe fn sum_values<S: Simd, const BITS: u32, const DOT_PAIRS: bool, const T: usize>(
    s: S,
    pass: &Pass<'_>,
    tiles: Range<usize>,
    weights: *const i16,
    panel: usize,
) {
    let layout = pass.layout;
    let words = quantiser::<BITS>().words(LANES);
    let offset = layout.params_bytes() + layout.key_bytes() + panel * layout.value_panel_bytes();
    let mut acc = [s.zeros(); T];
    // SAFETY: the panels lie inside the tiles; each row has 16 weights for each tile; a row's acc follows its first 16
    // floats.
    unsafe {
        for tile in tiles {
            let (weights, values) = (weights.add(tile * LANES), pass.tiles[tile].add(offset));
            let prefetch = pass.line_prefetch(tile, offset, words);
            add_panel::<S, BITS, DOT_PAIRS, T>(s, &mut acc, weights, SPLIT, values, words, prefetch);
        }
        for (t, acc) in acc.into_iter().enumerate() {
            let partial = pass.partial.add(t * partial_floats(layout.head_dim));
            let (unit, offsets) = (s.splat(*partial.add(UNIT)), s.splat(*partial.add(OFFSETS)));
            s.store(partial.add(LANES + panel * LANES), s.mul_add(s.to_f32(acc), unit, offsets));
        }
    }
}
