//! The vector trait with AVX2, FMA and F16C: 16 lanes are two registers.

use std::arch::asm;
use std::arch::x86_64::*;

use crate::arch::Table;
use crate::generic::grid::dot::{Pairs, Short};
use crate::generic::tile::{TileFn, TileRows, TileShapes, tile_shapes};
use crate::panel::LANES;
use crate::simd::{ShortSums, Simd};

crate::arch::compile_table!(Avx2 from Avx2::new_unchecked(), #[target_feature(enable = "avx2,fma,f16c")]);

pub(crate) static TABLE: Table = table::<Short, Pairs>();

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

/// Applies the intrinsic to both registers.
macro_rules! both {
    ($f:ident($($v:ident),+)) => {
        // SAFETY: these intrinsics require only AVX2 and FMA, which `self` proves.
        unsafe { V($f($($v.0),+), $f($($v.1),+)) }
    };
    ($f:ident::<$mode:ident>($v:ident)) => {
        // SAFETY: as above.
        unsafe { V($f::<$mode>($v.0), $f::<$mode>($v.1)) }
    };
}

/// Written in assembly, because the compiler schedules the broadcasts of a whole step early, runs out of registers and
/// spills accumulators, which doubles the time of a tile.
///
/// # Safety
/// `row[k]` is readable.
#[inline]
#[target_feature(enable = "avx,fma")]
unsafe fn mul_add_broadcast(row: *const f32, k: usize, b: V, mut c: V) -> V {
    // SAFETY: reads only `row[k]` and writes only its output registers.
    unsafe {
        asm!(
            "vbroadcastss {x}, dword ptr [{row} + 4 * {k}]",
            "vfmadd231ps {low}, {x}, {b_low}",
            "vfmadd231ps {high}, {x}, {b_high}",
            row = in(reg) row,
            k = in(reg) k,
            x = out(ymm_reg) _,
            b_low = in(ymm_reg) b.0,
            b_high = in(ymm_reg) b.1,
            low = inout(ymm_reg) c.0,
            high = inout(ymm_reg) c.1,
            options(pure, readonly, nostack, preserves_flags),
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
unsafe fn add_products(row: *const i16, pair: usize, halves: I, mut c: I) -> I {
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
unsafe fn add_short(row: *const i8, quad: usize, codes: I, mut c: I) -> I {
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
unsafe fn load_bf16_high(from: *const u8) -> V {
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
struct Mask(#[allow(dead_code, reason = "read by assembly")] [u16; 16]);

static NIBBLES: Mask = Mask([0x0f0f; 16]);
static BYTES: Mask = Mask([0x00ff; 16]);

/// The masked bits of every 16 bits of 64 bytes. In assembly for the same reason, with the mask in memory: in a tile of
/// 12 sums no register is left for it.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_masked(from: *const u8, mask: &Mask) -> I {
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
unsafe fn load_high_nibbles(from: *const u8) -> I {
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

/// The high bytes, for the same reason.
///
/// # Safety
/// 64 bytes are readable at `from`.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn load_high_bytes(from: *const u8) -> I {
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
    fn vector(self, lanes: [f32; LANES]) -> V {
        // SAFETY: the array has the 16 floats that are read.
        unsafe { self.load(lanes.as_ptr()) }
    }

    #[inline(always)]
    fn to_array(self, v: V) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has room for the 16 floats that are written.
        unsafe { self.store(lanes.as_mut_ptr(), v) };
        lanes
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
    unsafe fn load_bf16_low(self, from: *const u8) -> V {
        let from = from.cast::<__m256i>();
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe {
            let (low, high) = (_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1)));
            V(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_high(self, from: *const u8) -> V {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { load_bf16_high(from) }
    }

    #[inline(always)]
    fn prefetch(self, at: *const u8) {
        // SAFETY: a prefetch may name any address; it never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }

    #[inline(always)]
    fn add(self, a: V, b: V) -> V {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: V, b: V) -> V {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: V, b: V) -> V {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: V, b: V) -> V {
        both!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fmadd_ps(a, b, c))
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
        unsafe { mul_add_broadcast(rows.at[t], k, b, c) }
    }

    #[inline(always)]
    fn neg_mul_add(self, a: V, b: V, c: V) -> V {
        both!(_mm256_fnmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn max(self, a: V, b: V) -> V {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn min(self, a: V, b: V) -> V {
        both!(_mm256_min_ps(a, b))
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
        // SAFETY: `self` proves AVX.
        unsafe {
            match half {
                1 => V(_mm256_permute_ps::<0b10_11_00_01>(v.0), _mm256_permute_ps::<0b10_11_00_01>(v.1)),
                2 => V(_mm256_permute_ps::<0b01_00_11_10>(v.0), _mm256_permute_ps::<0b01_00_11_10>(v.1)),
                4 => V(_mm256_permute2f128_ps::<1>(v.0, v.0), _mm256_permute2f128_ps::<1>(v.1, v.1)),
                _ => V(v.1, v.0),
            }
        }
    }

    #[inline(always)]
    fn round(self, a: V) -> V {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        both!(_mm256_round_ps::<NEAREST>(a))
    }

    #[inline(always)]
    fn exp2(self, n: V) -> V {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let bias = _mm256_set1_epi32(127);
            let low = _mm256_add_epi32(_mm256_cvtps_epi32(n.0), bias);
            let high = _mm256_add_epi32(_mm256_cvtps_epi32(n.1), bias);
            V(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(high)),
            )
        }
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
        // SAFETY: `self` proves AVX2.
        unsafe {
            let count = _mm_cvtsi32_si128(shift.cast_signed());
            let mask = _mm256_set1_epi16(mask.cast_signed());
            I(
                _mm256_and_si256(_mm256_srl_epi16(words.0, count), mask),
                _mm256_and_si256(_mm256_srl_epi16(words.1, count), mask),
            )
        }
    }

    #[inline(always)]
    fn add_top_bits(self, words: I, c: I) -> I {
        // SAFETY: `self` proves AVX2.
        unsafe {
            I(
                _mm256_add_epi16(_mm256_add_epi16(c.0, c.0), _mm256_srli_epi16::<15>(words.0)),
                _mm256_add_epi16(_mm256_add_epi16(c.1, c.1), _mm256_srli_epi16::<15>(words.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn load_bits(self, from: *const u8, left: u32, mask: u32) -> V {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe {
            let words = self.load_words(from);
            let (left, mask) = (_mm_cvtsi32_si128(left.cast_signed()), _mm256_set1_epi32(mask.cast_signed()));
            V(
                _mm256_castsi256_ps(_mm256_and_si256(_mm256_sll_epi32(words.0, left), mask)),
                _mm256_castsi256_ps(_mm256_and_si256(_mm256_sll_epi32(words.1, left), mask)),
            )
        }
    }

    #[inline(always)]
    unsafe fn add_products(self, row: *const i16, pair: usize, halves: I, c: I) -> I {
        // SAFETY: `self` proves AVX2; both integers are readable by contract.
        unsafe { add_products(row, pair, halves, c) }
    }

    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, high: bool) -> I {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { if high { load_high_nibbles(from) } else { load_masked(from, &NIBBLES) } }
    }

    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8, high: bool) -> I {
        // SAFETY: `self` proves AVX2; 64 bytes are readable by contract.
        unsafe { if high { load_high_bytes(from) } else { load_masked(from, &BYTES) } }
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
        // SAFETY: `self` proves AVX2.
        unsafe {
            let count = _mm_cvtsi32_si128(shift.cast_signed());
            let mask = _mm256_set1_epi16(mask.cast_signed());
            I(
                _mm256_and_si256(_mm256_sll_epi16(words.0, count), mask),
                _mm256_and_si256(_mm256_sll_epi16(words.1, count), mask),
            )
        }
    }

    #[inline(always)]
    fn or(self, a: I, b: I) -> I {
        // SAFETY: `self` proves AVX2.
        unsafe { I(_mm256_or_si256(a.0, b.0), _mm256_or_si256(a.1, b.1)) }
    }

    #[inline(always)]
    fn byte(self, words: I, index: u32) -> I {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let count = _mm_cvtsi32_si128((8 * index).cast_signed());
            let mask = _mm256_set1_epi32(0xff);
            I(
                _mm256_and_si256(_mm256_srl_epi32(words.0, count), mask),
                _mm256_and_si256(_mm256_srl_epi32(words.1, count), mask),
            )
        }
    }

    #[inline(always)]
    fn to_f32(self, i: I) -> V {
        // SAFETY: `self` proves AVX.
        unsafe { V(_mm256_cvtepi32_ps(i.0), _mm256_cvtepi32_ps(i.1)) }
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
        unsafe { add_short(row, quad, codes, short) }
    }

    #[inline(always)]
    fn add_pairs(self, short: I, c: I) -> I {
        // SAFETY: `self` proves AVX2.
        unsafe {
            let ones = _mm256_set1_epi16(1);
            I(
                _mm256_add_epi32(c.0, _mm256_madd_epi16(short.0, ones)),
                _mm256_add_epi32(c.1, _mm256_madd_epi16(short.1, ones)),
            )
        }
    }
}
