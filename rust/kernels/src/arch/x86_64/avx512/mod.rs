//! The vector trait with AVX-512 (F, BW, DQ and VL): 16 lanes are one register.

mod asm;

use std::arch::x86_64::*;
use std::ops::Range;

use crate::arch::{PerDtype, Table};
use crate::generic::grid::dot::{Pairs, Quads, Short};
use crate::generic::matmul::{Product, matmul};
use crate::generic::panel_dtype::Bf16Pairs;
use crate::generic::tile::tile_shapes;
use crate::panel::LANES;
use crate::simd::{DotQuads, E4M3_BITS, ShortSums, Simd};
use crate::simd::{TileFn, TileRows, TileShapes};

crate::arch::compile_table!(
    Avx512 from Avx512::new_unchecked(),
    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
);

pub(crate) static TABLE: Table = table::<Short, Pairs, false>();
/// The table for CPUs that have VNNI, too.
pub(crate) static VNNI: Table = vnni_table();
/// The same, with dot products of bf16 pairs.
pub(crate) static BF16: Table = Table { matmul: PerDtype { bf16: matmul_of_pairs, ..VNNI.matmul }, ..VNNI };

pub(super) const fn vnni_table() -> Table {
    table::<Quads, Quads, true>()
}

/// # Safety
/// As for `matmul`; [`crate::Isa::Avx512Bf16`] is available.
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
unsafe fn matmul_of_pairs(product: &Product<'_>, panels: Range<usize>, tiles: Range<usize>) {
    // SAFETY: by contract.
    unsafe { matmul::<Avx512, Bf16Pairs>(Avx512::new_unchecked(), product, panels, tiles) }
}

/// Proof that this CPU has AVX2, FMA, F16C and AVX-512 F, BW, DQ and VL.
#[derive(Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// [`crate::Isa::Avx512`] is available.
    #[inline(always)]
    pub(crate) unsafe fn new_unchecked() -> Self {
        Self(())
    }
}

/// The first `count` lanes.
#[inline(always)]
fn first(count: usize) -> __mmask16 {
    if count < LANES { (1 << count) - 1 } else { !0 }
}

impl Simd for Avx512 {
    // By measurement: the chains of 8 rows x 2 panels are in memory between spans, and 8 rows are still one pass over
    // the weights; 12 rows are slower.
    const GRID_TILES: TileShapes = TileShapes { panels: &[2, 2, 2, 2, 2, 2, 2, 2] };
    const WIDE_SHRINK: bool = true;

    type V = __m512;
    type I = __m512i;

