//! Weight matrices on the device.
//!
//! A part of plain numbers is its rows, dense; one of integer codes has the layout of [`codes`]. All parts read the
//! same operand: a matrix of plain numbers reads that type. One with codes reads 8-bit integers or e4m3 if all its
//! parts do, and otherwise bfloat16, in which its parts of plain numbers are stored, too.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use penstock_cuda::DevicePointer;
use penstock_types::{Dtype, WeightFormat};

use super::cache::{CacheShape, LoadedAttention};
use super::cublas::CublasProducts;
use super::kernels::Source;
use super::operand::{OperandForm, Operands};
use super::product::CodesKernels;
use super::{Cuda, codes, cublas, start};
use crate::arena::Region;
use crate::backend::{CacheSpec, MatrixPart, PlannedMatrix, RowSource};
use crate::error::DeviceError;

/// Values that are read as float32 at once before they are converted.
const TILE: usize = 1 << 14;
/// Alignment of a part: that of 16-byte accesses and more.
const ALIGNMENT: usize = 256;
/// Packed matrices of multiples of these rows can be one behind the other in a file.
pub(super) const PACKED_ROWS: usize = codes::TILE_ROWS;

/// A weight matrix.
pub struct CudaMatrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) operand: OperandForm,
    pub(super) parts: Vec<Part>,
    pub(super) region: Region,
}

/// Consecutive rows of a matrix that have the same format, which one launch multiplies.
pub(super) struct Part {
    pub rows: usize,
    /// The first byte in the region of the matrix.
    pub offset: usize,
    /// The kernels and the grid of codes; `None` for plain numbers.
    pub codes: Option<Arc<CodesKernels>>,
}

/// The rows, the format and the first byte of a part.
#[derive(Clone, Copy)]
struct Place {
    rows: usize,
    format: WeightFormat,
    offset: usize,
}

/// The places of a matrix's parts.
struct Layout {
    operand: OperandForm,
    /// Those that are given.
    given: Vec<Place>,
    /// The same, without a division between parts that can be multiplied as one.
    joined: Vec<Place>,
    bytes: usize,
}

impl Layout {
    fn new(columns: usize, parts: &[(usize, WeightFormat)], has_fp8: bool) -> Self {
        let operand = OperandForm::new(parts.iter().map(|(_, format)| stored(columns, *format)), has_fp8);
        let (mut given, mut joined) = (Vec::new(), Vec::<Place>::new());
        let mut end = 0_usize;
        for (rows, format) in parts {
            let format = stored(columns, *format);
            let (format, unit) = match format {
                WeightFormat::Float(_) => (WeightFormat::Float(operand.floats()), 1),
                WeightFormat::Grid(_) => (format.with_activations(operand.activations()), codes::TILE_ROWS),
            };
            let before = joined.last_mut().filter(|before| before.format == format);
            let offset = match before.filter(|before| before.rows.is_multiple_of(unit)) {
                Some(before) => {
                    before.rows += rows;
                    end
                }
                None => {
                    let offset = end.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
                    joined.push(Place { rows: *rows, format, offset });
                    offset
                }
            };
            given.push(Place { rows: *rows, format, offset });
            end = offset.saturating_add(part_bytes(columns, *rows, format));
        }
        Self { operand, given, joined, bytes: end }
    }
}

/// The format on the device: bfloat16 for codes that it does not support.
fn stored(columns: usize, format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Grid(grid) if !codes::supports(&grid, columns) => WeightFormat::Float(Dtype::Bf16),
        _ => format,
    }
}

/// Bytes of some rows.
fn part_bytes(columns: usize, rows: usize, format: WeightFormat) -> usize {
    match format {
        WeightFormat::Float(dtype) => rows.saturating_mul(columns * dtype.bytes()),
        WeightFormat::Grid(grid) => codes::bytes(rows, columns, &grid),
    }
}

/// Bytes of a matrix; they do not depend on its operand.
pub(super) fn matrix_bytes(columns: usize, parts: &[(usize, WeightFormat)]) -> usize {
    Layout::new(columns, parts, false).bytes
}

