//! The microkernel: T rows of f32 times P panels of 16 lanes, accumulated in registers.
//!
//! ```text
//! acc[t][p] = fma(x[t][k], panel[p][k], acc[t][p])      for k ascending
//! ```
//!
//! Weights, keys and values are all panels, so nearly all time is spent in this loop. The determinism contract follows
//! from it: each lane of each accumulator is one chain over ascending k, and storing and reloading the chain (at a K
//! block, at a tile of a split) does not change its bits.
//!
//! Each instruction set lists its shapes T x P ([`tile_shapes`]). The accumulators must fit its registers, beside the
//! panels and a broadcast, and be numerous enough to hide the latency of the fused multiply-add (4 cycles, two per
//! cycle).

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

use std::ops::Range;

use super::panel_dtype::PanelDtype;
use crate::simd::{Simd, TileRows};

/// `tile_shapes!(1 x 4, 2 x 3)` is [`Simd::TILES`] and [`Simd::call_tile`] for tiles of 1 row times 4 panels and of 2
/// rows times 3 panels. The rows must ascend from 1.
macro_rules! tile_shapes {
    ($($rows:literal x $panels:literal),+) => {
        const TILES: TileShapes = TileShapes { panels: &[$($panels),+] };

        #[inline(always)]
        unsafe fn call_tile<F: TileFn<Self>>(self, rows: usize, left: usize, tile: F) -> usize {
            // SAFETY: by contract.
            unsafe {
                match rows {
                    $($rows if const { $rows <= F::MAX_ROWS } => {
                        if $panels == 1 || left >= $panels {
                            tile.call::<$rows, $panels>(self);
                            $panels
                        } else if $panels > 2 && left >= 2 {
                            tile.call::<$rows, 2>(self);
                            2
                        } else {
                            tile.call::<$rows, 1>(self);
                            1
                        }
                    })+
                    _ => unreachable!("a tile of {rows} rows; this is a bug"),
                }
            }
        }
    };
}
pub(crate) use tile_shapes;

/// A division of rows into as few tiles as possible, of nearly equal height: 32 is 6 6 5 5 5 5 and not 6 6 6 6 6 2,
/// whose last tile would run at a third of the speed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowTiles {
    pub(crate) count: usize,
    base: usize,
    larger: usize,
}

impl RowTiles {
    /// Tiles of at most `limit` rows.
    pub(crate) const fn new(rows: usize, limit: usize) -> Self {
        let count = rows.div_ceil(limit);
        let divisor = if count == 0 { 1 } else { count };
        Self { count, base: rows / divisor, larger: rows % divisor }
    }

    /// The rows of tile `index`.
    #[inline(always)]
    pub(crate) const fn rows(&self, index: usize) -> Range<usize> {
        self.start(index)..self.start(index + 1)
    }

    #[inline(always)]
    const fn start(&self, index: usize) -> usize {
        index * self.base + if index < self.larger { index } else { self.larger }
    }
}