    // By measurement: of 3 rows on, more than two panels at a time are not faster, and slow attention down by up to a
    // quarter.
    tile_shapes!(1 x 4, 2 x 3, 3 x 2, 4 x 2, 5 x 2, 6 x 2, 7 x 2, 8 x 3, 9 x 2, 10 x 2, 11 x 2, 12 x 2);

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: `self` proves AVX-512; 16 floats are readable by contract.
        unsafe { _mm512_loadu_ps(from) }
    }

    #[inline(always)]
    unsafe fn store(self, to: *mut f32, v: __m512) {
        // SAFETY: `self` proves AVX-512; 16 floats are writable by contract.
        unsafe { _mm512_storeu_ps(to, v) }
    }

    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> __m512 {
        // SAFETY: `self` proves AVX-512; 32 bytes are readable by contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_high(self, from: *const u8) -> __m512 {
        // SAFETY: `self` proves AVX-512; 64 bytes are readable by contract.
        unsafe { asm::load_bf16_high(from) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch may name any address; it never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    unsafe fn mul_add_broadcast<const T: usize>(
        self,
        rows: &TileRows<T>,
        t: usize,
        k: usize,
        b: __m512,
        c: __m512,
    ) -> __m512 {
        // SAFETY: `self` proves AVX-512; row `t` has column `k` by contract.
        unsafe { asm::mul_add_broadcast(rows, t, k, b, c) }
    }

    #[inline(always)]
    unsafe fn dot_bf16<const T: usize>(
        self,
        rows: &TileRows<T>,
        t: usize,
        pair: usize,
        weights: *const u8,
        c: __m512,
    ) -> __m512 {
        // SAFETY: `self` proves AVX-512; the rest is the contract.
        unsafe { asm::dot_bf16(rows, t, pair, self.load_words(weights), c) }
    }

    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, v: __m512) {
        // SAFETY: the CPU has BF16, and 16 halves are writable, by contract; both types are 256 bits of any value.
        unsafe {
            let halves = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(v));
            _mm256_storeu_si256(to.cast(), halves);
        }
    }

    #[inline(always)]
    fn neg_mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn select(self, bits: u32, a: __m512, b: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_mask_blend_ps(bits as __mmask16, b, a) }
    }

    #[inline(always)]
    fn exchange(self, v: __m512, half: usize) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            match half {
                1 => _mm512_permute_ps::<0b10_11_00_01>(v),
                2 => _mm512_permute_ps::<0b01_00_11_10>(v),
                4 => _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v),
                _ => _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v),
            }
        }
    }

    #[inline(always)]
    fn round(self, a: __m512) -> __m512 {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_roundscale_ps::<NEAREST>(a) }
    }

    #[inline(always)]
    fn exp2(self, n: __m512) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let exponents = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponents))
        }
    }

    #[inline(always)]
    fn zeros(self) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn load_words(self, from: *const u8) -> __m512i {
        // SAFETY: `self` proves AVX-512; 64 bytes are readable by contract.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    fn halves(self, words: __m512i, shift: u32, mask: u16) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW.
        unsafe {
            let shifted = _mm512_srl_epi16(words, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm512_and_si512(shifted, _mm512_set1_epi16(mask.cast_signed()))
        }
    }

    #[inline(always)]
    fn add_top_bits(self, words: __m512i, c: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW.
        unsafe { _mm512_add_epi16(_mm512_add_epi16(c, c), _mm512_srli_epi16::<15>(words)) }
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> __m512 {
        // SAFETY: `self` proves AVX-512; 64 bytes are readable by contract.
        unsafe {
            let shifted = _mm512_sll_epi32(self.load_words(from), _mm_cvtsi32_si128(left.cast_signed()));
            _mm512_castsi512_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: __m512i, c: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW; both integers are readable by contract.
        unsafe { asm::add_products(row, pair, halves, c) }
    }

    #[inline(always)]
    unsafe fn dot_pairs(self, row: *const i16, pair: usize, halves: __m512i, c: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512, the contract VNNI; both integers are readable by contract.
        unsafe { asm::dot_pairs(row, pair, halves, c) }
    }

    #[inline(always)]
    unsafe fn neg_shifted(self, sum: *const i32, shift: u32) -> __m512i {
        // SAFETY: `self` proves AVX-512; the integer is readable by contract.
        unsafe {
            let sums = _mm512_sll_epi32(_mm512_set1_epi32(*sum), _mm_cvtsi32_si128(shift.cast_signed()));
            _mm512_sub_epi32(_mm512_setzero_si512(), sums)
        }
    }

    #[inline(always)]
    fn halves_up(self, words: __m512i, shift: u32, mask: u16) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW.
        unsafe {
            let shifted = _mm512_sll_epi16(words, _mm_cvtsi32_si128(shift.cast_signed()));
            _mm512_and_si512(shifted, _mm512_set1_epi16(mask.cast_signed()))
        }
    }

    #[inline(always)]
    fn or(self, a: __m512i, b: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_or_si512(a, b) }
    }

    #[inline(always)]
    fn byte(self, words: __m512i, index: u32) -> __m512i {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let shifted = _mm512_srl_epi32(words, _mm_cvtsi32_si128((8 * index).cast_signed()));
            _mm512_and_si512(shifted, _mm512_set1_epi32(0xff))
        }
    }

    #[inline(always)]
    fn to_f32(self, i: __m512i) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe { _mm512_cvtepi32_ps(i) }
    }

    #[inline(always)]
    fn e4m3(self, words: __m512i, index: u32) -> __m512 {
        // SAFETY: `self` proves AVX-512.
        unsafe {
            let top = _mm512_sll_epi32(words, _mm_cvtsi32_si128((24 - 8 * index).cast_signed()));
            // An arithmetic shift, which copies the sign to the left.
            let bits = _mm512_srai_epi32::<4>(top);
            _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(E4M3_BITS.cast_signed())))
        }
    }

    #[inline(always)]
    unsafe fn store_i16(self, to: *mut i16, v: __m512) {
        // SAFETY: `self` proves AVX-512; 16 integers are writable by contract.
        unsafe { _mm256_storeu_si256(to.cast(), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(v))) }
    }

    #[inline(always)]
    unsafe fn load_part(self, from: *const f32, count: usize, rest: f32) -> __m512 {
        // SAFETY: `self` proves AVX-512; the lanes of the mask are readable by contract, and no others are read.
        unsafe { _mm512_mask_loadu_ps(_mm512_set1_ps(rest), first(count), from) }
    }

    #[inline(always)]
    unsafe fn store_part(self, to: *mut f32, count: usize, v: __m512) {
        // SAFETY: `self` proves AVX-512; the lanes of the mask are writable by contract, and no others are written.
        unsafe { _mm512_mask_storeu_ps(to, first(count), v) }
    }
}

impl ShortSums for Avx512 {
    type Short = __m512i;

    #[inline(always)]
    fn short_zeros(self) -> __m512i {
        self.zeros()
    }

    #[inline(always)]
    unsafe fn add_short(self, row: *const i8, quad: usize, codes: __m512i, short: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW; the bytes are readable by contract.
        unsafe { asm::add_short(row, quad, codes, short) }
    }

    #[inline(always)]
    fn add_pairs(self, short: __m512i, c: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512 with BW.
        unsafe { _mm512_add_epi32(c, _mm512_madd_epi16(short, _mm512_set1_epi16(1))) }
    }
}

impl DotQuads for Avx512 {
    #[inline(always)]
    unsafe fn dot_quads(self, row: *const i8, quad: usize, codes: __m512i, c: __m512i) -> __m512i {
        // SAFETY: `self` proves AVX-512, the contract VNNI; the bytes are readable by contract.
        unsafe { asm::dot_quads(row, quad, codes, c) }
    }
}
