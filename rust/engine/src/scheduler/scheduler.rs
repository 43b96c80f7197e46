//! [`Scheduler`]: the interface of the scheduler to the engine core.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use penstock_types::{PreemptionMode, PreemptionVictim};

use super::adapters::{Adapters, Removed};
use super::budget::TokenBudget;
use super::clients::lane_of;
use super::queue::WaitingQueue;
use super::rows::RowPlanner;
use super::slots::{Running, Slots};
use crate::kv_cache::{KvCacheManager, LoadLimit, SwappedBlocks};
use crate::kv_events::KvFeedWriter;
#[cfg(feature = "testing")]
use crate::kv_events::{KvNamespace, KvTier};
use crate::limits::Limits;
use crate::message::{AdapterError, NewAdapter};
use crate::prefix_cache::{BlockHasher, Namespace};
use crate::request::{AdapterId, ClientId, FinishReason, Overload, Rejection};
use crate::sequence::{ComputedTokens, SchedulingKey, Sequence};
use crate::stats::Counters;
use crate::step::{ScheduledRow, StepPlan};

/// Owns every sequence and every block.
///
/// Invariants: those of its parts; the block tables of running sequences are all tables there are; the next waiting
/// sequence lacks a slot or blocks, unless `admission_is_due` or `is_staging`.
pub struct Scheduler {
    pub(super) max_waiting: usize,
    pub(super) max_unfinished: usize,
    pub(super) max_paused: usize,
    pub(super) preemption_mode: PreemptionMode,
    pub(super) preemption_victim: PreemptionVictim,
    pub(super) kv: KvCacheManager,
    pub(super) slots: Slots,
    pub(super) adapters: Adapters,
    pub(super) queue: WaitingQueue,
    /// [`version`](Self::version) after the last attempt to admit a waiting sequence.
    pub(super) admitted_at: u64,
    /// Whether the next waiting sequence has more to load from the host tier than one plan may: the next plan
    /// continues.
    pub(super) is_staging: bool,
    /// Sequences that were ended by the scheduler; the core sends their last events.
    pub(super) ended: Vec<(Sequence, FinishReason)>,
    /// Adapters that were removed; the core reports them.
    pub(super) removed: Vec<Removed>,
    /// The counters of the engine; its gauges are zero here.
    pub(crate) counters: Counters,
    budget: TokenBudget,
    rows: RowPlanner,
}

impl Scheduler {
    /// A scheduler without sequences. `limits` have been validated.
    pub(crate) fn new(limits: &Limits, hasher: BlockHasher) -> Self {
        Self {
            max_waiting: limits.max_waiting,
            max_unfinished: limits.max_unfinished,
            max_paused: limits.max_paused,
            preemption_mode: limits.preemption_mode,
            preemption_victim: limits.preemption_victim,
            kv: KvCacheManager::new(limits, hasher),
            slots: Slots::new(limits.max_num_seqs),
            adapters: Adapters::new(limits),
            queue: WaitingQueue::default(),
            admitted_at: 0,
            is_staging: false,
            ended: Vec::new(),
            removed: Vec::new(),
            counters: Counters::default(),
            budget: TokenBudget::new(limits),
            rows: RowPlanner::new(limits.num_speculative_tokens),
        }
    }

    /// Adds a new request, which runs at once if it can and waits otherwise. If the queue is full, or it cannot end
    /// before its deadline, it is rejected: returned, with the bound that it would exceed.
    #[must_use]
    pub(crate) fn enqueue(&mut self, mut sequence: Sequence, now: Instant) -> Option<(Sequence, Rejection)> {
        let (key, client) = (sequence.key, sequence.request.client);
        if self.has_too_many_descheduled(client) {
            let (waiting, limit) = (self.num_with_descheduled(), self.max_with_descheduled(client));
            return Some((sequence, Rejection::TooManyPreempted { waiting, limit }));
        }
        let limit = self.max_new(client);
        sequence.prefix_hashes = self.queue.backlog.prefix_hashes(&sequence.request);
        let max_common = self.queue.backlog.max_common(&sequence.prefix_hashes);
        let deadline = sequence.request.deadline;
        self.add(&sequence);
        self.queue.push_new(sequence);
        // If another one waits before it, it cannot run either, unless it may overtake it.
        let may_run = || self.queue.next() == Some(key) || self.next_admissible() == Some(key);
        if self.admission_is_due() || may_run() {
            self.admit(LoadLimit::PerPlan, now);
        }
        // Then no new request was admitted, so it is still in the queue.
        let is_rejected = self.queue.num_new() > limit;
        if let Some(sequence) = is_rejected.then(|| self.remove_waiting(key)).flatten() {
            return Some((sequence, Rejection::Overloaded { waiting: self.queue.num_new(), limit }));
        }
        self.check_deadline(key, deadline?, max_common, now)
    }