/// Runs `$body` for each `$t` below `$count`, a constant of at most 16, without a loop: the compiler does not unroll
/// the loops of the tallest tiles, and a loop over accumulators keeps them in memory.
macro_rules! unrolled {
    ($t:ident < $count:ident => $body:expr) => {
        $crate::generic::tile::unrolled!($t < $count => $body; 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($t:ident < $count:ident => $body:expr; $($index:literal)+) => {
        $(if const { $index < $count } {
            let $t = $index;
            $body
        })+
    };
}
pub(crate) use unrolled;

impl<const T: usize> TileRows<T> {
    /// # Safety
    /// `T` rows, `stride` floats apart, are readable at `x`.
    #[inline(always)]
    unsafe fn new(x: *const f32, stride: usize) -> Self {
        let mut rows = Self { at: [x; T], stride };
        unrolled!(t < T => {
            // SAFETY: the row exists by contract.
            rows.at[t] = unsafe { x.add(t * stride) };
        });
        rows
    }
}

/// The prefetches of a tile: at each pair of steps, the cache lines of a pair at `offsets[p]` from panel p; the offsets
/// then grow by `advance` bytes.
#[derive(Clone, Copy)]
pub(crate) struct Prefetch<const P: usize> {
    pub(crate) offsets: [isize; P],
    pub(crate) advance: usize,
}

/// Accumulators of a tile.
pub(crate) type Acc<S, const T: usize, const P: usize> = [[<S as Simd>::V; P]; T];

#[inline(always)]
pub(crate) fn zero<S: Simd, const T: usize, const P: usize>(s: S) -> Acc<S, T, P> {
    [[s.splat(0.0); P]; T]
}

/// # Safety
/// `T` rows of 16 floats, `row_stride` floats apart, are readable at each of `P` positions `panel_stride` floats apart.
#[inline(always)]
pub(crate) unsafe fn load<S: Simd, const T: usize, const P: usize>(
    s: S,
    from: *const f32,
    row_stride: usize,
    panel_stride: usize,
) -> Acc<S, T, P> {
    let mut acc = zero::<S, T, P>(s);
    unrolled!(t < T => {
        for p in 0..P {
            // SAFETY: readable by contract.
            acc[t][p] = unsafe { s.load(from.add(t * row_stride + p * panel_stride)) };
        }
    });
    acc
}

/// # Safety
/// As for [`load`], and writable.
#[inline(always)]
pub(crate) unsafe fn store<S: Simd, const T: usize, const P: usize>(
    s: S,
    to: *mut f32,
    row_stride: usize,
    panel_stride: usize,
    acc: &Acc<S, T, P>,
) {
    unrolled!(t < T => {
        for p in 0..P {
            // SAFETY: writable by contract.
            unsafe { s.store(to.add(t * row_stride + p * panel_stride), acc[t][p]) };
        }
    });
}

/// Continues the chains over `steps`, which are whole pairs.
///
/// # Safety
/// - `x` has `T` rows, `x_stride` floats apart, with `steps` readable in each; if `E` rounds rows, a pair of bf16 takes
///   the place of a float, and the instruction set has [`Simd::dot_bf16`];
/// - every one of `panels` has `steps`.
#[inline(always)]
pub(crate) unsafe fn advance<S: Simd, E: PanelDtype, const T: usize, const P: usize>(
    s: S,
    acc: &mut Acc<S, T, P>,
    x: *const f32,
    x_stride: usize,
    panels: [*const u8; P],
    steps: Range<usize>,
    prefetch: Prefetch<P>,
) {
    // SAFETY: by contract.
    let rows = unsafe { TileRows::<T>::new(x, x_stride) };
    let mut k = steps.start;
    let mut pair = k / 2 * E::PAIR;
    let mut ahead = 0;
    while k < steps.end {
        for p in 0..P {
            let mut line = 0;
            while line < E::PAIR {
                s.prefetch(panels[p].wrapping_offset(prefetch.offsets[p]).wrapping_add(ahead + line));
                line += 64;
            }
        }
        // SAFETY: the pair and both columns are among `steps`.
        unsafe {
            if const { E::ROUNDS_ROWS } {
                step_of_pairs(s, acc, &rows, panels, pair, k / 2);
            } else {
                step::<S, E, T, P, false>(s, acc, &rows, panels, pair, k);
                step::<S, E, T, P, true>(s, acc, &rows, panels, pair, k + 1);
            }
        }
        pair += E::PAIR;
        ahead += prefetch.advance;
        k += 2;
    }
}

/// As [`advance`], for any steps, and for rows that are not rounded.
///
/// # Safety
/// As for [`advance`].
#[inline(always)]
pub(crate) unsafe fn advance_any<S: Simd, E: PanelDtype, const T: usize, const P: usize>(
    s: S,
    acc: &mut Acc<S, T, P>,
    x: *const f32,
    x_stride: usize,
    panels: [*const u8; P],
    steps: Range<usize>,
    prefetch: Prefetch<P>,
) {
    let Range { mut start, end } = steps;
    // SAFETY: by contract.
    let rows = unsafe { TileRows::<T>::new(x, x_stride) };
    // SAFETY: by contract.
    unsafe {
        if start % 2 == 1 && start < end {
            step::<S, E, T, P, true>(s, acc, &rows, panels, start / 2 * E::PAIR, start);
            start += 1;
        }
        advance::<S, E, T, P>(s, acc, x, x_stride, panels, start..end / 2 * 2, prefetch);
        if end % 2 == 1 && start < end {
            step::<S, E, T, P, false>(s, acc, &rows, panels, end / 2 * E::PAIR, end - 1);
        }
    }
}

/// Continues 16 chains in memory by step `k`: for a first or last step that is half of a pair.
///
/// # Safety
/// - 16 chains are readable and writable at `acc`;
/// - `row` has column `k`, and `panel` has its pair.
#[inline(always)]
pub(crate) unsafe fn single_step<S: Simd, E: PanelDtype>(
    s: S,
    acc: *mut f32,
    row: *const f32,
    panel: *const u8,
    k: usize,
) {
    // SAFETY: by contract.
    unsafe {
        let pair = panel.add(k / 2 * E::PAIR);
        let w = if k % 2 == 1 { E::odd(s, pair) } else { E::even(s, pair) };
        s.store(acc, s.mul_add(s.splat(*row.add(k)), w, s.load(acc)));
    }
}

/// One step of every chain.
///
/// # Safety
/// - `rows` have column `k`;
/// - `panels` have the pair of step `k` at offset `pair`; the step is its second if `ODD` and its first if not.
#[inline(always)]
unsafe fn step<S: Simd, E: PanelDtype, const T: usize, const P: usize, const ODD: bool>(
    s: S,
    acc: &mut Acc<S, T, P>,
    rows: &TileRows<T>,
    panels: [*const u8; P],
    pair: usize,
    k: usize,
) {
    for p in 0..P {
        // SAFETY: the pair and the columns exist by contract.
        unsafe {
            let at = panels[p].add(pair);
            let w = if ODD { E::odd(s, at) } else { E::even(s, at) };
            unrolled!(t < T => acc[t][p] = s.mul_add_broadcast(rows, t, k, w, acc[t][p]));
        }
    }
}

/// Two steps of every chain, with rows of bf16.
///
/// # Safety
/// - `rows` have pair `index`, and `panels` have it at offset `pair`;
/// - the instruction set has [`Simd::dot_bf16`].
#[inline(always)]
unsafe fn step_of_pairs<S: Simd, const T: usize, const P: usize>(
    s: S,
    acc: &mut Acc<S, T, P>,
    rows: &TileRows<T>,
    panels: [*const u8; P],
    pair: usize,
    index: usize,
) {
    for p in 0..P {
        // SAFETY: by contract.
        unsafe {
            let weights = panels[p].add(pair);
            unrolled!(t < T => acc[t][p] = s.dot_bf16(rows, t, index, weights, acc[t][p]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_balanced_and_cover_every_row_once() {
        let heights = |rows| {
            let tiles = RowTiles::new(rows, 6);
            (0..tiles.count).map(|i| tiles.rows(i).len()).collect::<Vec<_>>()
        };
        assert_eq!(heights(32), [6, 6, 5, 5, 5, 5]);
        assert_eq!(heights(7), [4, 3]);
        assert_eq!(heights(0), []);
        for rows in 0..200 {
            let tiles = RowTiles::new(rows, 6);
            let all: Vec<usize> = (0..tiles.count).flat_map(|i| tiles.rows(i)).collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
            assert!(heights(rows).iter().all(|height| (1..=6).contains(height)));
        }
    }
}
