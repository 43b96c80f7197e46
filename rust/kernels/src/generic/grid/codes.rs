//! Loading of the codes of a block, see the layout in `grid`; one marker type per [`CodeBits`].
//!
//! Products of integers use [`Codes::quad`] and [`Codes::halves`], products of floats [`Codes::float`].

use penstock_types::CodeBits;

use crate::grid::block_bytes;
use crate::simd::Simd;

pub(crate) trait Codes: Copy {
    const BITS: CodeBits;
    /// Columns that share a scale in the smallest group: 16 or 32.
    const SMALLEST_GROUP: usize = 32;
    const BLOCK_BYTES: usize = block_bytes(Self::BITS);
    /// Quads whose products fit 16-bit sums: pairs of products of at most `127 * (2^bits - 1)` each. 0 if not even one
    /// does.
    const SHORT_QUADS: usize = 32767 / (2 * 127 * ((1 << Self::BITS.count()) - 1));

    /// Quad `2 pair` of the block, or the one after it if `odd`: four codes in each lane.
    ///
    /// # Safety
    /// `BLOCK_BYTES` bytes are readable at `block`; `pair` is below 4.
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I;

    /// [`float`](Self::float) of a code is its value divided by this power of two.
    const FACTOR: f32 = 1.0;

    /// Code `index` of a quad as a float.
    #[inline(always)]
    fn float<S: Simd>(s: S, quad: S::I, index: u32) -> S::V {
        s.to_f32(s.byte(quad, index))
    }

    /// Codes 0 and 2 of a quad, or 1 and 3 if `last`, as 16 bits each.
    ///
    /// # Safety
    /// As for [`quad`](Self::quad).
    #[inline(always)]
    unsafe fn halves<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool, last: bool) -> S::I {
        // SAFETY: by contract.
        s.halves(unsafe { Self::quad(s, block, pair, odd) }, if last { 8 } else { 0 }, 0x00ff)
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Four;
#[derive(Clone, Copy)]
pub(crate) struct Five;
#[derive(Clone, Copy)]
pub(crate) struct Six;
#[derive(Clone, Copy)]
pub(crate) struct Eight;
#[derive(Clone, Copy)]
pub(crate) struct E4m3;

impl Codes for Four {
    const BITS: CodeBits = CodeBits::Four;

    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I {
        // SAFETY: by contract.
        unsafe { s.load_nibbles(block.add(pair * 64), odd) }
    }
}

impl Codes for Five {
    const BITS: CodeBits = CodeBits::Five;

    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I {
        // SAFETY: by contract.
        let (low, words) = unsafe { (Four::quad(s, block, pair, odd), s.load_words(block.add(256))) };
        // Bit `2 pair` of each byte, or the next, moved to bit 4.
        let high = s.halves(words, 2 * pair as u32, 0x0303);
        s.or(low, s.halves_up(high, if odd { 3 } else { 4 }, 0x1010))
    }
}

impl Codes for Six {
    const BITS: CodeBits = CodeBits::Six;
    const SMALLEST_GROUP: usize = 16;

    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I {
        // SAFETY: by contract.
        let (low, words) =
            unsafe { (Four::quad(s, block, pair, odd), s.load_words(block.add(256 + pair / 2 * 64))) };
        // Bits `4 (pair % 2)` and the next of each byte, or the two after them, moved to bits 4 and 5.
        let high = s.halves(words, 4 * (pair % 2) as u32, 0x0f0f);
        s.or(low, s.halves_up(high, if odd { 2 } else { 4 }, 0x3030))
    }
}

impl Codes for Eight {
    const BITS: CodeBits = CodeBits::Eight;

    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I {
        // SAFETY: by contract.
        unsafe { s.load_words(block.add(pair * 128 + if odd { 64 } else { 0 })) }
    }

    #[inline(always)]
    unsafe fn halves<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool, last: bool) -> S::I {
        // SAFETY: by contract.
        unsafe { s.load_bytes(block.add(pair * 128 + if odd { 64 } else { 0 }), last) }
    }
}

impl Codes for E4m3 {
    const BITS: CodeBits = CodeBits::E4m3;
    /// The exponent of a float32 has a bias of 127, that of a code 7.
    const FACTOR: f32 = f32::from_bits((127 + 120) << 23);

    #[inline(always)]
    unsafe fn quad<S: Simd>(s: S, block: *const u8, pair: usize, odd: bool) -> S::I {
        // SAFETY: by contract.
        unsafe { Eight::quad(s, block, pair, odd) }
    }

    #[inline(always)]
    fn float<S: Simd>(s: S, quad: S::I, index: u32) -> S::V {
        s.e4m3(quad, index)
    }
}
