//! The inputs of a step besides weights: flat host arrays, their largest size, and their validation.

use std::mem::size_of;
use std::ops::Range;

use penstock_types::{AttentionRow, HeadShape};

use crate::error::DeviceError;

/// The largest step, for which memory is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSpec {
    /// Rows (tokens).
    pub tokens: usize,
    /// Sequences, and slots.
    pub sequences: usize,
    /// Rows of logits that are computed at once.
    pub logits_rows: usize,
    /// Positions of the longest sequence.
    pub positions: usize,
    /// Tokens per block of the KV cache.
    pub block_size: usize,
    /// Query, key and value heads.
    pub heads: HeadShape,
    /// Ids from which a token is sampled.
    pub vocabulary: usize,
}

impl StepSpec {
    /// Most entries in the block tables of one step.
    pub(crate) fn most_blocks(&self) -> usize {
        self.sequences.saturating_mul(self.positions.div_ceil(self.block_size))
    }
}

/// The adapters that a device holds at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterSpec {
    /// Adapters.
    pub adapters: usize,
    /// Bytes of all of them together.
    pub bytes: u64,
    /// The highest rank of an update.
    pub rank: usize,
    /// Matrices of the model that can have updates.
    pub matrices: usize,
}

/// Adjacent rows that have the same adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdapterRows {
    /// The rows of the step.
    pub rows: Range<usize>,
    /// The number under which the adapter was loaded.
    pub adapter: u32,
}

/// The rows of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepRows {
    /// All rows of the step.
    All,
    /// The output rows.
    Outputs,
}

/// In [`StepInputs::tokens`], `FOLLOWS | slot` stands for the token that was sampled last for the slot.
pub const FOLLOWS: u32 = 1 << 31;

/// In [`StepInputs::positions`], `EXTRA | index` stands for a rotation that is not in the rope table.
pub const EXTRA: u32 = 1 << 31;

/// The inputs of a step besides weights, as flat host arrays; one row per token.
#[derive(Clone, Debug, Default)]
pub struct StepInputs {
    /// Input token of each row, or [`FOLLOWS`] and a slot.
    pub tokens: Vec<u32>,
    /// Position of each row, whose rotation is in the rope table, or [`EXTRA`] and an index into `extra_rotations`.
    pub positions: Vec<u32>,
    /// Block of the KV cache to which each row's key and value are written.
    pub write_blocks: Vec<u32>,
    /// Offset inside that block.
    pub write_offsets: Vec<u32>,
    /// Rotations of rows whose frequencies depend on more than the position, as rows of a rope table. Not reserved:
    /// most models have none.
    pub extra_rotations: Vec<f32>,
    /// Factor on the query of each row, or empty. Not reserved: most models have none.
    pub query_scales: Vec<f32>,
    /// The sequences, in row order.
    pub sequences: Vec<AttentionRow>,
    /// Block tables of all sequences.
    pub blocks: Vec<u32>,
    /// Rows whose logits are computed, ascending.
    pub output_rows: Vec<u32>,
    /// The rows with adapters, in row order. Not reserved: most steps have none.
    pub adapters: Vec<AdapterRows>,
}

/// The sizes that the indices of a step are checked against.
#[derive(Clone, Copy, Debug)]
pub struct StepLimits {
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Slots.
    pub slots: usize,
    /// Positions of the rope table.
    pub rope_positions: usize,
    /// Values of a rotation.
    pub head_dim: usize,
    /// Blocks of the KV cache.
    pub blocks: usize,
    /// Tokens per block.
    pub block_size: usize,
}

impl StepInputs {
    /// Empty arrays with room for the largest step.
    pub fn with_room(spec: &StepSpec) -> Result<Self, DeviceError> {
        let &StepSpec { tokens, sequences, .. } = spec;
        Ok(Self {
            tokens: room(tokens)?,
            positions: room(tokens)?,
            write_blocks: room(tokens)?,
            write_offsets: room(tokens)?,
            extra_rotations: Vec::new(),
            query_scales: Vec::new(),
            sequences: room(sequences)?,
            blocks: room(spec.most_blocks())?,
            output_rows: room(tokens)?,
            adapters: Vec::new(),
        })
    }