    /// Rejects a new request if it waits and cannot end before its deadline; counts its tokens otherwise. At most the
    /// first `max_common` tokens of its prompt are brought by other requests.
    fn check_deadline(
        &mut self,
        key: SchedulingKey,
        deadline: Instant,
        max_common: usize,
        now: Instant,
    ) -> Option<(Sequence, Rejection)> {
        let sequence = self.queue.find_new(key)?;
        let (lane, num_reusable) = (lane_of(sequence), sequence.num_reusable());
        let num_prompt = sequence.request.prompt.len();
        let (chain, tokens) = sequence.contents();
        let mut num_cached = 0;
        if chain.max_blocks() > 0 {
            let cached = self.kv.match_prefix(chain, tokens, num_reusable, now).cached();
            num_cached = max_common.min(num_reusable).max(cached.device + cached.host);
            num_cached -= num_cached % self.kv.block_size();
        }
        let num_tokens = (num_prompt - num_cached) as u32;
        let num_others = self.slots.len() - 1;
        let least = self.queue.backlog.least_time(lane, key.priority, num_tokens, num_others);
        let left = deadline.saturating_duration_since(now);
        if let Some(least) = least.filter(|least| *least > left) {
            let sequence = self.remove_waiting(key)?;
            return Some((sequence, Rejection::TooLate { least, left }));
        }
        self.queue.count_tokens(key, num_tokens);
        None
    }

    /// Notes that a step has computed `num_tokens` tokens, and that its outputs were delivered.
    pub(crate) fn step_done(&mut self, num_tokens: u64, now: Instant) {
        let is_idle = self.slots.num_running() == 0 && self.queue.len() == 0;
        let is_full = num_tokens >= self.budget.total() as u64;
        self.queue.backlog.step_done(num_tokens, is_full, is_idle, now);
    }

    /// The bounds for which new requests of clients with sequences would be rejected, unless they are so urgent that
    /// they run at once.
    pub(crate) fn overloads(&self) -> impl Iterator<Item = (Option<ClientId>, Overload)> {
        let has_room = self.num_unpaused() < self.max_unfinished
            && self.queue.num_new() < self.max_waiting.max(1)
            && self.num_with_descheduled() < self.max_waiting.saturating_add(self.slots.len());
        let clients = (!has_room).then(|| self.queue.clients.ids()).into_iter().flatten();
        clients.filter_map(|client| Some((client, self.overload(client)?)))
    }

    fn overload(&self, client: Option<ClientId>) -> Option<Overload> {
        if self.num_unpaused() >= self.max_unfinished(client, 1) {
            return Some(Overload::Unfinished);
        }
        let is_full = self.queue.num_new() >= self.max_new(client).max(1);
        (is_full || self.has_too_many_descheduled(client)).then_some(Overload::Waiting)
    }

    /// The bound on sequences that wait or run, without the paused ones, for a client that adds some.
    pub(crate) fn max_unfinished(&self, client: Option<ClientId>, num_added: usize) -> usize {
        self.queue.clients.max_unfinished(client, num_added, self.max_unfinished)
    }

    /// The bound on requests that were never scheduled, for another one of a client.
    fn max_new(&self, client: Option<ClientId>) -> usize {
        self.queue.clients.max_new(client, 1, self.max_waiting)
    }

    /// Preempted sequences count only if there are very many: requests of ever higher priority would pile them up.
    /// Paused ones do not count: they have a bound of their own.
    fn has_too_many_descheduled(&self, client: Option<ClientId>) -> bool {
        self.num_with_descheduled() >= self.max_with_descheduled(client)
    }

    fn num_with_descheduled(&self) -> usize {
        self.queue.num_new() + self.queue.num_descheduled()
    }

