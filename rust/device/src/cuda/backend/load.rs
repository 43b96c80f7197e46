//! Weights, rope tables and adapters of a CUDA device: packed on the host and copied to the device.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use penstock_cuda::DevicePointer;
use penstock_types::{Dtype, FieldError, HeadShape, KvDtype, PackedAdapter, WeightFormat};

use crate::cuda::cache::{CacheShape, LoadedAttention};
use crate::cuda::cublas::CublasProducts;
use crate::cuda::gemm_quantised::QuantisedGemmKernels;
use crate::cuda::kernels::Source;
use crate::cuda::matrix::{
    Layout, PACKED_LAYOUT, PACKED_ROWS, Part, Place, Stored, packed_bytes, part_bytes, read_as, stored,
};
use crate::cuda::operand::{OperandForm, Operands};
use crate::cuda::{
    Cuda, CudaAdapterLayout, CudaAdapters, CudaBuffer, CudaMatrix, CudaRope, cublas, quantised_matrix, start,
};
use crate::error::DeviceError;
use crate::seam::{
    AdapterSpec, CacheSpec, Load, MatrixPart, PackedLayout, PlannedMatrix, RowSource, StepSpec,
};

/// The largest head that `attention_f32.cu` has.
const MOST_HEAD_DIM: usize = 256;

impl Load for Cuda {
    type Matrix = CudaMatrix;
    type Vector = CudaBuffer;
    type Rope = CudaRope;
    type Adapters = CudaAdapters;
    type AdapterLayout = CudaAdapterLayout;

    fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError> {
        let dim = heads.head_dim;
        if dim > MOST_HEAD_DIM || !dim.is_multiple_of(2) {
            let limit = format!(
                "'cpu' for heads of {dim} dimensions: on CUDA, they have an even number, at most {MOST_HEAD_DIM}"
            );
            return Err(FieldError::new("device", "cuda", limit));
        }
        if dtype == KvDtype::Uint4 && !dim.is_multiple_of(8) {
            let limit =
                format!("another type on CUDA for heads of {dim} dimensions, which are no multiple of 8");
            return Err(FieldError::new("kv_cache_dtype", dtype.name(), limit));
        }
        Ok(())
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        match format {
            WeightFormat::Float(_) => true,
            WeightFormat::Grid(grid) => quantised_matrix::supports(&grid, columns),
        }
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        OperandForm::new(std::iter::once(format), self.has_fp8).name()
    }

    fn prepare(
        &mut self,
        matrices: &[PlannedMatrix],
        cache: &CacheSpec,
        has_adapters: bool,
    ) -> Result<(), DeviceError> {
        let shape = CacheShape::new(cache);
        let mut sources: Vec<Source> = Vec::new();
        self.operands = Operands { has_adapters, ..Operands::default() };
        if has_adapters {
            sources.push(("lora.cu", String::new()));
        }
        for PlannedMatrix { columns, parts, .. } in matrices {
            let Layout { operand, joined, .. } = Layout::new(*columns, parts, self.has_fp8);
            self.operands.add(operand);
            sources.extend(LoadedAttention::sources(&self.loader, &shape, operand));
            let grids = joined.iter().filter_map(|part| match part.format {
                WeightFormat::Float(_) => None,
                WeightFormat::Grid(grid) => Some(grid),
            });
            sources.extend(grids.flat_map(|grid| QuantisedGemmKernels::sources(&self.loader, &grid)));
        }
        sources.sort_unstable();
        sources.dedup();
        self.loader.load_all(&sources)?;
        self.try_cublas(matrices)
    }

    fn packed_layout(&self) -> PackedLayout {
        PackedLayout { name: PACKED_LAYOUT, rows: PACKED_ROWS }
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        packed_bytes(columns, rows, format) as u64
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        let (rows, columns) = (part.source.rows(), part.source.columns());
        let format = stored(columns, part.format);
        let out = &mut out[..part_bytes(columns, rows, format)];
        match format {
            WeightFormat::Float(dtype) => read_as(part.source, 0..rows, dtype, out),
            WeightFormat::Grid(grid) => quantised_matrix::read(part.source, &grid, 0..rows, out),
        }
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CudaMatrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.source.columns());
        let sizes: Vec<_> = parts.iter().map(|part| (part.source.rows(), part.format)).collect();
        let (matrix, places) = self.new_matrix(columns, &sizes)?;
        for (part, Place { rows, format, offset }) in parts.iter().zip(places) {
            let target = self.memory.pointer(&matrix.region).offset(offset);
            match format {
                WeightFormat::Float(dtype) => {
                    self.upload_floats(target, (rows, columns), part.source, dtype)?;
                }
                WeightFormat::Grid(grid) => {
                    let table = (
                        rows.div_ceil(quantised_matrix::TILE_ROWS),
                        quantised_matrix::bytes(1, columns, &grid),
                    );
                    self.uploader.upload(&self.queue, target, table, 1, &|tiles, out| {
                        let end = rows.min(tiles.end * quantised_matrix::TILE_ROWS);
                        quantised_matrix::read(
                            part.source,
                            &grid,
                            tiles.start * quantised_matrix::TILE_ROWS..end,
                            out,
                        );
                    })?;
                }
            }
        }
        Ok(matrix)
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<CudaMatrix, DeviceError> {
        let (matrix, places) = self.new_matrix(columns, parts)?;
        let mut rest = &bytes[..];
        for ((rows, format), place) in parts.iter().zip(places) {
            let (bytes, others) = rest.split_at(packed_bytes(columns, *rows, *format));
            rest = others;
            let format = stored(columns, *format);
            let bytes = &bytes[..part_bytes(columns, *rows, format)];
            let target = self.memory.pointer(&matrix.region).offset(place.offset);
            match (format, place.format) {
                (WeightFormat::Float(dtype), WeightFormat::Float(wanted)) => {
                    let stored = Stored { bytes, columns, dtype };
                    self.upload_floats(target, (*rows, columns), &stored, wanted)?;
                }
                _ => {
                    let copy = |range: Range<usize>, out: &mut [u8]| out.copy_from_slice(&bytes[range]);
                    self.uploader.upload(&self.queue, target, (bytes.len(), 1), 1, &copy)?;
                }
            }
        }
        Ok(matrix)
    }

