//! The rows of a step, and their draft tokens.
//!
//! Drafts use what nothing else needs: the budget that is left, and free blocks, after all pending tokens have theirs.
//! No sequence waits or is preempted for drafts, no prefix is evicted for them, and the blocks of rejected drafts are
//! freed before the next plan is made.
//!
//! **Drafting and steps in flight.** A draft follows a known token, so the row of a drafting sequence cannot be planned
//! before its row in flight is done. While a sequence drafts, plans are made one at a time, for all sequences. If only
//! the drafting sequences waited, the steps would alternate between all sequences and the others. A step of `n - k`
//! rows takes about as long as one of `n`, since both read all weights. So `k` drafting sequences would advance in
//! every second step only and lose half their speed; and if all sequences draft, the
//! steps fall apart into two halves, each as long as one of all. Planning one at a time costs the engine's part of a
//! step: about a twentieth of a step of one row, less of larger ones. `drafts::acceptance` counts it among the costs of
//! a draft (`WAIT_COST`).
//!
//! Two steps stay in flight if no sequence is expected to have drafts worth verifying, and if the last plan had no
//! budget left for drafts because prompts use it all.

use std::time::Instant;

use super::slots::{Running, Slots};
use crate::drafts::MAX_FORCED;
use crate::kv_cache::KvCacheManager;
use crate::sequence::SchedulingKey;
use crate::step::StepPlan;

/// Makes the rows of steps.
pub(super) struct RowPlanner {
    /// Whether the last plan had budget left for drafts.
    had_draft_budget: bool,
    /// Scratch of `add_rows`: the drafts of one row.
    drafts: Vec<u32>,
}

impl RowPlanner {
    pub(super) fn new(num_speculative_tokens: usize) -> Self {
        let drafts = Vec::with_capacity(num_speculative_tokens.max(MAX_FORCED));
        Self { had_draft_budget: true, drafts }
    }

    /// Whether a sequence drafts, or probably will in the next plan: then plans are made one at a time.
    pub(super) fn is_drafting(&self, slots: &Slots) -> bool {
        let num_running = slots.num_running();
        slots.iter().any(|running| running.sequence.is_drafting(num_running, self.had_draft_budget))
    }

    /// Adds a row for every sequence that was given tokens, and `budget` drafts at most.
    pub(super) fn add_rows(
        &mut self,
        slots: &mut Slots,
        kv: &mut KvCacheManager,
        mut budget: usize,
        plan: &mut StepPlan,
        owners: &mut Vec<Option<SchedulingKey>>,
        now: Instant,
    ) {
        let num_running = slots.num_running();
        self.had_draft_budget = budget > 0;
        let drafts = &mut self.drafts;
        for rank in 0..num_running {
            let slot = slots.order()[rank];
            let Running { sequence, table, num_scheduled } = slots.get_mut(slot);
            if *num_scheduled == 0 {
                continue;
            }
            drafts.clear();
            sequence.propose_drafts(*num_scheduled, budget, num_running, drafts);
            let end = sequence.num_planned() + *num_scheduled;
            // The watermark of an arriving sequence stays available.
            let capacity = kv.grow_from_free(table, end + drafts.len(), num_running);
            drafts.truncate(capacity - end);
            budget -= drafts.len();
            sequence.plan(slot, *num_scheduled, drafts, table.blocks(), plan, now);
            owners.push(Some(sequence.key));
        }
    }
}
