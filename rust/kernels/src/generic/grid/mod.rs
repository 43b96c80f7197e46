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
//! With a single tile, the K blocks of a panel follow each other, so that its bytes are read in order.
//!
//! `acc` is one chain over ascending spans: for each, one fused multiply-add of the integer sum of the centred codes,
//! and one of the minimum with the sum of the activations if minima are stored. Integer sums are exact, so tiles,
//! blocks, the share of a worker and the kind of instruction do not affect the result.

#![allow(clippy::needless_range_loop, reason = "t and p index several arrays")]

pub(crate) mod codes;
pub(crate) mod dot;
pub(crate) mod floats;
pub(crate) mod quantise;

use std::mem::MaybeUninit;
use std::ops::Range;

use codes::Codes;
use dot::{Dot, Sums};
use penstock_types::{Grid, Minimum, ScaleFormat};

use super::matmul::{ACC_FLOATS, Output, PanelOrder, STREAM_AHEAD, finish};
use super::tile::RowTiles;
use crate::grid::{BLOCK, GridLayout, SPAN};
use crate::operand::{OperandLayout, Span};
use crate::panel::LANES;
use crate::simd::Simd;
use crate::simd::TileShapes;

/// Maximum number of rows of a tile.
pub(crate) const MAX_ROWS: usize = 16;
/// Maximum number of panels of a tile.
const MOST_PANELS: usize = 4;
/// Scales of a panel in a K block: one for each of the smallest groups.
const SCALES: usize = SPAN / 16 * LANES;

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
    /// By the number of rows less 1: of one panel, and of [`TileShapes::panels_at_once`].
    pub(crate) tiles: [[GridTileFn; 2]; MAX_ROWS],
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
    let (layout, shapes) = (&product.layout, product.kernel.shapes);
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let smallest_tile = product.tokens.rows(tiles.end - 1).len();
    let order = PanelOrder::new(panels.len(), shapes.panels_at_once(smallest_tile), tiles.len() == 1);
    let share = Share { product, order, panels: panels.clone(), tiles, tokens: tokens.clone(), acc };
    let blocks = layout.columns.div_ceil(SPAN);
    // SAFETY: the caller's contract; blocks ascend for every panel.
    unsafe {
        if share.tiles.len() == 1 {
            // The weights are read once, in the order of their addresses.
            for pass in 0..share.order.passes {
                for block in 0..blocks {
                    share.block(s, pass, block * SPAN);
                }
            }
        } else {
            for block in 0..blocks {
                for pass in 0..share.order.passes {
                    share.block(s, pass, block * SPAN);
                }
            }
        }
        for (index, panel) in panels.enumerate() {
            finish(s, &product.output, panel, tokens.clone(), acc.add(index * tokens.len() * LANES));
        }
    }
}

/// Some panels and some tiles of a product, which one worker computes.
struct Share<'a> {
    product: &'a GridProduct<'a>,
    order: PanelOrder,
    panels: Range<usize>,
    tiles: Range<usize>,
    tokens: Range<usize>,
    /// 16 chains for each panel and token.
    acc: *mut f32,
}

