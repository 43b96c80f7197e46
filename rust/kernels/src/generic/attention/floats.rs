//! Attention over floating-point keys and values: both products are chains of f32 multiply-adds of the microkernel.
//!
//! A score is a chain over dimensions. An acc is a chain over exactly the positions visible to its row, in ascending
//! order; positions that are not visible to all rows of a tile are added row by row.

use std::marker::PhantomData;
use std::ops::Range;

use super::{AttentionShape, KvFormat, MAX_ROWS, Pass, SPLIT, Visible, partial_floats};
use crate::generic::panel_dtype::PanelDtype;
use crate::generic::row_ops::load as load_lanes;
use crate::generic::tile::{self, Prefetch};
use crate::panel::{LANES, panel_bytes};
use crate::simd::Simd;
use crate::simd::TileFn;

#[derive(Clone, Copy)]
pub(crate) struct Floats<E>(PhantomData<E>);

impl<E: PanelDtype> KvFormat for Floats<E> {
    #[inline(always)]
    unsafe fn copy_query<S: Simd>(s: S, shape: &AttentionShape, from: *const f32, to: *mut f32) {
        let head_dim = shape.layout.head_dim;
        let scale = s.splat(shape.scale);
        let mut d = 0;
        while d < head_dim {
            // SAFETY: the rest of the head is readable, and `to` is padded.
            unsafe { s.store(to.add(d), s.mul(load_lanes(s, from.add(d), LANES.min(head_dim - d)), scale)) };
            d += LANES;
        }
    }

    #[inline(always)]
    unsafe fn score<S: Simd>(s: S, pass: &Pass<'_>, tiles: Range<usize>) {
        let rows = pass.visible.len();
        let mut tile = tiles.start;
        while tile < tiles.end {
            // SAFETY: by contract.
            unsafe {
                let call = Score::<E> { pass, first: tile, dtype: PhantomData };
                tile += s.call_tile(rows, tiles.end - tile, call);
            }
        }
    }

    #[inline(always)]
    unsafe fn sum_values<S: Simd>(s: S, pass: &Pass<'_>, _: Range<usize>) {
        let floats = partial_floats(pass.layout.head_dim);
        for row in 0..pass.visible.len() {
            let mut i = LANES;
            while i < floats {
                // SAFETY: inside the row.
                unsafe { s.store(pass.partial.add(row * floats + i), s.splat(0.0)) };
                i += LANES;
            }
        }
        let panels = pass.layout.head_dim.div_ceil(LANES);
        for segment in Segments::new(pass.visible) {
            let mut panel = 0;
            while panel < panels {
                // SAFETY: by contract; the sums were just set.
                unsafe {
                    let call = SumValues::<E> { pass, segment: &segment, panel, dtype: PhantomData };
                    panel += s.call_tile(segment.rows.len(), panels - panel, call);
                }
            }
        }
    }
}

impl Pass<'_> {
    /// The prefetches for `panels`, `bytes` bytes each at offset `offsets[p]` of tile `tiles[p]`: this pass's share of
    /// the same bytes of the next split. At this distance the load on the memory is constant.
    #[inline(always)]
    fn prefetch<E: PanelDtype, const P: usize>(
        &self,
        panels: [*const u8; P],
        tiles: [usize; P],
        offsets: [usize; P],
        bytes: usize,
    ) -> Prefetch<P> {
        let mut prefetch = Prefetch { offsets: [0; P], advance: E::PAIR / 64 * self.line_share };
        for p in 0..P {
            let next = self.next_tiles[tiles[p]];
            if !next.is_null() {
                let share = offsets[p] + self.index * (bytes / 64) * self.line_share;
                let address = next.addr().wrapping_add(share);
                prefetch.offsets[p] = address.wrapping_sub(panels[p].addr()).cast_signed();
            }
        }
        prefetch
    }
}

/// Scores of the rows of `pass` with tiles of positions from `first` on.
struct Score<'a, E> {
    pass: &'a Pass<'a>,
    first: usize,
    dtype: PhantomData<E>,
}

