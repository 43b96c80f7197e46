//! Integer sums of a tile over some quads of a block: one type per kind of instruction. All give the same integers.

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

use std::ops::Range;

use super::codes::Codes;
use crate::simd::{DotQuads, ShortSums, Simd};

/// Integer sums of a tile.
pub(crate) type Sums<S, const T: usize, const P: usize> = [[<S as Simd>::I; P]; T];

/// A kind of dot product.
pub(crate) trait Dot<S: Simd> {
    /// Whether it reads wide codes of the activations.
    const WIDE: bool;

    /// Adds the products of pairs of quads `pairs` of a block.
    ///
    /// # Safety
    /// The codes of the block are readable at `blocks`, and its activations (of the form that [`WIDE`](Self::WIDE)
    /// says) at `x`.
    unsafe fn add<C: Codes, const T: usize, const P: usize>(
        s: S,
        sums: &mut Sums<S, T, P>,
        x: [*const u8; T],
        blocks: [*const u8; P],
        pairs: Range<usize>,
    );
}

/// Codes widened to 16 bits, two products at a time: for instruction sets without a dot product of bytes.
pub(crate) struct Pairs;

/// Sums of 16 bits, for as long as they cannot overflow.
pub(crate) struct Short;

/// Four products at a time. Only for the tables of CPUs that have the instruction.
pub(crate) struct Quads;

impl<S: Simd> Dot<S> for Pairs {
    const WIDE: bool = true;

    #[inline(always)]
    unsafe fn add<C: Codes, const T: usize, const P: usize>(
        s: S,
        sums: &mut Sums<S, T, P>,
        x: [*const u8; T],
        blocks: [*const u8; P],
        pairs: Range<usize>,
    ) {
        for pair in pairs {
            for p in 0..P {
                // SAFETY: the quads are in the block, for codes and activations.
                unsafe {
                    for odd in [false, true] {
                        // Columns 0 and 2 of the quad, then 1 and 3: the order of the wide codes.
                        for last in [false, true] {
                            let halves = C::halves(s, blocks[p], pair, odd, last);
                            let at = 4 * pair + 2 * usize::from(odd) + usize::from(last);
                            for t in 0..T {
                                sums[t][p] = s.add_products(x[t].cast(), at, halves, sums[t][p]);
                            }
                        }
                    }
                }
            }
        }
    }
}

impl<S: ShortSums> Dot<S> for Short {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add<C: Codes, const T: usize, const P: usize>(
        s: S,
        sums: &mut Sums<S, T, P>,
        x: [*const u8; T],
        blocks: [*const u8; P],
        pairs: Range<usize>,
    ) {
        const { assert!(C::SHORT_QUADS >= 2, "a pair of quads fits the sums") };
        let mut pairs = pairs;
        while !pairs.is_empty() {
            let mut short = [[s.short_zeros(); P]; T];
            let end = pairs.end.min(pairs.start + C::SHORT_QUADS / 2);
            for pair in pairs.start..end {
                for p in 0..P {
                    // SAFETY: the quads are in the block, for codes and activations.
                    unsafe {
                        for odd in [false, true] {
                            let codes = C::quad(s, blocks[p], pair, odd);
                            let quad = 2 * pair + usize::from(odd);
                            for t in 0..T {
                                short[t][p] = s.add_short(x[t].cast(), quad, codes, short[t][p]);
                            }
                        }
                    }
                }
            }
            for t in 0..T {
                for p in 0..P {
                    sums[t][p] = s.add_pairs(short[t][p], sums[t][p]);
                }
            }
            pairs.start = end;
        }
    }
}

impl<S: DotQuads> Dot<S> for Quads {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add<C: Codes, const T: usize, const P: usize>(
        s: S,
        sums: &mut Sums<S, T, P>,
        x: [*const u8; T],
        blocks: [*const u8; P],
        pairs: Range<usize>,
    ) {
        for pair in pairs {
            for odd in [false, true] {
                let mut codes = [s.zeros(); P];
                for p in 0..P {
                    // SAFETY: the quad is in the block.
                    codes[p] = unsafe { C::quad(s, blocks[p], pair, odd) };
                }
                let quad = 2 * pair + usize::from(odd);
                for t in 0..T {
                    for p in 0..P {
                        // SAFETY: the activations of the quad exist.
                        sums[t][p] = unsafe { s.dot_quads(x[t].cast(), quad, codes[p], sums[t][p]) };
                    }
                }
            }
        }
    }
}
