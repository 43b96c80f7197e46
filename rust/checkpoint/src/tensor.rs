//! A view of one stored tensor that is read as rows of `f32`, or as rows of codes with scales.

use std::fmt;
use std::ops::Range;

use penstock_types::{Dtype, GridRows, WeightFormat};

use crate::mapped::MappedFile;
use crate::packed::{Location, PackedMatrix};
use crate::storage::Storage;
use crate::{blocks, dequantize};

/// The order of the stored rows relative to the Hugging Face layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// The same order.
    AsStored,
    /// The order of query and key rows in GGUF files of the llama architecture. ggml rotates neighbouring pairs, so
    /// within each head row `2i` is the Hugging Face row `i`, and row `2i + 1` is its rotation partner
    /// `i + head_dim / 2`.
    Interleaved { head_dim: usize },
}

impl RowOrder {
    /// The stored index of a row of the Hugging Face layout.
    fn stored_index(self, row: usize) -> usize {
        match self {
            RowOrder::AsStored => row,
            RowOrder::Interleaved { head_dim } => {
                let (within, half) = (row % head_dim, head_dim / 2);
                row - within + 2 * (within % half) + within / half
            }
        }
    }
}

/// Location and type of a tensor. The size of the location matches the shape and type.
#[derive(Clone, Debug)]
pub(crate) struct TensorEntry {
    pub(crate) at: Location,
    pub(crate) shape: Vec<usize>,
    pub(crate) stored: StoredType,
    pub(crate) order: RowOrder,
}

/// The type of a tensor on disk: a supported type, a matrix of several parts, or the name of an unsupported type.
#[derive(Clone, Debug)]
pub(crate) enum StoredType {
    Weights(Storage),
    Packed(Box<PackedMatrix>),
    Other(&'static str),
}

impl TensorEntry {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size on disk, in bytes.
    pub(crate) fn stored_bytes(&self) -> usize {
        match &self.stored {
            StoredType::Packed(matrix) => matrix.parts().map(|part| part.range.len()).sum(),
            _ => self.at.range.len(),
        }
    }
}

impl StoredType {
    /// The type of plain numbers; `None` for all others.
    pub(crate) fn plain(&self) -> Option<Dtype> {
        match self {
            StoredType::Weights(storage @ (Storage::F64 | Storage::F32 | Storage::F16 | Storage::Bf16)) => {
                Some(storage.dtype())
            }
            _ => None,
        }
    }

    /// Whether the numbers are codes with scales.
    pub(crate) fn is_quantised(&self) -> bool {
        match self {
            StoredType::Weights(storage) => storage.block_elements() > 1,
            StoredType::Packed(_) => true,
            StoredType::Other(_) => false,
        }
    }

    /// Whether weights of this type can be read.
    pub(crate) fn is_supported(&self) -> bool {
        !matches!(self, StoredType::Other(_))
    }
}

impl fmt::Display for StoredType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StoredType::Weights(storage) => storage.fmt(f),
            StoredType::Packed(matrix) => f.write_str(matrix.type_name()),
            StoredType::Other(name) => f.write_str(name),
        }
    }
}

/// A view of one tensor with its Hugging Face name and shape. Only [`read_rows`](Tensor::read_rows) and
/// [`read_grid`](Tensor::read_grid) read data.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    name: &'a str,
    entry: &'a TensorEntry,
    data: Data<'a>,
    files: &'a [MappedFile],
}

#[derive(Clone, Copy)]
enum Data<'a> {
    Stored(Storage),
    Packed(&'a PackedMatrix),
}

