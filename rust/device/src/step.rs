//! What a step is made of besides weights: flat host arrays, and how large they can get.

use std::mem::size_of;

use penstock_types::{AttentionRow, HeadShape};

use crate::backend::DeviceError;

/// The largest step that will ever come: what memory is set aside for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpec {
    /// Rows (tokens).
    pub tokens: usize,
    /// Sequences.
    pub sequences: usize,
    /// Rows whose logits are there at once; any row's can be wanted.
    pub logits_rows: usize,
    /// Positions of the longest sequence.
    pub positions: usize,
    /// Tokens per block of the KV cache.
    pub block_size: usize,
    /// Query, key and value heads.
    pub heads: HeadShape,
    /// Ids that a token is chosen from.
    pub vocabulary: usize,
}

impl StepSpec {
    /// Most entries in the block tables of one step.
    fn blocks(&self) -> usize {
        self.sequences.saturating_mul(self.positions.div_ceil(self.block_size))
    }
}

/// Everything a step needs besides weights, as flat host arrays; one row per token.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// Input token of each row.
    pub tokens: Vec<u32>,
    /// Block of the KV cache each row's key and value go to.
    pub write_blocks: Vec<u32>,
    /// Offset inside that block.
    pub write_offsets: Vec<u32>,
    /// Cosines of each row's rotation angles, `head_dim / 2` a row, attention scaling included.
    pub cosines: Vec<f32>,
    /// Sines, likewise.
    pub sines: Vec<f32>,
    /// The sequences, in row order.
    pub sequences: Vec<AttentionRow>,
    /// Block tables of all sequences.
    pub blocks: Vec<u32>,
    /// Rows whose logits are wanted, ascending.
    pub output_rows: Vec<u32>,
}

impl StepInputs {
    /// Empty, with room for the largest step.
    pub fn with_room(spec: &StepSpec) -> Result<Self, DeviceError> {
        let &StepSpec { tokens, sequences, .. } = spec;
        let angles = tokens.saturating_mul(spec.heads.head_dim / 2);
        Ok(Self {
            tokens: room(tokens)?,
            write_blocks: room(tokens)?,
            write_offsets: room(tokens)?,
            cosines: room(angles)?,
            sines: room(angles)?,
            sequences: room(sequences)?,
            blocks: room(spec.blocks())?,
            output_rows: room(tokens)?,
        })
    }

    /// Bytes that [`with_room`](Self::with_room) takes.
    pub fn bytes(spec: &StepSpec) -> u64 {
        let row = 4 * size_of::<u32>() + spec.heads.head_dim / 2 * 2 * size_of::<f32>();
        let sequence = size_of::<AttentionRow>();
        let parts = [(spec.tokens, row), (spec.sequences, sequence), (spec.blocks(), size_of::<u32>())];
        parts
            .into_iter()
            .fold(0, |sum, (count, bytes)| sum.saturating_add((count as u64).saturating_mul(bytes as u64)))
    }

    /// Forgets the last step, keeps the memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.write_blocks.clear();
        self.write_offsets.clear();
        self.cosines.clear();
        self.sines.clear();
        self.sequences.clear();
        self.blocks.clear();
        self.output_rows.clear();
    }
}

/// An empty vector with room for `len` elements.
fn room<T>(len: usize) -> Result<Vec<T>, DeviceError> {
    let mut empty = Vec::new();
    empty.try_reserve_exact(len).map_err(|error| DeviceError::OutOfMemory {
        what: "an array of a step",
        bytes: (len as u64).saturating_mul(size_of::<T>() as u64),
        reason: error.to_string(),
    })?;
    Ok(empty)
}
