//! The vector trait with AVX2, FMA and F16C: 16 lanes are two registers.

mod asm;

use std::arch::x86_64::*;

use asm::{BYTES, NIBBLES};

use crate::arch::Table;
use crate::generic::grid::dot::{Pairs, Quads, Short};
use crate::generic::tile::tile_shapes;
use crate::simd::{DotQuads, E4M3_BITS, ShortSums, Simd};
use crate::simd::{TileFn, TileRows, TileShapes};

crate::arch::compile_table!(Avx2 from Avx2::new_unchecked(), #[target_feature(enable = "avx2,fma,f16c")]);

pub(crate) static TABLE: Table = table::<Short, Pairs, false>();
/// The table for CPUs that have AVX-VNNI, too.
pub(crate) static VNNI: Table = table::<Quads, Quads, true>();

/// Proof that this CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// [`crate::Isa::Avx2`] is available.
    #[inline(always)]
    pub(crate) unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

#[derive(Clone, Copy)]
pub(crate) struct V(__m256, __m256);

#[derive(Clone, Copy)]
pub(crate) struct I(__m256i, __m256i);

/// A `$type` of both registers: `$value` for each register of the variables. A macro, because a closure would not
/// inherit target features.
macro_rules! both {
    ($type:ident: $($v:ident),+ => $value:expr) => {{
        // SAFETY: the intrinsics require only AVX2 and FMA, which `self` proves.
        unsafe {
            $type(
                { $(let $v = $v.0;)+ $value },
                { $(let $v = $v.1;)+ $value },
            )
        }
    }};
}

impl Simd for Avx2 {
    const GRID_TILES: TileShapes = TileShapes { panels: &[2, 2, 2, 1, 1, 1] };

    type V = V;
    type I = I;

    tile_shapes!(1 x 4, 2 x 3, 3 x 2, 4 x 1, 5 x 1, 6 x 1);

    #[inline(always)]
    fn splat(self, value: f32) -> V {
        // SAFETY: `self` proves AVX.
        let half = unsafe { _mm256_set1_ps(value) };
        V(half, half)
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> V {
        // SAFETY: `self` proves AVX; 16 floats are readable by contract.
        unsafe { V(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: V) {
        // SAFETY: `self` proves AVX; 16 floats are writable by contract.
        unsafe {
            _mm256_storeu_ps(to, v.0);
            _mm256_storeu_ps(to.add(8), v.1);
        }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> V {
        let from = from.cast::<__m128i>();
        // SAFETY: `self` proves F16C; 32 bytes are readable by contract.
        unsafe { V(_mm256_cvtph_ps(_mm_loadu_si128(from)), _mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_high(self, from: *const u8) -> V {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { asm::load_bf16_high(from) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch may name any address; it never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        both!(V: a, b, c => _mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    unsafe fn mul_add_broadcast<const T: usize>(
        self,
        rows: &TileRows<T>,
        t: usize,
        k: usize,
        b: V,
        c: V,
    ) -> V {
        // SAFETY: `self` proves AVX and FMA; row `t` has column `k` by contract.
        unsafe { asm::mul_add_broadcast(rows.at[t], k, b, c) }
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        both!(V: a, b, c => _mm256_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(V: a, b => _mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn select(self, bits: u32, a: V, b: V) -> V {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bits = _mm256_set1_epi32(bits.cast_signed());
            let low = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let high = _mm256_slli_epi32::<8>(low);
            let chosen =
                |lanes| _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(bits, lanes), lanes));
            V(_mm256_blendv_ps(b.0, a.0, chosen(low)), _mm256_blendv_ps(b.1, a.1, chosen(high)))
        }
    }

    #[inline(always)]
    fn exchange(self, v: V, half: usize) -> V {
        match half {
            1 => both!(V: v => _mm256_permute_ps::<0b10_11_00_01>(v)),
            2 => both!(V: v => _mm256_permute_ps::<0b01_00_11_10>(v)),
            4 => both!(V: v => _mm256_permute2f128_ps::<1>(v, v)),
            _ => V(v.1, v.0),
        }
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        both!(V: a => _mm256_round_ps::<NEAREST>(a))
    }

    #[inline(always)]
    fn exp2(self, n: V) -> V {
        both!(V: n => {
            let exponents = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponents))
        })
    }

    #[inline(always)]
    fn zeros(self) -> I {
        // SAFETY: `self` proves AVX.
        unsafe { I(_mm256_setzero_si256(), _mm256_setzero_si256()) }
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> I {
        let from = from.cast::<__m256i>();
        // SAFETY: `self` proves AVX; 64 bytes are readable by contract.
        unsafe { I(_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))) }
    }

    #[inline(always)]
    fn halves(self, words: I, shift: u32, mask: u16) -> I {
        both!(I: words => {
            let shifted = _mm256_srl_epi16(words, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm256_and_si256(shifted, _mm256_set1_epi16(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn add_top_bits(self, words: I, c: I) -> I {
        both!(I: words, c => _mm256_add_epi16(_mm256_add_epi16(c, c), _mm256_srli_epi16::<15>(words)))
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> V {
        // SAFETY: by contract.
        let words = unsafe { self.load_words(from) };
        both!(V: words => {
            let shifted = _mm256_sll_epi32(words, _mm_cvtsi32_si128(left.cast_signed()));
            _mm256_castsi256_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask.cast_signed())))
        })
    }

    #[inline(always)]
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: I, c: I) -> I {
        // SAFETY: `self` proves AVX2; both integers are readable by contract.
        unsafe { asm::add_products(row, pair, halves, c) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> I {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { if high { asm::load_high_nibbles(from) } else { asm::load_masked(from, &NIBBLES) } }
    }

    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8, high: bool) -> I {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { if high { asm::load_high_bytes(from) } else { asm::load_masked(from, &BYTES) } }
    }

    #[inline(always)]
    unsafe fn dot_pairs(self, row: *const i16, pair: usize, halves: I, c: I) -> I {
        // SAFETY: `self` proves AVX2, the contract AVX-VNNI; both integers are readable by contract.
        unsafe { asm::dot_pairs(row, pair, halves, c) }
    }

    #[inline(always)]
    unsafe fn neg_shifted(self, sum: *const i32, shift: u32) -> I {
        // SAFETY: `self` proves AVX2; the integer is readable by contract.
        unsafe {
            let sums = _mm256_sll_epi32(_mm256_set1_epi32(*sum), _mm_cvtsi32_si128(shift.cast_signed()));
            let half = _mm256_sub_epi32(_mm256_setzero_si256(), sums);
            I(half, half)
        }
    }

    #[inline(always)]
    fn halves_up(self, words: I, shift: u32, mask: u16) -> I {
        both!(I: words => {
            let shifted = _mm256_sll_epi16(words, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm256_and_si256(shifted, _mm256_set1_epi16(mask.cast_signed()))
        })
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        both!(I: a, b => _mm256_or_si256(a, b))
    }

    #[inline(always)]
    fn byte(self, words: I, index: u32) -> I {
        both!(I: words => {
            let shifted = _mm256_srl_epi32(words, _mm_cvtsi32_si128((8 * index).cast_signed()));
            _mm256_and_si256(shifted, _mm256_set1_epi32(0xff))
        })
    }

    #[inline(always)]
    fn to_f32(self, i: I) -> V {
        both!(V: i => _mm256_cvtepi32_ps(i))
    }

    #[inline(always)]
    fn e4m3(self, words: I, index: u32) -> V {
        both!(V: words => {
            let top = _mm256_sll_epi32(words, _mm_cvtsi32_si128((24 - 8 * index).cast_signed()));
            // An arithmetic shift, which copies the sign to the left.
            let bits = _mm256_srai_epi32::<4>(top);
            _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(E4M3_BITS.cast_signed())))
        })
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, v: V) {
        // SAFETY: `self` proves AVX2; 16 integers are writable by contract.
        unsafe {
            // The pack works within 128 bits: quarters 0 and 2 are from the low register.
            let packed = _mm256_packs_epi32(_mm256_cvtps_epi32(v.0), _mm256_cvtps_epi32(v.1));
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
}

impl ShortSums for Avx2 {
    type Short = I;

    #[inline(always)]
    fn short_zeros(self) -> I {
        self.zeros()
    }

    #[inline(always)]
    unsafe fn add_short(self, row: *const i8, quad: usize, codes: I, short: I) -> I {
        // SAFETY: `self` proves AVX2; the bytes are readable by contract.
        unsafe { asm::add_short(row, quad, codes, short) }
    }

    #[inline(always)]
    fn add_pairs(self, short: I, c: I) -> I {
        both!(I: short, c => _mm256_add_epi32(c, _mm256_madd_epi16(short, _mm256_set1_epi16(1))))
    }
}

impl DotQuads for Avx2 {
    #[inline(always)]
    unsafe fn dot_quads(self, row: *const i8, quad: usize, codes: I, c: I) -> I {
        // SAFETY: `self` proves AVX2, the contract AVX-VNNI; the bytes are readable by contract.
        unsafe { asm::dot_quads(row, quad, codes, c) }
    }
}
