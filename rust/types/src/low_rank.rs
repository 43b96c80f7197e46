//! Low-rank updates of weight matrices: `weight + scale * B A`.

use std::collections::TryReserveError;

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
    /// The first byte of A and B in the bytes of the adapter; a multiple of 64.
    pub offset: usize,
}

/// Alignment of an adapter's bytes: a cache line.
const ALIGNMENT: usize = 64;

/// All updates of an adapter, with A and B as a backend stores them. The CPU computes with these bytes.
#[derive(Debug)]
pub struct PackedAdapter {
    /// In the order of matrices and rows.
    pub updates: Vec<LowRankUpdate>,
    /// The bytes after `start`, which is at most `ALIGNMENT`. The vector does not grow, so they stay where they are.
    memory: Vec<u8>,
    start: usize,
}

impl PackedAdapter {
    /// An adapter with `size` zeros for A and B of all updates.
    pub fn new(updates: Vec<LowRankUpdate>, size: usize) -> Result<Self, TryReserveError> {
        let mut memory: Vec<u8> = Vec::new();
        memory.try_reserve_exact(size.saturating_add(ALIGNMENT))?;
        let start = memory.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        memory.resize(start + size, 0);
        Ok(Self { updates, memory, start })
    }

    /// A and B of all updates.
    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..]
    }

    /// A and B of all updates.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..]
    }
}