    fn max_with_descheduled(&self, client: Option<ClientId>) -> usize {
        self.max_new(client).saturating_add(self.slots.len())
    }

    /// Adds another choice for the prompt of a request whose first choice was not rejected. It waits for the first if
    /// it can reuse a block of it.
    pub(crate) fn add_choice(&mut self, sequence: Sequence) {
        self.add(&sequence);
        if sequence.uses_prefix_cache() && self.kv.can_share(sequence.num_reusable()) {
            self.queue.push_follower(sequence);
        } else {
            self.queue.push_preempted(sequence);
        }
    }

    /// Lets the followers of `leader` run, which has computed its prompt.
    pub(crate) fn release_followers(&mut self, leader: SchedulingKey) {
        self.queue.release_followers(leader);
    }

    /// Makes a follower the leader in place of a sequence that was taken out, if some still wait for its prompt.
    pub(crate) fn replace_leader(&mut self, sequence: &Sequence) {
        if !sequence.is_follower {
            self.queue.promote_follower(sequence.key);
        }
    }

    /// Fills an empty plan with the rows of the next step, and `owners` with their sequences. The plan stays empty if
    /// nothing can be computed now; copies and freed slots then wait for a plan with rows.
    pub(crate) fn plan(
        &mut self,
        plan: &mut StepPlan,
        owners: &mut Vec<Option<SchedulingKey>>,
        now: Instant,
    ) {
        self.schedule_tokens(now);
        let mut is_due = self.admission_is_due() || self.is_staging;
        while is_due {
            self.admit(if self.has_work() { LoadLimit::PerPlan } else { LoadLimit::None }, now);
            self.schedule_tokens(now); // newly admitted sequences may pause at once, which makes room for others
            // If the sequences with work were preempted, the plan has time to load all.
            is_due = self.admission_is_due() || self.is_staging && !self.has_work();
        }
        self.make_room(now);
        let budget = self.budget.remaining(&self.slots);
        self.rows.add_rows(&mut self.slots, &mut self.kv, budget, plan, owners, now);
        if !plan.rows.is_empty() {
            self.assign_adapters(plan, owners);
            self.adapters.report_changes(&mut plan.adapter_changes);
            self.kv.begin_step(plan);
            self.slots.report_freed(plan);
        }
    }

    /// Gives each row the number of its adapter, and makes the rows of an adapter adjacent.
    fn assign_adapters(&self, plan: &mut StepPlan, owners: &mut [Option<SchedulingKey>]) {
        if self.adapters.len() == 0 {
            return;
        }
        for row in &mut plan.rows {
            let request = &self.slots.get(row.slot).sequence.request;
            row.adapter = request.adapter.map(|id| self.adapters.number(id));
        }
        if !plan.rows.is_sorted_by_key(|row| row.adapter) {
            plan.rows.sort_unstable_by_key(|row| (row.adapter, row.slot));
            for (row, owner) in plan.rows.iter().zip(owners) {
                *owner = Some(self.slots.get(row.slot).sequence.key);
            }
        }
    }

    /// Whether plans are made one at a time because a sequence drafts; see `rows`.
    pub(crate) fn is_drafting(&self) -> bool {
        self.rows.is_drafting(&self.slots)
    }

    /// Distributes the token budget. No sequence waits for a leader that pauses.
    fn schedule_tokens(&mut self, now: Instant) {
        self.skip_computed(now);
        let num_paused = self.slots.num_paused();
        self.budget.distribute(&mut self.slots, &self.queue.clients, &self.kv, now);
        if self.slots.num_paused() > num_paused {
            for Running { sequence, .. } in self.slots.iter().filter(|running| running.sequence.is_paused()) {
                self.queue.release_followers(sequence.key);
            }
        }
        self.end_unread(now);
    }

    /// Lets sequences skip the next tokens of their prompts that others have computed since they got their slots.
    fn skip_computed(&mut self, now: Instant) {
        for Running { sequence, table, .. } in self.slots.iter_mut() {
            if sequence.may_skip() {
                let num_reusable = sequence.num_reusable();
                let (chain, tokens) = sequence.contents();
                let num_tokens = self.kv.extend(table, chain, tokens, num_reusable, now);
                let num_found = sequence.skip(num_tokens);
                self.counters.prefix_hit_tokens += num_found as u64;
            }
        }
    }

