//! Integer products of quantised keys and values with rows of 16-bit integers.

use crate::quantiser::{Quantiser, WORD_BYTES};
use crate::simd::Simd;

pub(super) const fn quantiser<const BITS: u32>() -> Quantiser {
    Quantiser { bits: BITS }
}

/// The unit in which `largest` is `limit`, and its inverse; both are 0 if `largest` is negligible.
#[inline(always)]
pub(super) fn units(largest: f32, limit: f32) -> (f32, f32) {
    const LEAST: f32 = 1e-30; // well above the largest value whose inverse overflows
    if largest < LEAST { (0.0, 0.0) } else { (largest / limit, limit / largest) }
}

/// Adds the products of a pair of quantised values with one row of integers.
///
/// # Safety
/// The row has the pair; with `DOT_PAIRS`, the CPU has the instruction.
#[inline(always)]
pub(super) unsafe fn add_pair<S: Simd, const DOT_PAIRS: bool>(
    s: S,
    row: *const i16,
    pair: usize,
    halves: S::I,
    acc: S::I,
) -> S::I {
    // SAFETY: by contract.
    unsafe {
        if const { DOT_PAIRS } {
            s.dot_pairs(row, pair, halves, acc)
        } else {
            s.add_products(row, pair, halves, acc)
        }
    }
}

/// Adds the products of the quantised values of one panel with `T` rows of integers.
///
/// # Safety
/// `panel` has `words` words, and each row (`stride` integers apart) as many integers as they have steps.
#[inline(always)]
pub(super) unsafe fn add_panel<S: Simd, const BITS: u32, const DOT_PAIRS: bool, const T: usize>(
    s: S,
    acc: &mut [S::I; T],
    rows: *const i16,
    stride: usize,
    panel: *const u8,
    words: usize,
    prefetch: LinePrefetch,
) {
    let pairs = quantiser::<BITS>().steps() / 2;
    let mask = quantiser::<BITS>().levels() as u16;
    for word in 0..words {
        s.prefetch(prefetch.address.wrapping_add(word * prefetch.advance));
        // SAFETY: by contract.
        unsafe {
            let values = s.load_words(panel.add(word * WORD_BYTES));
            for pair in 0..pairs {
                let halves = s.halves(values, pair as u32 * BITS, mask);
                for (t, acc) in acc.iter_mut().enumerate() {
                    *acc =
                        add_pair::<S, DOT_PAIRS>(s, rows.add(t * stride), word * pairs + pair, halves, *acc);
                }
            }
        }
    }
}

/// The prefetches of a panel: one for every word, `advance` bytes apart. The address need not be valid.
#[derive(Clone, Copy)]
pub(super) struct LinePrefetch {
    pub(super) address: *const u8,
    pub(super) advance: usize,
}
