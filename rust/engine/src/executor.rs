//! The seam between the engine and whatever computes: a step goes out as a [`StepPlan`], its tokens come back in a
//! [`StepDone`]. Plain integers both ways; no model, no device, no tensor.
//!
//! Up to [`DEPTH`] plans are in flight. A plan may be submitted before the tokens sampled by the one before it are
//! known: such a row says [`ScheduledRow::follows_sample`] and the executor feeds it the token it sampled last for that slot.
//!
//! The executor remembers of each slot whose it is and what was generated there, which sampling depends on; a [`NewSequence`]
//! says when that starts anew.
//!
//! A row may end with drafts: guesses of the tokens to come, which are right if sampling, position by position, chooses
//! the very same. The tokens of such a row are those that were confirmed, and the first that was not.

use std::ops::Range;
use std::sync::Arc;

use penstock_types::{BlockCopy, BlockId};

use crate::request::{PromptPosition, Request, Token};

/// The most plans an executor holds at once: one computing, one ready.
pub const DEPTH: usize = 2;

/// What one sequence does in a step: tokens at `start..start + num_tokens` of its positions are computed.
#[derive(Clone, Debug)]
pub struct ScheduledRow {
    /// The executor's place for this sequence's state between steps, below `Limits::max_num_seqs`.
    pub slot: u32,
    /// Position of the first token of this row, counted from the beginning of the sequence. A slot's first row may start
    /// anywhere: what comes before lies in blocks that were computed for others, loaded, or kept from an earlier slot.
    pub start: u32,
    /// Length of the request's prompt (dynamic rope scaling depends on it, never on the chunking).
    pub prompt_len: u32,
    /// How many tokens are computed, at least one. `tokens` holds them all, except that when `follows_sample` is set it
    /// is empty and the single token is the one sampled for this slot in the latest earlier step.
    pub num_tokens: u32,
    /// The range of [`StepPlan::tokens`] with the input token ids.
    pub tokens: Range<u32>,
    /// The input is the token sampled last for this slot.
    pub follows_sample: bool,
    /// The range of [`StepPlan::blocks`] with the sequence's block table; covers every position up to the row's last.
    pub blocks: Range<u32>,
    /// How many of the last of its tokens are drafts. Only a row that samples has some.
    pub num_drafts: u32,
    /// Positions of the prompt that are reported on, within the row's own.
    pub reported: Range<u32>,
    /// Whether a token is sampled after this row's last position that is no draft, and after each draft that turns out
    /// right; and how.
    pub sample: Option<Sample>,
}

/// How a row's next token is sampled, by the parameters of the slot's request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// How many tokens were generated before this one: with the seed, the key of the draw. Below `min_tokens` the
    /// request's stop ids cannot be chosen.
    pub index: u32,
}

/// A sequence gets a slot: whatever the executor knew of the slot is to be forgotten.
#[derive(Clone, Debug)]
pub struct NewSequence {
    /// Which.
    pub slot: u32,
    /// What the sequence is generated for.
    pub request: Arc<Request>,
    /// The range of [`StepPlan::tokens`] with what it has generated already, in places it had before.
    pub generated: Range<u32>,
}

/// What came of one row.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowOutput {
    /// How many of [`StepPlan::sampled`] are its own: none, or the confirmed drafts and one.
    pub num_tokens: u32,
    /// How many of [`StepPlan::positions`] are its own: as many as were to be reported on.
    pub num_positions: u32,
    /// The range of [`StepPlan::forced`] with the tokens that can only come next: good drafts.
    pub forced: Range<u32>,
    /// Why its request cannot go on, though the step is well; its counts are zero then.
    pub failure: Option<String>,
}

