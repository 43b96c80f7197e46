//! Products of operands and matrices, and rows of tables: a launch or two for each part of a matrix. All kernels give
//! the same bits; cuBLASLt may give others.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::NoUninit;
use penstock_cuda::{Argument, DevicePointer, Kernel, Parameter, ProductOperands, ProductShape};
use penstock_types::{Dtype, Epilogue, Grid, Minimum, ScaleFormat};

use super::cublas::{alignment_of, is_aligned};
use super::division::{CodesTiles, Division, SEGMENT, TILE, Tiles};
use super::kernels::{Loader, Source, WarpgroupKernels};
use super::queue::{Queue, Shape};
use super::{Cuda, CudaBuffer, CudaMatrix, CudaOperand, CudaSlots, CudaStep, codes, start};
use crate::error::DeviceError;

/// Columns of a warp, and the most warps of a block, in the `gemv` kernels; of codes, also in `gemm_narrow`.
const CODES_SEGMENT: usize = 512;
const MAX_WARPS: usize = 8;
/// Most rows of `gemv_few`: `FEW` of `codes.cu`.
const FEW_ROWS: usize = 4;
/// The files of the kernels of codes.
const CODES: &str = "codes.cu";
const CODES_WARPGROUP: &str = "codes_warpgroup.cu";
/// Columns of a thread that reads a table of codes.
const COLUMNS_OF_A_THREAD: usize = 16;

/// The product of a part of a matrix.
#[derive(Clone, Copy)]
struct PartProduct {
    x: DevicePointer,
    w: DevicePointer,
    /// Or null.
    bias: DevicePointer,
    out: DevicePointer,
    rows: usize,
    outputs: usize,
    inner: usize,
    /// The distance of rows of `out`.
    pitch: usize,
    accumulates: bool,
    /// Of quantised rows.
    span_shift: i32,
}

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

/// The chains of a divided product, as `gemm.cu` reads them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Chains {
    chains: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    rows: i32,
    outputs: i32,
    segments: i32,
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
    /// The number of segments, if each block stores the chains of one and a second launch adds them.
    segments: Option<usize>,
}

impl<'a> Tiled<'a> {
    /// A launch in which a block computes all segments of a tile.
    fn whole(kernel: &'a Kernel, shape: Shape) -> Self {
        Self { kernel, shape, segments: None }
    }
}

/// A matrix of codes, as kernels read it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Codes {
    data: DevicePointer,
    rows: i32,
    columns: i32,
    group_shift: i32,
    has_bf16_scales: u16,
    has_zero_points: u16,
}

/// A product, as `codes_product.cuh` has it.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct CodesProduct {
    w: Codes,
    x: DevicePointer,
    bias: DevicePointer,
    out: DevicePointer,
    rows: i32,
    pitch: i32,
    accumulates: i32,
    span_shift: i32,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for CodesProduct {}

/// Rows of a table, as `codes.cu` reads them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct CodesRows {
    table: Codes,
    tokens: DevicePointer,
    last_tokens: DevicePointer,
    out: DevicePointer,
}
// SAFETY: the same fields as in the kernel's type.
unsafe impl Parameter for CodesRows {}

/// The kernels of a format and its activations.
pub(super) struct CodesKernels {
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

impl CodesKernels {
    /// The sources of the kernels of a format.
    pub fn sources(loader: &Loader, grid: &Grid) -> impl Iterator<Item = Source> + use<> {
        let files =
            std::iter::once(CODES).chain(Self::has_warpgroups(loader, grid).then_some(CODES_WARPGROUP));
        let variant = codes::variant(grid);
        files.map(move |file| (file, variant.clone()))
    }

    fn has_warpgroups(loader: &Loader, grid: &Grid) -> bool {
        loader.has_warpgroups() && codes::has_warpgroups(grid)
    }

