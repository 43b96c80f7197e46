//! Products of grids with the tiles of AMX, for 7 to 16 rows of 8-bit codes; fewer rows use VNNI.
//!
//! The codes of a block are a tile as they are stored: 64 bytes for each quad. One instruction adds the products of 4,
//! 8 or 16 quads to the 16 sums of each row. The sums are exact integers, so the bits are those of VNNI.

use std::arch::asm;
use std::arch::x86_64::*;

use super::avx512::{self, Avx512};
use crate::arch::{PerBits, Table};
use crate::generic::grid::codes::{Codes, Eight, Five, Four, Six};
use crate::generic::grid::{GridKernel, GridTileFn, TileCall, add_scaled, first_sums};
use crate::grid::BLOCK;
use crate::panel::LANES;
use crate::simd::Simd;
use crate::simd::TileShapes;

pub(crate) static TABLE: Table = table::<Amx>();

const SHAPES: TileShapes = TileShapes { panels: &[2, 2, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1] };

const fn table<M: Tiles>() -> Table {
    let vnni = avx512::vnni_table();
    let kernels = &vnni.grid_kernels;
    let grid_kernels = PerBits {
        four: kernel::<M, Four>(&kernels.four),
        five: kernel::<M, Five>(&kernels.five),
        six: kernel::<M, Six>(&kernels.six),
        eight: kernel::<M, Eight>(&kernels.eight),
        e4m3: kernels.e4m3,
    };
    Table { grid_tiles: SHAPES, grid_kernels, ..vnni }
}

const fn kernel<M: Tiles, C: Codes>(vnni: &GridKernel) -> GridKernel {
    let mut kernel = *vnni;
    kernel.shapes = SHAPES;
    macro_rules! set {
        ($($rows:literal)+) => { $(kernel.tiles[$rows - 1] = [tile::<M, C, $rows> as GridTileFn; 2];)+ };
    }
    set!(7 8 9 10 11 12 13 14 15 16);
    kernel
}

/// 16 rows of 16 sums.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Sums([[i32; LANES]; 16]);

/// The codes of two blocks, one byte each.
#[repr(align(64))]
struct Bytes([u8; 2 * BLOCK * LANES]);

/// The instructions of AMX, or their emulation in tests.
trait Tiles {
    /// Tiles of `rows` rows of codes of activations.
    ///
    /// # Safety
    /// The CPU has the instructions; there is no other value on this thread.
    unsafe fn new(rows: usize) -> Self;

    fn clear(&mut self);

    /// Adds the products of 4, 8 or 16 quads.
    ///
    /// # Safety
    /// Every row, `row_bytes` bytes apart, has the quads at `x`; the codes of the quads are readable at `codes`.
    unsafe fn add(&mut self, x: *const u8, row_bytes: usize, codes: *const u8, quads: usize);

    fn store(&mut self, sums: &mut Sums);
}

/// The state of this thread's tiles. Tile 0 has the sums; 1, 3 and 5 have rows and 2, 4 and 6 codes of 16, 8 and 4
/// quads.
struct Amx;

