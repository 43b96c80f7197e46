//! Attention of a few query rows of one kv head over paged keys and values.
//!
//! A *query row* is one query head at one position; the rows of a job share a kv head (the heads of its group times
//! some consecutive positions), so that keys and values are read from memory once for all of them.
//!
//! ```text
//! for a split of 256 positions            the splits start at 0, 256, 512, ... for every query
//!   for a tile of up to 12 query rows
//!     scores  = q . K                     lanes are positions
//!     weights = exp(scores - max), sum    masked lanes are -inf before and 0 after
//!     acc     = weights . V               lanes are dimensions
//!   merge (max, sum, acc) of the split into that of the splits before it
//! out = acc / sum                         rotated back for rotated values
//! ```
//!
//! The two products depend on the KV dtype: see [`floats`] and [`quantised`].
//!
//! Determinism contract: the output of a row is a function of its own query and of the keys and values visible to it. A
//! score is a function of the query and one key; the maximum does not depend on an order; lane i of the sum adds the
//! weights of positions i, i + 16, ... of the split; acc adds only the visible positions, in an order that does not
//! depend on the batch; splits are merged in ascending order. An invisible position adds nothing, so its bytes (NaN
//! included) have no effect.

pub(crate) mod floats;
mod products;
pub(crate) mod quantised;
mod rotated;
pub(crate) mod softmax;

use super::tile::RowTiles;
use crate::kv::KvLayout;
use crate::panel::LANES;
use crate::simd::Simd;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Positions of a split. Part of the determinism contract: another value changes the bits.
pub(crate) const SPLIT: usize = 256;
const SPLIT_TILES: usize = SPLIT / LANES;

/// Maximum number of query rows of a tile; an instruction set with smaller tiles has fewer.
pub(crate) const MAX_ROWS: usize = 12;

/// Maximum number of floats of the query rows of one job, padded to 16.
pub(crate) const JOB_FLOATS: usize = 48 * 128;
/// Maximum number of query rows of one job.
pub(crate) const JOB_ROWS: usize = 48;
/// The query rows of one job, in the form of a format.
pub(crate) type JobQueries = [f32; JOB_FLOATS];

/// Floats of the (max, sum, acc) of a row.
pub(crate) const fn partial_floats(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES) + LANES
}
/// Maximum number of floats of the (max, sum, acc) of all rows of a job.
pub(crate) const PARTIAL_FLOATS: usize = JOB_FLOATS + JOB_ROWS * LANES;

/// The inputs that all jobs of a call share. Its pointers are valid for its shapes.
pub(crate) struct AttentionShape {
    pub(crate) layout: KvLayout,
    pub(crate) block_bytes: usize,
    pub(crate) cache: *const u8,
    pub(crate) q: *const f32,
    pub(crate) q_stride: usize,
    pub(crate) out: *mut f32,
    pub(crate) out_stride: usize,
    /// Query heads per kv head.
    pub(crate) group: usize,
    pub(crate) scale: f32,
    pub(crate) window: usize,
    /// 0 for none.
    pub(crate) softcap: f32,
}

// SAFETY: the pointers come from slices that the caller of the attention borrows for its duration.
unsafe impl Sync for AttentionShape {}

/// The query rows of one job: row r is head `group * kv_head + r % group` of the sequence's query r / group.
#[derive(Clone)]
pub(crate) struct AttentionJob<'a> {
    pub(crate) kv_head: usize,
    pub(crate) rows: Range<usize>,
    /// The row of the sequence's first query in q and out.
    pub(crate) first_query: usize,
    /// The position of the first query.
    pub(crate) start: usize,
    pub(crate) blocks: &'a [u32],
}

impl AttentionShape {
    /// The positions visible to query row `row` of a sequence.
    #[inline(always)]
    pub(crate) fn visible(&self, start: usize, row: usize) -> Range<usize> {
        let end = start + row / self.group + 1;
        end.saturating_sub(self.window)..end
    }