impl Share<'_> {
    /// The products of the panels of a pass and of the K block that starts at column `k`.
    ///
    /// # Safety
    /// The contract of [`grid_matmul`]; `acc` has room for all chains, and is set after the first block.
    #[inline(always)]
    unsafe fn block<S: Simd>(&self, s: S, pass: usize, k: usize) {
        let (layout, kernel) = (&self.product.layout, self.product.kernel);
        let operand = &self.product.operand;
        let columns = k..layout.columns.min(k + SPAN);
        let group = if kernel.smallest_group < BLOCK { kernel.smallest_group } else { operand.span };
        // The last block is padded to 32 columns, and so are its groups.
        let groups = columns.len().next_multiple_of(BLOCK).div_ceil(group);
        let (first, count) = self.order.panels(pass);
        let mut scales = MaybeUninit::<[[f32; 2 * SCALES]; MOST_PANELS]>::uninit();
        let scales = scales.as_mut_ptr().cast::<f32>();
        let streamed = self.tiles.len() == 1;
        // SAFETY: the panels are among `panels`; the scales have room for those of a K block of each panel of a pass.
        let weights = unsafe { self.product.weights.add(self.panels.start * layout.bytes) };
        for p in 0..count {
            // SAFETY: as above.
            unsafe {
                let panel = weights.add((first + p * self.order.spacing) * layout.bytes);
                let ahead = if streamed { STREAM_AHEAD } else { 0 };
                decode_scales(s, layout, panel, k, group, groups, ahead, scales.add(p * 2 * SCALES));
            }
        }
        let block_bytes = columns.len().div_ceil(BLOCK) * kernel.block_bytes;
        let lines = kernel.block_bytes / 64;
        for tile in self.tiles.clone() {
            let (prefetch, prefetch_lines) = if streamed {
                (STREAM_AHEAD.cast_signed(), lines)
            } else {
                // Each tile prefetches its share of the codes that the next pass reads.
                let next = if pass + 1 < self.order.passes || columns.end == layout.columns {
                    (count * layout.bytes).cast_signed()
                } else {
                    block_bytes.cast_signed() - (first * layout.bytes).cast_signed()
                };
                let lines = lines.div_ceil(self.tiles.len());
                let share = (tile - self.tiles.start) * lines * 64 * columns.len().div_ceil(BLOCK);
                (next + share.cast_signed(), if share < block_bytes { lines } else { 0 })
            };
            let rows = self.product.tokens.rows(tile);
            let at_once = kernel.shapes.panels_at_once(rows.len());
            let mut done = 0;
            while done < count {
                let tile_panels = if count - done < at_once { 1 } else { at_once };
                let panel = first + done * self.order.spacing;
                // SAFETY: the tile's tokens lie inside the product; the panel is one of `panels`, and the columns are
                // in it; `acc` has room for every panel and token.
                unsafe {
                    let codes = weights.add(panel * layout.bytes + layout.codes);
                    let acc_row = panel * self.tokens.len() + rows.start - self.tokens.start;
                    (kernel.tiles[rows.len() - 1][usize::from(tile_panels > 1)])(&TileCall {
                        x: self.product.x.add(rows.start * operand.row_bytes),
                        operand,
                        codes_at: if kernel.is_wide { operand.wide_at + 2 * k } else { k },
                        codes: codes.add(k / BLOCK * kernel.block_bytes),
                        panel_stride: self.order.spacing * layout.bytes,
                        columns: columns.clone(),
                        scales: scales.add(done * 2 * SCALES),
                        has_minima: layout.grid.minimum != Minimum::Centred,
                        prefetch,
                        prefetch_lines,
                        acc: self.acc.add(acc_row * LANES),
                        acc_stride: self.order.spacing * self.tokens.len() * LANES,
                    });
                }
                done += tile_panels;
            }
        }
    }
}

