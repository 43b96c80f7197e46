//! Preemption when the blocks run out.
//!
//! The first victim is a sequence whose last token is in flight, because it no longer needs its blocks. Otherwise it is
//! a paused one, whatever its priority: a consumer that does not read must not stop others. Otherwise it is one of the
//! lowest priority, of the client that has the most slots, the newest or the longest. It may be the sequence that needs
//! the blocks. Rows are added to the plan afterwards, so a preempted sequence has none.

use std::time::Instant;

use penstock_types::{PreemptionMode, PreemptionVictim};

use super::scheduler::Scheduler;
use super::slots::Running;
use crate::request::FinishReason;
use crate::sequence::SchedulingKey;

impl Scheduler {
    /// Grows the block tables of the sequences that were given tokens, and preempts later ones for it. A preempted
    /// sequence loses its tokens of this step; that part of the budget is not used.
    pub(super) fn make_room(&mut self, now: Instant) {
        let mut rank = 0;
        while let Some(&slot) = self.slots.order().get(rank) {
            let Running { sequence, table, num_scheduled } = self.slots.get_mut(slot);
            if self.kv.grow(table, sequence.num_planned() + *num_scheduled) {
                rank += 1;
                continue;
            }
            let (victim, victim_rank) = self.victim();
            // A victim that computes nothing may come before.
            rank -= usize::from(victim_rank < rank);
            let sequence = &self.slots.get(victim).sequence;
            let has_work = !sequence.is_paused() && !sequence.is_all_planned();
            if has_work && self.preemption_mode == PreemptionMode::Interrupt {
                self.interrupt(victim, now);
            } else {
                self.preempt(victim, now);
            }
        }
    }

    /// The slot and the rank of the sequence that is preempted next.
    fn victim(&self) -> (u32, usize) {
        let ranked = || {
            let ranked = self.slots.ranked().enumerate();
            ranked.map(|(rank, (slot, running))| (&running.sequence, (slot, rank)))
        };
        if let Some((_, finishing)) = ranked().find(|(sequence, _)| sequence.is_all_planned()) {
            return finishing;
        }
        let last = ranked().max_by_key(|(sequence, _)| {
            let SchedulingKey { priority, id } = sequence.key;
            // A paused sequence is not interrupted, so its length does not matter.
            let by_length = self.preemption_victim == PreemptionVictim::Longest && !sequence.is_paused();
            let num_running = self.queue.clients.num_running(sequence);
            let length = if by_length { sequence.num_tokens() } else { 0 };
            (sequence.is_paused(), priority, num_running, length, id)
        });
        last.expect("one of them needs blocks; this is a bug").1
    }

    /// Takes slot and blocks from a sequence. It waits to be scheduled again, with the blocks that are swapped out or
    /// stay in the prefix cache; its tokens in flight still arrive. A sequence that waits only for those loses nothing:
    /// it ends when the last one arrives.
    pub(super) fn preempt(&mut self, slot: u32, now: Instant) {
        let Running { mut sequence, mut table, .. } = self.leave_slot(slot);
        let num_tokens = sequence.leave_slot();
        self.kv.shrink(&mut table, num_tokens); // drafts in flight are no tokens yet
        if !sequence.is_all_planned() {
            if self.preemption_mode == PreemptionMode::Swap {
                // Copied by the next plan: after the plans in flight have written, and before another sequence writes.
                sequence.swapped = self.kv.swap_out(&table, num_tokens);
            }
            self.counters.preemptions += 1;
            self.counters.swaps += u64::from(sequence.swapped.is_some());
        }
        self.kv.free(table, now);
        self.queue.push_preempted(sequence);
    }

    fn interrupt(&mut self, slot: u32, now: Instant) {
        self.counters.preemptions += 1;
        let sequence = self.deschedule(slot, now);
        self.ended.push((sequence, FinishReason::Interrupted));
    }

    /// The plan of `step` has failed before its copies were made, so blocks that it or a later plan copies are corrupt.
    /// The sequences that depend on them start over, with the tokens that have arrived; this does not count as a
    /// preemption. Appends to `invalidated` the sequences whose rows in flight are to be ignored.
    pub(crate) fn invalidate_copies(
        &mut self,
        step: u64,
        invalidated: &mut Vec<SchedulingKey>,
        now: Instant,
    ) {
        self.kv.invalidate_copies();
        for rank in (0..self.slots.num_running()).rev() {
            let slot = self.slots.order()[rank];
            if self.slots.get(slot).table.depends_on() >= step {
                let Running { mut sequence, table, .. } = self.leave_slot(slot);
                sequence.leave_slot();
                self.kv.free(table, now);
                self.queue.push_preempted(sequence);
            }
        }
        for sequence in self.queue.preempted_mut() {
            // The dependencies of its rows in flight are no longer known, so the rows are computed again.
            if !sequence.has_no_rows_in_flight() {
                sequence.clear_in_flight();
                invalidated.push(sequence.key);
            }
            if let Some(swapped) = sequence.swapped.take_if(|swapped| swapped.step >= step) {
                self.kv.discard(swapped);
            }
        }
        self.queue.note_change();
    }
}
