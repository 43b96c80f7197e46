//! The product of float32 rows and a grid matrix.
//!
//! ```text
//! weight = fma(scale, code, minimum)       as float32
//! ```
//!
//! A single tile of a few tokens decodes the weights in registers. For more tokens, some columns of a few panels are
//! decoded to the stack and then multiplied as a float32 matrix. Both have the same bits as a float32 matrix of the
//! same values: the product of scale and code is exact, or the weight is rounded after it.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::{CodeBits, Grid, Minimum, ScaleFormat};

use super::codes::Codes;
use super::decode_group;
use crate::generic::matmul::{ACC_FLOATS, Output, STREAM_AHEAD, finish};
use crate::generic::panel_dtype::F32;
use crate::generic::tile::{self, Prefetch, RowTiles, unrolled};
use crate::grid::{BLOCK, GridLayout};
use crate::panel::LANES;
use crate::simd::Simd;
use crate::simd::{TileFn, TileRows};

/// Columns that are decoded to the stack at a time: a multiple of a block. Four panels of them are 64 KiB.
const COLUMNS: usize = 256;
const MOST_PANELS: usize = 4;
/// Maximum number of rows of a tile that decodes in registers.
const MOST_ROWS: usize = 4;
/// Columns of a pair of quads.
const PAIR: usize = 8;

/// One product. Its pointers are valid for its shapes, and no other code accesses the part of `out` that its panels and
/// tokens cover.
pub(crate) struct GridFloatProduct<'a> {
    pub(crate) x: *const f32,
    pub(crate) tokens: RowTiles,
    pub(crate) weights: *const u8,
    pub(crate) layout: GridLayout,
    /// [`multiply_decoded`] of the same instruction set.
    pub(crate) multiply: unsafe fn(DecodedTile, usize, usize) -> usize,
    pub(crate) output: Output<'a>,
}

// SAFETY: the pointers come from slices that the caller of the product borrows for its duration.
unsafe impl Sync for GridFloatProduct<'_> {}

/// Whether a fused multiply-add rounds a weight as
/// [`GridRows::dequantize_row`](penstock_types::GridRows::dequantize_row) does: the product of scale and code has at
/// most 24 bits, or there is no sum, or the sum is that of two exact products.
const fn is_fused<S: Simd>(grid: &Grid) -> bool {
    match grid.scales {
        ScaleFormat::F16 | ScaleFormat::Bf16 => true,
        ScaleFormat::Nested => grid.bits.count() < 8,
        ScaleFormat::F32 => {
            matches!(grid.bits, CodeBits::E4m3) || S::IS_FUSED && matches!(grid.minimum, Minimum::Centred)
        }
    }
}

/// Computes the panels `panels` for the token tiles `tiles`.
///
/// # Safety
/// - `product` is as its type requires, for codes `C`;
/// - `panels` and `tiles` are not empty, lie inside it, and multiply to at most `share_tiles(S::TILES)`.
#[inline(always)]
pub(crate) unsafe fn grid_float_matmul<S: Simd, C: Codes>(
    s: S,
    product: &GridFloatProduct<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
) {
    let mut acc = MaybeUninit::<[f32; ACC_FLOATS]>::uninit();
    let acc = acc.as_mut_ptr().cast::<f32>();
    let layout = &product.layout;
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    // SAFETY: by contract.
    unsafe {
        if tiles.len() > 1 || tokens.len() > MOST_ROWS || !is_fused::<S>(&layout.grid) {
            decode_and_multiply::<S, C>(s, product, panels.clone(), tiles, acc);
        } else {
            let x = product.x.add(tokens.start * layout.columns);
            let mut done = 0;
            while done < panels.len() {
                let call = DecodingTile::<C> {
                    x,
                    layout,
                    panel: product.weights.add((panels.start + done) * layout.bytes),
                    acc: acc.add(done * tokens.len() * LANES),
                    codes: PhantomData,
                };
                done += s.call_tile(tokens.len(), panels.len() - done, call);
            }
            if !layout.columns.is_multiple_of(PAIR) {
                for (index, panel) in panels.clone().enumerate() {
                    let acc = acc.add(index * tokens.len() * LANES);
                    let panel = product.weights.add(panel * layout.bytes);
                    multiply_rest::<S, C>(s, layout, panel, x, tokens.len(), acc);
                }
            }
        }
    }
    for (index, panel) in panels.enumerate() {
        // SAFETY: every chain of this panel is in `acc`, one token after the other.
        unsafe { finish(s, &product.output, panel, tokens.clone(), acc.add(index * tokens.len() * LANES)) };
    }
}