    /// The query of row `row` of a job.
    #[inline(always)]
    fn query(&self, job: &AttentionJob<'_>, row: usize) -> *const f32 {
        let row = job.rows.start + row;
        let head = job.kv_head * self.group + row % self.group;
        let query = job.first_query + row / self.group;
        self.q.wrapping_add(query * self.q_stride + head * self.layout.head_dim)
    }
}

impl AttentionJob<'_> {
    /// The splits with a position visible to the job.
    #[inline(always)]
    pub(crate) fn splits(&self, shape: &AttentionShape) -> Range<usize> {
        let first = shape.visible(self.start, self.rows.start);
        let last = shape.visible(self.start, self.rows.end - 1);
        first.start / SPLIT..last.end.div_ceil(SPLIT)
    }
}

/// The arithmetic on keys and values: on [`floats`], or on [`quantised`] integers.
pub(crate) trait KvFormat: Copy {
    /// Copies a query, times the scale, in the form that [`score`](Self::score) takes.
    ///
    /// # Safety
    /// `head_dim` floats are readable at `from`; `to` has room for head_dim padded to 16.
    unsafe fn copy_query<S: Simd>(s: S, shape: &AttentionShape, from: *const f32, to: *mut f32);

    /// Computes the scores of the rows of `pass` with the positions of `tiles`, those without a key included.
    ///
    /// # Safety
    /// `pass` has these tiles, in this format; its queries were written by [`copy_query`](Self::copy_query).
    unsafe fn score<S: Simd>(s: S, pass: &Pass<'_>, tiles: Range<usize>);

    /// Writes the weighted sums of values of the rows of `pass` that have a visible position.
    ///
    /// # Safety
    /// As for [`score`](Self::score); the scores of every row are its weights at its visible positions.
    unsafe fn sum_values<S: Simd>(s: S, pass: &Pass<'_>, tiles: Range<usize>);
}

/// Copies the queries of a job, in the form of format `F`.
///
/// # Safety
/// As for [`attend_split`]; `queries` has room for [`JobQueries`].
#[inline(always)]
pub(crate) unsafe fn copy_queries<S: Simd, F: KvFormat>(
    s: S,
    shape: &AttentionShape,
    job: &AttentionJob<'_>,
    queries: *mut f32,
) {
    let padded = shape.layout.head_dim.next_multiple_of(LANES);
    for row in 0..job.rows.len() {
        // SAFETY: `queries` has room for the rows of a job, and the query's head is `head_dim` floats of q.
        unsafe { F::copy_query(s, shape, shape.query(job, row), queries.add(row * padded)) };
    }
}

/// Computes one split of a job: writes (max, sum, acc) of every row; those of no positions are (-inf, 0, 0).
///
/// # Safety
/// - `shape` and `job` are as their types require, for a layout of format `F`;
/// - the job's rows take at most [`JOB_FLOATS`] and are at most [`JOB_ROWS`];
/// - `queries` was written by [`copy_queries`];
/// - its blocks cover the visible positions and lie inside the cache;
/// - `partial` has room for [`partial_floats`] for each row.
#[inline(always)]
pub(crate) unsafe fn attend_split<S: Simd, F: KvFormat>(
    s: S,
    shape: &AttentionShape,
    job: &AttentionJob<'_>,
    queries: *const f32,
    split: usize,
    partial: *mut f32,
) {
    let head_dim = shape.layout.head_dim;
    let padded = head_dim.next_multiple_of(LANES);
    let floats = partial_floats(head_dim);
    let mut scores = MaybeUninit::<[f32; MAX_ROWS * SPLIT]>::uninit();
    let scores = scores.as_mut_ptr().cast::<f32>();

    // The tiles of the next split that are visible to the last row are prefetched while this split is computed.
    let end = shape.visible(job.start, job.rows.end - 1).end.saturating_sub((split + 1) * SPLIT).min(SPLIT);
    let next_tiles = tile_pointers(shape, job, (split + 1) * SPLIT, 0..end.div_ceil(LANES));

    let tiles = RowTiles::new(job.rows.len(), const { tile_rows::<S>() });
    for index in 0..tiles.count {
        let rows = tiles.rows(index);
        // SAFETY: `partial` has room for every row.
        let partial = unsafe { partial.add(rows.start * floats) };
        let mut visible = [Visible::default(); MAX_ROWS];
        let mut union = Visible { start: SPLIT, end: 0 };
        for (row, seen) in visible[..rows.len()].iter_mut().enumerate() {
            let positions = shape.visible(job.start, job.rows.start + rows.start + row);
            *seen = Visible::inside(positions, split);
            if seen.start < seen.end {
                union = Visible { start: union.start.min(seen.start), end: union.end.max(seen.end) };
            } else {
                // SAFETY: as above.
                unsafe { softmax::clear(s, partial.add(row * floats), floats) };
            }
        }
        if union.start >= union.end {
            continue;
        }
        let touched = union.start / LANES..union.end.div_ceil(LANES);
        let pass = Pass {
            layout: &shape.layout,
            tiles: tile_pointers(shape, job, split * SPLIT, touched.clone()),
            next_tiles,
            index,
            line_share: 64 / tiles.count,
            visible: &visible[..rows.len()],
            // SAFETY: the queries of all rows are readable.
            queries: unsafe { queries.add(rows.start * padded) },
            scores,
            partial,
        };
        // SAFETY: the pass describes these rows; the K and V tiles of `union` are valid by contract.
        unsafe {
            F::score(s, &pass, touched.clone());
            softmax::weights(s, shape.softcap, &pass);
            F::sum_values(s, &pass, touched);
        }
    }
}

/// Maximum number of query rows of a tile of an instruction set.
const fn tile_rows<S: Simd>() -> usize {
    if S::TILES.max_rows() < MAX_ROWS { S::TILES.max_rows() } else { MAX_ROWS }
}

/// A range of visible positions, relative to the start of a split.
#[derive(Clone, Copy, Default)]
struct Visible {
    start: usize,
    end: usize,
}

impl Visible {
    #[inline(always)]
    fn inside(positions: Range<usize>, split: usize) -> Self {
        let from = split * SPLIT;
        Self {
            start: positions.start.saturating_sub(from).min(SPLIT),
            end: positions.end.saturating_sub(from).min(SPLIT),
        }
    }

    /// The bits of the lanes of 16 positions from `start` on that are visible; `None` if all are.
    #[inline(always)]
    fn lanes(self, start: usize) -> Option<u32> {
        if self.start <= start && start + LANES <= self.end {
            return None;
        }
        let before = |position: usize| (1_u32 << position.saturating_sub(start).min(LANES)) - 1;
        Some(before(self.end) & !before(self.start))
    }
}

/// One tile of query rows in one split.
pub(crate) struct Pass<'a> {
    layout: &'a KvLayout,
    /// The split's tiles of 16 positions; null if a tile has no visible position.
    tiles: [*const u8; SPLIT_TILES],
    /// The same for the next split.
    next_tiles: [*const u8; SPLIT_TILES],
    /// The index of this tile of rows in its job; each prefetches its share of the next split.
    index: usize,
    /// The share of a cache line that one tile of rows prefetches for every line that it reads, in bytes.
    line_share: usize,
    /// The visible positions of each row.
    visible: &'a [Visible],
    /// `[row][head_dim padded to 16]`, in the format's form.
    queries: *const f32,
    /// `[row][256]`
    scores: *mut f32,
    /// `[row][16 floats: max, sum and two of the format; head_dim padded to 16]`
    partial: *mut f32,
}

/// Pointers to the tiles `tiles`, counted from position `start`.
#[inline(always)]
fn tile_pointers(
    shape: &AttentionShape,
    job: &AttentionJob<'_>,
    start: usize,
    tiles: Range<usize>,
) -> [*const u8; SPLIT_TILES] {
    let mut pointers = [std::ptr::null(); SPLIT_TILES];
    for tile in tiles {
        let position = start + tile * LANES;
        let block = job.blocks[position / shape.layout.block_size] as usize;
        let offset = shape.layout.tile_offset(job.kv_head, position % shape.layout.block_size);
        pointers[tile] = shape.cache.wrapping_add(block * shape.block_bytes + offset);
    }
    pointers
}