/// The operand of LDTILECFG.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles for Amx {
    #[inline(always)]
    unsafe fn new(rows: usize) -> Self {
        let rows = rows as u8;
        let mut shapes =
            Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        shapes.row_bytes[..7].copy_from_slice(&[64, 64, 64, 32, 64, 16, 64]);
        shapes.rows[..7].copy_from_slice(&[rows, rows, 16, rows, 8, rows, 4]);
        // SAFETY: the CPU has the instruction by contract, which reads the 64 bytes of `shapes`.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, preserves_flags)) };
        Self
    }

    #[inline(always)]
    fn clear(&mut self) {
        // SAFETY: `new` has set the shape of the tile.
        unsafe { asm!("tilezero tmm0", options(nomem, nostack, preserves_flags)) };
    }

    #[inline(always)]
    unsafe fn add(&mut self, x: *const u8, row_bytes: usize, codes: *const u8, quads: usize) {
        /// `tmm0 += $rows * $codes`: signed by unsigned bytes.
        macro_rules! add {
            ($rows:literal, $codes:literal) => {
                asm!(
                    concat!("tileloadd ", $rows, ", [{x} + {row_bytes}]"),
                    concat!("tileloadd ", $codes, ", [{codes} + {quad_bytes}]"),
                    concat!("tdpbsud tmm0, ", $rows, ", ", $codes),
                    x = in(reg) x,
                    row_bytes = in(reg) row_bytes,
                    codes = in(reg) codes,
                    quad_bytes = in(reg) 4 * LANES,
                    options(readonly, nostack, preserves_flags),
                )
            };
        }
        // SAFETY: `new` has set the shapes of the tiles; rows and codes are readable by contract.
        unsafe {
            match quads {
                16 => add!("tmm1", "tmm2"),
                8 => add!("tmm3", "tmm4"),
                _ => add!("tmm5", "tmm6"),
            }
        }
    }

    #[inline(always)]
    fn store(&mut self, sums: &mut Sums) {
        // SAFETY: the tile has at most 16 rows of 64 bytes.
        unsafe {
            asm!(
                "tilestored [{sums} + {row_bytes}], tmm0",
                sums = in(reg) sums,
                row_bytes = in(reg) 4 * LANES,
                options(nostack, preserves_flags),
            );
        }
    }
}

