//! The product of rows and a matrix of weights: checks, and the division among the workers.

use std::ops::Range;

use penstock_types::{Epilogue, WeightFormat};

use crate::generic::grid::{GridProduct, floats::GridFloatProduct};
use crate::generic::matmul::{Output, Product, block_tiles, share_tiles};
use crate::generic::tile::RowTiles;
use crate::grid::{GridLayout, is_supported};
use crate::kernels::Kernels;
use crate::low_rank::LowRank;
use crate::matrix::Matrix;
use crate::operand::Operand;
use crate::panel::LANES;
use crate::pool::{PanelClaims, Pool, SharedMut};

impl Kernels {
    /// `out[t][r] = sum over k of x[t][k] * matrix[r][k]`, then the epilogue.
    ///
    /// `matrices` are the parts of one matrix, one below the other. `x` is `[tokens, columns]`, in the form of
    /// [`operand_layout`](Self::operand_layout); `out` is `[tokens, rows]`. The headers of the kernels say in which
    /// order each sum is computed.
    pub fn matmul(
        &self,
        pool: &Pool,
        x: Operand<'_>,
        tokens: usize,
        matrices: &[Matrix<'_>],
        epilogue: Epilogue<&[f32]>,
        out: &mut [f32],
    ) {
        self.product(pool, x, tokens, matrices, epilogue, None, out);
    }

    /// [`matmul`](Self::matmul), then [`add_low_rank`](Self::add_low_rank), with the same bits, in one parallel region
    /// if the panels of the updates are those of the matrices.
    #[expect(clippy::too_many_arguments, reason = "the operands of two operations")]
    pub fn matmul_low_rank(
        &self,
        pool: &Pool,
        x: Operand<'_>,
        tokens: usize,
        matrices: &[Matrix<'_>],
        epilogue: Epilogue<&[f32]>,
        updates: LowRank<'_>,
        out: &mut [f32],
    ) {
        if updates.groups.is_empty() {
            self.matmul(pool, x, tokens, matrices, epilogue, out);
        } else if updates.is_aligned(matrices) {
            self.product(pool, x, tokens, matrices, epilogue, Some(updates), out);
        } else {
            self.matmul(pool, x, tokens, matrices, epilogue, out);
            let width = matrices.iter().map(|matrix| matrix.layout.rows).sum();
            self.add_low_rank(pool, updates, width, out);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the operands of two operations")]
    fn product(
        &self,
        pool: &Pool,
        x: Operand<'_>,
        tokens: usize,
        matrices: &[Matrix<'_>],
        epilogue: Epilogue<&[f32]>,
        updates: Option<LowRank<'_>>,
        out: &mut [f32],
    ) {
        let columns = matrices.first().expect("a matrix").layout.columns;
        let stride = matrices.iter().map(|matrix| matrix.layout.rows).sum();
        let operand = self.operand_layout(matrices.iter().map(|matrix| matrix.layout.format), columns);
        assert!(columns > 0, "{matrices:?} have no columns");
        match (x, operand) {
            (Operand::Floats(x), None) => assert_eq!(x.len(), tokens * columns, "x of {tokens} tokens"),
            (Operand::Codes(x), Some(operand)) => {
                assert_eq!(x.len(), tokens * operand.row_bytes, "codes of {tokens} tokens");
                assert!(x.as_ptr().cast::<u32>().is_aligned(), "codes are aligned to 4 bytes");
            }
            _ => panic!("the rows have another form than the matrices read; this is a bug"),
        }
        assert_eq!(out.len(), tokens * stride, "out of {tokens} tokens");
        if let Epilogue::Bias(bias) | Epilogue::AddBias(bias) = epilogue {
            assert_eq!(bias.len(), stride, "bias");
        }
        for matrix in matrices {
            if let WeightFormat::Grid(grid) = &matrix.layout.format {
                assert!(is_supported(grid), "{grid:?}");
            }
            assert_eq!(matrix.layout.columns, columns, "columns of the parts of a matrix");
            assert_eq!(matrix.bytes.len(), matrix.layout.bytes(), "bytes of {:?}", matrix.layout);
        }
        let shapes = if operand.is_some() { self.table.grid_tiles } else { self.table.tiles };
        let tiles = RowTiles::new(tokens, shapes.max_rows());
        // The unit of work is (token block, panel), panels fastest: the activations of a block stay in L2.
        let blocks = RowTiles::new(tiles.count, block_tiles(shapes));
        let panels: usize = matrices.iter().map(|matrix| matrix.layout.panels()).sum();
        let claims = PanelClaims::new(pool, blocks.count, panels);
        let unit = if tiles.count == 1 { shapes.panels_at_once(tokens) } else { 1 };
        let limit = share_tiles(shapes) / tiles.count.clamp(1, block_tiles(shapes));
        let out = SharedMut::new(out);
        let updates = updates.map(|updates| updates.start(self, pool, out, tokens, stride));
        let run = |matrix: &Matrix<'_>, first_row: usize, panels: Range<usize>, tile_range: Range<usize>| {
            let layout = matrix.layout;
            let rows = first_row..first_row + layout.rows;
            let output = Output {
                rows: layout.rows,
                stride,
                epilogue: epilogue.map(|bias| &bias[rows.clone()]),
                out: out.as_ptr().wrapping_add(first_row),
            };
            let weights = matrix.bytes.as_ptr();
            // SAFETY: the table's instruction set is available; the pointers come from slices of the right lengths,
            // which are borrowed here; every (block, panel) is claimed once; shares are within limits.
            unsafe {
                match (layout.format, x, operand) {
                    (WeightFormat::Float(dtype), Operand::Floats(x), _) => {
                        let product = Product { x: x.as_ptr(), columns, tokens: tiles, weights, output };
                        (self.table.matmul.of(dtype))(&product, panels, tile_range);
                    }
                    (WeightFormat::Grid(grid), Operand::Floats(x), _) => {
                        let layout = GridLayout::new(grid, columns);
                        let multiply = self.table.multiply_decoded;
                        let product = GridFloatProduct {
                            x: x.as_ptr(),
                            tokens: tiles,
                            weights,
                            layout,
                            multiply,
                            output,
                        };
                        (self.table.grid_float_matmul.of(grid.bits))(&product, panels, tile_range);
                    }
                    (WeightFormat::Grid(grid), Operand::Codes(x), Some(operand)) => {
                        let (layout, kernel) =
                            (GridLayout::new(grid, columns), self.table.grid_kernels.of(grid.bits));
                        let product = GridProduct {
                            x: x.as_ptr(),
                            operand,
                            tokens: tiles,
                            weights,
                            layout,
                            kernel,
                            output,
                        };
                        (self.table.grid_matmul)(&product, panels, tile_range);
                    }
                    _ => unreachable!("checked above"),
                }
            }
        };
        pool.share(&|worker| {
            if let Some(updates) = &updates {
                updates.shrink();
            }
            claims.for_each(worker, unit, limit, |mut share| {
                let block = blocks.rows(share.block);
                let rows = tiles.rows(block.start).start..tiles.rows(block.end - 1).end;
                while share.count > 0 {
                    // The part of the share in one matrix.
                    let (mut panel, mut row, mut index) = (share.panel, 0, 0);
                    while panel >= matrices[index].layout.panels() {
                        panel -= matrices[index].layout.panels();
                        row += matrices[index].layout.rows;
                        index += 1;
                    }
                    let layout = matrices[index].layout;
                    let count = share.count.min(layout.panels() - panel);
                    let panels = panel..panel + count;
                    let columns = row + panels.start * LANES..row + layout.rows.min(panels.end * LANES);
                    if let Some(updates) = &updates {
                        updates.prefetch(&rows, &columns);
                    }
                    run(&matrices[index], row, panels, block.clone());
                    if let Some(updates) = &updates {
                        updates.expand(&rows, &columns);
                    }
                    share.panel += count;
                    share.count -= count;
                }
            });
        });
    }
}
