//! The vector trait in plain Rust: arrays that the compiler vectorises for the target's baseline.
//!
//! Multiply-add is fused if the baseline has the instruction (aarch64, or x86-64 built for FMA) and rounded twice
//! otherwise: without hardware support a fused multiply-add is a library call per lane.

use half::f16;

use crate::arch::Table;
use crate::generic::grid::dot::Pairs;
use crate::generic::tile::tile_shapes;
use crate::panel::LANES;
use crate::simd::Simd;
use crate::simd::{TileFn, TileShapes};

crate::arch::compile_table!(Portable from Portable,);

pub(crate) static TABLE: Table = table::<Pairs, Pairs, false>();

#[derive(Clone, Copy)]
pub(crate) struct Portable;

#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct V([f32; LANES]);

#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct I([u32; LANES]);

/// Adding and subtracting it rounds a float below 2^22 to the nearest integer, ties to even.
const ROUND: f32 = 1.5 * (1 << 23) as f32;

#[inline(always)]
fn fused(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) { a.mul_add(b, c) } else { a * b + c }
}

/// A vector whose lane `$i` is `$lane`. A macro, because a closure would not inherit target features.
macro_rules! lanes {
    ($i:ident => $lane:expr) => {{
        let mut out = [0.0; LANES];
        for $i in 0..LANES {
            out[$i] = $lane;
        }
        V(out)
    }};
}

impl Simd for Portable {
    const IS_FUSED: bool = false;
    const GRID_TILES: TileShapes = TileShapes { panels: &[1, 1] };

    type V = V;
    type I = I;

    // Larger tiles make wheels 0.7 MB larger and prompts 2 % faster on SSE2, but decoding 18 % slower.
    tile_shapes!(1 x 1, 2 x 1);

    #[inline(always)]
    fn splat(self, value: f32) -> V {
        V([value; LANES])
    }

    #[inline(always)]
    fn vector(self, lanes: [f32; LANES]) -> V {
        V(lanes)
    }

    #[inline(always)]
    fn to_array(self, v: V) -> [f32; LANES] {
        v.0
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> V {
        // SAFETY: 16 floats are readable by contract; read_unaligned requires nothing else.
        V(unsafe { from.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: V) {
        // SAFETY: 16 floats are writable by contract; write_unaligned requires nothing else.
        unsafe { to.cast::<[f32; LANES]>().write_unaligned(v.0) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> V {
        // SAFETY: 32 bytes are readable by contract.
        let halves = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(i => f16::from_bits(u16::from_le(halves[i])).to_f32())
    }

    /// There is no portable prefetch.
    #[inline(always)]
    fn prefetch(self, _: *const u8) {}

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        lanes!(i => a.0[i] + b.0[i])
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        lanes!(i => a.0[i] - b.0[i])
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        lanes!(i => a.0[i] * b.0[i])
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        lanes!(i => a.0[i] / b.0[i])
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        lanes!(i => fused(a.0[i], b.0[i], c.0[i]))
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        lanes!(i => fused(-a.0[i], b.0[i], c.0[i]))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        lanes!(i => if a.0[i] > b.0[i] { a.0[i] } else { b.0[i] })
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        lanes!(i => if a.0[i] < b.0[i] { a.0[i] } else { b.0[i] })
    }

    #[inline(always)]
    fn select(self, bits: u32, a: V, b: V) -> V {
        lanes!(i => if bits & 1 << i == 0 { b.0[i] } else { a.0[i] })
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        lanes!(i => (a.0[i] + ROUND) - ROUND)
    }

    #[inline(always)]
    fn exp2(self, n: V) -> V {
        // The low bits of n + ROUND are n itself; shifted, they are the exponent field.
        lanes!(i => f32::from_bits((n.0[i] + (ROUND + 127.0)).to_bits() << 23))
    }

    #[inline(always)]
    fn zeros(self) -> I {
        I([0; LANES])
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> I {
        // SAFETY: 64 bytes are readable by contract.
        I(unsafe { from.cast::<[u32; LANES]>().read_unaligned() }.map(u32::from_le))
    }

    #[inline(always)]
    fn halves(self, mut words: I, shift: u32, mask: u16) -> I {
        let mask = u32::from(mask) * 0x1_0001;
        for word in &mut words.0 {
            *word = *word >> shift & mask;
        }
        words
    }

    #[inline(always)]
    fn add_top_bits(self, words: I, mut c: I) -> I {
        for (c, word) in c.0.iter_mut().zip(words.0) {
            *c = (*c << 1 & 0xfffe_fffe) + (word >> 15 & 0x0001_0001);
        }
        c
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> V {
        // SAFETY: 64 bytes are readable by contract.
        let words = unsafe { from.cast::<[u32; LANES]>().read_unaligned() };
        lanes!(i => f32::from_bits(u32::from_le(words[i]) << left & mask))
    }

    #[inline(always)]
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: I, mut c: I) -> I {
        // SAFETY: readable by contract.
        let (x, y) = unsafe { (i32::from(*row.add(2 * pair)), i32::from(*row.add(2 * pair + 1))) };
        for (c, halves) in c.0.iter_mut().zip(halves.0) {
            let (low, high) = (i32::from(halves as i16), i32::from((halves >> 16) as i16));
            *c = c.wrapping_add((x * low).cast_unsigned()).wrapping_add((y * high).cast_unsigned());
        }
        c
    }

    #[inline(always)]
    unsafe fn neg_shifted(self, sum: *const i32, shift: u32) -> I {
        // SAFETY: readable by contract.
        I([(-unsafe { *sum }.unbounded_shl(shift)).cast_unsigned(); LANES])
    }

    #[inline(always)]
    fn halves_up(self, mut words: I, shift: u32, mask: u16) -> I {
        let mask = u32::from(mask) * 0x1_0001;
        for word in &mut words.0 {
            *word = *word << shift & mask;
        }
        words
    }

    #[inline(always)]
    fn or(self, mut a: I, b: I) -> I {
        for (a, b) in a.0.iter_mut().zip(b.0) {
            *a |= b;
        }
        a
    }

    #[inline(always)]
    fn byte(self, mut words: I, index: u32) -> I {
        for word in &mut words.0 {
            *word = *word >> (8 * index) & 0xff;
        }
        words
    }

    #[inline(always)]
    fn to_f32(self, i: I) -> V {
        lanes!(lane => i.0[lane].cast_signed() as f32)
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, v: V) {
        let mut integers = [0; LANES];
        for (integer, v) in integers.iter_mut().zip(v.0) {
            *integer = v as i16;
        }
        // SAFETY: 16 integers are writable by contract; write_unaligned requires nothing else.
        unsafe { to.cast::<[i16; LANES]>().write_unaligned(integers) }
    }
}
