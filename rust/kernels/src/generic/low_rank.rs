//! The first product of a low-rank update: tokens times the few long rows of A.
//!
//! ```text
//! out[t][j] = scale * sum over k of x[t][k] * a[j][k]
//! ```
//!
//! A row of A is a panel with consecutive columns as lanes, so the rank is not padded to 16. The sum is 16 chains,
//! `fma(x[t][16 i + lane], a[j][16 i + lane], .)` for ascending i; they are added in the order of [`Simd::sum`], then
//! multiplied by the scale. Tiles and the share of a worker do not affect it.

use std::ops::Range;

use super::panel_dtype::PanelDtype;
use super::row_ops::load;
use crate::panel::{LANES, panel_bytes};
use crate::simd::Simd;

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
    let mut row = rows.start;
    while row < rows.end {
        let left = rows.end - row;
        let mut token = tokens.start;
        // SAFETY: the tokens and rows of each tile lie inside the ranges.
        unsafe {
            while token + 2 <= tokens.end && left >= 2 {
                tile::<S, E, 2, 2>(s, call, token, row);
                token += 2;
            }
            while token < tokens.end {
                match left {
                    1 => tile::<S, E, 1, 1>(s, call, token, row),
                    _ => tile::<S, E, 1, 2>(s, call, token, row),
                }
                token += 1;
            }
        }
        row += left.min(2);
    }
}

/// `T` tokens times `R` rows.
///
/// # Safety
/// As for [`shrink`].
#[inline(always)]
unsafe fn tile<S: Simd, E: PanelDtype, const T: usize, const R: usize>(
    s: S,
    call: &Shrink,
    token: usize,
    row: usize,
) {
    let row_bytes = panel_bytes(E::DTYPE, call.columns.div_ceil(LANES));
    let mut acc = [[s.splat(0.0); R]; T];
    let (mut k, mut pair) = (0, 0);
    while k < call.columns {
        for odd in [false, true] {
            let start = if odd { k + LANES } else { k };
            if start >= call.columns {
                break;
            }
            let count = LANES.min(call.columns - start);
            for (t, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the token has these columns, and every row the pair of vectors.
                unsafe {
                    let x = load(s, call.x.add((token + t) * call.x_stride + start), count);
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let at = call.rows.add((row + r) * row_bytes + pair);
                        let a = if odd { E::odd(s, at) } else { E::even(s, at) };
                        *acc = s.mul_add(x, a, *acc);
                    }
                }
            }
        }
        k += 2 * LANES;
        pair += E::PAIR;
    }
    for (t, acc) in acc.into_iter().enumerate() {
        for (r, acc) in acc.into_iter().enumerate() {
            // SAFETY: `out` has the rank for every token.
            unsafe {
                *call.out.add((token + t) * call.rank + row + r) = s.sum(acc) * call.scale;
            }
        }
    }
}
