//! Distribution of the `max_num_batched_tokens` of a step among the pending tokens of the running sequences:
//!
//! 1. Every sequence with a single pending token gets it. There are at most `max_num_seqs` of them, which the limits
//!    keep within the budget: a decoding sequence advances in every step, whatever prompts arrive.
//! 2. Of the rest, the first of the other sequences in scheduling order gets half (rounded up): a long prompt is not
//!    starved by a stream of short ones, since every sequence becomes the first in time.
//! 3. The remaining tokens go to the others, fewest pending tokens first: a short prompt does not wait for a long one,
//!    and the average time to the first token is least. What they leave goes to the first.
//!
//! Draft tokens use the remaining budget; see `rows`.

use std::time::Instant;

use super::slots::Slots;

/// The token budget of a step.
pub(super) struct TokenBudget {
    /// `max_num_batched_tokens`.
    total: usize,
    /// Scratch of `distribute`: the sequences with more than one pending token.
    prefills: Vec<PendingPrefill>,
}

/// A sequence with several pending tokens. Ordered by their number, then by scheduling order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PendingPrefill {
    num_pending: usize,
    rank: usize,
    slot: u32,
}

impl TokenBudget {
    pub(super) fn new(total: usize, max_num_seqs: usize) -> Self {
        Self { total, prefills: Vec::with_capacity(max_num_seqs) }
    }

    /// Sets the number of tokens that each running sequence computes in the next step, and pauses the blocked ones.
    pub(super) fn distribute(&mut self, slots: &mut Slots, now: Instant) {
        let mut remaining = self.total;
        self.prefills.clear();
        for rank in 0..slots.num_running() {
            let slot = slots.order()[rank];
            let sequence = &slots.get(slot).sequence;
            let mut num_pending = sequence.num_schedulable();
            if num_pending == 0 && sequence.is_blocked() {
                num_pending = usize::from(!slots.try_pause(slot, now));
            }
            let num_scheduled = usize::from(num_pending == 1);
            slots.get_mut(slot).num_scheduled = num_scheduled;
            remaining -= num_scheduled;
            if num_pending > 1 {
                self.prefills.push(PendingPrefill { num_pending, rank, slot });
            }
        }
        let Some((first, others)) = self.prefills.split_first_mut() else { return };
        let set_aside = first.num_pending.min(remaining.div_ceil(2));
        let mut shared = remaining - set_aside;
        others.sort_unstable();
        for PendingPrefill { num_pending, slot, .. } in others {
            let num_scheduled = (*num_pending).min(shared);
            shared -= num_scheduled;
            slots.get_mut(*slot).num_scheduled = num_scheduled;
        }
        slots.get_mut(first.slot).num_scheduled = first.num_pending.min(set_aside + shared);
    }

    /// The tokens that no sequence was given.
    pub(super) fn remaining(&self, slots: &Slots) -> usize {
        self.total - slots.iter().map(|running| running.num_scheduled).sum::<usize>()
    }
}
