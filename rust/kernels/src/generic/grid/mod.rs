//! The product of rows of 8-bit codes and a grid matrix.
//!
//! ```text
//! for a K block of 1024 columns
//!   for a few panels                  their scales as float32 on the stack
//!     for each tile of tokens
//!       for a span                    integer sums in registers
//!         acc += (scale of the row * scale of the span) * sum
//! epilogue: acc -> out
//! ```
//!
//! `acc` is one chain over ascending spans: for each, one fused multiply-add of the integer sum of the centred codes,
//! and one of the minimum with the sum of the activations if minima are stored. Integer sums are exact, so tiles, blocks,
//! the share of a worker and the kind of instruction do not affect the result.

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

pub(crate) mod codes;
pub(crate) mod dot;
pub(crate) mod floats;
pub(crate) mod quantise;

use std::mem::MaybeUninit;
use std::ops::Range;

use codes::Codes;
use dot::{Dot, Sums};
use penstock_types::{Minimum, ScaleFormat};

use super::matmul::{ACC_FLOATS, Output, finish};
use super::tile::{RowTiles, TileShapes};
use crate::grid::{BLOCK, GridLayout, SPAN};
use crate::operand::{OperandLayout, Span};
use crate::panel::LANES;
use crate::simd::Simd;

/// Maximum number of rows of a tile.
pub(crate) const MAX_ROWS: usize = 6;
/// Maximum number of panels of a tile.
pub(crate) const PANELS: usize = 2;
/// Scales of a panel in a K block: one for each of the smallest groups.
const SCALES: usize = SPAN / 16 * LANES;
/// The distance of the prefetch of codes that are read once, in bytes.
const AHEAD: usize = 1536;

/// One product. Its pointers are valid for its shapes, and no other code accesses the part of `out` that its panels and
/// tokens cover.
pub(crate) struct GridProduct<'a> {
    /// Rows of `operand`.
    pub(crate) x: *const u8,
    pub(crate) operand: OperandLayout,
    pub(crate) tokens: RowTiles,
    pub(crate) weights: *const u8,
    pub(crate) layout: GridLayout,
    pub(crate) kernel: &'static GridKernel,
    pub(crate) output: Output<'a>,
}

// SAFETY: the pointers come from slices that the caller of the product borrows for its duration.
unsafe impl Sync for GridProduct<'_> {}

pub(crate) type GridTileFn = unsafe fn(&TileCall<'_>);

/// The tiles of one number of bits, for one instruction set.
#[derive(Clone, Copy)]
pub(crate) struct GridKernel {
    /// By the number of rows less 1 and the number of panels less 1.
    pub(crate) tiles: [[GridTileFn; PANELS]; MAX_ROWS],
    pub(crate) shapes: TileShapes,
    /// Whether the tiles read wide codes of the activations.
    pub(crate) is_wide: bool,
    pub(crate) smallest_group: usize,
    pub(crate) block_bytes: usize,
}

/// Computes the panels `panels` for the token tiles `tiles`.
///
/// # Safety
/// - `product` is as its type requires, for the codes of its kernel, and its operand has the codes that it reads;
/// - `panels` and `tiles` are not empty, lie inside it, and multiply to at most `share_tiles(S::GRID_TILES)`.
#[inline(always)]
pub(crate) unsafe fn grid_matmul<S: Simd>(
    s: S,
    product: &GridProduct<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
) {
    let mut acc = MaybeUninit::<[f32; ACC_FLOATS]>::uninit();
    let acc = acc.as_mut_ptr().cast::<f32>();
    let mut scales = MaybeUninit::<[[f32; 2 * SCALES]; PANELS]>::uninit();
    let scales = scales.as_mut_ptr().cast::<f32>();
    let (layout, operand, kernel) = (&product.layout, &product.operand, product.kernel);
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let group = if kernel.smallest_group < BLOCK { kernel.smallest_group } else { operand.span };
    let has_minima = layout.grid.minimum != Minimum::Centred;
    let mut k = 0;
    while k < layout.columns {
        let columns = k..layout.columns.min(k + SPAN);
        // The last block is padded to 32 columns, and so are its groups.
        let groups = columns.len().next_multiple_of(BLOCK).div_ceil(group);
        let mut first = panels.start;
        while first < panels.end {
            let count = PANELS.min(panels.end - first);
            for p in 0..count {
                // SAFETY: the panel is one of `panels`; the scales have room for those of a K block.
                unsafe {
                    let panel = product.weights.add((first + p) * layout.bytes);
                    decode_scales(s, layout, panel, k, group, groups, scales.add(p * 2 * SCALES));
                }
            }
            for tile in tiles.clone() {
                let rows = product.tokens.rows(tile);
                let at_once = kernel.shapes.panels_at_once(rows.len());
                let mut done = 0;
                while done < count {
                    let panel = first + done;
                    let tile_panels = at_once.min(count - done);
                    // SAFETY: the tile's tokens lie inside the product; the panel is one of `panels`, and the columns are
                    // in it; `acc` has room for every panel and token by contract, and is set after the first block.
                    unsafe {
                        let codes = product.weights.add(panel * layout.bytes + layout.codes);
                        let acc_row = (panel - panels.start) * tokens.len() + rows.start - tokens.start;
                        (kernel.tiles[rows.len() - 1][tile_panels - 1])(&TileCall {
                            x: product.x.add(rows.start * operand.row_bytes),
                            operand,
                            codes_at: if kernel.is_wide { operand.wide_at + 2 * k } else { k },
                            codes: codes.add(k / BLOCK * kernel.block_bytes),
                            panel_bytes: layout.bytes,
                            columns: columns.clone(),
                            scales: scales.add(done * 2 * SCALES),
                            has_minima,
                            ahead: if tiles.len() == 1 { AHEAD } else { 0 },
                            acc: acc.add(acc_row * LANES),
                            acc_stride: tokens.len() * LANES,
                        });
                    }
                    done += tile_panels;
                }
            }
            first += count;
        }
        k = columns.end;
    }
    for (index, panel) in panels.enumerate() {
        // SAFETY: every chain of this panel is in `acc`, one token after the other.
        unsafe { finish(s, &product.output, panel, tokens.clone(), acc.add(index * tokens.len() * LANES)) };
    }
}

/// Writes the scales of `groups` groups of `width` columns from column `k` on, 16 lanes each, to `out`, and the minima
/// behind [`SCALES`].
///
/// # Safety
/// The panel is readable at `panel`; `out` is writable for 2 [`SCALES`] floats.
#[inline(always)]
unsafe fn decode_scales<S: Simd>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    k: usize,
    width: usize,
    groups: usize,
    out: *mut f32,
) {
    let stored = layout.grid.group.map_or(usize::MAX, usize::from);
    let last = layout.grid.groups(layout.columns) - 1;
    for index in 0..groups {
        // The sums may be of smaller groups than the scales.
        let group = ((k + index * width) / stored).min(last);
        // SAFETY: `groups` times 16 is at most `SCALES`; the group is in the panel.
        unsafe {
            let (scales, minima) = decode_group(s, layout, panel, group);
            s.store(out.add(index * LANES), scales);
            s.store(out.add(SCALES + index * LANES), minima);
        }
    }
}