impl<'a> Tensor<'a> {
    /// The name of the type is the error if the type is not supported.
    pub(crate) fn new(
        name: &'a str,
        entry: &'a TensorEntry,
        files: &'a [MappedFile],
    ) -> Result<Self, &'static str> {
        let data = match &entry.stored {
            StoredType::Weights(storage) => Data::Stored(*storage),
            StoredType::Packed(matrix) => Data::Packed(matrix),
            StoredType::Other(dtype) => return Err(dtype),
        };
        Ok(Tensor { name, entry, data, files })
    }

    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The shape, slowest dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry.shape
    }

    /// The name of the type on disk.
    pub fn stored_type(&self) -> String {
        self.entry.stored.to_string()
    }

    /// Size on disk, in bytes.
    pub fn stored_bytes(&self) -> usize {
        self.entry.stored_bytes()
    }

    /// Number of elements per row: the last dimension.
    pub fn columns(&self) -> usize {
        self.entry.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: the product of all dimensions but the last; 1 for a vector.
    pub fn rows(&self) -> usize {
        self.entry.shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
    }

    /// The format that holds the values exactly: that of [`read_grid`](Tensor::read_grid), or plain numbers, rounded
    /// from [`read_rows`](Tensor::read_rows). The activations of a grid are 8-bit integers for GGUF types, and those
    /// that the settings of a quantised directory name: floating-point unless it quantises activations.
    pub fn format(&self) -> WeightFormat {
        match self.data {
            Data::Packed(matrix) => matrix.format(self.files),
            Data::Stored(storage) => match blocks::grid(storage) {
                Some(grid) => WeightFormat::Grid(grid),
                None => WeightFormat::Float(storage.dtype()),
            },
        }
    }

    /// Converts a range of rows to `f32` and writes them consecutively to `out`.
    ///
    /// # Panics
    /// If the range exceeds [`rows`](Tensor::rows), or the length of `out` does not match the range.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        self.check_rows(&rows);
        let columns = self.columns();
        assert_eq!(
            out.len(),
            rows.len() * columns,
            "the output length does not match the rows of {}",
            self.name
        );
        let storage = match self.data {
            Data::Packed(matrix) => return matrix.read_rows(self.files, rows, out),
            Data::Stored(storage) => storage,
        };
        match self.entry.order {
            RowOrder::AsStored => {
                let row_bytes = unit_bytes(storage, columns);
                let bytes = &self.entry.at.bytes(self.files)[rows.start * row_bytes..rows.end * row_bytes];
                dequantize::to_f32(storage, bytes, out);
            }
            RowOrder::Interleaved { .. } => {
                // The elements of a bias are permuted like the rows of a matrix.
                let (units, width) = match self.entry.shape.len() {
                    1 => (rows.start * columns..rows.end * columns, 1),
                    _ => (rows, columns),
                };
                for (unit, out) in units.zip(out.chunks_exact_mut(width)) {
                    dequantize::to_f32(storage, self.unit(storage, unit, width), out);
                }
            }
        }
    }

    /// Reads the codes, scales and minima of a range of rows, and resizes `out` for them. The values are exactly those
    /// of [`read_rows`](Tensor::read_rows).
    ///
    /// # Panics
    /// If the range exceeds [`rows`](Tensor::rows), or [`format`](Tensor::format) is not a grid.
    pub fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        self.check_rows(&rows);
        let storage = match self.data {
            Data::Packed(matrix) => return matrix.read_grid(self.files, rows, out),
            Data::Stored(storage) => storage,
        };
        let Some(grid) = blocks::grid(storage) else {
            panic!("{} of type {} has no grid", self.name, self.entry.stored)
        };
        let columns = self.columns();
        out.resize(&grid, rows.len(), columns);
        for (at, row) in rows.enumerate() {
            blocks::read_row(storage, self.unit(storage, row, columns), at, out);
        }
    }

    fn check_rows(&self, rows: &Range<usize>) {
        assert!(
            rows.start <= rows.end && rows.end <= self.rows(),
            "rows {rows:?} of {}, which has {} rows",
            self.name,
            self.rows()
        );
    }

    /// The bytes of a row of the Hugging Face layout, or of an element of a bias, of `width` elements.
    fn unit(&self, storage: Storage, unit: usize, width: usize) -> &'a [u8] {
        let bytes = unit_bytes(storage, width);
        &self.entry.at.bytes(self.files)[self.entry.order.stored_index(unit) * bytes..][..bytes]
    }

    /// Asks the operating system to read the tensor from disk soon, without waiting.
    pub fn prefetch(&self) {
        let prefetch = |at: &Location| self.files[at.file].prefetch(at.range.clone());
        match self.data {
            Data::Packed(matrix) => matrix.parts().for_each(prefetch),
            Data::Stored(_) => prefetch(&self.entry.at),
        }
    }

    /// Removes the tensor's pages from the memory of the process, after its last use. It can be read again.
    pub fn release(&self) {
        let release = |at: &Location| self.files[at.file].release(at.range.clone());
        match self.data {
            Data::Packed(matrix) => matrix.parts().for_each(release),
            Data::Stored(_) => release(&self.entry.at),
        }
    }
}

/// The bytes of `width` elements.
fn unit_bytes(storage: Storage, width: usize) -> usize {
    width / storage.block_elements() * storage.block_bytes()
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} {})", self.name, self.entry.shape, self.entry.stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_map_to_stored_pairs() {
        let order = RowOrder::Interleaved { head_dim: 6 };
        let stored: Vec<_> = (0..12).map(|row| order.stored_index(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
