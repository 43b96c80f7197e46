//! The rows of a step, and their draft tokens.
//!
//! Drafts use what nothing else needs: the budget that is left, and free blocks, after all pending tokens have theirs. No
//! sequence waits or is preempted for drafts, no prefix is evicted for them, and the blocks of rejected drafts are freed before
//! the next plan is made.
//!
//! **Drafting and steps in flight.** A draft follows a known token, so the row of a drafting sequence cannot be planned before
//! its row in flight is done. While a sequence drafts, plans are therefore made one at a time, for all sequences: the step
//! that could be planned meanwhile would contain the other sequences only, and the steps would alternate between all sequences
//! and the others. A step of `n - k` rows takes about as long as one of `n`, since both read all weights, so the `k` drafting
//! sequences would advance in every second step, which costs them more than drafts gain; and if all of them draft, the steps
//! fall apart into two halves, each as long as one of all. What planning one at a time costs is the engine's part of a step,
//! about a twentieth (`WAIT_COST` in `drafts::acceptance`, which has it in its account), and it shrinks with larger batches.
//!
//! Steps stay in flight in pairs where drafting would not pay or could not happen: if no sequence is expected to have drafts
//! that are worth verifying, and if the last plan had no budget left for drafts because prompts use it all.

use std::time::Instant;

use super::scheduler::Scheduler;
use super::slots::Running;
use crate::drafts::MAX_FORCED;
use crate::request::RequestId;
use crate::step::StepPlan;

/// The use of the step budget that pending tokens leave.
pub(super) struct DraftBudget {
    /// Whether the last plan had budget left for drafts.
    was_available: bool,
    /// Scratch of `add_rows`: the drafts of one row.
    drafts: Vec<u32>,
}

impl DraftBudget {
    pub(super) fn new(num_speculative_tokens: usize) -> Self {
        Self { was_available: true, drafts: Vec::with_capacity(num_speculative_tokens.max(MAX_FORCED)) }
    }
}

impl Scheduler {
    /// Whether a sequence drafts, or probably will in the next plan: then plans are made one at a time.
    pub(crate) fn is_drafting(&self) -> bool {
        let num_running = self.slots.num_running();
        let has_budget = self.drafts.was_available;
        self.slots.iter().any(|running| running.sequence.is_drafting(num_running, has_budget))
    }

    /// Adds a row, perhaps with drafts, for every sequence that was given tokens.
    pub(super) fn add_rows(
        &mut self,
        plan: &mut StepPlan,
        requests: &mut Vec<Option<RequestId>>,
        now: Instant,
    ) {
        let num_scheduled: usize = self.slots.iter().map(|running| running.num_scheduled).sum();
        let mut budget = self.budget.total - num_scheduled;
        let num_running = self.slots.num_running();
        self.drafts.was_available = budget > 0;
        let drafts = &mut self.drafts.drafts;
        for rank in 0..num_running {
            let slot = self.slots.order()[rank];
            let Running { sequence, table, num_scheduled } = self.slots.get_mut(slot);
            if *num_scheduled == 0 {
                continue;
            }
            drafts.clear();
            sequence.propose_drafts(*num_scheduled, budget, num_running, drafts);
            let end = sequence.num_planned() + *num_scheduled;
            // The watermark of an arriving sequence stays available.
            let capacity = self.kv.grow_from_free(table, end + drafts.len(), num_running);
            drafts.truncate(capacity - end);
            budget -= drafts.len();
            sequence.plan(slot, *num_scheduled, drafts, table.blocks(), plan, now);
            requests.push(Some(sequence.id));
        }
    }
}
