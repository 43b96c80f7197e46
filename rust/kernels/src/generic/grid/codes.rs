//! Loading of the codes of a block, see the layout in `grid`; one marker type per [`CodeBits`].

use penstock_types::CodeBits;

use crate::grid::block_bytes;
use crate::simd::Simd;

pub(crate) trait Codes: Copy {
    const BITS: CodeBits;
    /// Columns that share a scale in the smallest group: 16 or 32.
    const SMALLEST_GROUP: usize = 32;
    const BLOCK_BYTES: usize = block_bytes(Self::BITS);
    /// Quads whose products fit 16-bit sums: pairs of products of at most `127 * (2^bits - 1)` each. 0 if not even one does.
    const SHORT_QUADS: usize = 32767 / (2 * 127 * ((1 << Self::BITS.count()) - 1));

    /// Quads `2 pair` and `2 pair + 1` of the block: four codes in each lane.
    ///
    /// # Safety
    /// `BLOCK_BYTES` bytes are readable at `block`; `pair` is below 4.
    unsafe fn pair<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2];
}

#[derive(Clone, Copy)]
pub(crate) struct Four;
#[derive(Clone, Copy)]
pub(crate) struct Five;
#[derive(Clone, Copy)]
pub(crate) struct Six;
#[derive(Clone, Copy)]
pub(crate) struct Eight;

/// The low four bits of a pair of quads.
///
/// # Safety
/// 256 bytes are readable at `block`; `pair` is below 4.
#[inline(always)]
unsafe fn nibbles<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2] {
    // SAFETY: by contract.
    let words = unsafe { s.load_words(block.add(pair * 64)) };
    [s.halves(words, 0, 0x0f0f), s.halves(words, 4, 0x0f0f)]
}

impl Codes for Four {
    const BITS: CodeBits = CodeBits::Four;

    #[inline(always)]
    unsafe fn pair<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2] {
        // SAFETY: by contract.
        unsafe { nibbles(s, block, pair) }
    }
}

impl Codes for Five {
    const BITS: CodeBits = CodeBits::Five;

    #[inline(always)]
    unsafe fn pair<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2] {
        // SAFETY: by contract.
        let (low, words) = unsafe { (nibbles(s, block, pair), s.load_words(block.add(256))) };
        // Bits `2 pair` and `2 pair + 1` of each byte, moved to bit 4.
        let high = s.halves(words, 2 * pair as u32, 0x0303);
        [s.or(low[0], s.halves_up(high, 4, 0x1010)), s.or(low[1], s.halves_up(high, 3, 0x1010))]
    }
}

impl Codes for Six {
    const BITS: CodeBits = CodeBits::Six;
    const SMALLEST_GROUP: usize = 16;

    #[inline(always)]
    unsafe fn pair<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2] {
        // SAFETY: by contract.
        let (low, words) = unsafe { (nibbles(s, block, pair), s.load_words(block.add(256 + pair / 2 * 64))) };
        // Bits `4 (pair % 2)` and the three after it of each byte, two for each quad, moved to bits 4 and 5.
        let high = s.halves(words, 4 * (pair % 2) as u32, 0x0f0f);
        [s.or(low[0], s.halves_up(high, 4, 0x3030)), s.or(low[1], s.halves_up(high, 2, 0x3030))]
    }
}

impl Codes for Eight {
    const BITS: CodeBits = CodeBits::Eight;

    #[inline(always)]
    unsafe fn pair<S: Simd>(s: S, block: *const u8, pair: usize) -> [S::I; 2] {
        // SAFETY: by contract.
        unsafe { [s.load_words(block.add(pair * 128)), s.load_words(block.add(pair * 128 + 64))] }
    }
}