    fn load(loader: &mut Loader, grid: &Grid) -> Result<Self, DeviceError> {
        let has_warpgroups = Self::has_warpgroups(loader, grid);
        let variant = codes::variant(grid);
        let suffix = variant.replace(',', "_");
        let mut load = |file, name| loader.kernel(file, &variant, &format!("{name}_{suffix}"));
        let warpgroups = if has_warpgroups {
            let (kernel, shared_bytes) =
                (load(CODES_WARPGROUP, "gemm_warpgroup_wide")?, CodesTiles::shared_bytes(grid));
            kernel.set_shared_limit(shared_bytes as u32).map_err(start)?;
            Some((kernel, shared_bytes))
        } else {
            None
        };
        let mut kernel = |name| load(CODES, name);
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

    fn codes(&self, data: DevicePointer, rows: usize, columns: usize) -> Codes {
        let grid = &self.grid;
        Codes {
            data,
            rows: rows as i32,
            columns: columns as i32,
            group_shift: grid.group.map_or(31, u16::ilog2).cast_signed(),
            has_bf16_scales: (grid.scales == ScaleFormat::Bf16).into(),
            has_zero_points: (grid.minimum == Minimum::ZeroPoint).into(),
        }
    }

    /// Launches a product.
    fn multiply(&self, queue: &Queue, division: &Division, product: &PartProduct) -> Result<(), DeviceError> {
        let PartProduct { rows, outputs, inner, .. } = *product;
        let call = CodesProduct {
            w: self.codes(product.w, outputs, inner),
            x: product.x,
            bias: product.bias,
            out: product.out,
            rows: rows as i32,
            pitch: product.pitch as i32,
            accumulates: product.accumulates.into(),
            span_shift: product.span_shift,
        };
        let are_faster = division.are_warpgroups_faster(&self.grid, rows, outputs);
        let (kernel, shape) =
            if let Some((kernel, shared_bytes)) = self.warpgroups.as_ref().filter(|_| are_faster) {
                let shape = Shape::new(CodesTiles::count(rows, outputs), CodesTiles::THREADS);
                (kernel, shape.with_shared(*shared_bytes))
            } else {
                let threads = 32 * inner.div_ceil(CODES_SEGMENT).min(MAX_WARPS);
                let tiles = division.tiles_of_codes(rows, outputs, self.warpgroups.is_some());
                let (kernel, tile_outputs, tile_rows, threads) = match tiles {
                    Tiles::Vectors if rows == 1 => (&self.gemv_row, 16, 1, threads),
                    Tiles::Vectors if rows <= FEW_ROWS => (&self.gemv_few, 16, FEW_ROWS, threads),
                    Tiles::Vectors => (&self.gemv, 16, 8, threads),
                    Tiles::Narrow => (&self.gemm_narrow, 32, 32, threads),
                    Tiles::Middle => (&self.gemm_middle, 128, 32, 128),
                    Tiles::Wide => (&self.gemm_wide, 128, 64, 256),
                };
                let blocks = [outputs.div_ceil(tile_outputs), rows.div_ceil(tile_rows), 1];
                (kernel, Shape::of(blocks, threads))
            };
        queue.launch(kernel, shape, &[(&call).into()])
    }
}

/// The kernels of formats, loaded once.
#[derive(Default)]
pub(super) struct LoadedCodes(HashMap<Grid, Arc<CodesKernels>>);

impl LoadedCodes {
    pub fn get(&mut self, loader: &mut Loader, grid: &Grid) -> Result<Arc<CodesKernels>, DeviceError> {
        if let Some(kernels) = self.0.get(grid) {
            return Ok(Arc::clone(kernels));
        }
        let kernels = Arc::new(CodesKernels::load(loader, grid)?);
        self.0.insert(*grid, Arc::clone(&kernels));
        Ok(kernels)
    }
}

impl Cuda {
    /// Launches a product of more than 8 rows of plain numbers by cuBLASLt; false if kernels have to compute it.
    fn multiply_by_cublas(&self, product: &PartProduct, dtype: Dtype) -> Result<bool, DeviceError> {
        let Some(cublas) = &self.cublas else { return Ok(false) };
        let PartProduct { x, w, bias, out, rows, outputs, inner, pitch, accumulates, .. } = *product;
        let is_small = self.division.tiles_of_floats(rows, outputs) == Tiles::Vectors;
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
    fn multiply_floats(&self, product: &PartProduct, dtype: Dtype) -> Result<(), DeviceError> {
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
        let divided = |kernel| Tiled {
            segments: self.division.segments(rows, outputs, inner),
            ..Tiled::whole(kernel, tiles(TILE, TILE))
        };
        let tiled = match (self.division.tiles_of_floats(rows, outputs), &kernels.warpgroups) {
            (Tiles::Vectors, _) => {
                let warps = if is_f32 { 4 } else { inner.div_ceil(SEGMENT).min(MAX_WARPS) };
                let shape = Shape::of([outputs.div_ceil(16), rows.div_ceil(8), 1], 32 * warps);
                Tiled::whole(kernels.gemv.get(dtype), shape)
            }
            _ if is_f32 => Tiled::whole(kernels.gemm_narrow.get(dtype), tiles(32, 64)),
            (_, Some(warpgroups)) => self.tiled_by_warpgroups(warpgroups, &call, dtype),
            (Tiles::Wide, None) => Tiled::whole(kernels.gemm_wide.get(dtype), tiles(128, 128)),
            (Tiles::Middle, None) => divided(kernels.gemm_middle.get(dtype)),
            (Tiles::Narrow, None) => divided(kernels.gemm_narrow.get(dtype)),
        };
        match tiled.segments {
            Some(segments) => self.multiply_segments(&tiled, call, segments),
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
        let tiles = self.division.tiles_of_warpgroups(rows, outputs);
        let inner = product.inner as usize;
        Tiled {
            kernel: kernels.get(tiles, dtype),
            shape: Shape::new(tiles.count(rows, outputs), tiles.threads()).with_shared(tiles.shared_bytes()),
            segments: self.division.segments_of_warpgroups(tiles, rows, outputs, inner),
        }
    }

    /// Launches a product with a block for each segment of a tile.
    fn multiply_segments(
        &self,
        tiled: &Tiled<'_>,
        product: Product,
        segments: usize,
    ) -> Result<(), DeviceError> {
        let chains = self.division.chains.as_ref().expect("scratch is allocated first; this is a bug");
        let chains = self.memory.pointer(chains);
        let Product { bias, out, rows, outputs, pitch, accumulates, .. } = product;
        let part =
            Product { bias: DevicePointer::NULL, out: chains, pitch: outputs, accumulates: 0, ..product };
        self.queue.launch(tiled.kernel, tiled.shape.with_segments(segments), &[(&part).into()])?;
        let segments = segments as i32;
        let call = Chains { chains, bias, out, rows, outputs, segments, pitch, accumulates, padding: 0 };
        let shape = Shape::of([(outputs as usize).div_ceil(256), rows as usize, 1], 256);
        self.queue.launch(&self.kernels.add_chains, shape, &[(&call).into()])
    }

    /// `out[i] = weight * x[rows[i]]`, then the epilogue.
    pub(super) fn multiply(
        &self,
        rows: Range<usize>,
        x: &CudaOperand,
        weight: &CudaMatrix,
        epilogue: &Epilogue<&CudaBuffer>,
        out: &CudaBuffer,
    ) -> Result<(), DeviceError> {
        let form = weight.operand;
        let x = x.pointer(&self.memory, form).offset(rows.start * form.row_bytes(weight.columns));
        let mut output = 0;
        for part in &weight.parts {
            let product = PartProduct {
                x,
                w: self.memory.pointer(&weight.region).offset(part.offset),
                bias: epilogue.bias().map_or(DevicePointer::NULL, |bias| self.memory.float(bias, output)),
                out: self.memory.float(out, output),
                rows: rows.len(),
                outputs: part.rows,
                inner: weight.columns,
                pitch: weight.rows,
                accumulates: matches!(epilogue, Epilogue::Add | Epilogue::AddBias(_)),
                span_shift: form.span_shift(),
            };
            match &part.codes {
                None => self.multiply_floats(&product, form.floats())?,
                Some(kernels) => kernels.multiply(&self.queue, &self.division, &product)?,
            }
            output += part.rows;
        }
        Ok(())
    }

    /// `out[row] = table[token of row]`.
    pub(super) fn copy_rows_of_tokens(
        &self,
        step: CudaStep<'_>,
        slots: &CudaSlots,
        table: &CudaMatrix,
        out: &CudaBuffer,
    ) -> Result<(), DeviceError> {
        let [part] = &table.parts[..] else { panic!("a table of several parts; this is a bug") };
        let count = step.inputs.tokens.len();
        let pointers = [self.memory.pointer(&table.region), step.tokens, slots.last_tokens()];
        let out = self.memory.pointer(&out.0);
        let Some(kernels) = &part.codes else {
            let width = table.columns as i32;
            let [from, tokens, last] = pointers.each_ref().map(Argument::from);
            let arguments = [from, tokens, last, (&out).into(), (&width).into()];
            return self.queue.launch(
                self.kernels.embed.get(table.operand.floats()),
                Shape::new(count, 256),
                &arguments,
            );
        };
        let [data, tokens, last_tokens] = pointers;
        let table = kernels.codes(data, table.rows, table.columns);
        let threads = (table.columns as usize / COLUMNS_OF_A_THREAD).next_multiple_of(32).clamp(32, 256);
        let call = CodesRows { table, tokens, last_tokens, out };
        self.queue.launch(&kernels.embed, Shape::new(count, threads), &[(&call).into()])
    }
}
