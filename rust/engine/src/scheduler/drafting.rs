//! The rows of a step, and what drafts they get.
//!
//! Drafts take what nobody else has a use for: budget that is left over, and free blocks, once all who have tokens to
//! compute have theirs. Nobody waits or loses a place for them, no prefix is forgotten for them, and the blocks of those
//! that were refused go back before the next plan is made. Where the last plan had no room for a draft, nobody waits
//! to make one: with prompts to compute, plans are made in advance whoever would draft.

use std::time::Instant;

use super::{Running, Scheduler};
use crate::executor::StepPlan;
use crate::request::RequestId;

impl Scheduler {
    /// Whether somebody drafts, or probably would in the next plan: then plans are made one at a time.
    pub(crate) fn is_drafting(&self) -> bool {
        let num_rows = self.order.len();
        self.occupied().any(|running| running.sequence.is_drafting(num_rows, self.has_draft_room))
    }

    /// Adds a row for everybody who was granted tokens, and drafts to some.
    pub(super) fn add_rows(&mut self, plan: &mut StepPlan, owners: &mut Vec<RequestId>, now: Instant) {
        let num_granted: usize = self.occupied().map(|running| running.num_granted).sum();
        let mut budget = self.max_num_batched_tokens - num_granted;
        let num_rows = self.order.len();
        self.has_draft_room = budget > 0;
        for &slot in &self.order {
            let running = self.slots[slot as usize].as_mut();
            let Running { sequence, blocks, num_granted } =
                running.expect("a slot in the order is occupied; this is a bug");
            if *num_granted == 0 {
                continue;
            }
            self.drafts.clear();
            sequence.draft(*num_granted, budget, num_rows, &mut self.drafts);
            let end = sequence.num_planned() + *num_granted;
            let num_blocks = (end + self.drafts.len()).div_ceil(self.block_size);
            let num_missing = num_blocks - blocks.blocks().len();
            // Who arrives meanwhile finds the headroom that is asked of him.
            let pool = self.memory.pool();
            let may_grow = num_missing <= pool.num_free() && num_missing + num_rows <= pool.num_available();
            if num_missing > 0 && !(may_grow && self.memory.grow(blocks, num_blocks)) {
                self.drafts.truncate(blocks.blocks().len() * self.block_size - end);
            }
            budget -= self.drafts.len();
            sequence.plan(slot, *num_granted, &self.drafts, blocks.blocks(), plan, now);
            owners.push(sequence.id);
        }
    }
}
