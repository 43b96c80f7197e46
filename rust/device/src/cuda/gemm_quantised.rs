//! Quantised GEMM: the kernels of matrices of quantised weights, loaded for each format, and launched for products and
//! for rows of tables.

use std::collections::HashMap;
use std::sync::Arc;

use bytemuck::NoUninit;
use penstock_cuda::{DevicePointer, Kernel, Parameter};
use penstock_types::{Grid, Minimum, ScaleFormat};

use super::kernels::{Loader, Source};
use super::queue::{Queue, Shape};
use super::tile_shape::{QuantisedWarpgroupTile, TileSelector, TileShape};
use super::{quantised_matrix, start};
use crate::error::DeviceError;

/// Columns of a split, which a warp computes, and the most warps of a block: in the `gemv` kernels, and in
/// `gemm_narrow` of quantised weights.
const SPLIT_COLUMNS: usize = 512;
pub(super) const MAX_WARPS: usize = 8;
/// Most rows of `gemv_few`: `FEW` of `gemm_quantised.cu`.
const FEW_ROWS: usize = 4;
/// The files of the kernels.
const GEMM_QUANTISED: &str = "gemm_quantised.cu";
const GEMM_QUANTISED_WARPGROUP: &str = "gemm_quantised_warpgroup.cu";
/// Columns of a thread that reads a quantised table.
const COLUMNS_OF_A_THREAD: usize = 16;

/// The product of a part of a matrix.
#[derive(Clone, Copy)]
pub(super) struct PartProduct {
    pub x: DevicePointer,
    pub w: DevicePointer,
    /// Or null.
    pub bias: DevicePointer,
    pub out: DevicePointer,
    pub rows: usize,
    pub outputs: usize,
    pub inner: usize,
    /// The distance of rows of `out`.
    pub pitch: usize,
    pub accumulates: bool,
    /// The base-2 logarithm of the columns that share a scale, if `x` is quantised; 31 if a row shares one.
    pub x_group_shift: i32,
}

/// A matrix of quantised weights, as kernels read it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct QuantisedMatrix {
    data: DevicePointer,
    rows: i32,
    columns: i32,
    group_shift: i32,
    has_bf16_scales: u16,
    has_zero_points: u16,
}

/// A product, as `gemm_quantised.cuh` has it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct QuantisedProduct {
    w: QuantisedMatrix,
    x: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    rows: i32,
    pitch: i32,
    accumulates: i32,
    x_group_shift: i32,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for QuantisedProduct {}

/// Rows of a table, as `gemm_quantised.cu` reads them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct QuantisedTableRows {
    table: QuantisedMatrix,
    tokens: DevicePointer,
    last_tokens: DevicePointer,
    out: DevicePointer,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for QuantisedTableRows {}

/// The kernels of a format and its activations.
pub(super) struct QuantisedGemmKernels {
    grid: Grid,
    gemv_row: Kernel,
    gemv_few: Kernel,
    gemv: Kernel,
    gemm_narrow: Kernel,
    gemm_middle: Kernel,
    gemm_wide: Kernel,
    /// The kernel of warpgroups and its dynamic shared memory, if the device and the format have it.
    warpgroups: Option<(Kernel, usize)>,
    embed: Kernel,
}

impl QuantisedGemmKernels {
    /// The sources of the kernels of a format.
    pub fn sources(loader: &Loader, grid: &Grid) -> impl Iterator<Item = Source> + use<> {
        let files = std::iter::once(GEMM_QUANTISED)
            .chain(Self::has_warpgroups(loader, grid).then_some(GEMM_QUANTISED_WARPGROUP));
        let variant = quantised_matrix::variant(grid);
        files.map(move |file| (file, variant.clone()))
    }

    fn has_warpgroups(loader: &Loader, grid: &Grid) -> bool {
        loader.has_warpgroups() && quantised_matrix::has_warpgroups(grid)
    }

    fn load(loader: &mut Loader, grid: &Grid) -> Result<Self, DeviceError> {
        let has_warpgroups = Self::has_warpgroups(loader, grid);
        let variant = quantised_matrix::variant(grid);
        let suffix = variant.replace(',', "_");
        let mut load = |file, name| loader.kernel(file, &variant, &format!("{name}_{suffix}"));
        let warpgroups = if has_warpgroups {
            let (kernel, shared_bytes) = (
                load(GEMM_QUANTISED_WARPGROUP, "gemm_warpgroup_wide")?,
                QuantisedWarpgroupTile::shared_bytes(grid),
            );
            kernel.set_shared_limit(shared_bytes as u32).map_err(start)?;
            Some((kernel, shared_bytes))
        } else {
            None
        };
        let mut kernel = |name| load(GEMM_QUANTISED, name);
        Ok(Self {
            grid: *grid,
            warpgroups,
            gemv_row: kernel("gemv_row")?,
            gemv_few: kernel("gemv_few")?,
            gemv: kernel("gemv")?,
            gemm_narrow: kernel("gemm_narrow")?,
            gemm_middle: kernel("gemm_middle")?,
            gemm_wide: kernel("gemm_wide")?,
            embed: kernel("embed")?,
        })
    }

