//! The adapters of an engine: those that are registered, those on the device, and those in use.
//!
//! An adapter is pinned while a sequence with it has a slot. It stays on the device afterwards until its room is
//! needed; then the least recently used one goes first. The device makes the changes in plan order, before
//! the rows of the plan: so a row always finds its adapter, and never another one in its place.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_types::PackedAdapter;

use crate::limits::Limits;
use crate::request::{AdapterId, AdapterUse};
use crate::step::AdapterChange;

/// The most waiting sequences, for each slot, that overtake one without room for its adapter.
const OVERTAKES: usize = 4;

/// All adapters.
///
/// Invariants: the numbers of the loaded adapters and the free ones are all numbers, each once; `num_pinned` and
/// `pinned_bytes` are those of the entries with running sequences, all of which are loaded.
pub(super) struct Adapters {
    max_loaded: usize,
    max_bytes: u64,
    entries: BTreeMap<AdapterId, Entry>,
    free_numbers: Vec<u32>,
    /// Bytes on the device.
    bytes: u64,
    num_pinned: usize,
    pinned_bytes: u64,
    num_uses: u64,
    /// Since the last plan.
    changes: Vec<AdapterChange>,
    num_overtakes: usize,
    max_overtakes: usize,
}

struct Entry {
    weights: Arc<PackedAdapter>,
    /// Bytes on the device.
    bytes: u64,
    /// Its number on the device.
    number: Option<u32>,
    /// Sequences that wait or run.
    num_sequences: usize,
    /// Sequences that have a slot.
    num_running: usize,
    last_use: u64,
    /// For other threads.
    usage: Arc<AdapterUse>,
    /// Dropped when the last sequence has ended; set if it takes no more sequences.
    closing: Option<Vec<Box<dyn Send>>>,
}

impl Entry {
    /// Reports the numbers to other threads. Called after each change.
    fn publish(&self) {
        let num_waiting = self.num_sequences - self.num_running;
        self.usage.set(self.num_running, num_waiting, self.number.is_some());
    }
}