/// A tile of all columns. Its weights are decoded in registers.
struct DecodingTile<'a, C> {
    x: *const f32,
    layout: &'a GridLayout,
    panel: *const u8,
    acc: *mut f32,
    codes: PhantomData<C>,
}

impl<S: Simd, C: Codes> TileFn<S> for DecodingTile<'_, C> {
    const MAX_ROWS: usize = MOST_ROWS;

    /// # Safety
    /// The call describes `T` rows, `P` panels and room for their accumulators.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let layout = self.layout;
        let mut rows = TileRows { at: [self.x; T], stride: layout.columns };
        let mut panels = [self.panel; P];
        // SAFETY: rows and panels exist by contract.
        unsafe {
            for (t, row) in rows.at.iter_mut().enumerate() {
                *row = self.x.add(t * layout.columns);
            }
            for (p, panel) in panels.iter_mut().enumerate() {
                *panel = self.panel.add(p * layout.bytes);
            }
        }
        let width = layout.grid.group.map_or(usize::MAX, usize::from);
        let (mut group, mut group_end) = (0, 0);
        let (mut scales, mut minima) = ([s.splat(0.0); P], [s.splat(0.0); P]);
        let mut acc = tile::zero::<S, T, P>(s);
        let whole = layout.columns / PAIR * PAIR;
        let mut k = 0;
        while k < whole {
            if k == group_end {
                for p in 0..P {
                    // SAFETY: the group is in the panel.
                    (scales[p], minima[p]) = unsafe { group_factors::<S, C>(s, layout, panels[p], group) };
                }
                group += 1;
                group_end = k.saturating_add(width);
            }
            let (block, pair) = (layout.codes + k / BLOCK * C::BLOCK_BYTES, k % BLOCK / PAIR);
            for p in 0..P {
                let mut line = 0;
                while line < C::BLOCK_BYTES * PAIR / BLOCK {
                    let at = block + pair * (C::BLOCK_BYTES * PAIR / BLOCK) + line;
                    s.prefetch(panels[p].wrapping_add(STREAM_AHEAD + at));
                    line += 64;
                }
            }
            for odd in [false, true] {
                let mut codes = [s.zeros(); P];
                for p in 0..P {
                    // SAFETY: the quad is in the block.
                    codes[p] = unsafe { C::quad(s, panels[p].add(block), pair, odd) };
                }
                for byte in 0..4 {
                    let at = k + if odd { 4 } else { 0 } + byte;
                    for p in 0..P {
                        let weight = s.mul_add(scales[p], C::float(s, codes[p], byte as u32), minima[p]);
                        unrolled!(t < T => {
                            // SAFETY: the row has the column.
                            acc[t][p] = unsafe { s.mul_add_broadcast(&rows, t, at, weight, acc[t][p]) };
                        });
                    }
                }
            }
            k += PAIR;
        }
        // SAFETY: there is room by contract.
        unsafe { tile::store(s, self.acc, LANES, T * LANES, &acc) };
    }
}