/// Writes rows in a type of plain numbers.
pub(super) fn read_as(source: &dyn RowSource, rows: Range<usize>, dtype: Dtype, out: &mut [u8]) {
    let columns = source.columns();
    let row_bytes = columns * dtype.bytes();
    let step = (TILE / columns.max(1)).max(1);
    let mut floats = vec![0.0; step.min(rows.len()) * columns];
    for first in rows.clone().step_by(step) {
        let tile = first..rows.end.min(first + step);
        let floats = &mut floats[..tile.len() * columns];
        source.read(tile.clone(), floats);
        let out = &mut out[(tile.start - rows.start) * row_bytes..][..tile.len() * row_bytes];
        write_as(floats, dtype, out);
    }
}

/// Writes numbers in a type, rounded to the nearest.
pub(super) fn write_as(floats: &[f32], dtype: Dtype, out: &mut [u8]) {
    match dtype {
        Dtype::F32 => cast_slice_mut(out).copy_from_slice(floats),
        Dtype::F16 => {
            cast_slice_mut::<u8, u16>(out).reinterpret_cast_mut::<f16>().convert_from_f32_slice(floats)
        }
        Dtype::Bf16 => {
            cast_slice_mut::<u8, u16>(out).reinterpret_cast_mut::<bf16>().convert_from_f32_slice(floats)
        }
    }
}

/// Rows of plain numbers in memory.
struct Stored<'a> {
    bytes: &'a [u8],
    columns: usize,
    dtype: Dtype,
}

impl RowSource for Stored<'_> {
    fn rows(&self) -> usize {
        self.bytes.len() / (self.columns * self.dtype.bytes()).max(1)
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        let row_bytes = self.columns * self.dtype.bytes();
        let bytes = &self.bytes[rows.start * row_bytes..rows.end * row_bytes];
        match self.dtype {
            Dtype::F32 => out.copy_from_slice(cast_slice(bytes)),
            Dtype::F16 => cast_slice::<u8, u16>(bytes).reinterpret_cast::<f16>().convert_to_f32_slice(out),
            Dtype::Bf16 => cast_slice::<u8, u16>(bytes).reinterpret_cast::<bf16>().convert_to_f32_slice(out),
        }
    }
}

impl Cuda {
    /// Loads the kernels of matrices of these columns and parts, of a cache, and of adapters.
    pub(super) fn load_kernels(
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
            sources.extend(grids.flat_map(|grid| CodesKernels::sources(&self.loader, &grid)));
        }
        sources.sort_unstable();
        sources.dedup();
        self.loader.load_all(&sources)?;
        self.try_cublas(matrices)
    }

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
            let codes = match format {
                WeightFormat::Float(_) => None,
                WeightFormat::Grid(grid) => Some(self.codes.get(&mut self.loader, &grid)?),
            };
            parts.push(Part { rows, offset, codes });
        }
        let region = self.memory.allocate(layout.bytes, "weights")?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok((CudaMatrix { rows, columns, operand: layout.operand, parts, region }, layout.given))
    }

    /// A matrix of these rows.
    pub(super) fn read_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CudaMatrix, DeviceError> {
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
                    let table = (rows.div_ceil(codes::TILE_ROWS), codes::bytes(1, columns, &grid));
                    self.uploader.upload(&self.queue, target, table, 1, &|tiles, out| {
                        let end = rows.min(tiles.end * codes::TILE_ROWS);
                        codes::read(part.source, &grid, tiles.start * codes::TILE_ROWS..end, out);
                    })?;
                }
            }
        }
        Ok(matrix)
    }

    /// A matrix of the bytes of its packed parts.
    pub(super) fn copied_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: &[u8],
    ) -> Result<CudaMatrix, DeviceError> {
        let (matrix, places) = self.new_matrix(columns, parts)?;
        let mut rest = bytes;
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

/// Bytes of a packed part in a file.
pub(super) fn packed_bytes(columns: usize, rows: usize, format: WeightFormat) -> usize {
    part_bytes(columns, rows, stored(columns, format)).next_multiple_of(64)
}

/// Packs a part of a matrix for a file.
pub(super) fn pack(part: MatrixPart<'_>, out: &mut [u8]) {
    let (rows, columns) = (part.source.rows(), part.source.columns());
    let format = stored(columns, part.format);
    let out = &mut out[..part_bytes(columns, rows, format)];
    match format {
        WeightFormat::Float(dtype) => read_as(part.source, 0..rows, dtype, out),
        WeightFormat::Grid(grid) => codes::read(part.source, &grid, 0..rows, out),
    }
}