/// The scales and the minima of a group; the minima are 0 if they are centred.
///
/// # Safety
/// The panel is readable at `panel` and has the group.
#[inline(always)]
pub(crate) unsafe fn decode_group<S: Simd>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    group: usize,
) -> (S::V, S::V) {
    // SAFETY: the scales of a panel are before its codes.
    unsafe {
        if layout.grid.scales == ScaleFormat::F16 && layout.grid.minimum != Minimum::ZeroPoint {
            let at = group * LANES * 2;
            let minima = match layout.grid.minimum {
                Minimum::Stored => s.load_f16(panel.add(layout.minima + at)),
                _ => s.splat(0.0),
            };
            return (s.load_f16(panel.add(at)), minima);
        }
        let (mut scales, mut minima) = ([0.0; LANES], [0.0; LANES]);
        let bytes = std::slice::from_raw_parts(panel, layout.codes);
        layout.decode_group(bytes, group, &mut scales, &mut minima);
        (s.vector(scales), s.vector(minima))
    }
}

/// A tile of tokens and panels.
pub(crate) struct TileCall<'a> {
    x: *const u8,
    operand: &'a OperandLayout,
    /// The offset of the codes of the first column in a row.
    codes_at: usize,
    codes: *const u8,
    panel_bytes: usize,
    columns: Range<usize>,
    scales: *const f32,
    has_minima: bool,
    ahead: usize,
    acc: *mut f32,
    acc_stride: usize,
}

