//! The executor's slots and the running sequences in them.

use std::time::Instant;

use crate::kv_cache::BlockTable;
use crate::sequence::{SchedulingKey, Sequence};
use crate::step::StepPlan;

/// A running sequence. Its slot is its index.
pub(super) struct Running {
    pub(super) sequence: Sequence,
    pub(super) table: BlockTable,
    /// The number of tokens that it computes in the plan that is being made.
    pub(super) num_scheduled: usize,
}

/// All slots.
///
/// Invariants: a slot is in `free` or in `order`, and occupied exactly if in `order`; `order` is sorted by scheduling
/// key.
pub(super) struct Slots {
    slots: Vec<Option<Running>>,
    free: Vec<u32>,
    /// Slots freed since the last plan, each once. They may be occupied again.
    freed: Vec<u32>,
    /// Occupied slots.
    order: Vec<u32>,
    num_paused: usize,
    num_changes: u64,
}

impl Slots {
    pub(super) fn new(num_slots: usize) -> Self {
        Self {
            slots: (0..num_slots).map(|_| None).collect(),
            free: (0..num_slots as u32).rev().collect(),
            freed: Vec::with_capacity(num_slots),
            order: Vec::with_capacity(num_slots),
            num_paused: 0,
            num_changes: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn num_running(&self) -> usize {
        self.order.len()
    }

    pub(super) fn num_paused(&self) -> usize {
        self.num_paused
    }

    /// Counts the changes that may let a waiting sequence run: freed slots and paused sequences.
    pub(super) fn num_changes(&self) -> u64 {
        self.num_changes
    }

    pub(super) fn has_free(&self) -> bool {
        !self.free.is_empty()
    }

    /// Occupied slots in scheduling order.
    pub(super) fn order(&self) -> &[u32] {
        &self.order
    }

    /// The running sequences in scheduling order, with their slots.
    pub(super) fn ranked(&self) -> impl DoubleEndedIterator<Item = (u32, &Running)> {
        self.order.iter().map(|slot| (*slot, self.get(*slot)))
    }

    /// The running sequences, in the order of slots.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Running> + Clone {
        self.slots.iter().flatten()
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Running> {
        self.slots.iter_mut().flatten()
    }

    pub(super) fn get(&self, slot: u32) -> &Running {
        self.slots[slot as usize].as_ref().expect("a slot in the order is occupied; this is a bug")
    }

    pub(super) fn get_mut(&mut self, slot: u32) -> &mut Running {
        self.slots[slot as usize].as_mut().expect("a slot in the order is occupied; this is a bug")
    }

    /// The sequence in `slot`, if it has this key.
    pub(super) fn find(&mut self, slot: u32, key: SchedulingKey) -> Option<&mut Running> {
        self.slots[slot as usize].as_mut().filter(|running| running.sequence.key == key)
    }

    /// The slot of the sequence with this key, if it runs.
    pub(super) fn slot_of(&self, key: SchedulingKey) -> Option<u32> {
        let rank = self.order.binary_search_by_key(&key, |slot| self.key(*slot)).ok()?;
        Some(self.order[rank])
    }

    /// Puts a sequence into a free slot.
    pub(super) fn insert(&mut self, running: Running) {
        let rank = self.order.partition_point(|slot| self.key(*slot) < running.sequence.key);
        let slot = self.free.pop().expect("there is a free slot; this is a bug");
        self.order.insert(rank, slot);
        self.slots[slot as usize] = Some(running);
    }

    /// Frees a slot. The blocks of its sequence are still to be freed.
    pub(super) fn remove(&mut self, slot: u32) -> Running {
        let running = self.slots[slot as usize].take().expect("only occupied slots are freed; this is a bug");
        self.num_paused -= usize::from(running.sequence.is_paused());
        self.order.retain(|other| *other != slot);
        self.free.push(slot);
        if !self.freed.contains(&slot) {
            self.freed.push(slot);
        }
        self.num_changes += 1;
        running
    }

    /// Pauses a blocked sequence; see [`Sequence::try_pause`].
    pub(super) fn try_pause(&mut self, slot: u32, now: Instant) -> bool {
        let is_paused = self.get_mut(slot).sequence.try_pause(now);
        self.num_paused += usize::from(is_paused);
        self.num_changes += u64::from(is_paused);
        is_paused
    }

    /// Resumes a paused sequence if its consumer has read.
    pub(super) fn try_resume(&mut self, slot: u32) {
        let sequence = &mut self.get_mut(slot).sequence;
        if sequence.is_paused() && !sequence.outbox.queue().is_armed() {
            sequence.resume();
            self.num_paused -= 1;
        }
    }

    /// Tells a plan with rows which slots were freed since the last one, except those with new sequences.
    pub(super) fn report_freed(&mut self, plan: &mut StepPlan) {
        let is_new = |slot: &u32| plan.new_sequences.iter().any(|new| new.slot == *slot);
        plan.freed_slots.extend(self.freed.drain(..).filter(|slot| !is_new(slot)));
    }

    fn key(&self, slot: u32) -> SchedulingKey {
        self.get(slot).sequence.key
    }

    /// Panics unless slots, order and counts agree.
    pub(super) fn check_integrity(&self) {
        let mut slots: Vec<u32> = self.order.iter().chain(&self.free).copied().collect();
        slots.sort_unstable();
        assert!(
            slots.iter().copied().eq(0..self.slots.len() as u32),
            "slots lost or duplicated; this is a bug: {slots:?}"
        );
        assert!(!slots.is_empty(), "nothing was checked; this is a bug");
        for &slot in &self.order {
            assert!(self.slots[slot as usize].is_some(), "slot {slot} is empty; this is a bug");
        }
        assert!(self.order.is_sorted_by_key(|slot| self.key(*slot)), "out of order; this is a bug");
        assert_eq!(self.iter().count(), self.order.len(), "a sequence is not in the order; this is a bug");
        let num_paused = self.iter().filter(|running| running.sequence.is_paused()).count();
        assert_eq!(num_paused, self.num_paused, "paused sequences miscounted; this is a bug");
    }
}
