//! Tokens times packed weights.
//!
//! ```text
//! for a K block                     activations of the token block stay in L2
//!   for a few panels                their K block stays in L1 or L2, the next ones are prefetched meanwhile
//!     for each tile of tokens       accumulators in registers, parked in `acc` between K blocks
//! epilogue: acc -> out
//! ```
//!
//! `out[t][r]` is the chain 0, `fma(x[t][0], w[r][0], .)`, `fma(x[t][1], w[r][1], .)`, ... and then one addition for a
//! bias or a residual. Neither tiles nor blocks nor the share a worker got appear in it.
//!
//! With a single tile the weights are read once from memory, so the panels of a group are walked as several streams,
//! each contiguous through its part of the group. What gave nothing: unpacking a panel to f32 first, K blocks or token
//! blocks of half the size, prefetching two passes ahead.

use std::mem::MaybeUninit;
use std::ops::Range;

use penstock_types::Epilogue;

use super::row_ops::{load, store};
use super::storage::Storage;
use super::tile::{self, Prefetch, Tiles, panels_at_once, with_tile_shape};
use crate::panel::{LANES, panel_bytes};
use crate::simd::Simd;

/// Columns of a K block; balanced, so the actual blocks are somewhat smaller.
const K_BLOCK: usize = 1024;
/// Tiles of a token block: 96 rows of a K block are 384 KiB of L2.
pub(crate) const BLOCK_TILES: usize = 16;
/// Tiles times panels of a share, at most; their accumulators are 48 KiB.
pub(crate) const SHARE_TILES: usize = 128;
/// How far ahead of its use a stream is prefetched, in bytes.
const STREAM_AHEAD: isize = 1536;

const ACC_FLOATS: usize = SHARE_TILES * tile::MAX_ROWS * LANES;

/// One product. Its pointers are valid for what the shapes say, and `out` is not read or written by anyone else
/// where this product's panels and tokens lead.
pub(crate) struct Product<'a> {
    pub(crate) x: *const f32,
    pub(crate) columns: usize,
    pub(crate) tokens: Tiles,
    pub(crate) weights: *const u8,
    pub(crate) rows: usize,
    pub(crate) epilogue: Epilogue<&'a [f32]>,
    pub(crate) out: *mut f32,
}

// SAFETY: the pointers come from slices that the caller of the product borrows for its duration.
unsafe impl Sync for Product<'_> {}

/// Computes the panels `panels` for the token tiles `tiles`.
///
/// # Safety
/// - `product` is as its type says, for element type `E`;
/// - `panels` and `tiles` are not empty, lie inside it, and multiply to at most [`SHARE_TILES`].
#[inline(always)]
pub(crate) unsafe fn matmul<S: Simd, E: Storage>(
    s: S,
    product: &Product<'_>,
    panels: Range<usize>,
    tiles: Range<usize>,
) {
    let mut acc = MaybeUninit::<[f32; ACC_FLOATS]>::uninit();
    let acc = acc.as_mut_ptr().cast::<f32>();
    let columns = product.columns;
    let tokens = product.tokens.rows(tiles.start).start..product.tokens.rows(tiles.end - 1).end;
    let walk = Walk::new(panels.len(), product.tokens.rows(tiles.end - 1).len(), tiles.len() == 1);
    let panel_bytes = panel_bytes(E::DTYPE, columns);

    let k_blocks = if tiles.len() == 1 { 1 } else { columns.div_ceil(K_BLOCK) };
    let k_block = columns.div_ceil(k_blocks).next_multiple_of(2);
    let mut k = 0;
    while k < columns {
        let steps = k..columns.min(k + k_block);
        let block_start = k / 2 * E::PAIR;
        let block_bytes = steps.len() / 2 * E::PAIR;
        for pass in 0..walk.passes {
            let (first, count) = walk.panels(pass);
            for tile in tiles.clone() {
                let rows = product.tokens.rows(tile);
                let (prefetch, prefetch_advance) = if tiles.len() == 1 {
                    (STREAM_AHEAD, E::PAIR)
                } else {
                    // Each tile asks for its share of what the next pass reads.
                    let next = if pass + 1 < walk.passes || steps.end == columns {
                        (block_start + count * panel_bytes).cast_signed()
                    } else {
                        (block_start + block_bytes).cast_signed() - (first * panel_bytes).cast_signed()
                    };
                    let share = (tile - tiles.start) * block_bytes / tiles.len();
                    (next + share.cast_signed(), E::PAIR / tiles.len())
                };
                let mut done = 0;
                while done < count {
                    let panel = first + done * walk.spacing;
                    let call = Call {
                        // SAFETY: the tile's tokens lie inside the product.
                        x: unsafe { product.x.add(rows.start * columns) },
                        x_stride: columns,
                        // SAFETY: the walk stays inside `panels`.
                        panel: unsafe { product.weights.add((panels.start + panel) * panel_bytes) },
                        panel_stride: walk.spacing * panel_bytes,
                        steps: steps.clone(),
                        // SAFETY: `acc` has room for every panel and token by contract.
                        acc: unsafe { acc.add((panel * tokens.len() + rows.start - tokens.start) * LANES) },
                        acc_stride: walk.spacing * tokens.len() * LANES,
                        prefetch,
                        prefetch_advance,
                    };
                    // SAFETY: the call's parts were just derived from the product; `acc` is set after the first block.
                    done += unsafe { with_tile_shape!(rows.len(), count - done, run_tile::<S, E>(s, &call)) };
                }
            }
        }
        k = steps.end;
    }
    for (index, panel) in panels.enumerate() {
        // SAFETY: every chain of this panel is in `acc`, one token after the other.
        unsafe { finish(s, product, panel, tokens.clone(), acc.add(index * tokens.len() * LANES)) };
    }
}