    /// Ends sequences while more than `max_paused` are paused: of the client with the most, the one that has been
    /// paused for longest.
    pub(super) fn end_unread(&mut self, now: Instant) {
        while self.num_paused() > self.max_paused {
            let running = self.slots.iter().map(|running| &running.sequence);
            let paused = running.filter(|sequence| sequence.is_paused()).chain(self.queue.paused());
            let mut num_paused = BTreeMap::<Option<ClientId>, usize>::new();
            for sequence in paused.clone() {
                *num_paused.entry(sequence.request.client).or_default() += 1;
            }
            let order = |sequence: &&Sequence| {
                (Reverse(num_paused[&sequence.request.client]), sequence.pause_order())
            };
            let victim = paused.min_by_key(order).map(|sequence| sequence.key);
            let sequence = victim.and_then(|key| self.remove(key, now));
            let sequence = sequence.expect("some are paused; this is a bug");
            self.ended.push((sequence, FinishReason::Unread));
        }
    }

    pub(super) fn num_paused(&self) -> usize {
        self.slots.num_paused() + self.queue.num_paused()
    }

    /// The sequence of a row in flight, unless it has ended. It may have been preempted meanwhile; it is not scheduled
    /// again before the row is done.
    pub(crate) fn find(&mut self, slot: u32, key: SchedulingKey) -> Option<&mut Sequence> {
        let running = self.slots.find(slot, key).map(|running| &mut running.sequence);
        running.or_else(|| self.queue.find(key))
    }

    /// Accounts for a row that was computed, after its outputs were delivered, and publishes its full blocks if the
    /// sequence still runs. If it is deferred, rows of the sequence in flight are to be ignored.
    pub(crate) fn row_computed(
        &mut self,
        row: &ScheduledRow,
        is_deferred: bool,
        key: SchedulingKey,
        now: Instant,
    ) -> ComputedTokens {
        if let Some(Running { sequence, table, .. }) = self.slots.find(row.slot, key) {
            let computed = sequence.row_computed(row, is_deferred);
            if row.num_drafts > 0 || is_deferred {
                self.kv.shrink(table, sequence.num_planned());
            }
            let (chain, tokens) = sequence.contents();
            self.kv.publish(table, chain, tokens, computed.end, now);
            return computed;
        }
        let sequence = self.queue.find(key).expect("a computed row has a sequence; this is a bug");
        let computed = sequence.row_computed(row, is_deferred);
        if let Some(swapped) = sequence.swapped.take_if(|_| is_deferred) {
            self.kv.discard(swapped); // it has positions of the discarded rows
        }
        if sequence.has_no_rows_in_flight() {
            self.queue.note_change();
        }
        computed
    }

    /// Takes out the sequence of a row, unless it has ended, and frees its slot and blocks. They are not given to
    /// another sequence before the next plan: the step may have more rows to deliver.
    pub(crate) fn finish(&mut self, slot: u32, key: SchedulingKey, now: Instant) -> Option<Sequence> {
        match self.slots.find(slot, key) {
            Some(_) => Some(self.deschedule(slot, now)),
            None => self.remove_waiting(key),
        }
    }

    /// Takes a sequence out, unless it has ended.
    fn remove(&mut self, key: SchedulingKey, now: Instant) -> Option<Sequence> {
        match self.slots.slot_of(key) {
            Some(slot) => Some(self.deschedule(slot, now)),
            None => self.remove_waiting(key),
        }
    }

    /// Takes a running sequence out and frees its slot and blocks. Its rows in flight do no harm: plans run in order,
    /// so they write before any plan submitted from now on does, and a sequence reads only positions that it has
    /// written itself or found published.
    pub(super) fn deschedule(&mut self, slot: u32, now: Instant) -> Sequence {
        let Running { sequence, table, .. } = self.leave_slot(slot);
        self.kv.free(table, now);
        self.forget(&sequence);
        sequence
    }

    /// Takes a sequence out of its slot. Its blocks are still to be freed.
    pub(super) fn leave_slot(&mut self, slot: u32) -> Running {
        let running = self.slots.remove(slot);
        self.queue.clients.leave_slot(&running.sequence);
        if let Some(adapter) = running.sequence.request.adapter {
            self.adapters.unpin(adapter);
        }
        running
    }

