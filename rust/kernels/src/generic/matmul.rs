//! The product of tokens and packed weights.
//!
//! ```text
//! for a K block                     activations of the token block stay in L2
//!   for a few panels                their K block stays in L1 or L2, the next ones are prefetched
//!     for each tile of tokens       accumulators in registers, stored in `acc` between K blocks
//! epilogue: acc -> out
//! ```
//!
//! `out[t][r]` is the chain 0, `fma(x[t][0], w[r][0], .)`, `fma(x[t][1], w[r][1], .)`, ... and then one addition each
//! for a residual and a bias. Tiles, blocks and the share of a worker do not affect it.
//!
//! If the panels are read as pairs ([`PanelDtype::ROUNDS_ROWS`]), x is rounded to bf16 first, at every number of
//! tokens, and a pair of columns is one instruction: `fma(x[t][k + 1], w[r][k + 1], .)`, then
//! `fma(x[t][k], w[r][k], .)`.
//!
//! With a single tile the weights are read once from memory, so the panels of a group are read as several streams, each
//! contiguous through its part of the group. Measured without a gain: unpacking a panel to f32 first, K blocks or token
//! blocks of half the size, prefetching two passes ahead.

use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::Epilogue;

use super::panel_dtype::PanelDtype;
use super::row_ops::{load, store};
use super::tile::{self, Prefetch, RowTiles};
use crate::panel::{LANES, panel_bytes};
use crate::simd::Simd;
use crate::simd::{TileFn, TileShapes};

/// Maximum number of columns of a K block; the blocks are balanced, so most are smaller.
const K_BLOCK: usize = 1024;
/// Maximum number of tokens of a token block: a K block of them is 384 KiB of L2.
const BLOCK_ROWS: usize = 96;
/// Maximum of tokens times panels of a share; their accumulators are 48 KiB.
const SHARE_ROWS: usize = 768;
/// The prefetch distance of a stream, in bytes.
pub(crate) const STREAM_AHEAD: usize = 4096;

/// Maximum number of columns times tokens of a K block whose activations are rounded.
const ROUNDED: usize = BLOCK_ROWS * K_BLOCK;

pub(crate) const ACC_FLOATS: usize = SHARE_ROWS * LANES;

/// Maximum number of tiles of a token block.
pub(crate) const fn block_tiles(shapes: TileShapes) -> usize {
    BLOCK_ROWS / shapes.max_rows()
}

/// Maximum of tiles times panels of a share.
pub(crate) const fn share_tiles(shapes: TileShapes) -> usize {
    SHARE_ROWS / shapes.max_rows()
}

/// One product. Its pointers are valid for its shapes, and no other code accesses the part of `out` that its panels and
/// tokens cover.
pub(crate) struct Product<'a> {
    pub(crate) x: *const f32,
    pub(crate) columns: usize,
    pub(crate) tokens: RowTiles,
    pub(crate) weights: *const u8,
    pub(crate) output: Output<'a>,
}

/// The output of a product.
pub(crate) struct Output<'a> {
    /// Rows of the matrix: columns of the output.
    pub(crate) rows: usize,
    /// Floats from one token to the next.
    pub(crate) stride: usize,
    pub(crate) epilogue: Epilogue<&'a [f32]>,
    pub(crate) out: *mut f32,
}

// SAFETY: the pointers come from slices that the caller of the product borrows for its duration.
unsafe impl Sync for Product<'_> {}

