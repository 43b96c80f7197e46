//! How a step's budget of `max_num_batched_tokens` is shared out, by one rule for all, among the tokens that running
//! sequences have pending:
//!
//! 1. Every sequence with a single pending token gets it. There are at most `max_num_seqs` of them, which the limits
//!    keep within the budget: a stream advances in every step, whatever prompts arrive.
//! 2. Of what is left, the first in the order among the others gets half (rounded up): a long prompt cannot be starved
//!    by a stream of short ones, since everyone in turn becomes the first.
//! 3. The rest goes to the others, fewest pending tokens first: a short prompt does not queue behind a long one, and on
//!    average the first tokens come as early as can be. What they leave, the first gets too: no budget is wasted.
//!
//! What nobody has pending tokens for goes to drafts, in the order; see `drafting`.

use super::Scheduler;

/// Ordered by fewest pending tokens, then by turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Behind {
    num_pending: usize,
    rank: usize,
    slot: u32,
}

impl Scheduler {
    /// Grants every running sequence its tokens of the next step, none to some. Finds out who has to pause.
    pub(super) fn share_out(&mut self) {
        let mut budget = self.max_num_batched_tokens;
        self.behind.clear();
        let num_paused_before = std::mem::take(&mut self.num_paused);
        for rank in 0..self.order.len() {
            let slot = self.order[rank];
            let running = self.running(slot);
            let num_pending = running.sequence.num_pending();
            let is_paused = running.sequence.is_paused;
            running.num_granted = usize::from(num_pending == 1);
            budget -= running.num_granted;
            self.num_paused += usize::from(is_paused);
            if num_pending > 1 {
                self.behind.push(Behind { num_pending, rank, slot });
            }
        }
        if self.num_paused > num_paused_before {
            self.release_from_paused();
            self.admission_is_due = true;
        }
        let Some((first, others)) = self.behind.split_first_mut() else { return };
        let first = *first;
        let set_aside = first.num_pending.min(budget.div_ceil(2));
        let mut shared = budget - set_aside;
        others.sort_unstable();
        for index in 1..self.behind.len() {
            let Behind { num_pending, slot, .. } = self.behind[index];
            let granted = num_pending.min(shared);
            shared -= granted;
            self.running(slot).num_granted = granted;
        }
        self.running(first.slot).num_granted = first.num_pending.min(set_aside + shared);
    }
}