/// Continues the chains of a panel over the columns after the last whole pair of quads.
///
/// # Safety
/// `rows` rows are readable at `x`, the panel at `panel`; their chains are at `acc`.
#[inline(always)]
unsafe fn multiply_rest<S: Simd, C: Codes>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    x: *const f32,
    rows: usize,
    acc: *mut f32,
) {
    let rest = layout.columns / PAIR * PAIR..layout.columns;
    let first = rest.start / 16 * 16;
    let mut weights = [0.0; 16 * LANES];
    // SAFETY: by contract; fewer than 16 columns are decoded.
    unsafe {
        decode::<S, C>(s, layout, panel, first..layout.columns, weights.as_mut_ptr());
        for column in rest {
            let weight = s.load(weights.as_ptr().add((column - first) * LANES));
            for row in 0..rows {
                let acc = acc.add(row * LANES);
                let x = s.splat(*x.add(row * layout.columns + column));
                s.store(acc, s.mul_add(x, weight, s.load(acc)));
            }
        }
    }
}

/// The scale and the minimum of a group, for [`Codes::float`].
///
/// # Safety
/// The panel is readable at `panel` and has the group.
#[inline(always)]
unsafe fn group_factors<S: Simd, C: Codes>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    group: usize,
) -> (S::V, S::V) {
    // SAFETY: by contract.
    let (scale, minimum) = unsafe { decode_group(s, layout, panel, group) };
    match layout.grid.minimum {
        Minimum::Centred => {
            let centre = C::BITS.centre() as f32;
            // The centre is a power of two, or 0.
            (s.mul(scale, s.splat(C::FACTOR)), s.mul(scale, s.splat(-centre)))
        }
        Minimum::Stored | Minimum::ZeroPoint => (scale, minimum),
    }
}

/// Writes the chains of the product to `acc`: decodes [`COLUMNS`] columns of a few panels at a time.
///
/// # Safety
/// As for [`grid_float_matmul`]; `acc` has room for all chains.
#[inline(always)]
unsafe fn decode_and_multiply<S: Simd, C: Codes>(
    s: S,
    product: &GridFloatProduct<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
    acc: *mut f32,
) {
    let mut decoded = MaybeUninit::<[[f32; COLUMNS * LANES]; MOST_PANELS]>::uninit();
    let decoded = decoded.as_mut_ptr().cast::<f32>();
    let layout = &product.layout;
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let at_once = S::TILES.panels_at_once(product.tokens.rows(tiles.end - 1).len());
    let mut k = 0;
    while k < layout.columns {
        let columns = k..layout.columns.min(k + COLUMNS);
        let mut first = panels.start;
        while first < panels.end {
            let count = at_once.min(panels.end - first);
            for p in 0..count {
                // SAFETY: the panel is one of `panels`; there is room for `at_once` panels.
                unsafe {
                    let panel = product.weights.add((first + p) * layout.bytes);
                    let out = decoded.add(p * COLUMNS * LANES);
                    decode::<S, C>(s, layout, panel, columns.clone(), out);
                }
            }
            for tile in tiles.clone() {
                let rows = product.tokens.rows(tile);
                let mut done = 0;
                while done < count {
                    // SAFETY: the tile's tokens and the panels lie inside the product; `acc` has room for all.
                    done += unsafe {
                        let x = product.x.add(rows.start * layout.columns + k);
                        let panel = decoded.add(done * COLUMNS * LANES).cast::<u8>();
                        let panel_index = first - panels.start + done;
                        let acc = acc.add((panel_index * tokens.len() + rows.start - tokens.start) * LANES);
                        let call = DecodedTile {
                            x,
                            x_stride: layout.columns,
                            panel,
                            steps: columns.len(),
                            is_first: k == 0,
                            acc,
                            acc_stride: tokens.len() * LANES,
                        };
                        (product.multiply)(call, rows.len(), count - done)
                    };
                }
            }
            first += count;
        }
        k = columns.end;
    }
}

/// Calls a tile of decoded weights, see [`Simd::call_tile`]. A separate function, because it does not depend on the
/// codes.
///
/// # Safety
/// The tile has `rows` rows and as many panels as are called.
#[inline(always)]
pub(crate) unsafe fn multiply_decoded<S: Simd>(s: S, tile: DecodedTile, rows: usize, left: usize) -> usize {
    // SAFETY: by contract.
    unsafe { s.call_tile(rows, left, tile) }
}

