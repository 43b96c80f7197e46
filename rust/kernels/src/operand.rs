//! The rows that a matrix product reads: float32, or 8-bit integers with scales.
//!
//! ```text
//! row     [codes][wide codes][spans], padded to 64 bytes
//! codes   one i8 for each column, -127 to 127; columns padded to a multiple of 32 with zeros
//! wide    the same as i16, in the order 0 2 1 3 of each quad; only for instruction sets without a dot product of bytes
//! spans   a [`Span`] for each group of columns
//! ```

use penstock_types::{Activations, Grid, WeightFormat};

use crate::grid::{BLOCK, SPAN};

/// The rows that a product reads.
#[derive(Clone, Copy, Debug)]
pub enum Operand<'a> {
    /// `[tokens, columns]`.
    Floats(&'a [f32]),
    /// Rows of [`OperandLayout::row_bytes`], aligned to 4.
    Codes(&'a [u8]),
}

/// The scale of the codes of a group of columns, and their sums.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Span {
    /// `activation = scale * code`.
    pub(crate) scale: f32,
    /// `scale` times the sum of the codes.
    pub(crate) scaled_sum: f32,
    /// The sum of the codes.
    pub(crate) sum: i32,
    /// The sums of the codes of each half of a block.
    pub(crate) halves: [i32; 2],
}

/// The forms of a row of codes that the matrices of a product read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OperandLayout {
    pub(crate) columns: usize,
    /// Columns of a span: a power of two from 32 to 1024.
    pub(crate) span: usize,
    /// Whether all spans of a row have the same scale.
    pub(crate) per_row: bool,
    pub(crate) narrow: bool,
    pub(crate) wide: bool,
    /// The offsets of the parts of a row, and its bytes.
    pub(crate) wide_at: usize,
    pub(crate) spans_at: usize,
    pub(crate) row_bytes: usize,
}

impl OperandLayout {
    /// The most columns of a matrix that reads codes: a row is computed on the stack.
    pub const MOST_COLUMNS: usize = 1 << 16;

    /// At least the bytes of a row of any layout.
    pub const fn most_row_bytes(columns: usize) -> usize {
        let padded = columns.next_multiple_of(BLOCK);
        (3 * padded + padded / BLOCK * size_of::<Span>()).next_multiple_of(64)
    }

    /// The layout for a product with matrices of these formats and `columns` columns. `None` if they read floats.
    ///
    /// `wide(grid)` is whether the kernel of a format reads wide codes.
    pub(crate) fn new(
        formats: impl Iterator<Item = WeightFormat>,
        columns: usize,
        wide: impl Fn(&Grid) -> bool,
    ) -> Option<Self> {
        let mut layout = Self {
            columns,
            span: SPAN,
            per_row: true,
            narrow: false,
            wide: false,
            wide_at: 0,
            spans_at: 0,
            row_bytes: 0,
        };
        let mut is_some = false;
        for format in formats {
            let WeightFormat::Grid(grid @ Grid { activations: Activations::Int8, .. }) = format else {
                return None;
            };
            is_some = true;
            if let Some(group) = grid.group {
                layout.span = layout.span.min(usize::from(group).max(BLOCK));
                layout.per_row = false;
            }
            *if wide(&grid) { &mut layout.wide } else { &mut layout.narrow } = true;
        }
        let padded = columns.next_multiple_of(BLOCK);
        layout.wide_at = if layout.narrow { padded } else { 0 };
        layout.spans_at = layout.wide_at + if layout.wide { 2 * padded } else { 0 };
        layout.row_bytes = (layout.spans_at + layout.spans() * size_of::<Span>()).next_multiple_of(64);
        is_some.then_some(layout)
    }

    /// Spans of a row.
    pub(crate) fn spans(&self) -> usize {
        self.columns.div_ceil(self.span)
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }
}
