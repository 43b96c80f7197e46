//! A step as data: the engine fills a [`StepPlan`], and the executor a [`StepOutput`]. Integers and shared requests and
//! adapters; no model, no device, no tensor.
//!
//! Up to [`DEPTH`] steps are in flight. A plan may be submitted before the tokens sampled by the previous step are
//! known: such a row sets [`ScheduledRow::follows_sample`], and its input is the token that was sampled last for its
//! slot.
//!
//! The executor keeps, for each slot, the request and the tokens generated so far, on which sampling depends. A
//! [`NewSequence`] resets a slot.
//!
//! A row may end with draft tokens. Sampling verifies them position by position: a draft is accepted if it equals the
//! sampled token. The output of the row is the accepted drafts and the first sampled token that differs or follows
//! them.

use std::ops::Range;
use std::sync::{Arc, Weak};

use penstock_types::{BlockCopy, BlockId, PackedAdapter};

use crate::request::{PromptPosition, Request};
use penstock_types::Token;

/// The most steps in flight.
pub const DEPTH: usize = 2;

/// The computation of one sequence in a step: tokens at the positions `start..start + num_tokens`.
#[derive(Clone, Debug)]
pub struct ScheduledRow {
    /// The slot of the sequence, below `Limits::max_num_seqs`.
    pub slot: u32,
    /// Position of the first token of this row in the sequence. The first row of a slot may start anywhere: the
    /// positions before it are in blocks that were computed for other sequences, loaded, or kept from an earlier slot.
    pub start: u32,
    /// Length of the request's prompt. Dynamic rope scaling depends on it, not on the chunking.
    pub prompt_len: u32,
    /// The number of tokens that are computed, at least one. They are in `tokens`, unless `follows_sample` is set: then
    /// that is empty, and the only token is the one that the latest earlier step sampled for this slot.
    pub num_tokens: u32,
    /// Range of [`StepPlan::tokens`] with the input token ids.
    pub tokens: Range<u32>,
    /// The input is the token sampled last for this slot.
    pub follows_sample: bool,
    /// Range of [`StepPlan::blocks`] with the sequence's block table, up to the row's last position.
    pub blocks: Range<u32>,
    /// The number of its last tokens that are drafts. Only a row that samples has drafts.
    pub num_drafts: u32,
    /// Positions of the prompt whose outputs are wanted, within the row's own.
    pub prompt_outputs: Range<u32>,
    /// If set, a token is sampled after the last token that is not a draft, and after each accepted draft.
    pub sample: Option<Sample>,
    /// The number of the adapter of the row. The rows of a plan are in the order of these numbers, those without first.
    pub adapter: Option<u32>,
}

/// A change of the adapters on the device.
#[derive(Clone, Debug)]
pub enum AdapterChange {
    /// Load an adapter under a free number.
    Load {
        /// Below `Limits::max_adapters`.
        number: u32,
        /// The updates of the adapter.
        weights: Arc<PackedAdapter>,
    },
    /// Free a number.
    Unload {
        /// The number of an adapter that was loaded.
        number: u32,
    },
}

/// The key of a sampled token; the parameters are those of the slot's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// The number of tokens generated before this one: with the seed, the key of the random number. Below `min_tokens`
    /// no stop id is sampled.
    pub index: u32,
}

/// A sequence that gets a slot. The executor forgets the slot's previous state.
#[derive(Clone, Debug)]
pub struct NewSequence {
    pub slot: u32,
    /// The request of the sequence.
    pub request: Arc<Request>,
    /// The sequence's index among the choices of the request.
    pub choice: u32,
    /// Range of [`StepPlan::tokens`] with the tokens that it generated in earlier slots.
    pub generated: Range<u32>,
    /// The same for one sequence in all its slots, and dead once it has ended. What the executor keeps of a sequence
    /// without a slot belongs to it.
    pub lifetime: Weak<()>,
}

/// The output of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowOutput {
    /// Number of tokens in [`StepOutput::sampled`]: 0 if the row does not sample or is deferred, else the accepted
    /// drafts and one more.
    pub num_tokens: u32,
    /// Number of entries in [`StepOutput::positions`]: the length of [`ScheduledRow::prompt_outputs`].
    pub num_positions: u32,
    /// Range of [`StepOutput::forced`] with the only tokens the grammar allows next; the engine drafts them.
    pub forced: Range<u32>,
    /// The row was computed, and its token is not sampled yet: the mask of its grammar was late. The engine computes
    /// the last token of the row that is not a draft again, in a later step, and samples after it. A row that follows
    /// the sample of a deferred row is deferred, too.
    pub is_deferred: bool,
    /// Set if the request of this row fails while the step succeeds; both counts are 0 then.
    pub failure: Option<String>,
}