impl Drop for Amx {
    #[inline(always)]
    fn drop(&mut self) {
        // SAFETY: nothing reads the tiles any more.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// As [`grid_tile`](crate::generic::grid::grid_tile), for `ROWS` rows and one panel.
///
/// # Safety
/// As for `grid_tile`; the CPU has the instructions of `M`.
unsafe fn tile<M: Tiles, C: Codes, const ROWS: usize>(call: &TileCall<'_>) {
    // SAFETY: by contract.
    unsafe { tile_of_rows::<M, C>(call, ROWS) }
}

/// # Safety
/// As for [`tile`].
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
unsafe fn tile_of_rows<M: Tiles, C: Codes>(call: &TileCall<'_>, rows: usize) {
    let operand = call.operand;
    let (mut x, mut block) = (call.x.wrapping_add(call.codes_at), call.codes);
    let mut sums = Sums([[0; LANES]; 16]);
    let mut bytes = Bytes([0; 2 * BLOCK * LANES]);
    let mut scales = call.scales;
    // SAFETY: rows, codes and scales exist by contract; a block is 8 quads, and columns are padded to whole blocks.
    unsafe {
        let s = Avx512::new_unchecked();
        let mut tiles = M::new(rows);
        let mut k = call.columns.start;
        while k < call.columns.end {
            let end = call.columns.end.min(k + operand.span);
            if C::SMALLEST_GROUP < BLOCK {
                // Two groups of 16: the span is a block.
                store_codes::<C>(s, block, &mut bytes, 0);
                for half in 0..2 {
                    let codes = bytes.0.as_ptr().add(half * BLOCK / 2 * LANES);
                    tiles.clear();
                    tiles.add(x.add(half * BLOCK / 2), operand.row_bytes, codes, 4);
                    tiles.store(&mut sums);
                    add_sums::<C>(s, call, &sums, rows, k, Some(half), scales);
                    scales = scales.wrapping_add(LANES);
                }
                (x, block) = (x.add(BLOCK), block.add(C::BLOCK_BYTES));
            } else {
                tiles.clear();
                let mut column = k;
                while column < end {
                    let blocks = if end - column > BLOCK { 2 } else { 1 };
                    let mut codes = block;
                    if C::BLOCK_BYTES < BLOCK * LANES {
                        for index in 0..blocks {
                            store_codes::<C>(s, block.add(index * C::BLOCK_BYTES), &mut bytes, index);
                        }
                        codes = bytes.0.as_ptr();
                    }
                    tiles.add(x, operand.row_bytes, codes, 8 * blocks);
                    (x, block) = (x.add(blocks * BLOCK), block.add(blocks * C::BLOCK_BYTES));
                    column += blocks * BLOCK;
                }
                tiles.store(&mut sums);
                add_sums::<C>(s, call, &sums, rows, k, None, scales);
                scales = scales.wrapping_add(LANES);
            }
            k = end;
        }
    }
}

/// Adds the scaled sums of the span of column `k` to the accumulators, or sets them at the first column.
///
/// # Safety
/// AVX-512 is available; `call` has the rows, the span and its scales.
#[inline(always)]
unsafe fn add_sums<C: Codes>(
    s: Avx512,
    call: &TileCall<'_>,
    sums: &Sums,
    rows: usize,
    k: usize,
    half: Option<usize>,
    scales: *const f32,
) {
    let operand = call.operand;
    let shift = if call.has_minima { 32 } else { C::BITS.count() - 1 };
    let is_first = k == 0 && half != Some(1);
    for (t, sums) in sums.0.iter().enumerate().take(rows) {
        // SAFETY: by contract.
        unsafe {
            let span = k / operand.span;
            let row = [call.x.add(t * operand.row_bytes + operand.spans_at)];
            let mut total = first_sums::<Avx512, 1, 1>(s, row, span, half, shift);
            total[0][0] = _mm512_add_epi32(total[0][0], s.load_words(sums.as_ptr().cast()));
            let acc = call.acc.add(t * LANES);
            let mut chain = [[if is_first { s.splat(0.0) } else { s.load(acc) }]];
            add_scaled::<Avx512, 1, 1>(s, &mut chain, &total, row, span, scales, call.has_minima);
            s.store(acc, chain[0][0]);
        }
    }
}

/// Writes the codes of a block as bytes to block `index` of `bytes`.
///
/// # Safety
/// AVX-512 is available; the block is readable; `index` is 0 or 1.
#[inline(always)]
unsafe fn store_codes<C: Codes>(s: Avx512, block: *const u8, bytes: &mut Bytes, index: usize) {
    for quad in 0..BLOCK / 4 {
        // SAFETY: by contract; the quads of a block are 512 bytes.
        unsafe {
            let codes = C::quad(s, block, quad / 2, quad % 2 == 1);
            let to = bytes.0.as_mut_ptr().add((index * BLOCK / 4 + quad) * 4 * LANES);
            _mm512_store_si512(to.cast(), codes);
        }
    }
}

#[cfg(test)]
pub(crate) static EMULATED: Table = table::<Emulated>().only_codes();

/// The instructions in plain Rust.
#[cfg(test)]
struct Emulated {
    rows: usize,
    sums: Sums,
}

#[cfg(test)]
impl Tiles for Emulated {
    unsafe fn new(rows: usize) -> Self {
        Self { rows, sums: Sums([[-1; LANES]; 16]) }
    }

    fn clear(&mut self) {
        self.sums.0[..self.rows].fill([0; LANES]);
    }

    unsafe fn add(&mut self, x: *const u8, row_bytes: usize, codes: *const u8, quads: usize) {
        for row in 0..self.rows {
            for column in 0..4 * quads {
                for lane in 0..LANES {
                    // SAFETY: rows and codes are readable by contract.
                    let (x, code) = unsafe {
                        let code = *codes.add((column / 4 * LANES + lane) * 4 + column % 4);
                        (*x.add(row * row_bytes + column).cast::<i8>(), code)
                    };
                    self.sums.0[row][lane] += i32::from(x) * i32::from(code);
                }
            }
        }
    }

    fn store(&mut self, sums: &mut Sums) {
        sums.0[..self.rows].copy_from_slice(&self.sums.0[..self.rows]);
    }
}