/// The order in which a share's panels are taken.
///
/// ```text
/// one tile, 4 streams, 9 panels     0 2 4 6 | 1 3 5 7 | 8        each stream reads forward through its own part
/// several tiles, pairs, 5 panels    0 1 | 2 3 | 4
/// ```
struct Walk {
    passes: usize,
    /// Passes that take `lanes` panels; the later ones take what is left, one by one.
    full: usize,
    lanes: usize,
    /// Panels from one pass to the next, and from one panel of a pass to the next.
    step: usize,
    spacing: usize,
}

impl Walk {
    #[inline(always)]
    fn new(panels: usize, smallest_tile: usize, streamed: bool) -> Self {
        let lanes = if panels < panels_at_once(smallest_tile) { 1 } else { panels_at_once(smallest_tile) };
        let full = panels / lanes;
        let (step, spacing) = if streamed { (1, full) } else { (lanes, 1) };
        Self { passes: full + panels % lanes, full, lanes, step, spacing }
    }

    /// The first panel of a pass, and how many it takes.
    #[inline(always)]
    fn panels(&self, pass: usize) -> (usize, usize) {
        if pass < self.full {
            (pass * self.step, self.lanes)
        } else {
            (self.full * self.lanes + pass - self.full, 1)
        }
    }
}

struct Call {
    x: *const f32,
    x_stride: usize,
    panel: *const u8,
    panel_stride: usize,
    steps: Range<usize>,
    acc: *mut f32,
    acc_stride: usize,
    /// From each panel, see [`Prefetch`].
    prefetch: isize,
    prefetch_advance: usize,
}

/// # Safety
/// `call` describes `T` rows, `P` panels and their accumulators, which are set unless `steps` begins at 0.
#[inline(always)]
unsafe fn run_tile<S: Simd, E: Storage, const T: usize, const P: usize>(s: S, call: &Call) {
    let mut panels = [call.panel; P];
    for (p, panel) in panels.iter_mut().enumerate() {
        // SAFETY: the call has P panels this far apart.
        *panel = unsafe { call.panel.add(p * call.panel_stride) };
    }
    let prefetch = Prefetch { offsets: [call.prefetch; P], advance: call.prefetch_advance };
    // SAFETY: by contract.
    unsafe {
        let mut acc = if call.steps.start == 0 {
            tile::zero::<S, T, P>(s)
        } else {
            tile::load(s, call.acc, LANES, call.acc_stride)
        };
        tile::advance::<S, E, T, P>(s, &mut acc, call.x, call.x_stride, panels, call.steps.clone(), prefetch);
        tile::store(s, call.acc, LANES, call.acc_stride, &acc);
    }
}

/// # Safety
/// `acc` holds 16 chains for each of `tokens`, which with `panel` lie inside the product.
#[inline(always)]
unsafe fn finish<S: Simd>(s: S, product: &Product<'_>, panel: usize, tokens: Range<usize>, acc: *const f32) {
    let row = panel * LANES;
    let lanes = LANES.min(product.rows - row);
    for (index, token) in tokens.enumerate() {
        // SAFETY: `lanes` outputs exist from `row` on, for `bias` and for every token of `out`; 16 chains are in `acc`.
        unsafe {
            let out = product.out.add(token * product.rows + row);
            let chain = s.load(acc.add(index * LANES));
            let value = match product.epilogue {
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
