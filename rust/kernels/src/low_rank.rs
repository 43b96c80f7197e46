//! Low-rank updates of products: `out += scale * B (A x)`, for rows that may each have another update.
//!
//! ```text
//! update  [rows of A][B]
//! A       a panel for each row, with columns as lanes, so a low rank is not padded; `generic/low_rank.rs` has its product
//! B       a matrix in panels
//! ```
//!
//! The products are Punica's (arXiv 2310.18547, section 4), "shrink" and "expand", for all updates of a call. They are
//! parts of the parallel region of the product that they update: a worker first takes its share of the shrinks, and
//! expands the output columns that it has computed as soon as all shrinks are complete. B is prefetched while the
//! worker reads the weights of these columns.

use std::ops::Range;
use std::sync::Arc;

use penstock_types::{LowRankShape, LowRankUpdate, PackedAdapter};

use crate::arch::Table;
use crate::generic::low_rank::{Expand, Shrink};
use crate::kernels::Kernels;
use crate::matrix::{Matrix, MatrixLayout};
use crate::panel::{LANES, panel_bytes, panel_index, write_floats};
use crate::pool::{Claims, Pool, SharedMut, WaitableCounter};
use crate::rows::Rows;

/// Rows of A in a piece of work, and tokens.
const SHRINK_ROWS: usize = 8;
const SHRINK_TOKENS: usize = 32;
/// Output columns in a piece of work, and tokens, if the product is complete already.
const EXPAND_COLUMNS: usize = 8 * LANES;
const EXPAND_TOKENS: usize = 96;
/// The most bytes of B that are prefetched at once: a part of L2.
const PREFETCHED: usize = 1 << 17;

/// B.
fn up(shape: &LowRankShape) -> MatrixLayout {
    MatrixLayout { rows: shape.rows, columns: shape.rank, format: shape.dtype.into() }
}

fn row_bytes(shape: &LowRankShape) -> usize {
    panel_bytes(shape.dtype, shape.columns.div_ceil(LANES))
}

/// Bytes of A.
fn down_bytes(shape: &LowRankShape) -> usize {
    shape.rank.saturating_mul(row_bytes(shape))
}

/// Bytes of an update: a multiple of 64.
///
/// # Panics
/// If that does not fit the address space.
pub fn low_rank_bytes(shape: &LowRankShape) -> usize {
    let bytes = down_bytes(shape).checked_add(up(shape).bytes());
    bytes
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .unwrap_or_else(|| panic!("{shape:?} does not fit the address space"))
}

/// Packs A, `[rank, columns]`, and B, `[rows, rank]`, into `out`, all of which is written.
pub fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
    let &LowRankShape { rows, columns, rank, dtype } = shape;
    assert_eq!((a.len(), b.len()), (rank * columns, rows * rank), "{shape:?}");
    assert_eq!(out.len(), low_rank_bytes(shape), "bytes of {shape:?}");
    let (down, packed) = out.split_at_mut(down_bytes(shape));
    down.fill(0);
    for (row, out) in a.chunks_exact(columns).zip(down.chunks_exact_mut(row_bytes(shape))) {
        write_floats(dtype, out, columns, |dtype, column| {
            (panel_index(dtype, column / LANES, column % LANES), row[column])
        });
    }
    let layout = up(shape);
    for (panel, out) in packed.chunks_exact_mut(layout.panel_bytes()).enumerate() {
        let rows = layout.panel_rows(panel);
        layout.pack_panel(panel, &b[rows.start * rank..rows.end * rank], out);
    }
}

/// Rows that have the same updates.
#[derive(Clone, Debug)]
pub struct LowRankRows {
    pub rows: Range<usize>,
    /// Their adapter, among those of the call.
    pub adapter: usize,
    /// Their updates, among those of the adapter.
    pub updates: Range<usize>,
}

/// The updates of the rows of a product.
#[derive(Debug)]
pub struct LowRank<'a> {
    /// The rows that the product reads, as float32.
    pub x: Rows<'a>,
    /// They do not overlap, nor do the output columns of the updates of a group.
    pub groups: &'a [LowRankRows],
    /// Those of the groups are there.
    pub adapters: &'a [Option<Arc<PackedAdapter>>],
    /// Room for the rank of every update of every row.
    pub hidden: &'a mut [f32],
}

impl Kernels {
    /// Adds the updates, times the rows of x, to the rows of `out`, each of `width` floats.
    pub fn add_low_rank(&self, pool: &Pool, updates: LowRank<'_>, width: usize, out: &mut [f32]) {
        assert!(out.len().is_multiple_of(width), "{} floats of rows of {width}", out.len());
        let count = out.len() / width;
        let updates = updates.start(self, pool, SharedMut::new(out), count, width);
        let (blocks, parts) = (count.div_ceil(EXPAND_TOKENS), width.div_ceil(EXPAND_COLUMNS));
        let claims = Claims::new(blocks * parts);
        pool.share(&|_| {
            updates.shrink();
            while let Some(piece) = claims.next() {
                let (row, column) = (piece / parts * EXPAND_TOKENS, piece % parts * EXPAND_COLUMNS);
                let rows = row..count.min(row + EXPAND_TOKENS);
                updates.expand(&rows, &(column..width.min(column + EXPAND_COLUMNS)));
            }
        });
    }
}