    /// Counts a sequence that arrives.
    fn add(&mut self, sequence: &Sequence) {
        self.queue.clients.add(sequence);
        self.queue.backlog.add_prefixes(&sequence.prefix_hashes);
        if let Some(adapter) = sequence.request.adapter {
            self.adapters.add_sequence(adapter, sequence.key);
        }
    }

    /// The opposite of `add`.
    fn forget(&mut self, sequence: &Sequence) {
        self.queue.clients.remove(sequence);
        self.queue.backlog.remove_prefixes(&sequence.prefix_hashes);
        if let Some(adapter) = sequence.request.adapter {
            let removed = self.adapters.remove_sequence(adapter, sequence.key);
            self.note_removal(adapter, removed);
        }
    }

    /// Removes the blocks of an adapter that was removed: its id is not used again.
    fn note_removal(&mut self, adapter: AdapterId, removed: Option<Removed>) {
        if let Some(removed) = removed {
            self.kv.reset_adapter(adapter);
            self.removed.push(removed);
        }
    }

    /// Reports removed adapters to the callers that wait for it.
    pub(crate) fn report_removals(&mut self) {
        self.removed.clear();
    }

    fn remove_waiting(&mut self, key: SchedulingKey) -> Option<Sequence> {
        let mut sequence = self.queue.remove(key)?;
        if let Some(swapped) = sequence.swapped.take() {
            self.kv.discard(swapped);
        }
        self.forget(&sequence);
        Some(sequence)
    }

    /// Looks at the flags that a consumer has raised: takes the sequence out if it was cancelled, and resumes it if its
    /// consumer has read.
    pub(crate) fn attend(&mut self, key: SchedulingKey, now: Instant) -> Option<Sequence> {
        let sequence = self.find_admitted(key)?;
        if sequence.outbox.is_cancelled() {
            return self.remove(key, now);
        }
        match self.slots.slot_of(key) {
            Some(slot) => self.slots.try_resume(slot),
            None => self.queue.try_resume(key),
        }
        None
    }

    /// Admits waiting sequences if any may have room now.
    pub(crate) fn admit_if_due(&mut self, now: Instant) {
        if self.admission_is_due() {
            self.admit(LoadLimit::PerPlan, now);
        }
    }

    /// Takes any sequence out, as long as there are some.
    pub(crate) fn pop_any(&mut self, now: Instant) -> Option<Sequence> {
        if let Some(&slot) = self.slots.order().last() {
            return Some(self.deschedule(slot, now));
        }
        let key = self.queue.any()?;
        self.remove_waiting(key)
    }

    /// A sequence that the scheduler has ended, with the reason, as long as there are some.
    pub(crate) fn pop_ended(&mut self) -> Option<(Sequence, FinishReason)> {
        self.ended.pop()
    }

