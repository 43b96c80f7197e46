//! A view of one stored tensor, read as rows of `f32`.

use std::fmt;
use std::ops::Range;

use crate::dequantize;
use crate::mapped::MappedFile;
use crate::storage::Storage;

/// How the rows of a stored tensor relate to the Hugging Face layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOrder {
    /// They are the same.
    AsStored,
    /// Query and key rows of llama-architecture GGUF files: ggml rotates neighbouring pairs, so within each head row
    /// `2i` is the Hugging Face row `i`, and row `2i + 1` is the row `i + head_dim / 2` it is rotated with.
    Interleaved { head_dim: usize },
}

impl RowOrder {
    /// Where the row that Hugging Face calls `row` is stored.
    fn stored(self, row: usize) -> usize {
        match self {
            RowOrder::AsStored => row,
            RowOrder::Interleaved { head_dim } => {
                let (within, half) = (row % head_dim, head_dim / 2);
                row - within + 2 * (within % half) + within / half
            }
        }
    }
}

/// Where a tensor lies. The range is inside its file and exactly as long as the shape and storage say.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) file: usize,
    pub(crate) range: Range<usize>,
    pub(crate) shape: Vec<usize>,
    pub(crate) stored: Stored,
    pub(crate) order: RowOrder,
}

/// The type of a tensor on disk: one that can be read as weights, or the name of one that cannot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stored {
    Weights(Storage),
    Other(&'static str),
}

/// One tensor of a checkpoint, under its Hugging Face name and shape. A view: nothing is read before
/// [`read_rows`](Tensor::read_rows).
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    name: &'a str,
    entry: &'a Entry,
    storage: Storage,
    file: &'a MappedFile,
}

impl<'a> Tensor<'a> {
    pub(crate) fn new(name: &'a str, entry: &'a Entry, storage: Storage, file: &'a MappedFile) -> Self {
        Tensor { name, entry, storage, file }
    }

    /// The Hugging Face name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The shape, slowest dimension first.
    pub fn shape(&self) -> &'a [usize] {
        &self.entry.shape
    }

    /// How the elements are stored.
    pub fn storage(&self) -> Storage {
        self.storage
    }

    /// Bytes on disk.
    pub fn stored_bytes(&self) -> usize {
        self.entry.range.len()
    }

    /// Elements of a row: the last dimension.
    pub fn columns(&self) -> usize {
        self.entry.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: all dimensions but the last together, so 1 for a vector.
    pub fn rows(&self) -> usize {
        self.entry.shape.split_last().map_or(1, |(_, leading)| leading.iter().product())
    }

    /// Converts a range of rows to `f32`, one after the other into `out`.
    ///
    /// # Panics
    /// If the range reaches beyond [`rows`](Tensor::rows), or `out` does not hold exactly those rows.
    pub fn read_rows(&self, rows: Range<usize>, out: &mut [f32]) {
        let columns = self.columns();
        assert!(
            rows.start <= rows.end && rows.end <= self.rows(),
            "rows {rows:?} of {}, which has {}",
            self.name,
            self.rows()
        );
        assert_eq!(out.len(), rows.len() * columns, "the output does not fit the rows of {}", self.name);
        let bytes = &self.file.bytes()[self.entry.range.clone()];
        match self.entry.order {
            RowOrder::AsStored => {
                let row_bytes = columns / self.storage.block_elements() * self.storage.block_bytes();
                let bytes = &bytes[rows.start * row_bytes..rows.end * row_bytes];
                dequantize::to_f32(self.storage, bytes, out);
            }
            order @ RowOrder::Interleaved { .. } => {
                // The elements of a bias are permuted as the rows of a matrix are.
                let (units, width) = match self.entry.shape.len() {
                    1 => (rows.start * columns..rows.end * columns, 1),
                    _ => (rows, columns),
                };
                let unit_bytes = width / self.storage.block_elements() * self.storage.block_bytes();
                for (unit, out) in units.zip(out.chunks_exact_mut(width)) {
                    let start = order.stored(unit) * unit_bytes;
                    dequantize::to_f32(self.storage, &bytes[start..start + unit_bytes], out);
                }
            }
        }
    }

    /// Asks the operating system to read the tensor from disk soon; does not wait.
    pub fn prefetch(&self) {
        self.file.prefetch(self.entry.range.clone());
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({} {:?} {})", self.name, self.entry.shape, self.storage)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_come_back_in_halves() {
        let order = RowOrder::Interleaved { head_dim: 6 };
        let stored: Vec<_> = (0..12).map(|row| order.stored(row)).collect();
        assert_eq!(stored, [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
    }
}
