//! The adapters of an engine: those that are registered, those on the device, and those in use.
//!
//! An adapter is pinned while a sequence with it has a slot. It stays on the device afterwards until its room is
//! needed; then the least recently used one goes first. The device makes the changes in plan order, before
//! the rows of the plan: so a row always finds its adapter, and never another one in its place. A step that fails
//! before its changes are made stops the engine.
//!
//! If the adapter of the first waiting sequence has no room, sequences without an adapter overtake it, and sequences
//! with adapters that are loaded or have room. After [`OVERTAKING_STEPS`], only those adapters take more sequences that
//! leave room for it: the most recently used of the pinned ones, and others that fit beside them. The adapter has room
//! when the open sequences of the other pinned adapters have ended.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use penstock_types::PackedAdapter;

use crate::limits::Limits;
use crate::message::{AdapterError, NewAdapter};
use crate::request::{AdapterId, AdapterUse};
use crate::sequence::SchedulingKey;
use crate::step::AdapterChange;

/// The number of steps for which all adapters with room take more sequences although a sequence waits without room. Not
/// 0, so that a loaded adapter computes many sequences; not more than a part of an output, so that the wait is short.
const OVERTAKING_STEPS: u64 = 64;

/// The values that are dropped to report that an adapter was removed.
pub(super) type Removed = Vec<Box<dyn Send>>;

/// All adapters.
///
/// Invariants: an entry has the number at which it is in `loaded`; `bytes`, `num_pinned` and `pinned_bytes` are those
/// of the loaded entries and of the entries with running sequences, all of which are loaded; `num_counted` entries
/// count towards the limit; `registered_bytes` are those of all entries.
pub(super) struct Adapters {
    max_bytes: u64,
    /// The most entries that count. All entries are at most twice as many.
    max_registered: usize,
    num_counted: usize,
    max_registered_bytes: u64,
    registered_bytes: u64,
    entries: BTreeMap<AdapterId, Entry>,
    /// The adapter under each number of the device, if there is one.
    loaded: Vec<Option<AdapterId>>,
    /// Bytes on the device.
    bytes: u64,
    num_pinned: usize,
    pinned_bytes: u64,
    num_uses: u64,
    /// The number of adapters that plans have loaded.
    num_loads: u64,
    num_evictions: u64,
    /// The changes since the last plan. There are at most two for each number: an adapter that is unloaded before a
    /// plan was never loaded.
    changes: Vec<AdapterChange>,
}

struct Entry {
    weights: Arc<PackedAdapter>,
    /// Bytes on the device.
    bytes: u64,
    /// Its number on the device.
    number: Option<u32>,
    /// The sequences with the adapter that wait or run.
    sequences: BTreeSet<SchedulingKey>,
    /// Sequences that have a slot.
    num_running: usize,
    /// The callers that hold the adapter, because they start its requests one after another.
    num_holds: usize,
    /// The value of `num_uses` when a sequence with it last got a slot, or the last one left its slot.
    last_use: u64,
    /// The numbers that other threads read.
    usage: Arc<AdapterUse>,
    /// Whether another adapter was registered in its place.
    is_replaced: bool,
    /// Set if it takes no more sequences, unless it is held.
    closing: Option<Removed>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.usage.note_removal();
    }
}

impl Entry {
    /// Whether it counts towards the limit.
    fn is_counted(&self) -> bool {
        self.closing.is_none() && !self.is_replaced
    }

    /// Reports the numbers to other threads. Called after each change.
    fn publish(&self) {
        let num_waiting = self.sequences.len() - self.num_running;
        self.usage.set(self.num_running, num_waiting, self.number.is_some());
    }
}

