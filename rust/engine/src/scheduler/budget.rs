//! Distribution of the `max_num_batched_tokens` of a step among the pending tokens of the running sequences:
//!
//! 1. Every sequence with a single pending token gets it. There are at most `max_num_seqs` of them, which the limits
//!    keep within the budget: a decoding sequence advances in every step, whatever prompts arrive.
//! 2. If several clients have other sequences, of those with the priority of the first, the first one of the client
//!    with the fewest slots gets four fifths of the rest (rounded down): a client with few prompts does not wait for
//!    those of a client with many.
//! 3. Of the rest, the first of the other sequences in scheduling order gets half (rounded up): a long prompt is not
//!    starved by a stream of short ones, since every sequence becomes the first in time.
//! 4. The remaining tokens go to the others, fewest pending tokens first: a short prompt does not wait for a long one,
//!    and the average time to the first token is least. What they leave goes to the first, and then to that of rule 2.
//!
//! A sequence gets nothing while others compute at least half of the tokens that it would get, in steps in flight or
//! earlier in this one, and it can use their blocks. It skips what they have computed once a step is done, and follows
//! them as long as they compute its next tokens. So a prompt that many requests begin with is computed once, also if
//! they arrive together. Less than half of a sequence's share of a step in common does not delay it.
//!
//! None of the others gets more than `max_prefill_chunk` tokens in a step.
//!
//! Draft tokens use the remaining budget; see `rows`.

use std::time::Instant;

use rustc_hash::FxHashSet;

use super::clients::Clients;
use super::slots::{Running, Slots};
use crate::kv_cache::{BlockKey, BlockTable, KvCacheManager};
use crate::limits::Limits;
use crate::sequence::Sequence;

/// The token budget of a step.
pub(super) struct TokenBudget {
    /// `max_num_batched_tokens`.
    total: usize,
    /// `max_prefill_chunk`.
    max_chunk: usize,
    /// Scratch of `distribute`: the sequences with more than one pending token.
    prefills: Vec<PendingPrefill>,
    /// Scratch of `distribute`: the blocks that are computed in this step or in steps in flight.
    in_progress: FxHashSet<BlockKey>,
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
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            total: limits.max_num_batched_tokens,
            max_chunk: limits.max_prefill_chunk,
            prefills: Vec::with_capacity(limits.max_num_seqs),
            in_progress: FxHashSet::default(),
        }
    }

    /// `max_num_batched_tokens`.
    pub(super) fn total(&self) -> usize {
        self.total
    }

    /// Sets the number of tokens that each running sequence computes in the next step, and pauses the blocked ones.
    pub(super) fn distribute(
        &mut self,
        slots: &mut Slots,
        clients: &Clients,
        kv: &KvCacheManager,
        now: Instant,
    ) {
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
        if self.prefills.is_empty() {
            return;
        }
        self.mark_rows_in_flight(slots, kv);
        let mut prefills = std::mem::take(&mut self.prefills);
        let preferred = take_preferred(&mut prefills);
        if let Some(prefill) = preferred {
            remaining -= self.schedule(prefill, remaining * 4 / 5, slots, kv);
        }
        if let Some((first, others)) = prefills.split_first_mut() {
            let mut shared = remaining - self.schedule(*first, remaining.div_ceil(2), slots, kv);
            others.sort_unstable();
            for prefill in others {
                shared -= self.schedule(*prefill, shared, slots, kv);
            }
            for PendingPrefill { num_pending, slot, .. } in std::iter::once(*first).chain(preferred) {
                let Running { num_scheduled, .. } = slots.get_mut(slot);
                if *num_scheduled > 0 {
                    let num_more = shared.min(num_pending.min(self.max_chunk) - *num_scheduled);
                    *num_scheduled += num_more;
                    shared -= num_more;
                }
            }
        }
        self.prefills = prefills;
    }

    /// Marks the blocks that steps in flight compute.
    fn mark_rows_in_flight(&mut self, slots: &mut Slots, kv: &KvCacheManager) {
        self.in_progress.clear();
        for Running { sequence, table, .. } in slots.iter_mut() {
            if !sequence.has_no_rows_in_flight() {
                let num_planned = sequence.num_planned();
                self.mark_in_progress(sequence, table, num_planned, kv);
            }
        }
    }

    /// Marks the blocks of the first `num_tokens` tokens of a sequence that are not yet published.
    fn mark_in_progress(
        &mut self,
        sequence: &mut Sequence,
        table: &BlockTable,
        num_tokens: usize,
        kv: &KvCacheManager,
    ) {
        let (chain, tokens) = sequence.contents();
        let num_known = num_tokens.min(tokens.len()); // a token that is being sampled is not known
        kv.keys_to_publish(table, chain, tokens, num_known, |key| {
            self.in_progress.insert(key);
        });
    }

    /// Schedules at most `limit` tokens, or none if it waits for others. Returns their number.
    fn schedule(
        &mut self,
        prefill: PendingPrefill,
        limit: usize,
        slots: &mut Slots,
        kv: &KvCacheManager,
    ) -> usize {
        let num_tokens = prefill.num_pending.min(limit).min(self.max_chunk);
        let Running { sequence, table, num_scheduled } = slots.get_mut(prefill.slot);
        if num_tokens == 0 || self.should_wait(sequence, table, num_tokens, kv) {
            return 0;
        }
        *num_scheduled = num_tokens;
        let end = sequence.num_planned() + num_tokens;
        self.mark_in_progress(sequence, table, end, kv);
        num_tokens
    }

    /// Whether others compute at least half of the next `num_tokens` tokens of a sequence for it.
    fn should_wait(
        &self,
        sequence: &mut Sequence,
        table: &BlockTable,
        num_tokens: usize,
        kv: &KvCacheManager,
    ) -> bool {
        let index = (sequence.num_planned() + num_tokens.div_ceil(2) - 1) / kv.block_size();
        if !sequence.may_skip() || (index + 1) * kv.block_size() > sequence.num_reusable() {
            return false;
        }
        let (chain, tokens) = sequence.contents();
        let key = kv.extension_key(table, chain, tokens, index);
        key.is_some_and(|key| self.in_progress.contains(&key))
    }

    /// The tokens that no sequence was given.
    pub(super) fn remaining(&self, slots: &Slots) -> usize {
        self.total - slots.iter().map(|running| running.num_scheduled).sum::<usize>()
    }
}

/// Takes out the sequence of rule 2, if there is one.
fn take_preferred(prefills: &mut Vec<PendingPrefill>) -> Option<PendingPrefill> {
    let first = *prefills.first()?;
    let equals = prefills.iter().take_while(|prefill| prefill.priority == first.priority);
    let fewest = equals.clone().map(|prefill| prefill.num_running).min()?;
    let most = equals.clone().map(|prefill| prefill.num_running).max()?;
    let preferred = equals.clone().position(|prefill| prefill.num_running == fewest)?;
    (fewest < most).then(|| prefills.remove(preferred))
}
