//! Rows of f32 inside a wider buffer: views of the q, k and v parts of one fused product, without copies.

use std::ops::Range;

use crate::pool::SharedMut;

/// Equally spaced rows, read-only.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    width: usize,
    stride: usize,
}

/// Equally spaced rows, writable.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    width: usize,
    stride: usize,
}

/// The part of `length` floats that holds columns `columns` of rows `stride` apart.
fn clip(length: usize, stride: usize, columns: &Range<usize>) -> Range<usize> {
    assert!(columns.start < columns.end && columns.end <= stride, "columns {columns:?} of rows of {stride}");
    assert_eq!(length % stride, 0, "{length} floats are not a whole number of rows of {stride}");
    if length == 0 { 0..0 } else { columns.start..length - stride + columns.end }
}

fn count(length: usize, stride: usize) -> usize {
    length.div_ceil(stride)
}

impl<'a> Rows<'a> {
    /// Contiguous rows of `width` floats.
    pub fn dense(data: &'a [f32], width: usize) -> Self {
        Self::columns(data, width, 0..width)
    }

    /// Columns `columns` of rows of `stride` floats.
    pub fn columns(data: &'a [f32], stride: usize, columns: Range<usize>) -> Self {
        Self { data: &data[clip(data.len(), stride, &columns)], width: columns.len(), stride }
    }

    pub fn count(&self) -> usize {
        count(self.data.len(), self.stride)
    }

    /// Floats in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Floats from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn row(&self, index: usize) -> &'a [f32] {
        &self.data[index * self.stride..][..self.width]
    }

    pub(crate) fn as_ptr(&self) -> *const f32 {
        self.data.as_ptr()
    }
}

impl<'a> RowsMut<'a> {
    /// Contiguous rows of `width` floats.
    pub fn dense(data: &'a mut [f32], width: usize) -> Self {
        Self::columns(data, width, 0..width)
    }

    /// Columns `columns` of rows of `stride` floats.
    pub fn columns(data: &'a mut [f32], stride: usize, columns: Range<usize>) -> Self {
        let part = clip(data.len(), stride, &columns);
        Self { data: &mut data[part], width: columns.len(), stride }
    }

    pub fn count(&self) -> usize {
        count(self.data.len(), self.stride)
    }

    /// Floats in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Floats from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }

    pub fn row_mut(&mut self, index: usize) -> &mut [f32] {
        &mut self.data[index * self.stride..][..self.width]
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut f32 {
        self.data.as_mut_ptr()
    }

    /// A view for workers that write different rows at the same time.
    pub(crate) fn shared(&mut self) -> SharedMut<'_, f32> {
        SharedMut::new(self.data)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_of_a_fused_buffer_are_rows() {
        let data: Vec<f32> = (0..15).map(|i| i as f32).collect();
        let rows = Rows::columns(&data, 5, 1..3);
        assert_eq!((rows.count(), rows.width(), rows.stride()), (3, 2, 5));
        assert_eq!([rows.row(0), rows.row(1), rows.row(2)], [[1.0, 2.0], [6.0, 7.0], [11.0, 12.0]]);
    }

    #[test]
    fn empty_buffer_has_no_rows() {
        assert_eq!(Rows::dense(&[], 4).count(), 0);
        assert_eq!(RowsMut::columns(&mut [], 4, 1..2).count(), 0);
    }

    #[test]
    #[should_panic(expected = "not a whole number of rows")]
    fn incomplete_last_row_panics() {
        Rows::dense(&[0.0; 7], 4);
    }
}
