//! Products of grids with the dot products of DOTPROD (signed bytes) and of I8MM (unsigned by signed bytes).

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

use std::arch::aarch64::*;
use std::arch::asm;
use std::ops::Range;

use super::neon::{self, I, Neon, each};
use crate::arch::{PerBits, Table};
use crate::generic::grid::GridKernel;
use crate::generic::grid::codes::Codes;
use crate::generic::grid::dot::{Dot, Quads, Sums};
use crate::simd::{DotQuads, Simd};

/// The table for CPUs that have DOTPROD.
pub(crate) static DOTPROD: Table = Table { grid_kernels: dotprod::KERNELS, ..neon::TABLE };
/// The table for CPUs that have DOTPROD and I8MM.
pub(crate) static I8MM: Table = Table { grid_kernels: i8mm::KERNELS, ..neon::TABLE };

/// Only the products of grids are used, and compiled.
mod dotprod {
    use super::*;

    type Signed = Neon<false>;
    crate::arch::compile_table!(Signed from Neon::new_unchecked(), #[target_feature(enable = "neon,dotprod")]);

    pub(super) const KERNELS: PerBits<GridKernel> = table::<Quads, SignedQuads, false>().grid_kernels;
}

/// Only the products of grids are used, and compiled.
mod i8mm {
    use super::*;

    type Mixed = Neon<true>;
    crate::arch::compile_table!(Mixed from Neon::new_unchecked(), #[target_feature(enable = "neon,dotprod,i8mm")]);

    pub(super) const KERNELS: PerBits<GridKernel> = table::<Quads, Quads, false>().grid_kernels;
}

/// `$instruction` of each register of codes with the four bytes of quad `quad` of the row. In assembly, because the
/// intrinsics are not stable.
macro_rules! dot_instruction {
    ($name:ident, $feature:literal, $instruction:literal) => {
        /// # Safety
        /// Bytes `4 quad` to `4 quad + 3` of the row are readable.
        #[inline]
        #[target_feature(enable = $feature)]
        unsafe fn $name(row: *const i8, quad: usize, codes: I, mut c: I) -> I {
            // SAFETY: reads only the four bytes and writes only its output registers.
            unsafe {
                asm!(
                    "ldr {x:s}, [{row}, {quad}, lsl #2]",
                    concat!($instruction, " {c0:v}.4s, {codes0:v}.16b, {x:v}.4b[0]"),
                    concat!($instruction, " {c1:v}.4s, {codes1:v}.16b, {x:v}.4b[0]"),
                    concat!($instruction, " {c2:v}.4s, {codes2:v}.16b, {x:v}.4b[0]"),
                    concat!($instruction, " {c3:v}.4s, {codes3:v}.16b, {x:v}.4b[0]"),
                    row = in(reg) row,
                    quad = in(reg) quad,
                    x = out(vreg) _,
                    codes0 = in(vreg) codes.0[0],
                    codes1 = in(vreg) codes.0[1],
                    codes2 = in(vreg) codes.0[2],
                    codes3 = in(vreg) codes.0[3],
                    c0 = inout(vreg) c.0[0],
                    c1 = inout(vreg) c.0[1],
                    c2 = inout(vreg) c.0[2],
                    c3 = inout(vreg) c.0[3],
                    options(pure, readonly, nostack, preserves_flags),
                );
            }
            c
        }
    };
}

dot_instruction!(dot_signed, "neon,dotprod", "sdot");
dot_instruction!(dot_mixed, "neon,i8mm", "usdot");

/// For codes below 128: DOTPROD has no product of unsigned by signed bytes.
impl DotQuads for Neon<false> {
    #[inline(always)]
    unsafe fn dot_quads(self, row: *const i8, quad: usize, codes: I, c: I) -> I {
        // SAFETY: by contract.
        unsafe { dot_signed(row, quad, codes, c) }
    }
}

impl DotQuads for Neon<true> {
    #[inline(always)]
    unsafe fn dot_quads(self, row: *const i8, quad: usize, codes: I, c: I) -> I {
        // SAFETY: by contract.
        unsafe { dot_mixed(row, quad, codes, c) }
    }
}

/// Four products at a time of codes of 8 bits less 128, which are signed, and 128 times the activations.
struct SignedQuads;

impl Dot<Neon<false>> for SignedQuads {
    const WIDE: bool = false;

    #[inline(always)]
    unsafe fn add<C: Codes, const T: usize, const P: usize>(
        s: Neon<false>,
        sums: &mut Sums<Neon<false>, T, P>,
        x: [*const u8; T],
        blocks: [*const u8; P],
        pairs: Range<usize>,
    ) {
        for t in 0..T {
            let mut sum = 0;
            for pair in pairs.clone() {
                // SAFETY: `s` proves NEON; the activations of the quads exist.
                sum += unsafe { i32::from(vaddlv_s8(vld1_s8(x[t].add(8 * pair).cast()))) };
            }
            for p in 0..P {
                sums[t][p] =
                    each!(I: R => vaddq_u32(sums[t][p].0[R], vdupq_n_u32((sum << 7).cast_unsigned())));
            }
        }
        for pair in pairs {
            for odd in [false, true] {
                let mut codes = [s.zeros(); P];
                for p in 0..P {
                    // SAFETY: the quad is in the block.
                    let quad = unsafe { C::quad(s, blocks[p], pair, odd) };
                    codes[p] = each!(I: R => {
                        vreinterpretq_u32_u8(veorq_u8(vreinterpretq_u8_u32(quad.0[R]), vdupq_n_u8(128)))
                    });
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
