//! The vector trait with NEON: 16 lanes are four registers.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::arch::Table;
use crate::generic::grid::dot::{Pairs, Short};
use crate::generic::tile::tile_shapes;
use crate::simd::{E4M3_BITS, ShortSums, Simd};
use crate::simd::{TileFn, TileShapes};

type Base = Neon<false>;

crate::arch::compile_table!(Base from Neon::new_unchecked(), #[target_feature(enable = "neon")]);

pub(crate) static NEON: Table = TABLE;
pub(super) const TABLE: Table = table::<Short, Pairs, false>();

/// Proof that this CPU has NEON. `I8MM` selects the instruction of [`DotQuads`](crate::simd::DotQuads), and nothing
/// else.
#[derive(Clone, Copy)]
pub(crate) struct Neon<const I8MM: bool>(());

impl<const I8MM: bool> Neon<I8MM> {
    /// # Safety
    /// [`crate::Isa::Neon`] is available.
    #[inline(always)]
    pub(crate) unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

#[derive(Clone, Copy)]
pub(crate) struct V([float32x4_t; 4]);

#[derive(Clone, Copy)]
pub(crate) struct I(pub(super) [uint32x4_t; 4]);

/// 16-bit sums, two for each lane.
#[derive(Clone, Copy)]
pub(crate) struct Sums([int16x8_t; 4]);

/// `$type` of the expression for each register `$r`. A macro, because a closure would not inherit target features.
macro_rules! each {
    ($type:ident: $r:ident => $register:expr) => {
        // SAFETY: the intrinsics require only NEON, which `self` proves, and readable memory, which the caller has.
        unsafe {
            $type([
                { const $r: usize = 0; $register },
                { const $r: usize = 1; $register },
                { const $r: usize = 2; $register },
                { const $r: usize = 3; $register },
            ])
        }
    };
}
pub(super) use each;

/// Every 16 bits shifted left, or right by `-left`.
#[inline]
#[target_feature(enable = "neon")]
fn shift_halves(words: uint32x4_t, left: i32, mask: u16) -> uint32x4_t {
    let shifted = vshlq_u16(vreinterpretq_u16_u32(words), vdupq_n_s16(left as i16));
    vreinterpretq_u32_u16(vandq_u16(shifted, vdupq_n_u16(mask)))
}

impl<const I8MM: bool> Simd for Neon<I8MM> {
    const GRID_TILES: TileShapes = TileShapes { panels: &[2, 2, 1, 1, 1, 1] };

    type V = V;
    type I = I;

    tile_shapes!(1 x 4, 2 x 3, 3 x 2, 4 x 1, 5 x 1, 6 x 1);

    #[inline(always)]
    fn splat(self, value: f32) -> V {
        // SAFETY: `self` proves NEON.
        V([unsafe { vdupq_n_f32(value) }; 4])
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> V {
        // SAFETY: 16 floats are readable by contract.
        each!(V: R => vld1q_f32(from.add(4 * R)))
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: V) {
        for (r, register) in v.0.into_iter().enumerate() {
            // SAFETY: 16 floats are writable by contract.
            unsafe { vst1q_f32(to.add(4 * r), register) };
        }
    }

    /// In assembly, because the intrinsics are not stable.
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> V {
        let mut v = self.splat(0.0);
        for pair in 0..2 {
            let (low, high);
            // SAFETY: 32 bytes are readable by contract; the instructions write only their output registers.
            unsafe {
                let halves = vld1q_u8(from.add(16 * pair));
                asm!(
                    "fcvtl {low:v}.4s, {halves:v}.4h",
                    "fcvtl2 {high:v}.4s, {halves:v}.8h",
                    halves = in(vreg) halves,
                    low = out(vreg) low,
                    high = lateout(vreg) high,
                    options(pure, nomem, nostack, preserves_flags),
                );
            }
            (v.0[2 * pair], v.0[2 * pair + 1]) = (low, high);
        }
        v
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch may name any address; it never faults.
        unsafe {
            asm!("prfm pldl2keep, [{at}]", at = in(reg) at, options(readonly, nostack, preserves_flags))
        }
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        each!(V: R => vaddq_f32(a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        each!(V: R => vsubq_f32(a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        each!(V: R => vmulq_f32(a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        each!(V: R => vdivq_f32(a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        each!(V: R => vfmaq_f32(c.0[R], a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        each!(V: R => vfmsq_f32(c.0[R], a.0[R], b.0[R]))
    }

    /// A comparison, because the instruction for the maximum returns NaN if either is NaN.
    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        each!(V: R => vbslq_f32(vcgtq_f32(a.0[R], b.0[R]), a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        each!(V: R => vbslq_f32(vcltq_f32(a.0[R], b.0[R]), a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn select(self, bits: u32, a: V, b: V) -> V {
        const LANE_BITS: [u32; 4] = [1, 2, 4, 8];
        each!(V: R => {
            let chosen = vtstq_u32(vdupq_n_u32(bits >> (4 * R)), vld1q_u32(LANE_BITS.as_ptr()));
            vbslq_f32(chosen, a.0[R], b.0[R])
        })
    }

    #[inline(always)]
    fn exchange(self, v: V, half: usize) -> V {
        match half {
            1 => each!(V: R => vrev64q_f32(v.0[R])),
            2 => each!(V: R => vextq_f32::<2>(v.0[R], v.0[R])),
            4 => V([v.0[1], v.0[0], v.0[3], v.0[2]]),
            _ => V([v.0[2], v.0[3], v.0[0], v.0[1]]),
        }
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        each!(V: R => vrndnq_f32(a.0[R]))
    }

    #[inline(always)]
    fn exp2(self, n: V) -> V {
        each!(V: R => {
            let exponents = vaddq_s32(vcvtnq_s32_f32(n.0[R]), vdupq_n_s32(127));
            vreinterpretq_f32_s32(vshlq_n_s32::<23>(exponents))
        })
    }

    #[inline(always)]
    fn zeros(self) -> I {
        // SAFETY: `self` proves NEON.
        I([unsafe { vdupq_n_u32(0) }; 4])
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> I {
        // SAFETY: 64 bytes are readable by contract.
        each!(I: R => vreinterpretq_u32_u8(vld1q_u8(from.add(16 * R))))
    }

    #[inline(always)]
    fn halves(self, words: I, shift: u32, mask: u16) -> I {
        each!(I: R => shift_halves(words.0[R], -shift.cast_signed(), mask))
    }

    #[inline(always)]
    fn halves_up(self, words: I, shift: u32, mask: u16) -> I {
        each!(I: R => shift_halves(words.0[R], shift.cast_signed(), mask))
    }

    #[inline(always)]
    fn add_top_bits(self, words: I, c: I) -> I {
        each!(I: R => {
            let c = vreinterpretq_u16_u32(c.0[R]);
            vreinterpretq_u32_u16(vsraq_n_u16::<15>(vaddq_u16(c, c), vreinterpretq_u16_u32(words.0[R])))
        })
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> V {
        // SAFETY: by contract.
        let words = unsafe { self.load_words(from) };
        each!(V: R => {
            let shifted = vshlq_u32(words.0[R], vdupq_n_s32(left.cast_signed()));
            vreinterpretq_f32_u32(vandq_u32(shifted, vdupq_n_u32(mask)))
        })
    }

    #[inline(always)]
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: I, c: I) -> I {
        // SAFETY: both integers are readable by contract.
        let x = unsafe { row.cast::<i32>().add(pair).read_unaligned() };
        each!(I: R => {
            let x = vreinterpretq_s16_s32(vdupq_n_s32(x));
            let halves = vreinterpretq_s16_u32(halves.0[R]);
            let low = vmull_s16(vget_low_s16(halves), vget_low_s16(x));
            let sums = vpaddq_s32(low, vmull_high_s16(halves, x));
            vaddq_u32(c.0[R], vreinterpretq_u32_s32(sums))
        })
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> I {
        // SAFETY: by contract.
        let words = unsafe { self.load_words(from) };
        each!(I: R => {
            let bytes = vreinterpretq_u8_u32(words.0[R]);
            vreinterpretq_u32_u8(if high { vshrq_n_u8::<4>(bytes) } else { vandq_u8(bytes, vdupq_n_u8(0x0f)) })
        })
    }

    #[inline(always)]
    unsafe fn neg_shifted(self, sum: *const i32, shift: u32) -> I {
        // SAFETY: `self` proves NEON; the integer is readable by contract.
        unsafe { I([vdupq_n_u32((*sum).unbounded_shl(shift).wrapping_neg().cast_unsigned()); 4]) }
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        each!(I: R => vorrq_u32(a.0[R], b.0[R]))
    }

    #[inline(always)]
    fn byte(self, words: I, index: u32) -> I {
        each!(I: R => {
            let shifted = vshlq_u32(words.0[R], vdupq_n_s32(-(8 * index).cast_signed()));
            vandq_u32(shifted, vdupq_n_u32(0xff))
        })
    }

    #[inline(always)]
    fn to_f32(self, i: I) -> V {
        each!(V: R => vcvtq_f32_s32(vreinterpretq_s32_u32(i.0[R])))
    }

    #[inline(always)]
    fn e4m3(self, words: I, index: u32) -> V {
        each!(V: R => {
            let words = vreinterpretq_s32_u32(words.0[R]);
            let top = vshlq_s32(words, vdupq_n_s32((24 - 8 * index).cast_signed()));
            // An arithmetic shift, which copies the sign to the left.
            let bits = vandq_u32(vreinterpretq_u32_s32(vshrq_n_s32::<4>(top)), vdupq_n_u32(E4M3_BITS));
            vreinterpretq_f32_u32(bits)
        })
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, v: V) {
        for half in 0..2 {
            // SAFETY: `self` proves NEON; 16 integers are writable by contract.
            unsafe {
                let low = vqmovn_s32(vcvtnq_s32_f32(v.0[2 * half]));
                vst1q_s16(to.add(8 * half), vqmovn_high_s32(low, vcvtnq_s32_f32(v.0[2 * half + 1])));
            }
        }
    }
}

impl<const I8MM: bool> ShortSums for Neon<I8MM> {
    type Short = Sums;

    #[inline(always)]
    fn short_zeros(self) -> Sums {
        // SAFETY: `self` proves NEON.
        Sums([unsafe { vdupq_n_s16(0) }; 4])
    }

    #[inline(always)]
    unsafe fn add_short(self, row: *const i8, quad: usize, codes: I, short: Sums) -> Sums {
        // SAFETY: the bytes are readable by contract.
        let x = unsafe { row.cast::<i32>().add(quad).read_unaligned() };
        each!(Sums: R => {
            let x = vreinterpretq_s8_s32(vdupq_n_s32(x));
            // Codes whose products fit the sums are below 128.
            let codes = vreinterpretq_s8_u32(codes.0[R]);
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(x));
            vaddq_s16(short.0[R], vpaddq_s16(low, vmull_high_s8(codes, x)))
        })
    }

    #[inline(always)]
    fn add_pairs(self, short: Sums, c: I) -> I {
        each!(I: R => vreinterpretq_u32_s32(vpadalq_s16(vreinterpretq_s32_u32(c.0[R]), short.0[R])))
    }
}
