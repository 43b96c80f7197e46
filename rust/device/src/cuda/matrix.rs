//! Weight matrices on the device.
//!
//! A part of plain numbers is its rows, dense; one of quantised weights has the layout of [`quantised_matrix`]. All
//! parts read the same operand: a matrix of plain numbers reads that type. One with quantised weights reads 8-bit
//! integers or e4m3 if all its parts do, and otherwise bfloat16, in which its parts of plain numbers are stored, too.

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{cast_slice, cast_slice_mut};
use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};
use penstock_types::{Dtype, WeightFormat};

use super::gemm_quantised::QuantisedGemmKernels;
use super::operand::OperandForm;
use super::quantised_matrix;
use crate::arena::Region;
use crate::seam::RowSource;

/// Values that are read as float32 at once before they are converted.
const TILE: usize = 1 << 14;
/// Alignment of a part: that of 16-byte accesses and more.
const ALIGNMENT: usize = 256;
/// The layout of packed matrices in files.
pub(super) const PACKED_LAYOUT: &str = "cuda-rows-2";
/// Packed matrices of multiples of these rows can be one behind the other in a file.
pub(super) const PACKED_ROWS: usize = quantised_matrix::TILE_ROWS;

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
    /// The kernels of quantised weights; `None` for plain numbers.
    pub quantised: Option<Arc<QuantisedGemmKernels>>,
}

/// The rows, the format and the first byte of a part.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub rows: usize,
    pub format: WeightFormat,
    pub offset: usize,
}

/// The places of a matrix's parts.
pub(super) struct Layout {
    pub operand: OperandForm,
    /// Those that are given.
    pub given: Vec<Place>,
    /// The same, without a division between parts that can be multiplied as one.
    pub joined: Vec<Place>,
    pub bytes: usize,
}

impl Layout {
    pub fn new(columns: usize, parts: &[(usize, WeightFormat)], has_fp8: bool) -> Self {
        let operand = OperandForm::new(parts.iter().map(|(_, format)| stored(columns, *format)), has_fp8);
        let (mut given, mut joined) = (Vec::new(), Vec::<Place>::new());
        let mut end = 0_usize;
        for (rows, format) in parts {
            let format = stored(columns, *format);
            let (format, unit) = match format {
                WeightFormat::Float(_) => (WeightFormat::Float(operand.floats()), 1),
                WeightFormat::Grid(_) => {
                    (format.with_activations(operand.activations()), quantised_matrix::TILE_ROWS)
                }
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

/// The format on the device: bfloat16 for quantised weights that it does not support.
pub(super) fn stored(columns: usize, format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Grid(grid) if !quantised_matrix::supports(&grid, columns) => {
            WeightFormat::Float(Dtype::Bf16)
        }
        _ => format,
    }
}

/// Bytes of some rows.
pub(super) fn part_bytes(columns: usize, rows: usize, format: WeightFormat) -> usize {
    match format {
        WeightFormat::Float(dtype) => rows.saturating_mul(columns * dtype.bytes()),
        WeightFormat::Grid(grid) => quantised_matrix::bytes(rows, columns, &grid),
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

/// Rows of plain numbers, as a file has them.
pub(super) struct Stored<'a> {
    pub bytes: &'a [u8],
    pub columns: usize,
    pub dtype: Dtype,
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

/// Bytes of a packed part in a file.
pub(super) fn packed_bytes(columns: usize, rows: usize, format: WeightFormat) -> usize {
    part_bytes(columns, rows, stored(columns, format)).next_multiple_of(64)
}