impl<'a> LowRank<'a> {
    /// Whether each panel of an update is part of a panel of a matrix.
    pub(crate) fn is_aligned(&self, matrices: &[Matrix<'_>]) -> bool {
        let is_part = |update: &LowRankUpdate| {
            let mut first = 0;
            matrices.iter().any(|matrix| {
                let rows = first..first + matrix.layout.rows;
                first = rows.end;
                let end = update.first_row + update.shape.rows;
                rows.contains(&update.first_row)
                    && (update.first_row - rows.start).is_multiple_of(LANES)
                    && end <= rows.end
            })
        };
        items(self.groups, self.adapters).all(|item| is_part(item.update))
    }

    /// The updates in a job on `pool`; `out` has `count` rows of `width` floats.
    pub(crate) fn start(
        self,
        kernels: &Kernels,
        pool: &Pool,
        out: SharedMut<'a, f32>,
        count: usize,
        width: usize,
    ) -> Updates<'a> {
        check(&self, count, width);
        let Self { x, groups, adapters, hidden } = self;
        let pieces = items(groups, adapters).map(|item| item.shrink_pieces()).sum();
        Updates {
            table: kernels.table,
            x,
            groups,
            adapters,
            hidden: SharedMut::new(hidden),
            out,
            width,
            claims: Claims::new(pieces),
            pieces,
            finished: pool.counter(),
        }
    }
}

fn check(low_rank: &LowRank<'_>, count: usize, width: usize) {
    let LowRank { x, groups, adapters, hidden } = low_rank;
    let (mut row, mut needed) = (0, 0);
    for group in *groups {
        assert!(group.rows.start >= row && !group.rows.is_empty(), "{groups:?} are not in order");
        row = group.rows.end;
        let mut column = 0;
        let (updates, bytes) = parts(group, adapters);
        for LowRankUpdate { shape, first_row, offset, .. } in updates {
            assert_eq!(shape.columns, x.width(), "columns of {shape:?}");
            assert!(shape.rank > 0, "{shape:?}");
            assert!(*first_row >= column, "the output columns of {updates:?} are not in order");
            column = first_row + shape.rows;
            assert!(column <= width, "{updates:?} have more output columns than {width}");
            assert!(
                offset.checked_add(low_rank_bytes(shape)).is_some_and(|end| end <= bytes.len()),
                "{updates:?}"
            );
            needed += group.rows.len() * shape.rank;
        }
    }
    assert!(row <= x.count() && row <= count, "rows {row} of {} and {count}", x.count());
    assert!(
        needed <= hidden.len(),
        "{needed} floats of the first products; there is room for {}",
        hidden.len()
    );
}

/// The updates of a product in a job.
pub(crate) struct Updates<'a> {
    table: &'static Table,
    x: Rows<'a>,
    groups: &'a [LowRankRows],
    adapters: &'a [Option<Arc<PackedAdapter>>],
    hidden: SharedMut<'a, f32>,
    out: SharedMut<'a, f32>,
    /// Floats of a row of `out`.
    width: usize,
    /// The pieces of the first products.
    claims: Claims,
    pieces: usize,
    /// The number of pieces that are complete.
    finished: WaitableCounter,
}