/// # Safety
/// `call` describes `T` rows, `P` panels and their accumulators, which are set unless `columns` starts at 0.
#[inline(always)]
pub(crate) unsafe fn grid_tile<S: Simd, C: Codes, D: Dot<S>, const T: usize, const P: usize>(
    s: S,
    call: &TileCall<'_>,
) {
    let operand = call.operand;
    let mut rows = [call.x; T];
    let mut x = [call.x; T];
    let mut blocks = [call.codes; P];
    let mut acc = [[s.splat(0.0); P]; T];
    // SAFETY: rows, panels and accumulators exist by contract.
    unsafe {
        for t in 0..T {
            rows[t] = call.x.add(t * operand.row_bytes + operand.spans_at);
            x[t] = call.x.add(t * operand.row_bytes + call.codes_at);
        }
        for p in 0..P {
            blocks[p] = call.codes.add(p * call.panel_bytes);
            if call.columns.start > 0 {
                for t in 0..T {
                    acc[t][p] = s.load(call.acc.add(p * call.acc_stride + t * LANES));
                }
            }
        }
    }
    // The centre is a power of two.
    let shift = if call.has_minima { 32 } else { C::BITS.count() - 1 };
    let mut scales = call.scales;
    let mut k = call.columns.start;
    let mut span = k / operand.span;
    while k < call.columns.end {
        let end = call.columns.end.min(k + operand.span);
        if C::SMALLEST_GROUP < BLOCK {
            // Two groups of 16: the span is a block.
            for half in 0..2 {
                // SAFETY: by contract.
                unsafe {
                    let mut sums = first_sums::<S, T, P>(s, rows, span, Some(half), shift);
                    if half == 0 {
                        D::add::<C, T, P>(s, &mut sums, x, blocks, 0..2);
                    } else {
                        D::add::<C, T, P>(s, &mut sums, x, blocks, 2..4);
                    }
                    add_scaled::<S, T, P>(s, &mut acc, &sums, rows, span, scales, call.has_minima);
                }
                scales = scales.wrapping_add(LANES);
            }
            // SAFETY: the next block, or the end of the codes.
            unsafe { advance_block::<S, C, D, T, P>(s, &mut x, &mut blocks, call.ahead) };
        } else {
            // SAFETY: by contract; the blocks are those of the span.
            unsafe {
                let mut sums = first_sums::<S, T, P>(s, rows, span, None, shift);
                let mut block = k;
                while block < end {
                    D::add::<C, T, P>(s, &mut sums, x, blocks, 0..4);
                    advance_block::<S, C, D, T, P>(s, &mut x, &mut blocks, call.ahead);
                    block += BLOCK;
                }
                add_scaled::<S, T, P>(s, &mut acc, &sums, rows, span, scales, call.has_minima);
            }
            scales = scales.wrapping_add(LANES);
        }
        span += 1;
        k = end;
    }
    for t in 0..T {
        for p in 0..P {
            // SAFETY: the accumulators exist by contract.
            unsafe { s.store(call.acc.add(p * call.acc_stride + t * LANES), acc[t][p]) };
        }
    }
}

/// Moves to the next block of 32 columns and prefetches a later one.
///
/// # Safety
/// The pointers are to a block.
#[inline(always)]
unsafe fn advance_block<S: Simd, C: Codes, D: Dot<S>, const T: usize, const P: usize>(
    s: S,
    x: &mut [*const u8; T],
    blocks: &mut [*const u8; P],
    ahead: usize,
) {
    for block in blocks {
        let mut line = 0;
        while line < C::BLOCK_BYTES && ahead > 0 {
            s.prefetch(block.wrapping_add(ahead + line));
            line += 64;
        }
        // SAFETY: at most the end of the codes.
        *block = unsafe { block.add(C::BLOCK_BYTES) };
    }
    for x in x {
        // SAFETY: at most the end of the codes of the row.
        *x = unsafe { x.add(if D::WIDE { 2 * BLOCK } else { BLOCK }) };
    }
}

/// The integer sums that centre the codes: `-centre * sum of the activations`, or 0 with a `shift` of 32.
///
/// # Safety
/// Span `span` exists in every row.
#[inline(always)]
unsafe fn first_sums<S: Simd, const T: usize, const P: usize>(
    s: S,
    rows: [*const u8; T],
    span: usize,
    half: Option<usize>,
    shift: u32,
) -> Sums<S, T, P> {
    let mut sums = [[s.zeros(); P]; T];
    for t in 0..T {
        // SAFETY: by contract.
        unsafe {
            let span = rows[t].cast::<Span>().add(span);
            let sum = match half {
                None => &raw const (*span).sum,
                Some(half) => (&raw const (*span).halves).cast::<i32>().add(half),
            };
            sums[t] = [s.neg_shifted(sum, shift); P];
        }
    }
    sums
}

/// `acc += sums * (scale * activation scale) [+ minimum * scaled sum]`
///
/// # Safety
/// Span `span` exists in every row; the scales of `P` panels are readable.
#[inline(always)]
unsafe fn add_scaled<S: Simd, const T: usize, const P: usize>(
    s: S,
    acc: &mut [[S::V; P]; T],
    sums: &Sums<S, T, P>,
    rows: [*const u8; T],
    span: usize,
    scales: *const f32,
    has_minima: bool,
) {
    for p in 0..P {
        // SAFETY: by contract.
        unsafe {
            let scale = s.load(scales.add(p * 2 * SCALES));
            for t in 0..T {
                let at = rows[t].cast::<Span>().add(span);
                let factor = s.mul(scale, s.splat((*at).scale));
                acc[t][p] = s.mul_add(s.to_f32(sums[t][p]), factor, acc[t][p]);
            }
            if has_minima {
                let minimum = s.load(scales.add(p * 2 * SCALES + SCALES));
                for t in 0..T {
                    let at = rows[t].cast::<Span>().add(span);
                    acc[t][p] = s.mul_add(minimum, s.splat((*at).scaled_sum), acc[t][p]);
                }
            }
        }
    }
}