/// One step: rows of work over flat arrays. Buffers are recycled: the plan comes back inside its [`StepDone`].
#[derive(Debug, Default)]
pub struct StepPlan {
    /// Counts from 1; steps complete in this order.
    pub step: u64,
    /// Made one after the other, after everything of earlier steps and before anything of this one is computed.
    pub copies: Vec<BlockCopy>,
    /// Slots whose sequences have left since the last plan and that no seat of this one is for: nothing of their requests
    /// is needed any more. Those of the last plan before the engine has nothing to do wait for the next one.
    pub freed_slots: Vec<u32>,
    /// Slots that begin anew, each with its first row in this plan.
    pub new_sequences: Vec<NewSequence>,
    /// One row per sequence, each slot at most once; at least one row. A block that a row writes to is in no other row.
    pub rows: Vec<ScheduledRow>,
    /// Input token ids of all rows, and what the seats have generated.
    pub tokens: Vec<u32>,
    /// Block tables of all rows.
    pub blocks: Vec<BlockId>,
    /// Written by the executor: its copies are made, whatever became of its work.
    pub copied: bool,
    /// Written by the executor: what came of each row, in row order.
    pub outputs: Vec<RowOutput>,
    /// Written by the executor: sampled tokens, in row order.
    pub sampled: Vec<Token>,
    /// Written by the executor: positions of prompts, in row order.
    pub positions: Vec<PromptPosition>,
    /// Written by the executor: tokens that grammars leave no choice about.
    pub forced: Vec<u32>,
}

impl StepPlan {
    /// Empties the plan and keeps its buffers.
    pub fn clear(&mut self) {
        let Self {
            step,
            copies,
            freed_slots,
            new_sequences,
            rows,
            tokens,
            blocks,
            copied,
            outputs,
            sampled,
            positions,
            forced,
        } = self;
        *step = 0;
        copies.clear();
        freed_slots.clear();
        new_sequences.clear();
        rows.clear();
        tokens.clear();
        blocks.clear();
        *copied = false;
        outputs.clear();
        sampled.clear();
        positions.clear();
        forced.clear();
    }

    /// An executor whose answers are not to the plan has failed, whatever it says.
    pub(crate) fn check_answers(&self, vocabulary_size: usize) -> Result<(), String> {
        let (rows, answers) = (self.rows.len(), self.outputs.len());
        if answers != rows {
            return Err(format!("the step answered {answers} rows instead of {rows}"));
        }
        let sum = |count: fn(&RowOutput) -> u32| {
            self.outputs.iter().map(|answer| count(answer) as usize).sum::<usize>()
        };
        let num_sampled = sum(|answer| answer.num_tokens);
        if num_sampled != self.sampled.len() {
            return Err(format!("the step sampled {} tokens and counts {num_sampled}", self.sampled.len()));
        }
        let num_positions = sum(|answer| answer.num_positions);
        if num_positions != self.positions.len() {
            return Err(format!(
                "the step tells of {} positions and counts {num_positions}",
                self.positions.len()
            ));
        }
        let is_sound = |(work, answer): (&ScheduledRow, &RowOutput)| {
            if answer.failure.is_some() {
                return answer.num_tokens == 0 && answer.num_positions == 0;
            }
            let most = if work.sample.is_some() { work.num_drafts + 1 } else { 0 };
            let tokens = 1.min(most)..=most;
            let is_known =
                answer.forced.end as usize <= self.forced.len() && answer.forced.start <= answer.forced.end;
            tokens.contains(&answer.num_tokens)
                && answer.num_positions == work.reported.len() as u32
                && is_known
        };
        let is_unknown = |id: &u32| *id as usize >= vocabulary_size;
        let mut ids = self.sampled.iter().map(|token| token.id).chain(self.forced.iter().copied());
        if let Some(id) = ids.find(is_unknown) {
            return Err(format!(
                "the step answered with token id {id}; the vocabulary has {vocabulary_size} ids"
            ));
        }
        match self.rows.iter().zip(&self.outputs).all(is_sound) {
            true => Ok(()),
            false => Err("the step answered a row with too few or too many tokens or positions".into()),
        }
    }
}

/// The first `count` of what is left.
pub(crate) fn split_off<'a, T>(left: &mut &'a mut [T], count: u32) -> &'a mut [T] {
    left.split_off_mut(..count as usize).expect("the answers were checked; this is a bug")
}

/// The answer to one [`StepPlan`].
#[derive(Debug)]
pub struct StepDone {
    /// The plan, its `answers` and what they count filled in if the step went well.
    pub plan: Box<StepPlan>,
    /// What went wrong, for the users whose requests were in the step. Its copies, and those of later plans, then count
    /// as not made unless it says `copied`.
    pub result: Result<(), String>,
}

/// Computes steps, in order, on its own thread.
pub trait Executor: Send {
    /// Takes a plan and returns at once. Called with at most [`DEPTH`] plans unanswered. Every plan is answered, in order,
    /// by [`Completions::send`](crate::mailbox::Completions::send), a failed one too.
    fn submit(&mut self, plan: Box<StepPlan>);
}