    /// Bytes that [`with_room`](Self::with_room) takes.
    pub fn bytes(spec: &StepSpec) -> u64 {
        let (row, sequence) = (5 * size_of::<u32>(), size_of::<AttentionRow>());
        let parts = [(spec.tokens, row), (spec.sequences, sequence), (spec.most_blocks(), size_of::<u32>())];
        parts
            .into_iter()
            .fold(0, |sum, (count, bytes)| sum.saturating_add((count as u64).saturating_mul(bytes as u64)))
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        let Self {
            tokens,
            positions,
            write_blocks,
            write_offsets,
            extra_rotations,
            query_scales,
            sequences,
            blocks,
            output_rows,
            adapters,
        } = self;
        [tokens, positions, write_blocks, write_offsets, blocks, output_rows]
            .into_iter()
            .for_each(Vec::clear);
        extra_rotations.clear();
        query_scales.clear();
        sequences.clear();
        adapters.clear();
    }

    /// The rows of an operation that have adapters, in order.
    pub fn adapter_rows(&self, rows: StepRows) -> impl Iterator<Item = AdapterRows> {
        self.adapters.iter().filter_map(move |AdapterRows { rows: all, adapter }| {
            let first = |row: usize| self.output_rows.partition_point(|output| (*output as usize) < row);
            let rows = match rows {
                StepRows::All => all.clone(),
                StepRows::Outputs => first(all.start)..first(all.end),
            };
            (!rows.is_empty()).then_some(AdapterRows { rows, adapter: *adapter })
        })
    }

    /// Checks that the adapters of the rows are loaded.
    pub fn check_adapters(&self, is_loaded: impl Fn(usize) -> bool) -> Result<(), DeviceError> {
        match self.adapters.iter().find(|rows| !is_loaded(rows.adapter as usize)) {
            Some(rows) => Err(DeviceError::InvalidStep(format!("adapter {} is not loaded", rows.adapter))),
            None => Ok(()),
        }
    }

    /// Checks every index. For [`Compute::upload`](super::Compute::upload).
    pub fn validate(&self, limits: &StepLimits) -> Result<(), DeviceError> {
        let rows = self.tokens.len();
        let check = |is_valid: bool, what: &str| match is_valid {
            true => Ok(()),
            false => Err(DeviceError::InvalidStep(what.to_owned())),
        };
        let all = |values: &[u32], limit: usize| values.iter().all(|value| (*value as usize) < limit);
        let token_is_valid = |token: &u32| match token & FOLLOWS {
            0 => (*token as usize) < limits.vocabulary,
            _ => ((token ^ FOLLOWS) as usize) < limits.slots,
        };
        let extra = self.extra_rotations.len() / limits.head_dim.max(1);
        let position_is_valid = |position: &u32| match position & EXTRA {
            0 => (*position as usize) < limits.rope_positions,
            _ => ((position ^ EXTRA) as usize) < extra,
        };
        check(self.tokens.iter().all(token_is_valid), "a token or a slot is out of range")?;
        check(self.positions.len() == rows, "each row has one position")?;
        check(self.positions.iter().all(position_is_valid), "a position is out of range")?;
        let has_scales = self.query_scales.is_empty() || self.query_scales.len() == rows;
        check(has_scales, "each row has one factor, or none has")?;
        check(
            self.write_blocks.len() == rows && self.write_offsets.len() == rows,
            "each row is written once",
        )?;
        check(all(&self.write_blocks, limits.blocks), "a written block is out of range")?;
        check(all(&self.write_offsets, limits.block_size), "an offset in a block is out of range")?;
        check(all(&self.blocks, limits.blocks), "a block is out of range")?;
        check(all(&self.output_rows, rows), "an output row is out of range")?;
        let mut next = 0;
        for AttentionRow { first_query, num_queries, start, blocks } in &self.sequences {
            check(*first_query == next, "the rows of the sequences are not adjacent")?;
            next += num_queries;
            let has_blocks = start
                .checked_add(*num_queries)
                .is_some_and(|end| end.div_ceil(limits.block_size) <= blocks.len());
            check(has_blocks && blocks.end <= self.blocks.len(), "a block table is too short")?;
        }
        check(next == rows, "a row belongs to no sequence")?;
        let mut end = 0;
        for AdapterRows { rows, .. } in &self.adapters {
            check(end <= rows.start && rows.start < rows.end, "the rows of adapters are not in order")?;
            end = rows.end;
        }
        check(end <= rows, "a row of an adapter is out of range")
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