    /// A matrix of this format, as kernels read it.
    fn matrix(&self, data: DevicePointer, rows: usize, columns: usize) -> QuantisedMatrix {
        let grid = &self.grid;
        QuantisedMatrix {
            data,
            rows: rows as i32,
            columns: columns as i32,
            group_shift: grid.group.map_or(31, u16::ilog2).cast_signed(),
            has_bf16_scales: (grid.scales == ScaleFormat::Bf16).into(),
            has_zero_points: (grid.minimum == Minimum::ZeroPoint).into(),
        }
    }

    /// Launches a product.
    pub fn multiply(
        &self,
        queue: &Queue,
        selector: &TileSelector,
        product: &PartProduct,
    ) -> Result<(), DeviceError> {
        let PartProduct { rows, outputs, inner, .. } = *product;
        let call = QuantisedProduct {
            w: self.matrix(product.w, outputs, inner),
            x: product.x,
            bias: product.bias,
            out: product.out,
            rows: rows as i32,
            pitch: product.pitch as i32,
            accumulates: product.accumulates.into(),
            x_group_shift: product.x_group_shift,
        };
        let are_faster = selector.are_warpgroups_faster(&self.grid, rows, outputs);
        let (kernel, shape) =
            if let Some((kernel, shared_bytes)) = self.warpgroups.as_ref().filter(|_| are_faster) {
                let shape =
                    Shape::new(QuantisedWarpgroupTile::count(rows, outputs), QuantisedWarpgroupTile::THREADS);
                (kernel, shape.with_shared(*shared_bytes))
            } else {
                let threads = 32 * inner.div_ceil(SPLIT_COLUMNS).min(MAX_WARPS);
                let tile_shape = selector.quantised_tile_shape(rows, outputs, self.warpgroups.is_some());
                let (kernel, tile_outputs, tile_rows, threads) = match tile_shape {
                    TileShape::Vectors if rows == 1 => (&self.gemv_row, 16, 1, threads),
                    TileShape::Vectors if rows <= FEW_ROWS => (&self.gemv_few, 16, FEW_ROWS, threads),
                    TileShape::Vectors => (&self.gemv, 16, 8, threads),
                    TileShape::Narrow => (&self.gemm_narrow, 32, 32, threads),
                    TileShape::Middle => (&self.gemm_middle, 128, 32, 128),
                    TileShape::Wide => (&self.gemm_wide, 128, 64, 256),
                };
                let blocks = [outputs.div_ceil(tile_outputs), rows.div_ceil(tile_rows), 1];
                (kernel, Shape::of(blocks, threads))
            };
        queue.launch(kernel, shape, &[(&call).into()])
    }

    /// Launches the reading of `count` rows of a table: those of `tokens`, or of the tokens that were sampled last.
    pub fn read_rows(
        &self,
        queue: &Queue,
        (data, rows, columns): (DevicePointer, usize, usize),
        [tokens, last_tokens, out]: [DevicePointer; 3],
        count: usize,
    ) -> Result<(), DeviceError> {
        let table = self.matrix(data, rows, columns);
        let threads = (columns / COLUMNS_OF_A_THREAD).next_multiple_of(32).clamp(32, 256);
        let call = QuantisedTableRows { table, tokens, last_tokens, out };
        queue.launch(&self.embed, Shape::new(count, threads), &[(&call).into()])
    }
}

/// The kernels of formats, loaded once.
#[derive(Default)]
pub(super) struct LoadedQuantisedGemm(HashMap<Grid, Arc<QuantisedGemmKernels>>);

impl LoadedQuantisedGemm {
    pub fn get(
        &mut self,
        loader: &mut Loader,
        grid: &Grid,
    ) -> Result<Arc<QuantisedGemmKernels>, DeviceError> {
        if let Some(kernels) = self.0.get(grid) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(QuantisedGemmKernels::load(loader, grid)?);
        self.0.insert(*grid, Arc::clone(&kernels));
        Ok(kernels)
    }
}
