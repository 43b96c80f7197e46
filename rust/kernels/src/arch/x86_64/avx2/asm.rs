//! The instructions of AVX2, FMA and AVX-VNNI that are written in assembly.

use std::arch::asm;
use std::arch::x86_64::*;

use super::{I, V};

/// The lines of assembly, with element `$k` of `$row` broadcast to `x`, and the halves of `$b` and `$c` in registers.
macro_rules! with_broadcast {
    ($row:ident, $k:ident, $b:ident, $c:ident, $($line:expr),+) => {
        asm!(
            $($line),+,
            row = in(reg) $row,
            k = in(reg) $k,
            x = out(ymm_reg) _,
            b_low = in(ymm_reg) $b.0,
            b_high = in(ymm_reg) $b.1,
            low = inout(ymm_reg) $c.0,
            high = inout(ymm_reg) $c.1,
            options(pure, readonly, nostack, preserves_flags),
        )
    };
}

/// Written in assembly, because the compiler schedules the broadcasts of a whole step early, runs out of registers and
/// spills accumulators, which doubles the time of a tile.
///
/// # Safety
/// `row[k]` is readable.
#[inline]
#[target_feature(enable = "avx,fma")]
pub(super) unsafe fn mul_add_broadcast(row: *const f32, k: usize, b: V, mut c: V) -> V {
    // SAFETY: reads only `row[k]` and writes only its output registers.
    unsafe {
        with_broadcast!(
            row,
            k,
            b,
            c,
            "vbroadcastss {x}, dword ptr [{row} + 4 * {k}]",
            "vfmadd231ps {low}, {x}, {b_low}",
            "vfmadd231ps {high}, {x}, {b_high}"
        );
    }
    c
}

