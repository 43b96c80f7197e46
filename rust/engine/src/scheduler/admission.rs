//! Admission of waiting sequences.
//!
//! Sequences are admitted strictly in scheduling order: a sequence does not overtake another that is ready, so a large
//! one is not starved by small ones. The next is admitted when there are a slot and blocks for all its tokens, except
//! those that other sequences share with it through the prefix cache, and a watermark of free blocks stays: one for
//! each running sequence that is still to grow, so that none has to be preempted again at once.
//!
//! The blocks that an admitted sequence loads from the host tier are copied by the next plan, and every row in it waits
//! for them. So a plan with other work loads a bounded number of blocks: a long prefix is staged in the KV cache plan
//! by plan, and its sequence is admitted with the last part. Only swapped blocks are loaded at once.
//!
//! The adapter of an admitted sequence is loaded by the next plan. If the adapters in use leave no room for that of the
//! next sequence, others overtake it, but no adapter keeps another one out: see `adapters`.
//!
//! If slots, blocks or room for the adapter lack, the sequences that lose little are preempted: paused ones of any
//! priority, because their consumers do not read, and then those of lower priority. Then those of a client that has two
//! sequences with a slot more than the client of the waiting one: it has no fewer afterwards, so the preempted ones
//! cannot take the slot back. They are not ended for that; they wait like every preempted sequence. A sequence is
//! paused instead of admitted if its consumer has not read since it was preempted.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::scheduler::Scheduler;
use super::slots::Running;
use crate::kv_cache::{Demand, KvAllocation, LoadLimit};
use crate::request::{CachedTokens, RequestId};
use crate::sequence::SchedulingKey;

/// The place of a running sequence in the order in which sequences yield their slots; the greatest yields first. Paused
/// sequences come first, because they lose nothing by it.
type YieldOrder = (bool, i32, usize, RequestId);

/// The outcome of an attempt to admit a sequence.
enum Admission {
    Admitted,
    /// There is no slot, or too few blocks are available.
    NoRoom,
    /// It could be admitted, but has more to load than one plan may.
    Staging,
}

impl Scheduler {
    /// Admits waiting sequences, in order, until the next has no room.
    pub(super) fn admit(&mut self, mut limit: LoadLimit, now: Instant) {
        self.is_staging = false;
        // The sequence that has room without those that yield to it. Their preemption does not change that.
        let mut fitting = None;
        while let Some(first) = self.queue.next() {
            let key = if self.has_room_for_adapter(first) {
                first
            } else if self.preempt_for_adapter(first, now) {
                continue;
            } else {
                self.queue.get_mut(first).blocked_since.get_or_insert(self.kv.next_step());
                let Some(key) = self.next_admissible() else { break };
                key
            };
            if self.queue.try_pause(key, now) {
                self.queue.release_followers(key);
                continue;
            }
            match self.try_admit(key, limit, now) {
                Admission::Admitted => {
                    limit = LoadLimit::PerPlan;
                    fitting = None;
                }
                Admission::NoRoom if self.preempt_for(key, fitting == Some(key), now) => fitting = Some(key),
                Admission::NoRoom => break,
                Admission::Staging => {
                    self.is_staging = true;
                    break;
                }
            }
        }
        self.admitted_at = self.version();
        self.end_unread(now);
    }

    /// The waiting sequence that is admitted next: the first in scheduling order, or if its adapter has no room, one
    /// that may overtake it.
    pub(super) fn next_admissible(&self) -> Option<SchedulingKey> {
        let first = self.queue.next()?;
        if self.has_room_for_adapter(first) {
            return Some(first);
        }
        let blocked = self.queue.get(first);
        let now = self.kv.next_step();
        let num_steps = now - blocked.blocked_since.unwrap_or(now);
        let waiting = self.queue.adapters().into_iter();
        let overtaking = self.adapters.overtaking(blocked.request.adapter?, num_steps, waiting);
        let adapters: Vec<_> = std::iter::once(None).chain(overtaking.into_iter().map(Some)).collect();
        self.queue.next_with(&adapters)
    }

    fn has_room_for_adapter(&self, key: SchedulingKey) -> bool {
        self.queue.get(key).request.adapter.is_none_or(|id| self.adapters.has_room(id))
    }

    /// Preempts one of the running sequences that yield to a waiting one, if its adapter has room without all of them.
    /// Chooses the adapter first, so that no other one loses sequences in vain: an adapter comes when all its sequences
    /// yield, and is spared if there is room without it.
    fn preempt_for_adapter(&mut self, key: SchedulingKey, now: Instant) -> bool {
        let Some(adapter) = self.queue.get(key).request.adapter else { return false };
        let yielding = self.yielding(key);
        if yielding.is_empty() {
            return false;
        }
        let staying = self.slots.ranked().filter(|(slot, _)| !yielding.contains(slot));
        let staying = staying.filter_map(|(_, running)| running.sequence.request.adapter);
        let staying = BTreeSet::from_iter(staying);
        // With the place in the order of the sequence that yields last, and the slot of the one that yields first.
        let mut adapters = BTreeMap::new();
        for &slot in &yielding {
            let running = self.slots.get(slot);
            let Some(id) = running.sequence.request.adapter.filter(|id| !staying.contains(id)) else {
                continue;
            };
            let order = self.yield_order(running);
            let (last, victim) = adapters.entry(id).or_insert((order, (order, slot)));
            *last = order.min(*last);
            *victim = (order, slot).max(*victim);
        }
        let mut order: Vec<_> = adapters.iter().map(|(id, (last, _))| (*last, *id)).collect();
        order.sort_unstable_by_key(|(last, _)| Reverse(*last));
        let order = order.into_iter().map(|(_, id)| id);
        let Some(chosen) = self.adapters.last_before_room(adapter, order) else { return false };
        let (_, (_, victim)) = adapters[&chosen];
        self.preempt(victim, now);
        true
    }

