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
//! T x P is chosen for 16 registers of 8 lanes. At T x P = 6 the accumulators take 12 registers, which leaves two for
//! the panel, one for the broadcast and one for the bf16 mask; fewer than 8 accumulator registers would expose the
//! latency of the fused multiply-add (4 cycles, two per cycle). So 1 row takes 4 panels at a time, 2 rows take 3, 3
//! rows take 2.

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

use std::ops::Range;

use super::panel_dtype::PanelDtype;
use crate::simd::Simd;

/// Maximum number of rows of a tile.
pub(crate) const MAX_ROWS: usize = 6;

/// The number of panels that a tile of `rows` rows processes at a time.
pub(crate) const fn panels_at_once(rows: usize) -> usize {
    [0, 4, 3, 2, 1, 1, 1][rows]
}

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

/// Calls a function generic over T and P for `$rows` in 1..=6 rows and `panels_at_once($rows)` panels, or one panel if
/// fewer are `$left`. The value is the number of panels processed.
macro_rules! with_tile_shape {
    ($rows:expr, $left:expr, $f:ident::<$($generic:ident),+>($($argument:expr),* $(,)?)) => {
        match ($rows, $left >= $crate::generic::tile::panels_at_once($rows)) {
            (6, _) => { $f::<$($generic),+, 6, 1>($($argument),*); 1 }
            (5, _) => { $f::<$($generic),+, 5, 1>($($argument),*); 1 }
            (4, _) => { $f::<$($generic),+, 4, 1>($($argument),*); 1 }
            (3, true) => { $f::<$($generic),+, 3, 2>($($argument),*); 2 }
            (3, false) => { $f::<$($generic),+, 3, 1>($($argument),*); 1 }
            (2, true) => { $f::<$($generic),+, 2, 3>($($argument),*); 3 }
            (2, false) => { $f::<$($generic),+, 2, 1>($($argument),*); 1 }
            (1, true) => { $f::<$($generic),+, 1, 4>($($argument),*); 4 }
            (1, false) => { $f::<$($generic),+, 1, 1>($($argument),*); 1 }
            (rows, _) => unreachable!("a tile of {rows} rows; this is a bug"),
        }
    };
}
pub(crate) use with_tile_shape;

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
    for t in 0..T {
        for p in 0..P {
            // SAFETY: readable by contract.
            acc[t][p] = unsafe { s.load(from.add(t * row_stride + p * panel_stride)) };
        }
    }
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
    for t in 0..T {
        for p in 0..P {
            // SAFETY: writable by contract.
            unsafe { s.store(to.add(t * row_stride + p * panel_stride), acc[t][p]) };
        }
    }
}

/// Continues the chains over `steps`, which may start and end in the middle of a pair.
///
/// # Safety
/// - `x` has `T` rows, `x_stride` floats apart, with `steps` readable in each;
/// - every one of `panels` has the pairs that `steps` touches.
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
    let mut rows = [x; T];
    for t in 1..T {
        // SAFETY: the row exists by contract.
        rows[t] = unsafe { x.add(t * x_stride) };
    }
    let mut k = steps.start;
    let mut ahead = 0;
    if k % 2 == 1 && k < steps.end {
        // SAFETY: the pair and the column are among `steps`.
        unsafe { step::<S, E, T, P, true>(s, acc, rows, panels, k) };
        k += 1;
    }
    while k + 1 < steps.end {
        for p in 0..P {
            let mut line = 0;
            while line < E::PAIR {
                s.prefetch(panels[p].wrapping_offset(prefetch.offsets[p]).wrapping_add(ahead + line));
                line += 64;
            }
        }
        // SAFETY: the pair and both columns are among `steps`.
        unsafe {
            step::<S, E, T, P, false>(s, acc, rows, panels, k);
            step::<S, E, T, P, true>(s, acc, rows, panels, k + 1);
        }
        ahead += prefetch.advance;
        k += 2;
    }
    if k < steps.end {
        // SAFETY: the pair and the column are among `steps`.
        unsafe { step::<S, E, T, P, false>(s, acc, rows, panels, k) };
    }
}

/// One step of every chain.
///
/// # Safety
/// - `rows` have column `k`;
/// - `panels` have the pair of step `k`, which is odd if `ODD` and even if not.
#[inline(always)]
unsafe fn step<S: Simd, E: PanelDtype, const T: usize, const P: usize, const ODD: bool>(
    s: S,
    acc: &mut Acc<S, T, P>,
    rows: [*const f32; T],
    panels: [*const u8; P],
    k: usize,
) {
    for p in 0..P {
        // SAFETY: the pair and the columns exist by contract.
        unsafe {
            let pair = panels[p].add(k / 2 * E::PAIR);
            let w = if ODD { E::odd(s, pair) } else { E::even(s, pair) };
            for t in 0..T {
                acc[t][p] = s.mul_add_broadcast(rows[t], k, w, acc[t][p]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_balanced_and_cover_every_row_once() {
        let heights = |rows| {
            let tiles = RowTiles::new(rows, MAX_ROWS);
            (0..tiles.count).map(|i| tiles.rows(i).len()).collect::<Vec<_>>()
        };
        assert_eq!(heights(32), [6, 6, 5, 5, 5, 5]);
        assert_eq!(heights(7), [4, 3]);
        assert_eq!(heights(0), []);
        for rows in 0..200 {
            let tiles = RowTiles::new(rows, MAX_ROWS);
            let all: Vec<usize> = (0..tiles.count).flat_map(|i| tiles.rows(i)).collect();
            assert_eq!(all, (0..rows).collect::<Vec<_>>());
            assert!(heights(rows).iter().all(|height| (1..=MAX_ROWS).contains(height)));
        }
    }
}