impl Adapters {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            max_loaded: limits.max_adapters,
            max_bytes: limits.adapter_bytes,
            entries: BTreeMap::new(),
            free_numbers: (0..limits.max_adapters as u32).rev().collect(),
            bytes: 0,
            num_pinned: 0,
            pinned_bytes: 0,
            num_uses: 0,
            changes: Vec::new(),
            num_overtakes: 0,
            max_overtakes: OVERTAKES * limits.max_num_seqs,
        }
    }

    /// Registers an adapter that takes `bytes` on the device, at most all that there are for adapters.
    pub(super) fn register(
        &mut self,
        id: AdapterId,
        weights: Arc<PackedAdapter>,
        bytes: u64,
        usage: Arc<AdapterUse>,
    ) {
        assert!(self.max_loaded > 0 && bytes <= self.max_bytes, "{id} never fits; this is a bug");
        let entry = Entry {
            weights,
            bytes,
            number: None,
            num_sequences: 0,
            num_running: 0,
            last_use: 0,
            usage,
            closing: None,
        };
        let former = self.entries.insert(id, entry);
        assert!(former.is_none(), "{id} is registered twice; this is a bug");
    }

    /// The registered adapters.
    pub(super) fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.entries.keys().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether sequences can be started with it.
    pub(super) fn is_open(&self, id: AdapterId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.closing.is_none())
    }

    /// Takes no more sequences with an adapter, and removes it when those that there are have ended; `done` is dropped
    /// then.
    pub(super) fn close(&mut self, id: AdapterId, done: Box<dyn Send>) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.closing.get_or_insert_default().push(done);
            self.remove_if_unused(id);
        }
    }

    /// A sequence was added.
    pub(super) fn add_sequence(&mut self, id: AdapterId) {
        let entry = self.entry(id);
        entry.num_sequences += 1;
        entry.publish();
    }

    /// A sequence without a slot has ended.
    pub(super) fn remove_sequence(&mut self, id: AdapterId) {
        let entry = self.entry(id);
        entry.num_sequences -= 1;
        entry.publish();
        self.remove_if_unused(id);
    }

    fn remove_if_unused(&mut self, id: AdapterId) {
        if self.entries[&id].closing.is_some() && self.entries[&id].num_sequences == 0 {
            self.unload(id);
            self.entries.remove(&id);
        }
    }

    /// Whether a sequence with this adapter may get a slot: its adapter is loaded, or is once unused ones make room.
    pub(super) fn has_room(&self, id: AdapterId) -> bool {
        let entry = &self.entries[&id];
        let fits = || self.num_pinned < self.max_loaded && self.pinned_bytes + entry.bytes <= self.max_bytes;
        entry.number.is_some() || fits()
    }

    /// The same if only these adapters were pinned, each given once.
    pub(super) fn would_have_room(&self, id: AdapterId, pinned: impl Iterator<Item = AdapterId>) -> bool {
        let (mut count, mut bytes) = (0, self.entries[&id].bytes);
        for other in pinned.filter(|other| *other != id) {
            count += 1;
            bytes += self.entries[&other].bytes;
        }
        count < self.max_loaded && bytes <= self.max_bytes
    }

    /// A sequence gets a slot; there is room for its adapter.
    pub(super) fn pin(&mut self, id: AdapterId) {
        self.load(id);
        self.num_uses += 1;
        let now = self.num_uses;
        let entry = self.entry(id);
        entry.last_use = now;
        entry.num_running += 1;
        entry.publish();
        if entry.num_running == 1 {
            let bytes = entry.bytes;
            self.num_pinned += 1;
            self.pinned_bytes += bytes;
        }
    }

    /// A sequence has left its slot.
    pub(super) fn unpin(&mut self, id: AdapterId) {
        let entry = self.entry(id);
        entry.num_running -= 1;
        entry.publish();
        if entry.num_running == 0 {
            let bytes = entry.bytes;
            self.num_pinned -= 1;
            self.pinned_bytes -= bytes;
        }
    }

    /// The number of an adapter that is pinned.
    pub(super) fn number(&self, id: AdapterId) -> u32 {
        self.entries[&id].number.expect("a pinned adapter is loaded; this is a bug")
    }

    fn load(&mut self, id: AdapterId) {
        let Entry { weights, bytes, number: None, .. } = &self.entries[&id] else { return };
        let (weights, bytes) = (Arc::clone(weights), *bytes);
        while self.free_numbers.is_empty() || self.bytes + bytes > self.max_bytes {
            let unused =
                self.entries.iter().filter(|(_, entry)| entry.number.is_some() && entry.num_running == 0);
            let oldest = unused.min_by_key(|(_, entry)| entry.last_use).map(|(id, _)| *id);
            self.unload(oldest.expect("there is room for the adapter; this is a bug"));
        }
        let number = self.free_numbers.pop().expect("there is a number; this is a bug");
        let entry = self.entry(id);
        entry.number = Some(number);
        entry.publish();
        self.bytes += bytes;
        self.changes.push(AdapterChange::Load { number, weights });
    }

    fn unload(&mut self, id: AdapterId) {
        let entry = self.entry(id);
        let bytes = entry.bytes;
        if let Some(number) = entry.number.take() {
            entry.publish();
            self.bytes -= bytes;
            self.free_numbers.push(number);
            self.changes.push(AdapterChange::Unload { number });
        }
    }

    fn entry(&mut self, id: AdapterId) -> &mut Entry {
        self.entries.get_mut(&id).expect("an adapter is registered while it is used; this is a bug")
    }

    /// Moves the changes since the last plan to a plan with rows.
    pub(super) fn report_changes(&mut self, changes: &mut Vec<AdapterChange>) {
        changes.append(&mut self.changes);
    }

    /// Whether another sequence may overtake one without room for its adapter.
    pub(super) fn may_overtake(&self) -> bool {
        self.num_overtakes < self.max_overtakes
    }

    /// A sequence was admitted, before another one or as the first.
    pub(super) fn note_admission(&mut self, has_overtaken: bool) {
        self.num_overtakes = if has_overtaken { self.num_overtakes + 1 } else { 0 };
    }

    /// Panics unless the invariants hold for these sequences: their adapters, and whether they have a slot.
    pub(super) fn check_integrity(&self, sequences: impl Iterator<Item = (AdapterId, bool)>) {
        let mut found: BTreeMap<AdapterId, (usize, usize)> = BTreeMap::new();
        for (id, is_running) in sequences {
            let counts = found.entry(id).or_default();
            *counts = (counts.0 + 1, counts.1 + usize::from(is_running));
        }
        let mut numbers = self.free_numbers.clone();
        let (mut bytes, mut num_pinned, mut pinned_bytes) = (0, 0, 0);
        for (id, entry) in &self.entries {
            let counts = (entry.num_sequences, entry.num_running);
            assert_eq!(counts, found.remove(id).unwrap_or_default(), "{id} is miscounted; this is a bug");
            assert!(
                entry.num_sequences > 0 || entry.closing.is_none(),
                "{id} was not removed; this is a bug"
            );
            if let Some(number) = entry.number {
                numbers.push(number);
                bytes += entry.bytes;
            }
            if entry.num_running > 0 {
                assert!(entry.number.is_some(), "{id} is not loaded; this is a bug");
                num_pinned += 1;
                pinned_bytes += entry.bytes;
            }
        }
        assert!(found.is_empty(), "sequences without their adapters; this is a bug: {found:?}");
        numbers.sort_unstable();
        assert!(numbers.into_iter().eq(0..self.max_loaded as u32), "numbers of adapters; this is a bug");
        let counts = (self.bytes, self.num_pinned, self.pinned_bytes);
        assert_eq!(counts, (bytes, num_pinned, pinned_bytes), "adapters are miscounted; this is a bug");
        assert!(bytes <= self.max_bytes, "too many adapters are loaded; this is a bug");
    }
}
