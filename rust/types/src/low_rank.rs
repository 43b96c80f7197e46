//! Low-rank updates of weight matrices: `weight + scale * B A`.

use crate::enums::Dtype;

/// The shape of an update: A is `[rank, columns]`, B `[rows, rank]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LowRankShape {
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub columns: usize,
    /// At least 1.
    pub rank: usize,
    /// The type of A and B in memory.
    pub dtype: Dtype,
}

/// The update of some rows of one matrix of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LowRankUpdate {
    /// The matrix, numbered by the model.
    pub matrix: u32,
    /// The first of its rows that are updated.
    pub first_row: usize,
    /// The shape of A and B.
    pub shape: LowRankShape,
    /// The factor of `B A`.
    pub scale: f32,
    /// The first byte of A and B where all updates are stored; a multiple of 64.
    pub offset: usize,
}

/// All updates of an adapter, with A and B as a backend stores them.
#[derive(Debug, Default)]
pub struct PackedAdapter {
    /// In the order of matrices and rows.
    pub updates: Vec<LowRankUpdate>,
    /// A and B of all updates.
    pub bytes: Vec<u8>,
}