/// The same for integers, in assembly for the same reason.
///
/// # Safety
/// `row[2 pair]` and `row[2 pair + 1]` are readable.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_products(row: *const i16, pair: usize, halves: I, mut c: I) -> I {
    // SAFETY: reads only the two integers and writes only its output registers.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{row} + 4 * {pair}]",
            "vpmaddwd {y}, {x}, {halves_low}",
            "vpmaddwd {x}, {x}, {halves_high}",
            "vpaddd {low}, {low}, {y}",
            "vpaddd {high}, {high}, {x}",
            row = in(reg) row,
            pair = in(reg) pair,
            x = out(ymm_reg) _,
            y = out(ymm_reg) _,
            halves_low = in(ymm_reg) halves.0,
            halves_high = in(ymm_reg) halves.1,
            low = inout(ymm_reg) c.0,
            high = inout(ymm_reg) c.1,
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
#[target_feature(enable = "avx2")]
pub(super) unsafe fn add_short(row: *const i8, quad: usize, codes: I, mut c: I) -> I {
    // SAFETY: reads only the four bytes and writes only its output registers.
    unsafe {
        asm!(
            "vpbroadcastd {x}, dword ptr [{row} + 4 * {quad}]",
            "vpmaddubsw {y}, {codes_low}, {x}",
            "vpmaddubsw {x}, {codes_high}, {x}",
            "vpaddw {low}, {low}, {y}",
            "vpaddw {high}, {high}, {x}",
            row = in(reg) row,
            quad = in(reg) quad,
            x = out(ymm_reg) _,
            y = out(ymm_reg) _,
            codes_low = in(ymm_reg) codes.0,
            codes_high = in(ymm_reg) codes.1,
            low = inout(ymm_reg) c.0,
            high = inout(ymm_reg) c.1,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    c
}

/// In assembly for the same reason: the compiler would load the pairs once for both halves and keep them in registers.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_bf16_high(from: *const u8) -> V {
    let (low, high);
    let mask = _mm256_set1_epi32(0xffff_0000_u32.cast_signed());
    // SAFETY: reads only 64 bytes at `from` and writes only its output registers.
    unsafe {
        asm!(
            "vpand {low}, {mask}, ymmword ptr [{from}]",
            "vpand {high}, {mask}, ymmword ptr [{from} + 32]",
            from = in(reg) from,
            mask = in(ymm_reg) mask,
            low = out(ymm_reg) low,
            high = lateout(ymm_reg) high,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    V(low, high)
}

#[repr(align(32))]
pub(super) struct Mask(#[allow(dead_code, reason = "read by assembly")] [u16; 16]);

pub(super) static NIBBLES: Mask = Mask([0x0f0f; 16]);
pub(super) static BYTES: Mask = Mask([0x00ff; 16]);

/// The masked bits of every 16 bits of 64 bytes. In assembly for the same reason, with the mask in memory: in a tile of
/// 12 sums no register is left for it.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_masked(from: *const u8, mask: &Mask) -> I {
    let (low, high);
    // SAFETY: reads only 64 bytes at `from` and the mask, and writes only its output registers.
    unsafe {
        asm!(
            "vmovdqu {low}, ymmword ptr [{from}]",
            "vmovdqu {high}, ymmword ptr [{from} + 32]",
            "vpand {low}, {low}, ymmword ptr [{mask}]",
            "vpand {high}, {high}, ymmword ptr [{mask}]",
            from = in(reg) from,
            mask = in(reg) mask,
            low = out(ymm_reg) low,
            high = out(ymm_reg) high,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    I(low, high)
}

/// The high nibbles, for the same reason.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_high_nibbles(from: *const u8) -> I {
    let (low, high);
    // SAFETY: reads only 64 bytes at `from` and the mask, and writes only its output registers.
    unsafe {
        asm!(
            "vmovdqu {low}, ymmword ptr [{from}]",
            "vmovdqu {high}, ymmword ptr [{from} + 32]",
            "vpsrlw {low}, {low}, 4",
            "vpsrlw {high}, {high}, 4",
            "vpand {low}, {low}, ymmword ptr [{mask}]",
            "vpand {high}, {high}, ymmword ptr [{mask}]",
            from = in(reg) from,
            mask = in(reg) &NIBBLES,
            low = out(ymm_reg) low,
            high = out(ymm_reg) high,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    I(low, high)
}

/// `$instruction` of `b` and of the 32 bits at index `k` of a row, in every lane, with `c`. In assembly for the same
/// reason, and because the instructions of AVX-VNNI are not among the features of this file.
macro_rules! row_instruction {
    ($name:ident, $instruction:literal, $integer:ty) => {
        /// # Safety
        /// The CPU has AVX-VNNI (in unit tests: or VNNI of AVX-512); the 32 bits are readable.
        #[inline]
        #[target_feature(enable = "avx2")]
        pub(super) unsafe fn $name(row: *const $integer, k: usize, b: I, mut c: I) -> I {
            // SAFETY: reads only the 32 bits and writes only its output registers.
            unsafe {
                if cfg!(test) && !std::arch::is_x86_feature_detected!("avxvnni") {
                    with_broadcast!(
                        row,
                        k,
                        b,
                        c,
                        "vpbroadcastd {x}, dword ptr [{row} + 4 * {k}]",
                        concat!("{{evex}} ", $instruction, " {low}, {b_low}, {x}"),
                        concat!("{{evex}} ", $instruction, " {high}, {b_high}, {x}")
                    );
                } else {
                    with_broadcast!(
                        row,
                        k,
                        b,
                        c,
                        "vpbroadcastd {x}, dword ptr [{row} + 4 * {k}]",
                        concat!("{{vex}} ", $instruction, " {low}, {b_low}, {x}"),
                        concat!("{{vex}} ", $instruction, " {high}, {b_high}, {x}")
                    );
                }
            }
            c
        }
    };
}

row_instruction!(dot_quads, "vpdpbusd", i8);
row_instruction!(dot_pairs, "vpdpwssd", i16);

/// The high bytes, for the same reason.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) unsafe fn load_high_bytes(from: *const u8) -> I {
    let (low, high);
    // SAFETY: reads only 64 bytes at `from` and writes only its output registers.
    unsafe {
        asm!(
            "vmovdqu {low}, ymmword ptr [{from}]",
            "vmovdqu {high}, ymmword ptr [{from} + 32]",
            "vpsrlw {low}, {low}, 8",
            "vpsrlw {high}, {high}, 8",
            from = in(reg) from,
            low = out(ymm_reg) low,
            high = out(ymm_reg) high,
            options(pure, readonly, nostack, preserves_flags),
        );
    }
    I(low, high)
}