impl Updates<'_> {
    /// Computes first products until all are claimed.
    pub(crate) fn shrink(&self) {
        let mut items = items(self.groups, self.adapters);
        let Some(mut item) = items.next() else { return };
        let mut first = 0;
        // Claims ascend, so each item is visited once.
        while let Some(claimed) = self.claims.next() {
            // Also if the kernel panics: another worker may wait.
            let _finished = Finished(&self.finished);
            while claimed - first >= item.shrink_pieces() {
                first += item.shrink_pieces();
                let Some(next) = items.next() else { return };
                item = next;
            }
            let LowRankUpdate { shape, scale, offset, .. } = *item.update;
            let (tokens, rows) = item.shrink_piece(claimed - first);
            let call = Shrink {
                x: self.x.row(item.rows.start).as_ptr(),
                x_stride: self.x.stride(),
                columns: shape.columns,
                rows: item.bytes[offset..].as_ptr(),
                scale,
                out: self.hidden.as_ptr().wrapping_add(item.hidden),
                rank: shape.rank,
            };
            // SAFETY: the table's instruction set is available; the shapes were checked; each piece is claimed once.
            unsafe { (self.table.shrink.of(shape.dtype))(&call, tokens, rows) }
        }
    }

    /// Prefetches the panels of B of some rows and columns of the output.
    pub(crate) fn prefetch(&self, rows: &Range<usize>, columns: &Range<usize>) {
        let mut left = PREFETCHED;
        for item in items(self.groups, self.adapters) {
            let (tokens, panels) = (item.tokens(rows), item.panels(columns));
            if tokens.is_empty() || panels.is_empty() {
                continue;
            }
            let size = up(&item.update.shape).panel_bytes();
            let bytes = (panels.len() * size).min(left);
            left -= bytes;
            let at = item.bytes[item.update.offset..].as_ptr();
            let at = at.wrapping_add(down_bytes(&item.update.shape) + panels.start * size);
            // SAFETY: the table's instruction set is available.
            unsafe { (self.table.prefetch)(at, bytes) }
        }
    }

    /// Waits for the first products and adds the second ones to some rows and columns of the output. A panel of an
    /// update belongs to its first column.
    pub(crate) fn expand(&self, rows: &Range<usize>, columns: &Range<usize>) {
        self.finished.wait(|finished| finished == self.pieces);
        for item in items(self.groups, self.adapters) {
            let (tokens, panels) = (item.tokens(rows), item.panels(columns));
            if tokens.is_empty() || panels.is_empty() {
                continue;
            }
            let LowRankUpdate { shape, first_row, offset, .. } = *item.update;
            let call = Expand {
                hidden: self.hidden.as_ptr().cast_const().wrapping_add(item.hidden),
                rank: shape.rank,
                rows: shape.rows,
                panels: item.bytes[offset + down_bytes(&shape)..].as_ptr(),
                out: self.out.as_ptr().wrapping_add(item.rows.start * self.width + first_row),
                stride: self.width,
            };
            // SAFETY: the table's instruction set is available; the shapes were checked; the first products are
            // complete, and the worker has claimed these rows and columns.
            unsafe { (self.table.expand.of(shape.dtype))(&call, panels, tokens) }
        }
    }
}

/// Counts a piece when it is dropped.
struct Finished<'a>(&'a WaitableCounter);

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        self.0.increment();
    }
}

/// The updates of a group, and the bytes of their adapter.
fn parts<'a>(
    group: &LowRankRows,
    adapters: &'a [Option<Arc<PackedAdapter>>],
) -> (&'a [LowRankUpdate], &'a [u8]) {
    let adapter = adapters[group.adapter].as_deref().expect("the adapter of a group; this is a bug");
    (&adapter.updates[group.updates.clone()], adapter.bytes())
}

/// One update of one group.
struct Item<'a> {
    rows: &'a Range<usize>,
    update: &'a LowRankUpdate,
    /// The bytes of its adapter.
    bytes: &'a [u8],
    /// The first float of its first product.
    hidden: usize,
}

/// Every update of every group.
fn items<'a>(
    groups: &'a [LowRankRows],
    adapters: &'a [Option<Arc<PackedAdapter>>],
) -> impl Iterator<Item = Item<'a>> {
    let mut hidden = 0;
    let of_group = move |group: &'a LowRankRows| {
        let (updates, bytes) = parts(group, adapters);
        updates.iter().map(move |update| (&group.rows, update, bytes))
    };
    groups.iter().flat_map(of_group).map(move |(rows, update, bytes)| {
        let item = Item { rows, update, bytes, hidden };
        hidden += rows.len() * update.shape.rank;
        item
    })
}

impl Item<'_> {
    fn row_blocks(&self) -> usize {
        self.update.shape.rank.div_ceil(SHRINK_ROWS)
    }

    fn shrink_pieces(&self) -> usize {
        self.row_blocks() * self.rows.len().div_ceil(SHRINK_TOKENS)
    }

    /// The tokens and the rows of A of a piece.
    fn shrink_piece(&self, piece: usize) -> (Range<usize>, Range<usize>) {
        let (block, row) =
            (piece / self.row_blocks() * SHRINK_TOKENS, piece % self.row_blocks() * SHRINK_ROWS);
        let tokens = block..self.rows.len().min(block + SHRINK_TOKENS);
        (tokens, row..self.update.shape.rank.min(row + SHRINK_ROWS))
    }

    /// The tokens of the group that are among some rows of the output.
    fn tokens(&self, rows: &Range<usize>) -> Range<usize> {
        let inside = |row: usize| row.clamp(self.rows.start, self.rows.end) - self.rows.start;
        inside(rows.start)..inside(rows.end)
    }

    /// The panels of B that begin in some columns of the output.
    fn panels(&self, columns: &Range<usize>) -> Range<usize> {
        let from = |column: usize| {
            column.saturating_sub(self.update.first_row).min(self.update.shape.rows).div_ceil(LANES)
        };
        from(columns.start)..from(columns.end)
    }
}
