//! The instructions of AVX-512, VNNI and BF16 that are written in assembly.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::simd::TileRows;

/// `$instruction` of `b` and of the 32 bits of row `t` at column `k`, in every lane, with `c`. In assembly, because the
/// compiler loads the floats of a whole step early, runs out of registers and spills accumulators. Rows are addressed
/// from the first of three, so that the addresses of a tall tile fit the registers.
macro_rules! row_instruction {
    ($name:ident, $instruction:literal, $type:ty) => {
        /// # Safety
        /// Row `t` has column `k`; the CPU has the instruction.
        #[inline]
        #[target_feature(enable = "avx512f")]
        pub(super) unsafe fn $name<const T: usize>(
            rows: &TileRows<T>,
            t: usize,
            k: usize,
            b: $type,
            mut c: __m512,
        ) -> __m512 {
            let stride = size_of::<f32>() * rows.stride;
            // SAFETY: reads only column `k` of row `t` and writes only its output register.
            unsafe {
                let at = rows.at[t / 3 * 3].add(k);
                match t % 3 {
                    0 => asm!(
                        concat!($instruction, " {c}, {b}, dword ptr [{at}]{{1to16}}"),
                        at = in(reg) at,
                        b = in(zmm_reg) b,
                        c = inout(zmm_reg) c,
                        options(pure, readonly, nostack, preserves_flags),
                    ),
                    1 => asm!(
                        concat!($instruction, " {c}, {b}, dword ptr [{at} + {stride}]{{1to16}}"),
                        at = in(reg) at,
                        stride = in(reg) stride,
                        b = in(zmm_reg) b,
                        c = inout(zmm_reg) c,
                        options(pure, readonly, nostack, preserves_flags),
                    ),
                    _ => asm!(
                        concat!($instruction, " {c}, {b}, dword ptr [{at} + 2 * {stride}]{{1to16}}"),
                        at = in(reg) at,
                        stride = in(reg) stride,
                        b = in(zmm_reg) b,
                        c = inout(zmm_reg) c,
                        options(pure, readonly, nostack, preserves_flags),
                    ),
                }
            }
            c
        }
    };
}

row_instruction!(mul_add_broadcast, "vfmadd231ps", __m512);
row_instruction!(dot_bf16, "vdpbf16ps", __m512i);

/// In assembly for the same reason.
///
/// # Safety
/// `row[2 pair]` and `row[2 pair + 1]` are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn add_products(row: *const i16, pair: usize, halves: __m512i, mut c: __m512i) -> __m512i {
    let _product: __m512i; // a discarded output would be named as a wrong register
    // SAFETY: reads only the two integers and writes only its output registers.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{row} + 4 * {pair}]",
            "vpmaddwd {x}, {x}, {halves}",
            "vpaddd {c}, {c}, {x}",
            row = in(reg) row,
            pair = in(reg) pair,
            x = out(zmm_reg) _product,
            halves = in(zmm_reg) halves,
            c = inout(zmm_reg) c,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    c
}

/// In assembly for the same reason.
///
/// # Safety
/// Bytes `4 quad` to `4 quad + 3` of the row are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn add_short(row: *const i8, quad: usize, codes: __m512i, mut c: __m512i) -> __m512i {
    let _products: __m512i;
    // SAFETY: reads only the four bytes and writes only its output registers.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{row} + 4 * {quad}]",
            "vpmaddubsw {x}, {codes}, {x}",
            "vpaddw {c}, {c}, {x}",
            row = in(reg) row,
            quad = in(reg) quad,
            x = out(zmm_reg) _products,
            codes = in(zmm_reg) codes,
            c = inout(zmm_reg) c,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    c
}

/// In assembly for the same reason, and because the instruction is not among the features of this file.
///
/// # Safety
/// The CPU has VNNI; bytes `4 quad` to `4 quad + 3` of the row are readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn dot_quads(row: *const i8, quad: usize, codes: __m512i, mut c: __m512i) -> __m512i {
    // SAFETY: reads only the four bytes and writes only its output register.
    unsafe {
        asm!(
            "vpdpbusd {c}, {codes}, dword ptr [{row} + 4 * {quad}]{{1to16}}",
            row = in(reg) row,
            quad = in(reg) quad,
            codes = in(zmm_reg) codes,
            c = inout(zmm_reg) c,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    c
}

/// In assembly for the same reasons.
///
/// # Safety
/// The CPU has VNNI; `row[2 pair]` and `row[2 pair + 1]` are readable.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn dot_pairs(row: *const i16, pair: usize, halves: __m512i, mut c: __m512i) -> __m512i {
    // SAFETY: reads only the two integers and writes only its output register.
    unsafe {
        asm!(
            "vpdpwssd {c}, {halves}, dword ptr [{row} + 4 * {pair}]{{1to16}}",
            row = in(reg) row,
            pair = in(reg) pair,
            halves = in(zmm_reg) halves,
            c = inout(zmm_reg) c,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    c
}

/// In assembly, because the compiler would load the pairs once for both halves and keep them in registers.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_bf16_high(from: *const u8) -> __m512 {
    let pairs;
    let mask = _mm512_set1_epi32(0xffff_0000_u32.cast_signed());
    // SAFETY: reads only 64 bytes at `from` and writes only its output register.
    unsafe {
        asm!(
            "vpandd {pairs}, {mask}, zmmword ptr [{from}]",
            from = in(reg) from,
            mask = in(zmm_reg) mask,
            pairs = lateout(zmm_reg) pairs,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    pairs
}
