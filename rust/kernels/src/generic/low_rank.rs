//! The two products of a low-rank update: tokens times the few long rows of A, and the result times B.
//!
//! ```text
//! shrink   hidden[t][j] = scale * sum over k of x[t][k] * a[j][k]
//! expand   out[t][i] += sum over j of hidden[t][j] * b[i][j]
//! ```
//!
//! A row of A is a panel with consecutive columns as lanes, so the rank is not padded to 16. The sum is 16 chains,
//! `fma(x[t][16 i + lane], a[j][16 i + lane], .)` for ascending i; they are added in the order of [`Simd::sum`], then
//! multiplied by the scale. B is a matrix in panels, and its sum the chain of `matmul`, which is then added to `out`.
//! Tiles and the share of a worker do not affect the results.

use std::marker::PhantomData;
use std::ops::Range;

use super::panel_dtype::PanelDtype;
use super::row_ops::{load, store};
use super::tile::{self, Prefetch, RowTiles};
use crate::panel::{LANES, panel_bytes};
use crate::simd::Simd;
use crate::simd::TileFn;

/// The first product of one part of an update. Its pointers are valid for its shapes, and no other code accesses the
/// part of `out` that a call covers.
pub(crate) struct Shrink {
    pub(crate) x: *const f32,
    /// Floats from one token to the next.
    pub(crate) x_stride: usize,
    pub(crate) columns: usize,
    /// The rows of A as panels.
    pub(crate) rows: *const u8,
    pub(crate) scale: f32,
    pub(crate) out: *mut f32,
    /// Floats from one token of `out` to the next.
    pub(crate) rank: usize,
}

/// Computes the rows `rows` of A for the tokens `tokens`.
///
/// # Safety
/// `call` is as its type requires, for dtype `E`; `tokens` and `rows` lie inside it.
#[inline(always)]
pub(crate) unsafe fn shrink<S: Simd, E: PanelDtype>(
    s: S,
    call: &Shrink,
    tokens: Range<usize>,
    rows: Range<usize>,
) {
    let row_bytes = panel_bytes(E::DTYPE, call.columns.div_ceil(LANES));
    let mut row = rows.start;
    let mut fetched = row;
    while row < rows.end {
        let left = rows.end - row;
        // The rows of this tile and of the next one.
        let ahead = rows.end.min(row + 8);
        prefetch(s, call.rows.wrapping_add(fetched * row_bytes), (ahead - fetched) * row_bytes);
        fetched = ahead;
        let mut token = tokens.start;
        // SAFETY: the tokens and rows of each tile lie inside the ranges.
        row += unsafe {
            if const { S::WIDE_SHRINK } && left >= 4 {
                while token + 4 <= tokens.end {
                    shrink_tile::<S, E, 4, 4, 16>(s, call, token, row);
                    token += 4;
                }
                while token + 2 <= tokens.end {
                    shrink_tile::<S, E, 2, 4, 8>(s, call, token, row);
                    token += 2;
                }
                while token < tokens.end {
                    shrink_tile::<S, E, 1, 4, 4>(s, call, token, row);
                    token += 1;
                }
                4
            } else if left >= 2 {
                while token + 2 <= tokens.end {
                    shrink_tile::<S, E, 2, 2, 4>(s, call, token, row);
                    token += 2;
                }
                while token < tokens.end {
                    shrink_tile::<S, E, 1, 2, 2>(s, call, token, row);
                    token += 1;
                }
                2
            } else {
                while token < tokens.end {
                    shrink_tile::<S, E, 1, 1, 1>(s, call, token, row);
                    token += 1;
                }
                1
            }
        };
    }
}