    /// Removes the prefixes from the cache that were not used for too long.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.kv.expire(now);
    }

    /// The time at which `expire` next removes a block.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.kv.next_expiry()
    }

    /// Removes the blocks of a salt from the prefix cache, or all blocks.
    pub(crate) fn reset_prefix_cache(&mut self, salt: Option<Arc<str>>) {
        if salt.is_none() {
            return self.kv.reset_prefix_cache();
        }
        let is_in_it = |sequence: &Sequence| sequence.chain().namespace().salt == salt;
        let running = self.slots.iter_mut().filter(|running| is_in_it(&running.sequence));
        running.for_each(|running| running.table.unpublish());
        let waiting = self.queue.preempted_mut().filter(|sequence| is_in_it(sequence));
        waiting.filter_map(|sequence| sequence.swapped.as_mut()).for_each(SwappedBlocks::unpublish);
        for adapter in std::iter::once(None).chain(self.adapters.ids().map(Some)) {
            self.kv.reset_namespace(&Namespace { salt: salt.clone(), adapter });
        }
    }

    /// Whether requests with this adapter are taken.
    pub(crate) fn has_adapter(&self, id: AdapterId) -> bool {
        self.adapters.is_open(id)
    }

    /// Registers an adapter; it is loaded when a sequence with it gets a slot.
    pub(crate) fn register_adapter(&mut self, adapter: NewAdapter) -> Result<(), AdapterError> {
        let (id, name) = (adapter.id, Arc::clone(&adapter.name));
        self.adapters.register(adapter)?;
        self.kv.announce(id, name);
        Ok(())
    }

    /// Adds a reader of KV events.
    pub(crate) fn add_reader(&mut self, writer: KvFeedWriter, key: u128) {
        self.kv.add_reader(writer, key);
    }

    /// Hands the KV events since the last call to the readers.
    pub(crate) fn hand_over_events(&mut self) {
        self.kv.hand_over_events();
    }

    /// The blocks that readers of KV events know.
    #[cfg(feature = "testing")]
    pub(crate) fn announced_blocks(&self) -> Vec<(KvNamespace, Vec<u32>, KvTier)> {
        self.kv.announced_blocks()
    }

    /// The adapters that take sequences.
    pub(crate) fn num_adapters(&self) -> usize {
        self.adapters.num_counted()
    }

    /// Takes no more sequences with an adapter, unless it is held; `ignore_holds` ends that. `done` is dropped by
    /// [`report_removals`](Self::report_removals) after the open ones have ended.
    pub(crate) fn close_adapter(&mut self, id: AdapterId, done: Box<dyn Send>, ignore_holds: bool) {
        self.kv.withdraw(id);
        let removed = self.adapters.close(id, done, ignore_holds);
        self.note_removal(id, removed);
    }

    /// Keeps an adapter that is registered until `release_adapter`.
    pub(crate) fn hold_adapter(&mut self, id: AdapterId) {
        self.adapters.hold(id);
    }

    /// To be called once for each `hold_adapter`.
    pub(crate) fn release_adapter(&mut self, id: AdapterId) {
        let removed = self.adapters.release(id);
        self.note_removal(id, removed);
    }

    /// Takes the last sequence with this adapter out, as long as there are some.
    pub(crate) fn pop_with_adapter(&mut self, id: AdapterId, now: Instant) -> Option<Sequence> {
        let key = self.adapters.last_sequence(id)?;
        self.remove(key, now)
    }

    /// The sequence with this key, unless it has ended.
    pub(crate) fn find_admitted(&mut self, key: SchedulingKey) -> Option<&mut Sequence> {
        match self.slots.slot_of(key) {
            Some(slot) => Some(&mut self.slots.get_mut(slot).sequence),
            None => self.queue.find(key),
        }
    }

    /// The number of open requests.
    pub(crate) fn num_unfinished(&self) -> usize {
        self.slots.num_running() + self.queue.len()
    }

    /// The number of open requests, without the paused ones.
    pub(crate) fn num_unpaused(&self) -> usize {
        self.num_unfinished() - self.num_paused()
    }

    /// The counters, and the gauges of this moment.
    pub(crate) fn stats(&self) -> Counters {
        let (pool, host) = (self.kv.pool(), self.kv.host());
        Counters {
            running: self.slots.num_running() as u64,
            waiting: self.queue.len() as u64,
            swapped: self.kv.num_swapped() as u64,
            paused: self.num_paused() as u64,
            blocks_total: pool.num_blocks() as u64,
            blocks_used: pool.num_used() as u64,
            blocks_cached: pool.num_cached() as u64,
            blocks_reserved: pool.num_reserved() as u64,
            host_blocks_total: host.num_blocks() as u64,
            host_blocks_used: (host.num_blocks() - host.num_free()) as u64,
            adapter_loads: self.adapters.num_loads(),
            adapter_evictions: self.adapters.num_evictions(),
            ..self.counters
        }
    }

    /// Counts every change after which a waiting sequence may be admitted that could not be before.
    pub(super) fn version(&self) -> u64 {
        self.queue.num_changes() + self.slots.num_changes() + self.kv.pool().num_releases()
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn num_visited(&self) -> u64 {
        self.queue.num_visited()
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn num_visited_blocks(&self) -> u64 {
        self.kv.num_visited()
    }

    /// Whether anything has changed since the last attempt to admit a waiting sequence.
    pub(super) fn admission_is_due(&self) -> bool {
        self.version() != self.admitted_at
    }

    /// Whether any sequence computes something in the plan that is being made.
    fn has_work(&self) -> bool {
        self.slots.iter().any(|running| running.num_scheduled > 0)
    }
}