/// The inputs and the accumulators of a tile of decoded weights. The accumulators are set unless it is the first tile.
pub(crate) struct DecodedTile {
    x: *const f32,
    x_stride: usize,
    panel: *const u8,
    steps: usize,
    is_first: bool,
    acc: *mut f32,
    acc_stride: usize,
}

impl<S: Simd> TileFn<S> for DecodedTile {
    /// # Safety
    /// The call describes `T` rows, `P` decoded panels and their accumulators.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let mut panels = [self.panel; P];
        for (p, panel) in panels.iter_mut().enumerate() {
            // SAFETY: the call has P panels.
            *panel = unsafe { self.panel.add(p * COLUMNS * LANES * size_of::<f32>()) };
        }
        let prefetch = Prefetch { offsets: [0; P], advance: 0 };
        let pairs = self.steps / 2 * 2;
        // SAFETY: by contract.
        unsafe {
            let mut acc = if self.is_first {
                tile::zero::<S, T, P>(s)
            } else {
                tile::load(s, self.acc, LANES, self.acc_stride)
            };
            tile::advance::<S, F32, T, P>(s, &mut acc, self.x, self.x_stride, panels, 0..pairs, prefetch);
            tile::store(s, self.acc, LANES, self.acc_stride, &acc);
            if pairs < self.steps {
                for t in 0..T {
                    for (p, panel) in panels.iter().enumerate() {
                        let acc = self.acc.add(p * self.acc_stride + t * LANES);
                        tile::single_step::<S, F32>(s, acc, self.x.add(t * self.x_stride), *panel, pairs);
                    }
                }
            }
        }
    }
}

/// Writes columns `columns` of a panel as float32, 16 lanes each.
///
/// # Safety
/// The panel is readable at `panel` and has the columns, which start at a multiple of 16; `out` is writable for a
/// multiple of 16 columns.
#[inline(always)]
unsafe fn decode<S: Simd, C: Codes>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    columns: Range<usize>,
    out: *mut f32,
) {
    let width = layout.grid.group.map_or(usize::MAX, usize::from);
    let (is_fused, stored) = (is_fused::<S>(&layout.grid), layout.grid.minimum == Minimum::Stored);
    let (mut scale, mut minimum, mut zero) = (s.splat(0.0), s.splat(0.0), s.splat(0.0));
    let mut decoded = usize::MAX;
    let mut out = out;
    let mut k = columns.start;
    while k < columns.end {
        let group = k / width;
        if group != decoded {
            decoded = group;
            // SAFETY: the group is in the panel, and the scales of a panel are before its codes.
            unsafe {
                if is_fused {
                    (scale, minimum) = group_factors::<S, C>(s, layout, panel, group);
                } else {
                    (scale, minimum) = decode_group(s, layout, panel, group);
                    let bytes = std::slice::from_raw_parts(panel, layout.codes);
                    zero = s.vector(layout.zero_points(bytes, group));
                }
            }
        }
        for quad in 0..4 {
            // SAFETY: the quad is in the block.
            let codes = unsafe {
                let block = panel.add(layout.codes + k / BLOCK * C::BLOCK_BYTES);
                C::quad(s, block, k % BLOCK / PAIR + quad / 2, quad % 2 == 1)
            };
            for byte in 0..4 {
                let code = C::float(s, codes, byte);
                let weight = if is_fused {
                    s.mul_add(scale, code, minimum)
                } else if stored {
                    s.add(s.mul(scale, code), minimum)
                } else {
                    // Rounded once: the difference of integers is exact.
                    s.mul(scale, s.sub(code, zero))
                };
                // SAFETY: there is room by contract.
                unsafe {
                    s.store(out, weight);
                    out = out.add(LANES);
                }
            }
        }
        k += 16;
    }
}