/// `T` tokens times `R` rows; `N` is the number of products.
///
/// # Safety
/// As for [`shrink`].
#[inline(always)]
unsafe fn shrink_tile<S: Simd, E: PanelDtype, const T: usize, const R: usize, const N: usize>(
    s: S,
    call: &Shrink,
    token: usize,
    row: usize,
) {
    let row_bytes = panel_bytes(E::DTYPE, call.columns.div_ceil(LANES));
    let mut acc = [s.splat(0.0); N];
    let (mut k, mut pair) = (0, 0);
    // SAFETY: the tokens have these columns, and every row the pairs of vectors.
    unsafe {
        let (x, a) = (call.x.add(token * call.x_stride), call.rows.add(row * row_bytes));
        while k + 2 * LANES <= call.columns {
            let (even, odd) = (x.add(k), x.add(k + LANES));
            step::<S, E, T, R, N, false>(s, &mut acc, even, call.x_stride, LANES, a.add(pair), row_bytes);
            step::<S, E, T, R, N, true>(s, &mut acc, odd, call.x_stride, LANES, a.add(pair), row_bytes);
            k += 2 * LANES;
            pair += E::PAIR;
        }
        if k < call.columns {
            let count = LANES.min(call.columns - k);
            step::<S, E, T, R, N, false>(s, &mut acc, x.add(k), call.x_stride, count, a.add(pair), row_bytes);
            k += count;
        }
        if k < call.columns {
            let count = call.columns - k;
            step::<S, E, T, R, N, true>(s, &mut acc, x.add(k), call.x_stride, count, a.add(pair), row_bytes);
        }
    }
    let sums = sums(s, acc);
    for t in 0..T {
        for r in 0..R {
            // SAFETY: `out` has the rank for every token.
            unsafe {
                *call.out.add((token + t) * call.rank + row + r) =
                    sums[(t * R + r) * (LANES / N)] * call.scale;
            }
        }
    }
}

/// One step of all chains: `count` columns of the rows at `x` times one vector of each pair at `a`.
///
/// # Safety
/// `T` rows at `x` have the columns, and `R` rows at `a` the pair.
#[inline(always)]
unsafe fn step<S: Simd, E: PanelDtype, const T: usize, const R: usize, const N: usize, const ODD: bool>(
    s: S,
    acc: &mut [S::V; N],
    x: *const f32,
    x_stride: usize,
    count: usize,
    a: *const u8,
    row_bytes: usize,
) {
    let mut tokens = [s.splat(0.0); T];
    for (t, token) in tokens.iter_mut().enumerate() {
        // SAFETY: by contract.
        *token = unsafe { load(s, x.add(t * x_stride), count) };
    }
    for r in 0..R {
        // SAFETY: by contract.
        let a = unsafe {
            let pair = a.add(r * row_bytes);
            if ODD { E::odd(s, pair) } else { E::even(s, pair) }
        };
        for (t, token) in tokens.iter().enumerate() {
            acc[t * R + r] = s.mul_add(*token, a, acc[t * R + r]);
        }
    }
}

/// The sums of `N` vectors, each in the order of [`Simd::sum`]: that of vector i in lane `i * LANES / N`. `N` is a
/// power of two.
#[inline(always)]
fn sums<S: Simd, const N: usize>(s: S, mut v: [S::V; N]) -> [f32; LANES] {
    let (mut count, mut half) = (N, LANES / 2);
    while half > 0 {
        if count > 1 {
            count /= 2;
            // The lanes with numbers that do not have the bit of `half`.
            let low = [0x5555, 0x3333, 0x0f0f, 0x00ff][half.trailing_zeros() as usize];
            for i in 0..count {
                let (a, b) = (v[i], v[i + count]);
                v[i] = s.add(s.select(low, a, b), s.exchange(s.select(low, b, a), half));
            }
        } else {
            v[0] = s.add(v[0], s.exchange(v[0], half));
        }
        half /= 2;
    }
    s.to_array(v[0])
}

