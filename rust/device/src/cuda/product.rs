//! Products of operands and matrices of plain numbers: a launch or two for each part of a matrix. All kernels give the
//! same bits; cuBLASLt may give others.

use bytemuck::NoUninit;
use penstock_cuda::{DevicePointer, Kernel, Parameter, ProductOperands, ProductShape};
use penstock_types::Dtype;

use super::Cuda;
use super::cublas::{alignment_of, is_aligned};
use super::gemm_quantised::{MAX_WARPS, PartProduct};
use super::kernels::WarpgroupKernels;
use super::queue::Shape;
use super::tile_shape::{SPLIT_COLUMNS, TILE, TileShape};
use crate::error::DeviceError;

/// A product of plain numbers, as `gemm.cu` reads it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Product {
    x: DevicePointer,
    w: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    rows: i32,
    outputs: i32,
    inner: i32,
    pitch: i32,
    accumulates: i32,
    padding: u32,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for Product {}

/// The chains of a product by split-K, as `gemm.cu` reads them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Chains {
    chains: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    rows: i32,
    outputs: i32,
    splits: i32,
    pitch: i32,
    accumulates: i32,
    padding: u32,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for Chains {}

/// The launch of a product by tiles.
struct Tiled<'a> {
    kernel: &'a Kernel,
    shape: Shape,
    /// The number of splits, if each block stores the chains of one and a second launch adds them (split-K).
    splits: Option<usize>,
}

impl<'a> Tiled<'a> {
    /// A launch in which a block computes all splits of a tile.
    fn whole(kernel: &'a Kernel, shape: Shape) -> Self {
        Self { kernel, shape, splits: None }
    }
}

impl Cuda {
    /// Launches a product of more than 8 rows of plain numbers by cuBLASLt; false if kernels have to compute it.
    fn multiply_by_cublas(&self, product: &PartProduct, dtype: Dtype) -> Result<bool, DeviceError> {
        let Some(cublas) = &self.cublas else { return Ok(false) };
        let PartProduct { x, w, bias, out, rows, outputs, inner, pitch, accumulates, .. } = *product;
        let is_small = self.tile_selector.tile_shape(rows, outputs) == TileShape::Vectors;
        if dtype == Dtype::F32 || is_small || !is_aligned(inner) {
            return Ok(false);
        }
        let shape = ProductShape {
            is_bf16: dtype == Dtype::Bf16,
            rows,
            outputs,
            inner,
            pitch,
            alignment: alignment_of(out.0 | bias.0 | (4 * pitch as u64)),
            accumulates,
            has_bias: bias != DevicePointer::NULL,
        };
        let Some(found) = cublas.get(shape, self.queue.is_capturing()) else { return Ok(false) };
        let workspace = cublas.workspace.as_ref().expect("scratch is allocated first; this is a bug");
        let workspace = self.memory.pointer(workspace);
        let error = self.queue.multiply(&found, ProductOperands { x, w, bias, out, workspace })?;
        if let Some(error) = &error {
            cublas.refuse(shape, error);
        }
        Ok(error.is_none())
    }

    /// Launches a product of plain numbers.
    pub(super) fn multiply_floats(&self, product: &PartProduct, dtype: Dtype) -> Result<(), DeviceError> {
        if self.multiply_by_cublas(product, dtype)? {
            return Ok(());
        }
        let PartProduct { x, w, bias, out, rows, outputs, inner, pitch, accumulates, .. } = *product;
        let call = Product {
            x,
            w,
            bias,
            out,
            rows: rows as i32,
            outputs: outputs as i32,
            inner: inner as i32,
            pitch: pitch as i32,
            accumulates: accumulates.into(),
            padding: 0,
        };
        let kernels = &self.kernels;
        let tiles = |tile_rows: usize, tile_outputs: usize| {
            Shape::new(rows.div_ceil(tile_rows) * outputs.div_ceil(tile_outputs), 128)
        };
        let is_f32 = dtype == Dtype::F32;
        let has_words = (inner * dtype.bytes()).is_multiple_of(16);
        if !has_words {
            let shape = Shape::of([rows, outputs.div_ceil(8), 1], 256);
            return self.queue.launch(kernels.gemm_any.get(dtype), shape, &[(&call).into()]);
        }
        let split = |kernel| Tiled {
            splits: self.tile_selector.splits(rows, outputs, inner),
            ..Tiled::whole(kernel, tiles(TILE, TILE))
        };
        let tiled = match (self.tile_selector.tile_shape(rows, outputs), &kernels.warpgroups) {
            (TileShape::Vectors, _) => {
                let warps = if is_f32 { 4 } else { inner.div_ceil(SPLIT_COLUMNS).min(MAX_WARPS) };
                let shape = Shape::of([outputs.div_ceil(16), rows.div_ceil(8), 1], 32 * warps);
                Tiled::whole(kernels.gemv.get(dtype), shape)
            }
            _ if is_f32 => Tiled::whole(kernels.gemm_narrow.get(dtype), tiles(32, 64)),
            (_, Some(warpgroups)) => self.tiled_by_warpgroups(warpgroups, &call, dtype),
            (TileShape::Wide, None) => Tiled::whole(kernels.gemm_wide.get(dtype), tiles(128, 128)),
            (TileShape::Middle, None) => split(kernels.gemm_middle.get(dtype)),
            (TileShape::Narrow, None) => split(kernels.gemm_narrow.get(dtype)),
        };
        match tiled.splits {
            Some(splits) => self.multiply_split_k(&tiled, call, splits),
            None => self.queue.launch(tiled.kernel, tiled.shape, &[(&call).into()]),
        }
    }

    /// The launch of a product by warpgroups.
    fn tiled_by_warpgroups<'a>(
        &self,
        kernels: &'a WarpgroupKernels,
        product: &Product,
        dtype: Dtype,
    ) -> Tiled<'a> {
        let (rows, outputs) = (product.rows as usize, product.outputs as usize);
        let tile_shape = self.tile_selector.warpgroup_tile_shape(rows, outputs);
        let inner = product.inner as usize;
        Tiled {
            kernel: kernels.get(tile_shape, dtype),
            shape: Shape::new(tile_shape.count(rows, outputs), tile_shape.threads())
                .with_shared(tile_shape.shared_bytes()),
            splits: self.tile_selector.warpgroup_splits(tile_shape, rows, outputs, inner),
        }
    }

    /// Launches a product by split-K: with a block for each split of a tile.
    fn multiply_split_k(
        &self,
        tiled: &Tiled<'_>,
        product: Product,
        splits: usize,
    ) -> Result<(), DeviceError> {
        let chains = self.tile_selector.chains.as_ref().expect("scratch is allocated first; this is a bug");
        let chains = self.memory.pointer(chains);
        let Product { bias, out, rows, outputs, pitch, accumulates, .. } = product;
        let part =
            Product { bias: DevicePointer::NULL, out: chains, pitch: outputs, accumulates: 0, ..product };
        self.queue.launch(tiled.kernel, tiled.shape.with_splits(splits), &[(&part).into()])?;
        let splits = splits as i32;
        let call = Chains { chains, bias, out, rows, outputs, splits, pitch, accumulates, padding: 0 };
        let shape = Shape::of([(outputs as usize).div_ceil(256), rows as usize, 1], 256);
        self.queue.launch(&self.kernels.add_chains, shape, &[(&call).into()])
    }
}
