//! Distribution of the `max_num_batched_tokens` of a step among the pending tokens of the running sequences:
//!
//! 1. Every sequence with a single pending token gets it. There are at most `max_num_seqs` of them, which the limits
//!    keep within the budget: a decoding sequence advances in every step, whatever prompts arrive.
//! 2. If several clients have other sequences, of those with the priority of the first, the first one of the client with
//!    the fewest slots gets four fifths of the rest (rounded down): a client with few prompts does not wait for those of
//!    a client with many.
//! 3. Of the rest, the first of the other sequences in scheduling order gets half (rounded up): a long prompt is not
//!    starved by a stream of short ones, since every sequence becomes the first in time.
//! 4. The remaining tokens go to the others, fewest pending tokens first: a short prompt does not wait for a long one,
//!    and the average time to the first token is least. What they leave goes to the first, and then to that of rule 2.
//!
//! Draft tokens use the remaining budget; see `rows`.

use std::time::Instant;

use super::clients::Clients;
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
    priority: i32,
    /// The number of slots of its client.
    num_running: usize,
}

impl TokenBudget {
    pub(super) fn new(total: usize, max_num_seqs: usize) -> Self {
        Self { total, prefills: Vec::with_capacity(max_num_seqs) }
    }

    /// `max_num_batched_tokens`.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Sets the number of tokens that each running sequence computes in the next step, and pauses the blocked ones.
    pub(super) fn distribute(&mut self, slots: &mut Slots, clients: &Clients, now: Instant) {
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
                let sequence = &slots.get(slot).sequence;
                let (priority, num_running) = (sequence.key.priority, clients.num_running(sequence));
                self.prefills.push(PendingPrefill { num_pending, rank, slot, priority, num_running });
            }
        }
        let preferred = self.take_preferred();
        if let Some(PendingPrefill { num_pending, slot, .. }) = preferred {
            let num_scheduled = num_pending.min(remaining * 4 / 5);
            slots.get_mut(slot).num_scheduled = num_scheduled;
            remaining -= num_scheduled;
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
        let num_scheduled = first.num_pending.min(set_aside + shared);
        slots.get_mut(first.slot).num_scheduled = num_scheduled;
        let left = set_aside + shared - num_scheduled;
        if let Some(PendingPrefill { num_pending, slot, .. }) = preferred {
            let running = slots.get_mut(slot);
            running.num_scheduled = num_pending.min(running.num_scheduled + left);
        }
    }

    /// Takes out the sequence of rule 2, if there is one.
    fn take_preferred(&mut self) -> Option<PendingPrefill> {
        let first = *self.prefills.first()?;
        let equals = self.prefills.iter().take_while(|prefill| prefill.priority == first.priority);
        let fewest = equals.clone().map(|prefill| prefill.num_running).min()?;
        let most = equals.clone().map(|prefill| prefill.num_running).max()?;
        let preferred = equals.clone().position(|prefill| prefill.num_running == fewest)?;
        (fewest < most).then(|| self.prefills.remove(preferred))
    }

    /// The tokens that no sequence was given.
    pub(super) fn remaining(&self, slots: &Slots) -> usize {
        self.total - slots.iter().map(|running| running.num_scheduled).sum::<usize>()
    }
}
