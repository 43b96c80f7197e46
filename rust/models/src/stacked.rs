//! The rows of weights: tensors of a checkpoint stacked by rows, and a part of another source.

use std::ops::Range;

use penstock_checkpoint::Tensor;
use penstock_device::{RowSource, WeightSource};
use penstock_types::{Dtype, GridRows, WeightFormat};

/// Tensors concatenated by rows.
pub(crate) struct Stacked<'a> {
    pub(crate) tensors: Vec<Tensor<'a>>,
    pub(crate) rows: Vec<usize>,
    pub(crate) columns: usize,
}

impl RowSource for Stacked<'_> {
    fn rows(&self) -> usize {
        self.rows.iter().sum()
    }

    fn columns(&self) -> usize {
        self.columns
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        let mut out = out;
        for (tensor, rows) in self.inside(rows) {
            let (part, rest) = out.split_at_mut(rows.len() * self.columns);
            tensor.read_rows(rows, part);
            out = rest;
        }
    }
}

impl WeightSource for Stacked<'_> {
    fn format(&self) -> WeightFormat {
        let mut formats = self.tensors.iter().map(Tensor::format);
        let first = formats.next().expect("a tensor");
        // Tensors in different formats are read as floats.
        if formats.all(|format| format == first) { first } else { WeightFormat::Float(Dtype::F32) }
    }

    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        let mut parts = self.inside(rows);
        if let Some((tensor, rows)) = parts.next() {
            tensor.read_grid(rows, out);
        }
        for (tensor, rows) in parts {
            let mut part = GridRows::default();
            tensor.read_grid(rows, &mut part);
            out.append(part);
        }
    }
}

impl<'a> Stacked<'a> {
    /// The tensors with some of these rows, and the row numbers in each tensor.
    fn inside(&self, rows: Range<usize>) -> impl Iterator<Item = (&Tensor<'a>, Range<usize>)> {
        let mut first = 0;
        self.tensors.iter().zip(&self.rows).filter_map(move |(tensor, count)| {
            let start = first;
            first += count;
            let inside = rows.start.max(start)..rows.end.min(start + count);
            (inside.start < inside.end).then(|| (tensor, inside.start - start..inside.end - start))
        })
    }
}

/// Some rows of another source.
pub(crate) struct Slice<'a> {
    pub(crate) source: &'a dyn WeightSource,
    pub(crate) rows: Range<usize>,
}

impl Slice<'_> {
    fn outer(&self, rows: Range<usize>) -> Range<usize> {
        self.rows.start + rows.start..self.rows.start + rows.end
    }
}

impl RowSource for Slice<'_> {
    fn rows(&self) -> usize {
        self.rows.len()
    }

    fn columns(&self) -> usize {
        self.source.columns()
    }

    fn read(&self, rows: Range<usize>, out: &mut [f32]) {
        self.source.read(self.outer(rows), out);
    }
}

impl WeightSource for Slice<'_> {
    fn format(&self) -> WeightFormat {
        self.source.format()
    }

    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        self.source.read_grid(self.outer(rows), out);
    }
}
