//! The product of float32 rows and a grid matrix: a few columns of a few panels are unpacked to float32 on the stack,
//! then multiplied as a matrix of float32.
//!
//! So the result is, bit for bit, that of a float32 matrix with the same values.

use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::Minimum;

use super::codes::Codes;
use crate::generic::matmul::{ACC_FLOATS, Output, finish};
use crate::generic::panel_dtype::F32;
use crate::generic::tile::{self, Prefetch, RowTiles, panels_at_once, with_tile_shape};
use crate::grid::{BLOCK, GridLayout};
use crate::panel::LANES;
use crate::simd::Simd;

/// Columns that are unpacked at a time: two blocks of four panels are 32 KiB.
const COLUMNS: usize = 2 * BLOCK;
const MOST_PANELS: usize = 4;

/// One product. Its pointers are valid for its shapes, and no other code accesses the part of `out` that its panels and
/// tokens cover.
pub(crate) struct GridFloatProduct<'a> {
    pub(crate) x: *const f32,
    pub(crate) tokens: RowTiles,
    pub(crate) weights: *const u8,
    pub(crate) layout: GridLayout,
    pub(crate) output: Output<'a>,
}

// SAFETY: the pointers come from slices that the caller of the product borrows for its duration.
unsafe impl Sync for GridFloatProduct<'_> {}

/// Computes the panels `panels` for the token tiles `tiles`.
///
/// # Safety
/// - `product` is as its type requires, for codes `C`;
/// - `panels` and `tiles` are not empty, lie inside it, and multiply to at most `SHARE_TILES`.
#[inline(always)]
pub(crate) unsafe fn grid_float_matmul<S: Simd, C: Codes>(
    s: S,
    product: &GridFloatProduct<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
) {
    let mut acc = MaybeUninit::<[f32; ACC_FLOATS]>::uninit();
    let acc = acc.as_mut_ptr().cast::<f32>();
    let mut unpacked = MaybeUninit::<[[f32; COLUMNS * LANES]; MOST_PANELS]>::uninit();
    let unpacked = unpacked.as_mut_ptr().cast::<f32>();
    let layout = &product.layout;
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let at_once = panels_at_once(product.tokens.rows(tiles.end - 1).len());
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
                    unpack::<S, C>(s, layout, panel, columns.clone(), unpacked.add(p * COLUMNS * LANES));
                }
            }
            for tile in tiles.clone() {
                let rows = product.tokens.rows(tile);
                let mut done = 0;
                while done < count {
                    // SAFETY: the tile's tokens and the panels lie inside the product; `acc` has room for all.
                    done += unsafe {
                        let x = product.x.add(rows.start * layout.columns + k);
                        let panel = unpacked.add(done * COLUMNS * LANES).cast::<u8>();
                        let panel_index = first - panels.start + done;
                        let acc = acc.add((panel_index * tokens.len() + rows.start - tokens.start) * LANES);
                        let call = Call {
                            x,
                            layout,
                            panel,
                            steps: columns.len(),
                            is_first: k == 0,
                            acc,
                            acc_stride: tokens.len() * LANES,
                        };
                        with_tile_shape!(rows.len(), count - done, run_tile::<S>(s, &call))
                    };
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

struct Call<'a> {
    x: *const f32,
    layout: &'a GridLayout,
    panel: *const u8,
    steps: usize,
    is_first: bool,
    acc: *mut f32,
    acc_stride: usize,
}

/// # Safety
/// `call` describes `T` rows, `P` unpacked panels and their accumulators, which are set unless it is the first.
#[inline(always)]
unsafe fn run_tile<S: Simd, const T: usize, const P: usize>(s: S, call: &Call<'_>) {
    let mut panels = [call.panel; P];
    for (p, panel) in panels.iter_mut().enumerate() {
        // SAFETY: the call has P panels.
        *panel = unsafe { call.panel.add(p * COLUMNS * LANES * size_of::<f32>()) };
    }
    let prefetch = Prefetch { offsets: [0; P], advance: 0 };
    // SAFETY: by contract.
    unsafe {
        let mut acc = if call.is_first {
            tile::zero::<S, T, P>(s)
        } else {
            tile::load(s, call.acc, LANES, call.acc_stride)
        };
        tile::advance::<S, F32, T, P>(
            s,
            &mut acc,
            call.x,
            call.layout.columns,
            panels,
            0..call.steps,
            prefetch,
        );
        tile::store(s, call.acc, LANES, call.acc_stride, &acc);
    }
}

/// Writes columns `columns` of a panel as float32, 16 lanes each.
///
/// # Safety
/// The panel is readable at `panel`; `out` is writable for [`COLUMNS`] times 16 floats.
#[inline(always)]
unsafe fn unpack<S: Simd, C: Codes>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    columns: Range<usize>,
    out: *mut f32,
) {
    // SAFETY: the scales of a panel are before its codes.
    let bytes = unsafe { std::slice::from_raw_parts(panel, layout.codes) };
    let width = layout.grid.group.map_or(usize::MAX, usize::from);
    let stored = layout.grid.minimum == Minimum::Stored;
    let mut k = columns.start;
    let mut out = out;
    while k < columns.end {
        // SAFETY: the block has the columns from k on.
        let block = unsafe { panel.add(layout.codes + k / BLOCK * C::BLOCK_BYTES) };
        for half in 0..2 {
            let (mut scales, mut minima) = ([0.0; LANES], [0.0; LANES]);
            layout.decode_group(
                bytes,
                ((k + half * 16) / width).min(layout.grid.groups(layout.columns) - 1),
                &mut scales,
                &mut minima,
            );
            let scale = s.vector(scales);
            let minimum = if layout.grid.minimum == Minimum::Centred {
                s.mul(scale, s.splat(-(C::BITS.centre() as f32)))
            } else {
                s.vector(minima)
            };
            for pair in 2 * half..2 * half + 2 {
                for odd in [false, true] {
                    // SAFETY: the quad is in the block; there is room for 64 columns, a multiple of 32.
                    let words = unsafe { C::quad(s, block, pair, odd) };
                    for byte in 0..4 {
                        let code = s.to_f32(s.byte(words, byte));
                        let value = if stored {
                            s.add(s.mul(scale, code), minimum)
                        } else {
                            // Rounded once: the product of the scale and an integer.
                            s.mul_add(scale, code, minimum)
                        };
                        // SAFETY: as above.
                        unsafe {
                            s.store(out, value);
                            out = out.add(LANES);
                        }
                    }
                }
            }
        }
        k += BLOCK;
    }
}