impl<S: Simd, E: PanelDtype> TileFn<S> for Score<'_, E> {
    const MAX_ROWS: usize = MAX_ROWS;

    /// # Safety
    /// `pass` has `T` rows and these tiles.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let Self { pass, first, .. } = self;
        let mut panels = [std::ptr::null(); P];
        panels.copy_from_slice(&pass.tiles[first..first + P]);
        let head_dim = pass.layout.head_dim;
        let mut tiles = [first; P];
        for (p, tile) in tiles.iter_mut().enumerate() {
            *tile += p;
        }
        let prefetch = pass.prefetch::<E, P>(panels, tiles, [0; P], pass.layout.key_bytes());
        let mut acc = tile::zero::<S, T, P>(s);
        // SAFETY: the queries have `head_dim` floats and each K panel has `head_dim` steps; each row has 256 scores.
        unsafe {
            let stride = head_dim.next_multiple_of(LANES);
            let queries = pass.queries;
            tile::advance_any::<S, E, T, P>(s, &mut acc, queries, stride, panels, 0..head_dim, prefetch);
            tile::store(s, pass.scores.add(first * LANES), SPLIT, LANES, &acc);
        }
    }
}

/// The order in which rows add positions to their sums: positions visible to every row are added for all rows together,
/// those before and after them row by row.
struct Segments<'a> {
    visible: &'a [Visible],
    common: Visible,
    next: usize,
}

struct Segment {
    rows: Range<usize>,
    positions: Range<usize>,
}

impl<'a> Segments<'a> {
    #[inline(always)]
    fn new(visible: &'a [Visible]) -> Self {
        let mut common = Visible { start: 0, end: SPLIT };
        for seen in visible {
            common = Visible { start: common.start.max(seen.start), end: common.end.min(seen.end) };
        }
        if common.start >= common.end {
            common = Visible { start: SPLIT, end: SPLIT };
        }
        Self { visible, common, next: 0 }
    }
}

impl Iterator for Segments<'_> {
    type Item = Segment;

    #[inline(always)]
    fn next(&mut self) -> Option<Segment> {
        let (count, common) = (self.visible.len(), self.common);
        while self.next <= 2 * count {
            let index = self.next;
            self.next += 1;
            let (rows, positions) = if index < count {
                let seen = self.visible[index];
                (index..index + 1, seen.start..seen.end.min(common.start))
            } else if index == count {
                (0..count, common.start..common.end)
            } else {
                let row = index - count - 1;
                let seen = self.visible[row];
                (row..row + 1, seen.start.max(common.end)..seen.end)
            };
            if positions.start < positions.end {
                return Some(Segment { rows, positions });
            }
        }
        None
    }
}

/// Continues the weighted sums of the rows of `segment` over V panels (16 dimensions each) from `panel` on.
struct SumValues<'a, E> {
    pass: &'a Pass<'a>,
    segment: &'a Segment,
    panel: usize,
    dtype: PhantomData<E>,
}

impl<S: Simd, E: PanelDtype> TileFn<S> for SumValues<'_, E> {
    const MAX_ROWS: usize = MAX_ROWS;

    /// # Safety
    /// `pass` has these panels, and weights and values for the positions of the segment, which has `T` rows; the sums
    /// are set.
    #[inline(always)]
    unsafe fn call<const T: usize, const P: usize>(self, s: S) {
        let Self { pass, segment, panel, .. } = self;
        let stride = partial_floats(pass.layout.head_dim);
        let panel_bytes = panel_bytes(E::DTYPE, LANES);
        let mut offsets = [pass.layout.key_bytes() + panel * panel_bytes; P];
        for (p, offset) in offsets.iter_mut().enumerate() {
            *offset += p * panel_bytes;
        }
        // SAFETY: the acc of each row follows its first 16 floats, 16 floats for each panel; the panels lie inside the
        // tiles; each row has 16 weights for each tile.
        unsafe {
            let acc_at = pass.partial.add(segment.rows.start * stride + LANES + panel * LANES);
            let mut acc = tile::load::<S, T, P>(s, acc_at, stride, LANES);
            let mut at = segment.positions.start;
            while at < segment.positions.end {
                let base = at / LANES * LANES;
                let end = segment.positions.end.min(base + LANES);
                let mut panels = [pass.tiles[at / LANES]; P];
                for (panel, offset) in panels.iter_mut().zip(offsets) {
                    *panel = panel.add(offset);
                }
                let prefetch = pass.prefetch::<E, P>(panels, [at / LANES; P], offsets, panel_bytes);
                let (weights, steps) =
                    (pass.scores.add(segment.rows.start * SPLIT + base), at - base..end - base);
                tile::advance_any::<S, E, T, P>(s, &mut acc, weights, SPLIT, panels, steps, prefetch);
                at = end;
            }
            tile::store(s, acc_at, stride, LANES, &acc);
        }
    }
}