/// Computes the panels `panels` for the token tiles `tiles`.
///
/// # Safety
/// - `product` is as its type requires, for dtype `E`;
/// - if `E` rounds rows, the instruction set has [`Simd::dot_bf16`] and [`Simd::store_bf16`];
/// - `panels` and `tiles` are not empty, lie inside it, and multiply to at most [`share_tiles`].
#[inline(always)]
pub(crate) unsafe fn matmul<S: Simd, E: PanelDtype>(
    s: S,
    product: &Product<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
) {
    let mut acc = MaybeUninit::<[f32; ACC_FLOATS]>::uninit();
    let acc = acc.as_mut_ptr().cast::<f32>();
    let columns = product.columns;
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let smallest_tile = product.tokens.rows(tiles.end - 1).len();
    let order = PanelOrder::new(panels.len(), S::TILES.panels_at_once(smallest_tile), tiles.len() == 1);
    let panel_bytes = panel_bytes(E::DTYPE, columns);

    let limit = if tiles.len() > 1 {
        K_BLOCK
    } else if E::ROUNDS_ROWS {
        ROUNDED / tokens.len() / LANES * LANES
    } else {
        columns
    };
    let k_block = columns.div_ceil(columns.div_ceil(limit)).next_multiple_of(2);
    let mut rounded = MaybeUninit::<[u16; ROUNDED]>::uninit();
    let mut k = 0;
    while k < columns {
        let end = columns.min(k + k_block);
        let block_bytes = (end - k) / 2 * E::PAIR;
        // SAFETY: the columns lie inside the product; `rounded` has room for the block.
        let (x, x_stride, steps) = unsafe {
            let x = product.x.add(tokens.start * columns + k);
            if const { E::ROUNDS_ROWS } {
                let (rounded, stride) = (rounded.as_mut_ptr().cast::<u16>(), k_block.next_multiple_of(LANES));
                for row in 0..tokens.len() {
                    round_row(s, x.add(row * columns), end - k, rounded.add(row * stride));
                }
                (rounded.cast_const().cast(), stride / 2, (end - k).next_multiple_of(2))
            } else {
                (x, columns, (end - k) / 2 * 2)
            }
        };
        for pass in 0..order.passes {
            let (first, count) = order.panels(pass);
            for tile in tiles.clone() {
                let rows = product.tokens.rows(tile);
                let (prefetch, prefetch_advance) = if tiles.len() == 1 {
                    (STREAM_AHEAD.cast_signed(), E::PAIR)
                } else {
                    // Each tile prefetches its share of the bytes that the next pass reads.
                    let next = if pass + 1 < order.passes || end == columns {
                        (count * panel_bytes).cast_signed()
                    } else {
                        block_bytes.cast_signed() - (first * panel_bytes).cast_signed()
                    };
                    let share = (tile - tiles.start) * block_bytes / tiles.len();
                    (next + share.cast_signed(), E::PAIR / tiles.len())
                };
                let mut done = 0;
                while done < count {
                    let panel = first + done * order.spacing;
                    let call = TileCall::<E> {
                        // SAFETY: the tile's tokens lie inside the block.
                        x: unsafe { x.add((rows.start - tokens.start) * x_stride) },
                        x_stride,
                        // SAFETY: the panel is one of `panels`, and has these columns.
                        panel: unsafe {
                            product.weights.add((panels.start + panel) * panel_bytes + k / 2 * E::PAIR)
                        },
                        panel_stride: order.spacing * panel_bytes,
                        steps,
                        is_first: k == 0,
                        // SAFETY: `acc` has room for every panel and token by contract.
                        acc: unsafe { acc.add((panel * tokens.len() + rows.start - tokens.start) * LANES) },
                        acc_stride: order.spacing * tokens.len() * LANES,
                        prefetch,
                        prefetch_advance,
                        dtype: PhantomData,
                    };
                    // SAFETY: the call's pointers are those of the product; `acc` is set after the first block.
                    done += unsafe { s.call_tile(rows.len(), count - done, call) };
                }
            }
        }
        k = end;
    }
    for (index, panel) in panels.enumerate() {
        // SAFETY: every chain of this panel is in `acc`, one token after the other; the last column is half of a pair.
        unsafe {
            let acc = acc.add(index * tokens.len() * LANES);
            if columns % 2 == 1 && !E::ROUNDS_ROWS {
                let weights = product.weights.add(panel * panel_bytes);
                for (index, token) in tokens.clone().enumerate() {
                    let (acc, row) = (acc.add(index * LANES), product.x.add(token * columns));
                    tile::single_step::<S, E>(s, acc, row, weights, columns - 1);
                }
            }
            finish(s, &product.output, panel, tokens.clone(), acc);
        }
    }
}

/// The order of a share's panels.
///
/// ```text
/// one tile, 4 streams, 9 panels     0 2 4 6 | 1 3 5 7 | 8        each stream reads its own part sequentially
/// several tiles, pairs, 5 panels    0 1 | 2 3 | 4
/// ```
pub(crate) struct PanelOrder {
    pub(crate) passes: usize,
    /// Passes of `lanes` panels; the remaining panels get one pass each.
    full: usize,
    lanes: usize,
    /// Panels between the first panels of two passes.
    step: usize,
    /// Panels between two panels of a pass.
    pub(crate) spacing: usize,
}

