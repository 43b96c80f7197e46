//! Weight matrices on the device.
//!
//! A part of plain numbers is its rows, dense. All parts read the same operand: a matrix of plain numbers reads that type, and
//! one with integer codes bfloat16, in which its other parts are stored, too.

use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use penstock_types::{Dtype, WeightFormat};

use super::Cuda;
use crate::arena::Region;
use crate::backend::{DeviceError, MatrixPart, RowSource};

/// Values that are read as float32 at once before they are converted.
const TILE: usize = 1 << 14;
/// Alignment of a part: that of 16-byte accesses and more.
const ALIGNMENT: usize = 256;

/// A weight matrix.
pub struct CudaMatrix {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// The type of the operand.
    pub(super) operand: Dtype,
    pub(super) parts: Vec<Part>,
    pub(super) region: Region,
}

/// Rows of a matrix that have the same format.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub rows: usize,
    pub format: WeightFormat,
    /// The first byte in the region of the matrix.
    pub offset: usize,
}

/// The type of the operand of a matrix.
fn operand(formats: impl Iterator<Item = WeightFormat>) -> Dtype {
    let mut dtypes = formats.map(|format| match format {
        WeightFormat::Float(dtype) => dtype,
        WeightFormat::Grid(_) => Dtype::Bf16,
    });
    let first = dtypes.next().unwrap_or(Dtype::Bf16);
    if dtypes.all(|dtype| dtype == first) { first } else { Dtype::Bf16 }
}

/// Bytes of a row of a part.
fn row_bytes(columns: usize, format: WeightFormat) -> usize {
    format.bytes(1, columns)
}

/// The parts of a matrix in its region, the type of its operand, and its size.
fn layout(columns: usize, parts: &[(usize, WeightFormat)]) -> (Vec<Part>, Dtype, usize) {
    let operand = operand(parts.iter().map(|(_, format)| *format));
    let mut offset = 0_usize;
    let parts = parts
        .iter()
        .map(|(rows, format)| {
            let format = match format {
                WeightFormat::Float(_) => WeightFormat::Float(operand),
                grid @ WeightFormat::Grid(_) => *grid,
            };
            let part = Part { rows: *rows, format, offset };
            let bytes = rows.saturating_mul(row_bytes(columns, format));
            offset = offset.saturating_add(bytes).saturating_add(ALIGNMENT - 1) & !(ALIGNMENT - 1);
            part
        })
        .collect();
    (parts, operand, offset)
}

/// Bytes of a matrix.
pub(super) fn matrix_bytes(columns: usize, parts: &[(usize, WeightFormat)]) -> usize {
    layout(columns, parts).2
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
fn write_as(floats: &[f32], dtype: Dtype, out: &mut [u8]) {
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
    /// A matrix with any contents.
    fn new_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
    ) -> Result<CudaMatrix, DeviceError> {
        let (parts, operand, bytes) = layout(columns, parts);
        let region = self.memory.allocate(bytes, "weights")?;
        let rows = parts.iter().map(|part| part.rows).sum();
        Ok(CudaMatrix { rows, columns, operand, parts, region })
    }

    /// A matrix of these rows.
    pub(super) fn read_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CudaMatrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.source.columns());
        let sizes: Vec<_> = parts.iter().map(|part| (part.source.rows(), part.format)).collect();
        let matrix = self.new_matrix(columns, &sizes)?;
        for (part, stored) in parts.iter().zip(&matrix.parts) {
            self.upload_part(&matrix, stored, part.source)?;
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
        let matrix = self.new_matrix(columns, parts)?;
        let mut rest = bytes;
        for ((rows, format), stored) in parts.iter().zip(&matrix.parts) {
            let (bytes, others) = rest.split_at(packed_bytes(columns, *rows, *format));
            rest = others;
            let WeightFormat::Float(dtype) = *format else { unreachable!("no codes yet") };
            let bytes = &bytes[..rows * row_bytes(columns, *format)];
            self.upload_part(&matrix, stored, &Stored { bytes, columns, dtype })?;
        }
        Ok(matrix)
    }

    fn upload_part(
        &mut self,
        matrix: &CudaMatrix,
        part: &Part,
        source: &dyn RowSource,
    ) -> Result<(), DeviceError> {
        let target = self.memory.pointer(&matrix.region).offset(part.offset);
        let table = (part.rows, row_bytes(matrix.columns, part.format));
        let WeightFormat::Float(dtype) = part.format else { unreachable!("no codes yet") };
        self.uploader.upload(&self.queue, target, table, 1, &|rows, out| read_as(source, rows, dtype, out))
    }
}

/// Bytes of a packed part in a file.
pub(super) fn packed_bytes(columns: usize, rows: usize, format: WeightFormat) -> usize {
    rows.saturating_mul(row_bytes(columns, format)).next_multiple_of(64)
}

/// Packs a part of a matrix for a file.
pub(super) fn pack(part: MatrixPart<'_>, out: &mut [u8]) {
    let WeightFormat::Float(dtype) = part.format else { unreachable!("no codes yet") };
    let rows = part.source.rows();
    let bytes = rows * row_bytes(part.source.columns(), part.format);
    read_as(part.source, 0..rows, dtype, &mut out[..bytes]);
}