impl Adapters {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            max_bytes: limits.adapter_bytes,
            max_registered: limits.max_registered_adapters,
            num_counted: 0,
            max_registered_bytes: limits.max_registered_bytes,
            registered_bytes: 0,
            entries: BTreeMap::new(),
            loaded: vec![None; limits.max_adapters],
            bytes: 0,
            num_pinned: 0,
            pinned_bytes: 0,
            num_uses: 0,
            num_loads: 0,
            num_evictions: 0,
            changes: Vec::new(),
        }
    }

    /// Registers an adapter. Loading has checked that it fits into the memory for adapters.
    pub(super) fn register(&mut self, adapter: NewAdapter) -> Result<(), AdapterError> {
        let NewAdapter { id, weights, bytes, usage, replaces, name: _ } = adapter;
        assert!(!self.loaded.is_empty() && bytes <= self.max_bytes, "{id} never fits; this is a bug");
        let is_counted = |id: &AdapterId| self.entries.get(id).is_some_and(Entry::is_counted);
        let replaced = replaces.filter(is_counted);
        let num_others = self.num_counted - usize::from(replaced.is_some());
        let limit = self.max_registered;
        if num_others >= limit || self.entries.len() >= limit.saturating_mul(2) {
            let (loaded, closing) = (self.num_counted, self.entries.len() - self.num_counted);
            return Err(AdapterError::TooMany { loaded, closing, limit });
        }
        let (registered, limit) = (self.registered_bytes, self.max_registered_bytes);
        if bytes > limit.saturating_sub(registered) {
            return Err(AdapterError::TooManyBytes { bytes, registered, limit });
        }
        self.registered_bytes += bytes;
        if let Some(replaced) = replaced {
            self.entry(replaced).is_replaced = true;
        }
        self.num_counted = num_others + 1;
        let entry = Entry {
            weights,
            bytes,
            number: None,
            sequences: BTreeSet::new(),
            num_running: 0,
            num_holds: 0,
            last_use: 0,
            usage,
            is_replaced: false,
            closing: None,
        };
        let former = self.entries.insert(id, entry);
        assert!(former.is_none(), "{id} is registered twice; this is a bug");
        Ok(())
    }

    /// The registered adapters.
    pub(super) fn ids(&self) -> impl Iterator<Item = AdapterId> {
        self.entries.keys().copied()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The adapters that plans have put on the device.
    pub(super) fn num_loads(&self) -> u64 {
        self.num_loads
    }

    /// The adapters that plans have put on the device, and that others replaced.
    pub(super) fn num_evictions(&self) -> u64 {
        self.num_evictions
    }

    /// The adapters that count towards the limit.
    pub(super) fn num_counted(&self) -> usize {
        self.num_counted
    }

    /// Whether sequences can be started with it.
    pub(super) fn is_open(&self, id: AdapterId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.closing.is_none() || entry.num_holds > 0)
    }

    /// Takes no more sequences with an adapter, unless it is held; `ignore_holds` ends that. It is removed when the
    /// open ones have ended, and `done` is returned with it. May be called several times.
    #[must_use]
    pub(super) fn close(
        &mut self,
        id: AdapterId,
        done: Box<dyn Send>,
        ignore_holds: bool,
    ) -> Option<Removed> {
        let entry = self.entries.get_mut(&id)?;
        self.num_counted -= usize::from(entry.is_counted());
        entry.closing.get_or_insert_default().push(done);
        if ignore_holds {
            entry.num_holds = 0;
        }
        self.remove_if_unused(id)
    }

    /// Keeps an adapter, and lets sequences with it start, until it is released. Without effect on a removed one.
    pub(super) fn hold(&mut self, id: AdapterId) {
        if let Some(entry) = self.entries.get_mut(&id) {
            entry.num_holds += 1;
        }
    }

    /// Ends a hold. Without effect on an adapter that was removed, as `close` can do with a held one.
    #[must_use]
    pub(super) fn release(&mut self, id: AdapterId) -> Option<Removed> {
        let entry = self.entries.get_mut(&id)?;
        entry.num_holds -= 1;
        self.remove_if_unused(id)
    }

    /// Adds a sequence with the adapter.
    pub(super) fn add_sequence(&mut self, id: AdapterId, key: SchedulingKey) {
        let entry = self.entry(id);
        entry.sequences.insert(key);
        entry.publish();
    }

    /// Removes a sequence that has ended without a slot.
    #[must_use]
    pub(super) fn remove_sequence(&mut self, id: AdapterId, key: SchedulingKey) -> Option<Removed> {
        let entry = self.entry(id);
        entry.sequences.remove(&key);
        entry.publish();
        self.remove_if_unused(id)
    }

    /// The last sequence with an adapter in scheduling order: a follower comes after its leader.
    pub(super) fn last_sequence(&self, id: AdapterId) -> Option<SchedulingKey> {
        self.entries.get(&id)?.sequences.last().copied()
    }

    fn remove_if_unused(&mut self, id: AdapterId) -> Option<Removed> {
        let Entry { closing, sequences, num_holds, .. } = &self.entries[&id];
        if closing.is_none() || !sequences.is_empty() || *num_holds > 0 {
            return None;
        }
        self.unload(id);
        let mut entry = self.entries.remove(&id)?;
        self.registered_bytes -= entry.bytes;
        entry.closing.take()
    }

    /// Whether a sequence with this adapter may get a slot: its adapter is loaded, or is once unused ones make room.
    pub(super) fn has_room(&self, id: AdapterId) -> bool {
        let entry = &self.entries[&id];
        entry.number.is_some() || self.fit(self.num_pinned + 1, self.pinned_bytes + entry.bytes)
    }

    fn fit(&self, count: usize, bytes: u64) -> bool {
        count <= self.loaded.len() && bytes <= self.max_bytes
    }

    /// The first of these pinned adapters after which there is room for `id`, if they lose their sequences in this
    /// order.
    pub(super) fn last_before_room(
        &self,
        id: AdapterId,
        mut pinned: impl Iterator<Item = AdapterId>,
    ) -> Option<AdapterId> {
        let (mut count, mut bytes) = (self.num_pinned + 1, self.pinned_bytes + self.entries[&id].bytes);
        pinned.find(|other| {
            count -= 1;
            bytes -= self.entries[other].bytes;
            self.fit(count, bytes)
        })
    }

    /// The adapters with which sequences may overtake one that has waited for room for `blocked` for `num_steps`: the
    /// adapters of waiting sequences that have room, and later only those that also leave room for `blocked`.
    pub(super) fn overtaking(
        &self,
        blocked: AdapterId,
        num_steps: u64,
        waiting: impl Iterator<Item = AdapterId>,
    ) -> Vec<AdapterId> {
        let loaded = self.loaded.iter().flatten().copied();
        // If as many are pinned as there may be, only these have room.
        let candidates: Vec<_> = match self.num_pinned < self.loaded.len() {
            true => waiting.filter(|id| self.has_room(*id)).collect(),
            false => loaded.clone().collect(),
        };
        if num_steps < OVERTAKING_STEPS {
            return candidates;
        }
        let is_pinned = |id: &AdapterId| self.entries[id].num_running > 0;
        let mut pinned: Vec<_> = loaded.filter(is_pinned).collect();
        pinned.sort_unstable_by_key(|id| Reverse(self.entries[id].last_use));
        let (mut staying, mut bytes) = (vec![], self.entries[&blocked].bytes);
        // The adapters that stay are used again and the others are not, so their order does not change.
        for id in pinned {
            let with_it = bytes + self.entries[&id].bytes;
            if !self.fit(staying.len() + 2, with_it) {
                break;
            }
            staying.push(id);
            bytes = with_it;
        }
        let count = staying.len() + 2;
        let leaves_room = |id: &AdapterId| self.fit(count, bytes + self.entries[id].bytes);
        staying.extend(candidates.into_iter().filter(|id| !is_pinned(id) && leaves_room(id)));
        staying
    }

    /// Pins the adapter of a sequence that gets a slot. There is room for it.
    pub(super) fn pin(&mut self, id: AdapterId) {
        self.load(id);
        self.use_now(id);
        let entry = self.entry(id);
        entry.num_running += 1;
        entry.publish();
        if entry.num_running == 1 {
            let bytes = entry.bytes;
            self.num_pinned += 1;
            self.pinned_bytes += bytes;
        }
    }

    /// Unpins the adapter of a sequence that has left its slot.
    pub(super) fn unpin(&mut self, id: AdapterId) {
        let entry = self.entry(id);
        entry.num_running -= 1;
        entry.publish();
        if entry.num_running == 0 {
            let bytes = entry.bytes;
            self.num_pinned -= 1;
            self.pinned_bytes -= bytes;
            self.use_now(id);
        }
    }

    fn use_now(&mut self, id: AdapterId) {
        self.num_uses += 1;
        self.entry(id).last_use = self.num_uses;
    }

    /// The number of an adapter that is pinned.
    pub(super) fn number(&self, id: AdapterId) -> u32 {
        self.entries[&id].number.expect("a pinned adapter is loaded; this is a bug")
    }

    fn load(&mut self, id: AdapterId) {
        let Entry { weights, bytes, number: None, .. } = &self.entries[&id] else { return };
        let (weights, bytes) = (Arc::clone(weights), *bytes);
        let index = loop {
            let free = self.loaded.iter().position(Option::is_none);
            match free.filter(|_| self.bytes + bytes <= self.max_bytes) {
                Some(index) => break index,
                None => self.num_evictions += u64::from(self.unload(self.least_recently_used())),
            }
        };
        let number = index as u32;
        self.loaded[index] = Some(id);
        let entry = self.entry(id);
        entry.number = Some(number);
        entry.publish();
        self.bytes += bytes;
        self.changes.push(AdapterChange::Load { number, weights });
    }

    /// The loaded adapter that is replaced next; it is not pinned.
    fn least_recently_used(&self) -> AdapterId {
        let loaded = self.loaded.iter().flatten().map(|id| (*id, &self.entries[id]));
        let unused = loaded.filter(|(_, entry)| entry.num_running == 0);
        unused
            .min_by_key(|(_, entry)| entry.last_use)
            .expect("there is room for the adapter; this is a bug")
            .0
    }

    /// Frees the number of an adapter. Returns whether a plan has put the adapter on the device.
    fn unload(&mut self, id: AdapterId) -> bool {
        let entry = self.entry(id);
        let bytes = entry.bytes;
        let Some(number) = entry.number.take() else { return false };
        entry.publish();
        self.bytes -= bytes;
        self.loaded[number as usize] = None;
        let is_load = |change: &AdapterChange| match change {
            AdapterChange::Load { number: loaded, .. } => *loaded == number,
            AdapterChange::Unload { .. } => false,
        };
        let planned = self.changes.iter().position(is_load);
        match planned {
            Some(load) => drop(self.changes.remove(load)),
            None => self.changes.push(AdapterChange::Unload { number }),
        }
        planned.is_none()
    }

    fn entry(&mut self, id: AdapterId) -> &mut Entry {
        self.entries.get_mut(&id).expect("an adapter is registered while it is used; this is a bug")
    }

    /// Moves the changes since the last plan to a plan with rows.
    pub(super) fn report_changes(&mut self, changes: &mut Vec<AdapterChange>) {
        let loads = self.changes.iter().filter(|change| matches!(change, AdapterChange::Load { .. }));
        self.num_loads += loads.count() as u64;
        changes.append(&mut self.changes);
    }

    /// Panics unless the invariants hold for these sequences: their adapters, their keys, and whether they have a slot.
    pub(super) fn check_integrity(&self, sequences: impl Iterator<Item = (AdapterId, SchedulingKey, bool)>) {
        let mut found: BTreeMap<AdapterId, (BTreeSet<SchedulingKey>, usize)> = BTreeMap::new();
        for (id, key, is_running) in sequences {
            let (keys, num_running) = found.entry(id).or_default();
            keys.insert(key);
            *num_running += usize::from(is_running);
        }
        let num_counted = self.entries.values().filter(|entry| entry.is_counted()).count();
        assert_eq!(self.num_counted, num_counted, "adapters are miscounted; this is a bug");
        assert!(num_counted <= self.max_registered, "too many adapters are registered; this is a bug");
        let registered: u64 = self.entries.values().map(|entry| entry.bytes).sum();
        assert_eq!(self.registered_bytes, registered, "adapters are miscounted; this is a bug");
        assert!(registered <= self.max_registered_bytes, "adapters take too many bytes; this is a bug");
        let (mut num_loaded, mut bytes, mut num_pinned, mut pinned_bytes) = (0, 0, 0, 0);
        for (id, entry) in &self.entries {
            let (keys, num_running) = found.remove(id).unwrap_or_default();
            assert!(
                entry.sequences == keys && entry.num_running == num_running,
                "{id} is miscounted; this is a bug"
            );
            let is_used = entry.closing.is_none() || !keys.is_empty() || entry.num_holds > 0;
            assert!(is_used, "{id} was not removed; this is a bug");
            if let Some(number) = entry.number {
                assert_eq!(self.loaded[number as usize], Some(*id), "numbers of adapters; this is a bug");
                num_loaded += 1;
                bytes += entry.bytes;
            }
            if num_running > 0 {
                assert!(entry.number.is_some(), "{id} is not loaded; this is a bug");
                num_pinned += 1;
                pinned_bytes += entry.bytes;
            }
        }
        assert!(found.is_empty(), "sequences without their adapters; this is a bug: {found:?}");
        assert_eq!(self.loaded.iter().flatten().count(), num_loaded, "numbers of adapters; this is a bug");
        let counts = (self.bytes, self.num_pinned, self.pinned_bytes);
        assert_eq!(counts, (bytes, num_pinned, pinned_bytes), "adapters are miscounted; this is a bug");
        assert!(bytes <= self.max_bytes, "too many adapters are loaded; this is a bug");
        assert!(self.changes.len() <= 2 * self.loaded.len(), "too many changes of adapters; this is a bug");
    }
}
