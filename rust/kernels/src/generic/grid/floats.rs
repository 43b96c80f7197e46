//! The product of float32 rows and a grid matrix: a few columns of a few panels are unpacked to float32 on the stack,
//! then multiplied as a matrix of float32.
//!
//! So the result is, bit for bit, that of a float32 matrix with the same values.

use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::Minimum;

use super::codes::Codes;
use super::decode_group;
use crate::generic::matmul::{ACC_FLOATS, Output, finish};
use crate::generic::panel_dtype::F32;
use crate::generic::tile::{self, Prefetch, RowTiles, TileFn};
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
    let mut unpacked = MaybeUninit::<[[f32; COLUMNS * LANES]; MOST_PANELS]>::uninit();
    let unpacked = unpacked.as_mut_ptr().cast::<f32>();
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
                            x_stride: layout.columns,
                            panel,
                            steps: columns.len(),
                            is_first: k == 0,
                            acc,
                            acc_stride: tokens.len() * LANES,
                        };
                        s.call_tile(rows.len(), count - done, call)
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

/// The inputs of a tile, and its accumulators, which are set unless it is the first.
struct Call {
    x: *const f32,
    x_stride: usize,
    panel: *const u8,
    steps: usize,
    is_first: bool,
    acc: *mut f32,
    acc_stride: usize,
}

impl<S: Simd> TileFn<S> for Call {
    /// # Safety
    /// The call describes `T` rows, `P` unpacked panels and their accumulators.
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
/// The panel is readable at `panel`; `out` is writable for [`COLUMNS`] times 16 floats.
#[inline(always)]
unsafe fn unpack<S: Simd, C: Codes>(
    s: S,
    layout: &GridLayout,
    panel: *const u8,
    columns: Range<usize>,
    out: *mut f32,
) {
    let width = layout.grid.group.map_or(usize::MAX, usize::from);
    let stored = layout.grid.minimum == Minimum::Stored;
    let last = layout.grid.groups(layout.columns) - 1;
    let mut k = columns.start;
    let mut out = out;
    let (mut scale, mut minimum, mut zero, mut decoded) = (s.splat(0.0), s.splat(0.0), s.splat(0.0), None);
    while k < columns.end {
        // SAFETY: the block has the columns from k on.
        let block = unsafe { panel.add(layout.codes + k / BLOCK * C::BLOCK_BYTES) };
        for half in 0..2 {
            let group = ((k + half * 16) / width).min(last);
            if decoded != Some(group) {
                decoded = Some(group);
                // SAFETY: the group is in the panel, and the scales of a panel are before its codes.
                unsafe {
                    (scale, minimum) = decode_group(s, layout, panel, group);
                    let bytes = std::slice::from_raw_parts(panel, layout.codes);
                    zero = s.vector(layout.zero_points(bytes, group));
                }
            }
            for pair in 2 * half..2 * half + 2 {
                for odd in [false, true] {
                    // SAFETY: the quad is in the block; there is room for 64 columns, a multiple of 32.
                    let words = unsafe { C::quad(s, block, pair, odd) };
                    for byte in 0..4 {
                        let code = s.to_f32(s.byte(words, byte));
                        let value = if stored {
                            s.add(s.mul(scale, code), minimum)
                        } else {
                            // Rounded once: the difference of integers is exact.
                            s.mul(scale, s.sub(code, zero))
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