impl PanelOrder {
    #[inline(always)]
    pub(crate) fn new(panels: usize, at_once: usize, streamed: bool) -> Self {
        let lanes = if panels < at_once { 1 } else { at_once };
        let full = panels / lanes;
        let (step, spacing) = if streamed { (1, full) } else { (lanes, 1) };
        Self { passes: full + panels % lanes, full, lanes, step, spacing }
    }

    /// The first panel of a pass, and its number of panels.
    #[inline(always)]
    pub(crate) fn panels(&self, pass: usize) -> (usize, usize) {
        if pass < self.full {
            (pass * self.step, self.lanes)
        } else {
            (self.full * self.lanes + pass - self.full, 1)
        }
    }
}

/// The inputs of a tile, and its accumulators, which are set unless it is the first of its chains.
struct TileCall<E> {
    x: *const f32,
    x_stride: usize,
    panel: *const u8,
    panel_stride: usize,
    steps: usize,
    is_first: bool,
    acc: *mut f32,
    acc_stride: usize,
    /// Relative to each panel, see [`Prefetch`].
    prefetch: isize,
    prefetch_advance: usize,
    dtype: PhantomData<E>,
}

impl<S: Simd, E: PanelDtype> TileFn<S> for TileCall<E> {
    /// # Safety
    /// The call describes `T` rows, `P` panels and their accumulators.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let mut panels = [self.panel; P];
        for (p, panel) in panels.iter_mut().enumerate() {
            // SAFETY: the call has P panels this far apart.
            *panel = unsafe { self.panel.add(p * self.panel_stride) };
        }
        let prefetch = Prefetch { offsets: [self.prefetch; P], advance: self.prefetch_advance };
        // SAFETY: by contract.
        unsafe {
            let mut acc = if self.is_first {
                tile::zero::<S, T, P>(s)
            } else {
                tile::load(s, self.acc, LANES, self.acc_stride)
            };
            tile::advance::<S, E, T, P>(s, &mut acc, self.x, self.x_stride, panels, 0..self.steps, prefetch);
            tile::store(s, self.acc, LANES, self.acc_stride, &acc);
        }
    }
}

/// Rounds `count` floats to bf16 and pads them with zeros to whole vectors.
///
/// # Safety
/// `count` floats are readable at `from`; `to` has room for the padded row; the instruction set has
/// [`Simd::store_bf16`].
#[inline(always)]
unsafe fn round_row<S: Simd>(s: S, from: *const f32, count: usize, to: *mut u16) {
    let mut i = 0;
    while i < count {
        // SAFETY: by contract.
        unsafe { s.store_bf16(to.add(i), load(s, from.add(i), LANES.min(count - i))) };
        i += LANES;
    }
}

/// The epilogue.
///
/// # Safety
/// `acc` has 16 chains for each of `tokens`; `tokens` and `panel` lie inside the product.
#[inline(always)]
pub(crate) unsafe fn finish<S: Simd>(
    s: S,
    output: &Output<'_>,
    panel: usize,
    tokens: Range<usize>,
    acc: *const f32,
) {
    let row = panel * LANES;
    let lanes = LANES.min(output.rows - row);
    for (index, token) in tokens.enumerate() {
        // SAFETY: `lanes` outputs exist from `row` on, for `bias` and for every token of `out`; 16 chains are in `acc`.
        unsafe {
            let out = output.out.add(token * output.stride + row);
            let chain = s.load(acc.add(index * LANES));
            let value = match output.epilogue {
                Epilogue::Store => chain,
                Epilogue::Bias(bias) => s.add(chain, load(s, bias.as_ptr().add(row), lanes)),
                Epilogue::Add => s.add(chain, load(s, out, lanes)),
                Epilogue::AddBias(bias) => {
                    s.add(s.add(chain, load(s, out, lanes)), load(s, bias.as_ptr().add(row), lanes))
                }
            };
            store(s, out, lanes, value);
        }
    }
}