/// The input of one step: rows over flat arrays. The executor reads it and returns it, unchanged, in
/// [`StepDone`](crate::executor::StepDone).
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Counts from 1. Steps complete in this order.
    pub step: u64,
    /// Copies of blocks, made in this order, after everything of earlier steps and before the rows of this one.
    pub copies: Vec<BlockCopy>,
    /// Changes of the adapters, made in this order, after everything of earlier steps and before the rows of this one.
    pub adapter_changes: Vec<AdapterChange>,
    /// Slots that were freed since the last plan and have no new sequence in this one: their requests are not needed
    /// any more. Slots freed before the engine becomes idle are in the next plan.
    pub freed_slots: Vec<u32>,
    /// Sequences that get slots, each with its first row in this plan.
    pub new_sequences: Vec<NewSequence>,
    /// One row per sequence, at least one. A block that a row writes to is in no other row.
    pub rows: Vec<ScheduledRow>,
    /// Input token ids of all rows, and generated tokens of new sequences.
    pub tokens: Vec<u32>,
    /// Block tables of all rows.
    pub blocks: Vec<BlockId>,
}

/// The output of one step. The engine submits it empty with its [`StepPlan`]; the executor fills it and returns both in
/// [`StepDone`](crate::executor::StepDone), and the engine reuses their buffers.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// [`StepPlan::step`] of its plan. Set by the engine.
    pub step: u64,
    /// Whether the adapter changes of the plan were made. May be true though the step has failed.
    pub adapters_changed: bool,
    /// Whether the copies of the plan were made. May be true though the step has failed.
    pub copies_done: bool,
    /// One entry per row of the plan, in row order.
    pub rows: Vec<RowOutput>,
    /// Sampled tokens of all rows, in row order.
    pub sampled: Vec<Token>,
    /// Prompt positions of all rows, in row order.
    pub positions: Vec<PromptPosition>,
    /// Tokens forced by grammars; see [`RowOutput::forced`].
    pub forced: Vec<u32>,
}

impl StepPlan {
    /// Empties the plan and keeps its buffers.
    pub fn clear(&mut self) {
        let Self { step, copies, adapter_changes, freed_slots, new_sequences, rows, tokens, blocks } = self;
        *step = 0;
        copies.clear();
        adapter_changes.clear();
        freed_slots.clear();
        new_sequences.clear();
        rows.clear();
        tokens.clear();
        blocks.clear();
    }
}

impl StepOutput {
    /// Empties the output and keeps its buffers.
    pub fn clear(&mut self) {
        let Self { step, adapters_changed, copies_done, rows, sampled, positions, forced } = self;
        *step = 0;
        *adapters_changed = false;
        *copies_done = false;
        rows.clear();
        sampled.clear();
        positions.clear();
        forced.clear();
    }

    /// Checks the output against its plan. An output that does not match fails its step.
    pub(crate) fn check(&self, plan: &StepPlan, vocabulary_size: usize) -> Result<(), String> {
        if self.rows.len() != plan.rows.len() {
            return Err(format!("the step returned {} rows instead of {}", self.rows.len(), plan.rows.len()));
        }
        let sum =
            |count: fn(&RowOutput) -> u32| self.rows.iter().map(|row| count(row) as usize).sum::<usize>();
        let num_sampled = sum(|row| row.num_tokens);
        if num_sampled != self.sampled.len() {
            return Err(format!(
                "the step returned {} tokens; its rows count {num_sampled}",
                self.sampled.len()
            ));
        }
        let num_positions = sum(|row| row.num_positions);
        if num_positions != self.positions.len() {
            return Err(format!(
                "the step returned {} prompt positions; its rows count {num_positions}",
                self.positions.len()
            ));
        }
        let is_valid = |(row, output): (&ScheduledRow, &RowOutput)| {
            if output.failure.is_some() {
                return output.num_tokens == 0 && output.num_positions == 0;
            }
            let samples = row.sample.is_some();
            let most = if samples && !output.is_deferred { row.num_drafts + 1 } else { 0 };
            let forced_is_in_range =
                output.forced.end as usize <= self.forced.len() && output.forced.start <= output.forced.end;
            (1.min(most)..=most).contains(&output.num_tokens)
                && output.num_positions == row.prompt_outputs.len() as u32
                && (samples || !output.is_deferred)
                && forced_is_in_range
        };
        let is_out_of_range = |id: &u32| *id as usize >= vocabulary_size;
        let mut ids = self.sampled.iter().map(|token| token.id).chain(self.forced.iter().copied());
        if let Some(id) = ids.find(is_out_of_range) {
            return Err(format!("the step returned token id {id}; the vocabulary has {vocabulary_size} ids"));
        }
        match plan.rows.iter().zip(&self.rows).all(is_valid) {
            true => Ok(()),
            false => Err("the step returned too few or too many tokens or prompt positions for a row".into()),
        }
    }
}

/// Splits the first `count` elements off `rest`.
pub(crate) fn split_off<'a, T>(rest: &mut &'a mut [T], count: u32) -> &'a mut [T] {
    rest.split_off_mut(..count as usize).expect("the output was checked; this is a bug")
}
