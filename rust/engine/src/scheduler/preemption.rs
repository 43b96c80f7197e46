//! Who loses its place when the blocks run out, and what becomes of it.
//!
//! First one whose last token is on its way: it needs its blocks no more. Else the one that is served last: of the least
//! urgent, one whose consumer does not read, else the newest. It may be the one that asked, but not while somebody's
//! consumer does not read: that must never stop others. Asking goes along the order, so whoever is preempted has no row
//! in the plan that is being made.

use std::time::Instant;

use super::{Running, Scheduler};
use crate::limits::PreemptionMode;
use crate::request::RequestId;
use crate::sequence::Sequence;

impl Scheduler {
    /// Grows the block lists of those who were granted tokens, at the cost of those who come later in the order. Who
    /// is preempted for it loses his grant; that much of the step's budget is lost.
    pub(super) fn make_room(&mut self, now: Instant) {
        let mut rank = 0;
        while let Some(&slot) = self.order.get(rank) {
            let Running { sequence, blocks, num_granted } =
                self.slots[slot as usize].as_mut().expect("a slot in the order is occupied; this is a bug");
            let num_blocks = (sequence.num_planned() + *num_granted).div_ceil(self.block_size);
            if self.memory.grow(blocks, num_blocks) {
                rank += 1;
                continue;
            }
            let (victim, victim_rank) = self.victim_for(slot);
            // One that computes nothing may stand before.
            rank -= usize::from(victim_rank < rank);
            let sequence = &self.seated(victim).sequence;
            let computes = !sequence.is_paused && !sequence.is_all_planned();
            if computes && self.preemption_mode == PreemptionMode::Interrupt {
                self.interrupt(victim, now);
            } else {
                self.preempt(victim, now);
            }
        }
    }

    /// The slot and the rank of the one that has to go for the one in `slot`.
    fn victim_for(&self, slot: u32) -> (u32, usize) {
        let seated = || {
            let ranked = self.order.iter().enumerate();
            ranked.map(|(rank, slot)| (&self.seated(*slot).sequence, (*slot, rank)))
        };
        let all_planned = seated().find(|(sequence, _)| sequence.is_all_planned());
        if let Some((_, place)) = all_planned {
            return place;
        }
        let last_served = seated()
            .max_by_key(|(Sequence { turn, is_paused, .. }, _)| (turn.priority, *is_paused, turn.arrival));
        let (_, last_served) = last_served.expect("somebody asked; this is a bug");
        let last_paused = || seated().rfind(|(sequence, _)| sequence.is_paused).map(|(_, place)| place);
        if last_served.0 == slot { last_paused().unwrap_or(last_served) } else { last_served }
    }

    /// Takes a place away. The sequence waits for another, with what of its blocks is saved or stays in the prefix
    /// cache; tokens of it that are on their way still arrive. One that waits for nothing else loses nothing: it ends
    /// when the last has come.
    pub(super) fn preempt(&mut self, slot: u32, now: Instant) {
        let Running { mut sequence, mut blocks, .. } = self.unseat(slot);
        let num_tokens = sequence.leave_place();
        self.memory.shrink(&mut blocks, num_tokens.div_ceil(self.block_size)); // drafts in flight are no tokens yet
        if !sequence.is_all_planned() {
            if self.preemption_mode == PreemptionMode::Swap {
                // Copied by the next plan, so after the plans in flight have written and before anybody else does.
                sequence.saved = self.memory.save(&blocks, num_tokens);
            }
            self.counters.preemptions += 1;
            self.counters.swaps += u64::from(sequence.saved.is_some());
        }
        self.memory.give_back(blocks, now);
        self.wait_again(sequence);
    }

    fn interrupt(&mut self, slot: u32, now: Instant) {
        self.counters.preemptions += 1;
        let sequence = self.vacate(slot, now);
        self.interrupted.push(sequence);
    }

    /// The plan of `step` has failed, and what it or a later one copies cannot be relied on. Whoever depends on that
    /// starts over: it waits for a place, with the tokens that have arrived; nobody took it, so that does not count as a
    /// preemption. Names those whose rows in flight are worth nothing.
    pub(crate) fn distrust_copies(&mut self, step: u64, distrusted: &mut Vec<RequestId>, now: Instant) {
        self.memory.distrust_copies();
        for rank in (0..self.order.len()).rev() {
            let slot = self.order[rank];
            if self.seated(slot).blocks.depends_on() >= step {
                let Running { mut sequence, blocks, .. } = self.unseat(slot);
                sequence.leave_place();
                self.memory.give_back(blocks, now);
                self.wait_again(sequence);
            }
        }
        self.admission_is_due = true;
        for sequence in &mut self.preempted {
            // Without its place nobody knows what a row in flight depends on: those are computed again.
            if !sequence.is_settled() {
                sequence.forget_flights();
                distrusted.push(sequence.id);
            }
            if let Some(saved) = sequence.saved.take_if(|saved| saved.step >= step) {
                self.memory.discard(saved);
            }
        }
    }
}
