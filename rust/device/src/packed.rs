//! The rows of matrices that were packed for the CPU, for backends with another layout.

use std::ops::Range;

use penstock_kernels::{Matrix, MatrixLayout, is_supported};
use penstock_types::{GridRows, WeightFormat};

use crate::seam::{RowSource, WeightSource};

/// The layout of converted models.
pub const LAYOUT: &str = penstock_kernels::PACKED_LAYOUT;

/// A packed matrix as a source of rows.
#[derive(Clone, Copy, Debug)]
pub struct PackedRows<'a>(Matrix<'a>);

impl<'a> PackedRows<'a> {
    /// The parts of a matrix, by their rows and formats, from its bytes; `None` if there are more or less bytes, or if
    /// a format has no layout.
    pub fn parts(columns: usize, parts: &[(usize, WeightFormat)], bytes: &'a [u8]) -> Option<Vec<Self>> {
        let mut rest = bytes;
        let parts = parts.iter().map(|(rows, format)| {
            let has_layout = match format {
                WeightFormat::Float(_) => true,
                WeightFormat::Grid(grid) => is_supported(grid),
            };
            let layout = has_layout.then_some(MatrixLayout { rows: *rows, columns, format: *format })?;
            let (bytes, others) = rest.split_at_checked(layout.bytes())?;
            rest = others;
            Some(Self(Matrix { layout, bytes }))
        });
        let parts = parts.collect::<Option<_>>()?;
        rest.is_empty().then_some(parts)
    }
}

impl RowSource for PackedRows<'_> {
    fn rows(&self) -> usize {
        self.0.layout.rows
    }

    fn columns(&self) -> usize {
        self.0.layout.columns
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        for (row, out) in rows.zip(out.chunks_mut(self.columns().max(1))) {
            self.0.read_row(row, out);
        }
    }
}

impl WeightSource for PackedRows<'_> {
    fn format(&self) -> WeightFormat {
        self.0.layout.format
    }

    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        self.0.read_grid(rows, out);
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::{CodeBits, Dtype, Grid, Minimum, ScaleFormat};

    use super::*;

    #[test]
    fn parts_take_exactly_the_bytes() {
        let floats = WeightFormat::Float(Dtype::Bf16);
        let bytes = vec![0; 2 * 16 * 32 * 2];
        let parts = |bytes, rows| PackedRows::parts(32, &[(16, floats), (rows, floats)], bytes);
        assert_eq!(parts(&bytes, 3).map(|parts| parts.len()), Some(2));
        assert!(parts(&bytes[1..], 3).is_none());
        assert!(parts(&bytes, 17).is_none());
        assert!(PackedRows::parts(32, &[(16, floats)], &bytes).is_none());
    }

    #[test]
    fn format_without_a_layout_has_no_parts() {
        let grid = Grid {
            bits: CodeBits::Four,
            group: Some(48),
            scales: ScaleFormat::F16,
            minimum: Minimum::Centred,
            activations: penstock_types::Activations::Float,
        };
        assert!(PackedRows::parts(96, &[(16, WeightFormat::Grid(grid))], &[]).is_none());
    }
}
