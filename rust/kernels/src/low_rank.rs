//! Low-rank updates of products: `out += scale * B (A x)`, for rows that may each have another update.
//!
//! ```text
//! update  [rows of A][B]
//! A       a panel for each row, with columns as lanes, so a low rank is not padded; `generic/low_rank.rs` has its product
//! B       a matrix in panels
//! ```
//!
//! The products are Punica's (arXiv 2310.18547, section 4), "shrink" and "expand": each is one parallel region for all
//! updates of a call.

use std::ops::Range;

use penstock_types::{Epilogue, LowRankShape, LowRankUpdate};

use crate::generic::low_rank::Shrink;
use crate::generic::matmul::{Output, Product, block_tiles};
use crate::generic::tile::RowTiles;
use crate::kernels::Kernels;
use crate::matrix::MatrixLayout;
use crate::panel::{LANES, panel_bytes, panel_index, write_floats};
use crate::pool::{Claims, Pool, SharedMut};
use crate::rows::{Rows, RowsMut};

/// Rows of A in a piece of work, and tokens.
const SHRINK_ROWS: usize = 4;
const SHRINK_TOKENS: usize = 32;
/// Panels of B in a piece of work.
const EXPAND_PANELS: usize = 8;

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
    /// Their updates, among those of the call.
    pub updates: Range<usize>,
}

impl Kernels {
    /// Adds to some rows of `out` the updates of these rows, times the rows of `x`.
    ///
    /// The rows of `groups` do not overlap, nor do the output columns of the updates of a group. `bytes` has all
    /// updates. `hidden` has room for the rank of every update of every row.
    #[expect(clippy::too_many_arguments, reason = "the operands of one operation")]
    pub fn add_low_rank(
        &self,
        pool: &Pool,
        x: Rows<'_>,
        groups: &[LowRankRows],
        updates: &[LowRankUpdate],
        bytes: &[u8],
        hidden: &mut [f32],
        out: RowsMut<'_>,
    ) {
        check(x, groups, updates, bytes, hidden, &out);
        let mut out = out;
        let (hidden, stride) = (SharedMut::new(hidden), out.stride());
        let out = out.shared();
        let items = Items { groups, updates };
        items.share(
            pool,
            |item| item.shrink_pieces(),
            |item, piece| {
                let LowRankUpdate { shape, scale, offset, .. } = *item.update;
                let (tokens, rows) = item.shrink_piece(piece);
                let call = Shrink {
                    x: x.row(item.rows.start).as_ptr(),
                    x_stride: x.stride(),
                    columns: shape.columns,
                    rows: bytes[offset..].as_ptr(),
                    scale,
                    out: hidden.as_ptr().wrapping_add(item.hidden),
                    rank: shape.rank,
                };
                // SAFETY: the table's instruction set is available; the shapes were checked; each piece is claimed once.
                unsafe { (self.table.shrink.of(shape.dtype))(&call, tokens, rows) }
            },
        );
        let shapes = self.table.tiles;
        let tiles = |item: &Item<'_>| RowTiles::new(item.rows.len(), shapes.max_rows());
        let blocks = |item: &Item<'_>| RowTiles::new(tiles(item).count, block_tiles(shapes));
        let panel_blocks = |item: &Item<'_>| up(&item.update.shape).panels().div_ceil(EXPAND_PANELS);
        items.share(
            pool,
            |item| panel_blocks(item) * blocks(item).count,
            |item, piece| {
                let LowRankUpdate { shape, first_row, offset, .. } = *item.update;
                let layout = up(&shape);
                let (block, first) = (piece / panel_blocks(item), piece % panel_blocks(item) * EXPAND_PANELS);
                let panels = first..layout.panels().min(first + EXPAND_PANELS);
                let product = Product {
                    x: hidden.as_ptr().cast_const().wrapping_add(item.hidden),
                    columns: shape.rank,
                    tokens: tiles(item),
                    weights: bytes[offset + down_bytes(&shape)..].as_ptr(),
                    output: Output {
                        rows: layout.rows,
                        stride,
                        epilogue: Epilogue::Add,
                        out: out.as_ptr().wrapping_add(item.rows.start * stride + first_row),
                    },
                };
                // SAFETY: the table's instruction set is available; the shapes were checked; each piece is claimed once, and
                // the first products are complete.
                unsafe { (self.table.matmul.of(shape.dtype))(&product, panels, blocks(item).rows(block)) }
            },
        );
    }
}

fn check(
    x: Rows<'_>,
    groups: &[LowRankRows],
    updates: &[LowRankUpdate],
    bytes: &[u8],
    hidden: &[f32],
    out: &RowsMut<'_>,
) {
    let (mut row, mut needed) = (0, 0);
    for group in groups {
        assert!(group.rows.start >= row && !group.rows.is_empty(), "{groups:?} are not in order");
        row = group.rows.end;
        let mut column = 0;
        for LowRankUpdate { shape, first_row, offset, .. } in &updates[group.updates.clone()] {
            assert_eq!(shape.columns, x.width(), "columns of {shape:?}");
            assert!(shape.rank > 0, "{shape:?}");
            assert!(*first_row >= column, "the output columns of {updates:?} are not in order");
            column = first_row + shape.rows;
            assert!(column <= out.width(), "{updates:?} have more output columns than {}", out.width());
            assert!(
                offset.checked_add(low_rank_bytes(shape)).is_some_and(|end| end <= bytes.len()),
                "{updates:?}"
            );
            needed += group.rows.len() * shape.rank;
        }
    }
    assert!(row <= x.count() && row <= out.count(), "rows {row} of {} and {}", x.count(), out.count());
    assert!(
        needed <= hidden.len(),
        "{needed} floats of the first products; there is room for {}",
        hidden.len()
    );
}

/// Every update of every group.
#[derive(Clone, Copy)]
struct Items<'a> {
    groups: &'a [LowRankRows],
    updates: &'a [LowRankUpdate],
}

/// One update of one group.
struct Item<'a> {
    rows: &'a Range<usize>,
    update: &'a LowRankUpdate,
    /// The first float of its first product.
    hidden: usize,
}

impl<'a> Items<'a> {
    fn each(self) -> impl Iterator<Item = Item<'a>> {
        let mut hidden = 0;
        self.groups
            .iter()
            .flat_map(move |group| {
                self.updates[group.updates.clone()].iter().map(move |update| (&group.rows, update))
            })
            .map(move |(rows, update)| {
                let item = Item { rows, update, hidden };
                hidden += rows.len() * update.shape.rank;
                item
            })
    }

    /// Runs every piece of every item once, divided among the workers.
    fn share(
        self,
        pool: &Pool,
        pieces: impl Fn(&Item<'a>) -> usize + Sync,
        run: impl Fn(&Item<'a>, usize) + Sync,
    ) {
        let claims = Claims::new(self.each().map(|item| pieces(&item)).sum());
        pool.share(&|_| {
            // A worker claims ascending pieces, so it visits every item once.
            let mut items = self.each();
            let Some(mut item) = items.next() else { return };
            let mut first = 0;
            while let Some(claimed) = claims.next() {
                while claimed - first >= pieces(&item) {
                    first += pieces(&item);
                    let Some(next) = items.next() else { return };
                    item = next;
                }
                run(&item, claimed - first);
            }
        });
    }
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
}