    /// The slots of the running sequences that yield to a waiting one. The first ones of each client stay.
    fn yielding(&self, key: SchedulingKey) -> BTreeSet<u32> {
        let max_running = self.queue.clients.num_running(self.queue.get(key)) + 1;
        let (mut yielding, mut staying) = (BTreeSet::new(), BTreeMap::new());
        for (slot, Running { sequence, .. }) in self.slots.ranked() {
            let num_staying = staying.entry(sequence.request.client).or_insert(0);
            let yields = match sequence.key.priority.cmp(&key.priority) {
                Ordering::Less => false,
                Ordering::Equal => *num_staying >= max_running,
                Ordering::Greater => true,
            };
            if yields || sequence.is_paused() {
                yielding.insert(slot);
            } else {
                *num_staying += 1;
            }
        }
        yielding
    }

    fn yield_order(&self, running: &Running) -> YieldOrder {
        let Running { sequence, .. } = running;
        let SchedulingKey { priority, id } = sequence.key;
        (sequence.is_paused(), priority, self.queue.clients.num_running(sequence), id)
    }

    fn try_admit(&mut self, key: SchedulingKey, limit: LoadLimit, now: Instant) -> Admission {
        if !self.slots.has_free() {
            return Admission::NoRoom;
        }
        let demand = self.demand(key, |_| true);
        let sequence = self.queue.get_mut(key);
        let num_reusable = sequence.num_reusable();
        if !self.kv.could_allocate(&demand, sequence.chain(), num_reusable) {
            return Admission::NoRoom;
        }
        let (chain, tokens) = sequence.contents();
        let hit = self.kv.match_prefix(chain, tokens, num_reusable, now);
        let cached = hit.cached();
        let (table, num_computed) = match self.kv.allocate(hit, &mut sequence.swapped, &demand, limit, now) {
            KvAllocation::Allocated(table, num_computed) => (table, num_computed),
            KvAllocation::Staged(num_tokens) => {
                sequence.num_staged += num_tokens;
                return Admission::Staging;
            }
            KvAllocation::OutOfBlocks => return Admission::NoRoom,
        };
        let mut sequence = self.queue.remove(key).expect("it was just found; this is a bug");
        if let Some(adapter) = sequence.request.adapter {
            self.adapters.pin(adapter);
        }
        // Staged tokens were found on the host, unless they were evicted meanwhile.
        let staged = std::mem::take(&mut sequence.num_staged).min(cached.device);
        let cached = CachedTokens { device: cached.device - staged, host: cached.host + staged };
        let uses_prefix_cache = sequence.uses_prefix_cache();
        if sequence.enter_slot(num_computed, cached) && uses_prefix_cache {
            self.counters.prefix_query_tokens += sequence.request.prompt.len() as u64;
            self.counters.prefix_hit_tokens += (cached.device + cached.host) as u64;
            self.counters.prefix_host_hit_tokens += cached.host as u64;
        }
        self.queue.clients.enter_slot(&sequence);
        self.slots.insert(Running { sequence, table, num_scheduled: 0 });
        Admission::Admitted
    }

    /// The demand of a waiting sequence, beside the running ones that stay.
    fn demand(&self, key: SchedulingKey, stays: impl Fn(u32) -> bool) -> Demand {
        let may_grow = |(slot, running): &(u32, &Running)| {
            self.kv.may_grow(&running.table, running.sequence.max_kv_tokens) && stays(*slot)
        };
        let sequence = self.queue.get(key);
        Demand {
            num_tokens: sequence.num_tokens(),
            max_tokens: sequence.max_kv_tokens,
            watermark: self.slots.ranked().filter(may_grow).count(),
        }
    }

    /// Preempts one of the running sequences that yield to a waiting one, if there is room for it without all of them:
    /// if it `fits`, which is known since the last preemption for it.
    fn preempt_for(&mut self, key: SchedulingKey, fits: bool, now: Instant) -> bool {
        let yielding = self.yielding(key);
        let running = yielding.iter().map(|slot| (*slot, self.slots.get(*slot)));
        let Some((victim, _)) = running.clone().max_by_key(|(_, running)| self.yield_order(running)) else {
            return false;
        };
        let demand = self.demand(key, |slot| !yielding.contains(&slot));
        let tables = running.map(|(_, running)| &running.table);
        if !fits && !self.kv.could_allocate_without(&demand, tables) {
            return false;
        }
        self.preempt(victim, now);
        true
    }
}