/// Writes the scales of `groups` groups of `width` columns from column `k` on, 16 lanes each, to `out`, and the minima
/// behind [`SCALES`]. Prefetches the scales at a distance of `ahead` bytes, if that is not 0.
///
/// # Safety
/// The panel is readable at `panel`; `out` is writable for 2 [`SCALES`] floats.
#[inline(always)]
#[expect(clippy::too_many_arguments, reason = "a part of the loop that calls it")]
unsafe fn decode_scales<S: Simd>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    k: usize,
    width: usize,
    groups: usize,
    ahead: usize,
    out: *mut f32,
) {
    // The sums may be of smaller groups than the scales. Both are powers of two.
    let shift = layout.grid.group.map_or(usize::BITS - 1, |stored| (usize::from(stored) / width).ilog2());
    let first = k / width;
    let last = layout.grid.groups(layout.columns) - 1;
    macro_rules! decode {
        ($scales:ident) => {{
            let grid = Grid { scales: ScaleFormat::$scales, ..layout.grid };
            let layout = GridLayout { grid, ..*layout };
            for index in 0..groups {
                let group = ((first + index) >> shift).min(last);
                // SAFETY: `groups` times 16 is at most `SCALES`; the group is in the panel.
                unsafe {
                    if ahead > 0 {
                        let at = |part: usize, bytes: usize| part + group * LANES * bytes + ahead;
                        s.prefetch(panel.wrapping_add(at(0, grid.scales.bytes())));
                        match grid.minimum {
                            Minimum::Centred => {}
                            Minimum::Stored => {
                                s.prefetch(panel.wrapping_add(at(layout.minima, grid.scales.bytes())))
                            }
                            Minimum::ZeroPoint => s.prefetch(panel.wrapping_add(at(layout.minima, 1))),
                        }
                    }
                    let (scales, minima) = decode_group(s, &layout, panel, group);
                    s.store(out.add(index * LANES), scales);
                    s.store(out.add(SCALES + index * LANES), minima);
                }
            }
        }};
    }
    match layout.grid.scales {
        ScaleFormat::F32 => decode!(F32),
        ScaleFormat::F16 => decode!(F16),
        ScaleFormat::Bf16 => decode!(Bf16),
        ScaleFormat::Nested => decode!(Nested),
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
    pub(crate) x: *const u8,
    pub(crate) operand: &'a OperandLayout,
    /// The offset of the codes of the first column in a row.
    pub(crate) codes_at: usize,
    pub(crate) codes: *const u8,
    pub(crate) panel_stride: usize,
    pub(crate) columns: Range<usize>,
    pub(crate) scales: *const f32,
    pub(crate) has_minima: bool,
    /// The first prefetch relative to the codes of each panel, and the cache lines to prefetch in each block of
    /// columns.
    pub(crate) prefetch: isize,
    pub(crate) prefetch_lines: usize,
    pub(crate) acc: *mut f32,
    pub(crate) acc_stride: usize,
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
    let mut prefetch = call.prefetch;
    let mut acc = [[s.splat(0.0); P]; T];
    // SAFETY: rows, panels and accumulators exist by contract.
    unsafe {
        for t in 0..T {
            rows[t] = call.x.add(t * operand.row_bytes + operand.spans_at);
            x[t] = call.x.add(t * operand.row_bytes + call.codes_at);
        }
        for p in 0..P {
            blocks[p] = call.codes.add(p * call.panel_stride);
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
            unsafe {
                advance_block::<S, C, D, T, P>(s, &mut x, &mut blocks, &mut prefetch, call.prefetch_lines)
            };
        } else {
            // SAFETY: by contract; the blocks are those of the span.
            unsafe {
                let mut sums = first_sums::<S, T, P>(s, rows, span, None, shift);
                let mut block = k;
                while block < end {
                    D::add::<C, T, P>(s, &mut sums, x, blocks, 0..4);
                    advance_block::<S, C, D, T, P>(
                        s,
                        &mut x,
                        &mut blocks,
                        &mut prefetch,
                        call.prefetch_lines,
                    );
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

/// Moves to the next block of 32 columns and prefetches some lines of later ones.
///
/// # Safety
/// The pointers are to a block.
#[inline(always)]
unsafe fn advance_block<S: Simd, C: Codes, D: Dot<S>, const T: usize, const P: usize>(
    s: S,
    x: &mut [*const u8; T],
    blocks: &mut [*const u8; P],
    prefetch: &mut isize,
    lines: usize,
) {
    for block in blocks {
        for line in 0..lines {
            s.prefetch(block.wrapping_offset(*prefetch).wrapping_add(line * 64));
        }
        // SAFETY: at most the end of the codes.
        *block = unsafe { block.add(C::BLOCK_BYTES) };
    }
    *prefetch += (lines * 64).cast_signed() - C::BLOCK_BYTES.cast_signed();
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
pub(crate) unsafe fn first_sums<S: Simd, const T: usize, const P: usize>(
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
pub(crate) unsafe fn add_scaled<S: Simd, const T: usize, const P: usize>(
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