    fn copies_mapped(&self) -> bool {
        true
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CudaBuffer, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let region = self.memory.allocate(bytes.len(), "weights")?;
        let target = self.memory.pointer(&region);
        self.uploader.upload(&self.queue, target, (bytes.len(), 1), 1, &|range, out| {
            out.copy_from_slice(&bytes[range]);
        })?;
        Ok(CudaBuffer(region))
    }

    fn load_rope(&mut self, table: &dyn RowSource, step: &StepSpec) -> Result<CudaRope, DeviceError> {
        let rope = CudaRope::new(self, table, step)?;
        self.uploader.release()?;
        Ok(rope)
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        step: &StepSpec,
    ) -> Result<CudaAdapters, DeviceError> {
        CudaAdapters::new(self, adapters, step)
    }

    fn load_adapter(
        &mut self,
        adapters: &mut CudaAdapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        self.put_adapter(adapters, number as usize, adapter)
    }

    fn unload_adapter(&mut self, adapters: &mut CudaAdapters, number: u32) -> Result<(), DeviceError> {
        self.remove_adapter(adapters, number as usize);
        Ok(())
    }
}

impl Cuda {
    /// Opens cuBLASLt, if it may be used, and tries its products. Without any, the backend is deterministic.
    fn try_cublas(&mut self, matrices: &[PlannedMatrix]) -> Result<(), DeviceError> {
        let Some(library) = self.cublas_library.take() else { return Ok(()) };
        let mut shapes = Vec::new();
        for matrix in
            matrices.iter().filter(|matrix| matrix.is_multiplied && cublas::is_aligned(matrix.columns))
        {
            let PlannedMatrix { columns, parts, .. } = matrix;
            shapes.extend(Layout::new(*columns, parts, self.has_fp8).joined.iter().filter_map(|part| {
                match part.format {
                    WeightFormat::Float(Dtype::F32) | WeightFormat::Grid(_) => None,
                    WeightFormat::Float(dtype) => Some((*columns, part.rows, dtype == Dtype::Bf16)),
                }
            }));
        }
        shapes.sort_unstable();
        shapes.dedup();
        let tried = match shapes[..] {
            [] => Ok(None),
            _ => CublasProducts::new(library, &self.context).and_then(|cublas| {
                Ok(cublas.try_shapes(&self.context, self.queue.shared_stream(), &shapes)?.then_some(cublas))
            }),
        };
        let reason = match tried {
            Ok(Some(cublas)) => {
                self.cublas = Some(cublas);
                return Ok(());
            }
            Ok(None) => "cuBLASLt multiplies none of the model's weights".to_owned(),
            Err(error) if error.is_sticky() => return Err(start(error)),
            Err(error) => error.to_string(),
        };
        log::warn!("deterministic=False changes nothing: {reason}");
        Ok(())
    }

    /// A matrix with any contents, and the places of the parts that are given.
    fn new_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
    ) -> Result<(CudaMatrix, Vec<Place>), DeviceError> {
        let layout = Layout::new(columns, parts, self.has_fp8);
        self.operands.add(layout.operand);
        let mut parts = Vec::new();
        for Place { rows, format, offset } in layout.joined {
            let quantised = match format {
                WeightFormat::Float(_) => None,
                WeightFormat::Grid(grid) => Some(self.quantised_gemm.get(&mut self.loader, &grid)?),
            };
            parts.push(Part { rows, offset, quantised });
        }
        let region = self.memory.allocate(layout.bytes, "weights")?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok((CudaMatrix { rows, columns, operand: layout.operand, parts, region }, layout.given))
    }

    fn upload_floats(
        &mut self,
        target: DevicePointer,
        (rows, columns): (usize, usize),
        source: &dyn RowSource,
        dtype: Dtype,
    ) -> Result<(), DeviceError> {
        let table = (rows, columns * dtype.bytes());
        self.uploader.upload(&self.queue, target, table, 1, &|rows, out| read_as(source, rows, dtype, out))
    }
}