/// The second product of one part of an update. Its pointers are valid for its shapes, and no other code accesses the
/// part of `out` that a call covers.
pub(crate) struct Expand {
    /// `[tokens, rank]`.
    pub(crate) hidden: *const f32,
    pub(crate) rank: usize,
    /// Rows of B.
    pub(crate) rows: usize,
    /// The panels of B.
    pub(crate) panels: *const u8,
    pub(crate) out: *mut f32,
    /// Floats from one token of `out` to the next.
    pub(crate) stride: usize,
}

/// Adds the rows of the panels `panels` of B for the tokens `tokens`.
///
/// # Safety
/// `call` is as its type requires, for dtype `E`; `panels` and `tokens` lie inside it.
#[inline(always)]
pub(crate) unsafe fn expand<S: Simd, E: PanelDtype>(
    s: S,
    call: &Expand,
    panels: Range<usize>,
    tokens: Range<usize>,
) {
    let tiles = RowTiles::new(tokens.len(), S::TILES.max_rows());
    for tile in 0..tiles.count {
        let rows = tiles.rows(tile);
        let mut panel = panels.start;
        while panel < panels.end {
            let tile = ExpandTile::<E> { call, token: tokens.start + rows.start, panel, dtype: PhantomData };
            // SAFETY: the tokens and the panels lie inside the call.
            panel += unsafe { s.call_tile(rows.len(), panels.end - panel, tile) };
        }
    }
}

struct ExpandTile<'a, E> {
    call: &'a Expand,
    token: usize,
    panel: usize,
    dtype: PhantomData<E>,
}

impl<S: Simd, E: PanelDtype> TileFn<S> for ExpandTile<'_, E> {
    /// # Safety
    /// The call has `T` tokens from `token` on and `P` panels from `panel` on.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let Expand { hidden, rank, rows, panels, out, stride } = *self.call;
        let panel_bytes = panel_bytes(E::DTYPE, rank);
        let mut at = [panels; P];
        for (p, panel) in at.iter_mut().enumerate() {
            // SAFETY: by contract.
            *panel = unsafe { panels.add((self.panel + p) * panel_bytes) };
        }
        // The panels after these.
        let next = Prefetch { offsets: [(P * panel_bytes).cast_signed(); P], advance: E::PAIR };
        let mut acc = tile::zero::<S, T, P>(s);
        // SAFETY: by contract; `out` has the rows of B for every token.
        unsafe {
            tile::advance_any::<S, E, T, P>(
                s,
                &mut acc,
                hidden.add(self.token * rank),
                rank,
                at,
                0..rank,
                next,
            );
            tile::unrolled!(t < T => {
                for (p, sum) in acc[t].iter().enumerate() {
                    let row = (self.panel + p) * LANES;
                    let lanes = LANES.min(rows - row);
                    let out = out.add((self.token + t) * stride + row);
                    store(s, out, lanes, s.add(*sum, load(s, out, lanes)));
                }
            });
        }
    }
}

/// Prefetches the cache lines of `bytes` bytes at `at`, which may be any address.
#[inline(always)]
pub(crate) fn prefetch<S: Simd>(s: S, at: *const u8, bytes: usize) {
    let mut line = 0;
    while line < bytes {
        s.prefetch(at.wrapping_add(line));
        line += 64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arch::portable::Portable;

    #[test]
    fn sums_together_have_the_bits_of_each_alone() {
        fn check<const N: usize>() {
            let vectors: [[f32; LANES]; N] = std::array::from_fn(|i| {
                std::array::from_fn(|lane| {
                    ((i * LANES + lane) as f32 * 0.7).sin() * 1e3_f32.powi(lane as i32 % 3)
                })
            });
            let together = sums(Portable, vectors.map(|lanes| Portable.vector(lanes)));
            for (i, lanes) in vectors.into_iter().enumerate() {
                let alone = Portable.sum(Portable.vector(lanes));
                assert_eq!(together[i * LANES / N].to_bits(), alone.to_bits(), "vector {i} of {N}");
            }
        }
        check::<1>();
        check::<2>();
        check::<4>();
        check::<8>();
        check::<16>();
    }
}
