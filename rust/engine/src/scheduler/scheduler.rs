//! [`Scheduler`]: the interface of the scheduler to the engine core.

use std::time::Instant;

use penstock_types::PreemptionMode;

use super::budget::TokenBudget;
use super::queue::WaitingQueue;
use super::rows::RowPlanner;
use super::slots::{Running, Slots};
use crate::kv_cache::{KvCacheManager, LoadLimit};
use crate::limits::Limits;
use crate::prefix_cache::BlockHasher;
use crate::request::RequestId;
use crate::sequence::{ComputedTokens, SchedulingKey, Sequence};
use crate::stats::Counters;
use crate::step::{ScheduledRow, StepPlan};

/// Owns every sequence and every block.
///
/// Invariants: those of its parts; the block tables of running sequences are all tables there are; the next waiting
/// sequence lacks a slot or blocks, unless `admission_is_due` or `is_staging`.
pub struct Scheduler {
    pub(super) max_waiting: usize,
    pub(super) preemption_mode: PreemptionMode,
    pub(super) kv: KvCacheManager,
    pub(super) slots: Slots,
    pub(super) queue: WaitingQueue,
    /// [`version`](Self::version) after the last attempt to admit a waiting sequence.
    pub(super) admitted_at: u64,
    /// The next waiting sequence has more to load from the host tier than one plan may: the next plan continues.
    pub(super) is_staging: bool,
    /// Sequences that were ended by preemption; the core sends their last events.
    pub(super) interrupted: Vec<Sequence>,
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
            preemption_mode: limits.preemption_mode,
            kv: KvCacheManager::new(limits, hasher),
            slots: Slots::new(limits.max_num_seqs),
            queue: WaitingQueue::default(),
            admitted_at: 0,
            is_staging: false,
            interrupted: Vec::new(),
            counters: Counters::default(),
            budget: TokenBudget::new(limits.max_num_batched_tokens, limits.max_num_seqs),
            rows: RowPlanner::new(limits.num_speculative_tokens),
        }
    }

    /// Adds a new request, which runs at once if it can and waits otherwise. If the queue is full it is rejected:
    /// returned.
    #[must_use]
    pub(crate) fn enqueue(&mut self, sequence: Sequence, now: Instant) -> Option<Sequence> {
        if self.has_too_many_descheduled() {
            return Some(sequence);
        }
        let key = sequence.key;
        self.queue.push_new(sequence);
        // If another one waits before it, it cannot run either.
        if self.admission_is_due() || self.queue.is_next(key) {
            self.admit(LoadLimit::PerPlan, now);
        }
        // Then no new request was admitted, so it is still in the queue.
        let is_rejected = self.queue.num_new() > self.max_waiting;
        is_rejected.then(|| self.queue.remove_new(key)).flatten()
    }

    /// Whether a new request would be rejected, unless it is so urgent that it runs at once.
    pub(crate) fn is_overloaded(&self) -> bool {
        self.queue.num_new() >= self.max_waiting.max(1) || self.has_too_many_descheduled()
    }

    /// Preempted sequences count only if there are very many: consumers that never read would pile them up.
    fn has_too_many_descheduled(&self) -> bool {
        let num_waiting = self.queue.num_new() + self.queue.num_descheduled();
        num_waiting >= self.max_waiting.saturating_add(self.slots.len())
    }

    /// Adds another choice for the prompt of the request `leader`, which was not rejected. It waits for the leader if
    /// it can reuse a block of it.
    pub(crate) fn add_choice(&mut self, leader: RequestId, sequence: Sequence) {
        if sequence.uses_prefix_cache() && self.kv.can_share(sequence.num_reusable()) {
            self.queue.push_follower(leader, sequence);
        } else {
            self.queue.push_preempted(sequence);
        }
    }

    /// The request `leader` has computed its prompt.
    pub(crate) fn release_followers(&mut self, leader: RequestId) {
        self.queue.release_followers(leader);
    }

    /// The request `leader` has ended, perhaps before it computed its prompt.
    pub(crate) fn promote_leader(&mut self, leader: RequestId) {
        self.queue.promote_leader(leader);
    }

    /// Fills an empty plan with the rows of the next step, and `requests` with their requests. The plan stays empty if
    /// nothing can be computed now; copies and freed slots then wait for a plan with rows.
    pub(crate) fn plan(&mut self, plan: &mut StepPlan, requests: &mut Vec<Option<RequestId>>, now: Instant) {
        self.schedule_tokens();
        let mut is_due = self.admission_is_due() || self.is_staging;
        while is_due {
            self.admit(if self.has_work() { LoadLimit::PerPlan } else { LoadLimit::None }, now);
            self.schedule_tokens(); // newly admitted sequences may pause at once, which makes room for others
            // If the sequences with work were preempted, the plan has time to load all.
            is_due = self.admission_is_due() || self.is_staging && !self.has_work();
        }
        self.make_room(now);
        let budget = self.budget.remaining(&self.slots);
        self.rows.add_rows(&mut self.slots, &mut self.kv, budget, plan, requests, now);
        if !plan.rows.is_empty() {
            self.kv.begin_step(plan);
            self.slots.report_freed(plan);
        }
    }

    /// Whether plans are made one at a time because a sequence drafts; see `rows`.
    pub(crate) fn is_drafting(&self) -> bool {
        self.rows.is_drafting(&self.slots)
    }

    /// Distributes the token budget. No sequence waits for a leader that pauses.
    fn schedule_tokens(&mut self) {
        let num_paused = self.slots.num_paused();
        self.budget.distribute(&mut self.slots);
        if self.slots.num_paused() == num_paused {
            return;
        }
        let is_paused = |leader: &RequestId| {
            let mut running = self.slots.iter().map(|running| &running.sequence);
            running.any(|sequence| sequence.id == *leader && sequence.is_paused)
        };
        loop {
            let Some(leader) = self.queue.leaders().find(is_paused) else { return };
            self.queue.release_followers(leader);
        }
    }

    /// The sequence of a row in flight, unless it has ended. It may have been preempted meanwhile; it is not scheduled
    /// again before the row is done.
    pub(crate) fn find(&mut self, slot: u32, request: RequestId) -> Option<&mut Sequence> {
        let running = self.slots.find(slot, request).map(|running| &mut running.sequence);
        running.or_else(|| self.queue.find_preempted(request))
    }

    /// Accounts for a row that was computed, after its outputs were delivered, and publishes its full blocks if the
    /// sequence still runs.
    pub(crate) fn row_computed(
        &mut self,
        row: &ScheduledRow,
        request: RequestId,
        now: Instant,
    ) -> ComputedTokens {
        if let Some(Running { sequence, table, .. }) = self.slots.find(row.slot, request) {
            let computed = sequence.row_computed(row);
            if row.num_drafts > 0 {
                self.kv.shrink(table, sequence.num_planned());
            }
            let (chain, tokens) = sequence.contents();
            self.kv.publish(table, chain, tokens, computed.end, now);
            return computed;
        }
        let sequence =
            self.queue.find_preempted(request).expect("a computed row has a sequence; this is a bug");
        let computed = sequence.row_computed(row);
        if sequence.has_no_rows_in_flight() {
            self.queue.note_change();
        }
        computed
    }

    /// Takes out the sequence of a row, unless it has ended, and frees its slot and blocks. They are not given to
    /// another sequence before the next plan: the step may have more rows to deliver.
    pub(crate) fn finish(&mut self, slot: u32, request: RequestId, now: Instant) -> Option<Sequence> {
        if self.slots.find(slot, request).is_some() {
            return Some(self.deschedule(slot, now));
        }
        let sequence = self.queue.remove_preempted(request)?;
        Some(self.discard_swapped(sequence))
    }

    /// Takes a running sequence out and frees its slot and blocks. Its rows in flight do no harm: plans run in order,
    /// so they write before any plan submitted from now on does, and a sequence reads only positions that it has
    /// written itself or found published.
    pub(super) fn deschedule(&mut self, slot: u32, now: Instant) -> Sequence {
        let Running { sequence, table, .. } = self.slots.remove(slot);
        self.kv.free(table, now);
        sequence
    }

    fn discard_swapped(&mut self, mut sequence: Sequence) -> Sequence {
        if let Some(swapped) = sequence.swapped.take() {
            self.kv.discard(swapped);
        }
        sequence
    }

    /// Looks at the flags that consumers have raised: moves every cancelled sequence to `cancelled`, and resumes those
    /// whose consumers have read.
    pub(crate) fn attend(&mut self, cancelled: &mut Vec<Sequence>, now: Instant) {
        for rank in (0..self.slots.num_running()).rev() {
            let slot = self.slots.order()[rank];
            let sequence = &self.slots.get(slot).sequence;
            if sequence.outbox.is_cancelled() {
                cancelled.push(self.deschedule(slot, now));
            } else if sequence.is_paused && !sequence.outbox.queue().is_armed() {
                self.slots.resume(slot);
            }
        }
        self.queue.resume_paused();
        let first = cancelled.len();
        self.queue.take_cancelled(cancelled);
        for sequence in &mut cancelled[first..] {
            if let Some(swapped) = sequence.swapped.take() {
                self.kv.discard(swapped);
            }
        }
        if self.admission_is_due() {
            self.admit(LoadLimit::PerPlan, now);
        }
    }

    /// Takes any sequence out, as long as there are some.
    pub(crate) fn pop_any(&mut self, now: Instant) -> Option<Sequence> {
        if let Some(&slot) = self.slots.order().last() {
            return Some(self.deschedule(slot, now));
        }
        let sequence = self.queue.pop_any()?;
        Some(self.discard_swapped(sequence))
    }

    /// A sequence that was ended by preemption, as long as there are some.
    pub(crate) fn pop_interrupted(&mut self) -> Option<Sequence> {
        self.interrupted.pop()
    }

    /// Removes the prefixes from the cache that were not used for too long.
    pub(crate) fn expire(&mut self, now: Instant) {
        self.kv.expire(now);
    }

    /// The time at which `expire` next removes a block.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.kv.next_expiry()
    }

    pub(crate) fn reset_prefix_cache(&mut self) {
        self.kv.reset_prefix_cache();
    }

    /// The sequence with this key, which was just admitted; `leader` is the first choice of its request.
    pub(crate) fn find_admitted(&mut self, key: SchedulingKey, leader: RequestId) -> &mut Sequence {
        let running = self.slots.find_key(key).map(|running| &mut running.sequence);
        running.or_else(|| self.queue.find(key, leader)).expect("it was admitted; this is a bug")
    }

    /// The number of open requests.
    pub(crate) fn num_unfinished(&self) -> usize {
        self.slots.num_running() + self.queue.len()
    }

    pub(crate) fn num_waiting(&self) -> usize {
        self.queue.len()
    }

    /// The counters, and the gauges of this moment.
    pub(crate) fn stats(&self) -> Counters {
        let (pool, host) = (self.kv.pool(), self.kv.host());
        Counters {
            running: self.slots.num_running() as u64,
            waiting: self.queue.len() as u64,
            paused: self.slots.num_paused() as u64,
            blocks_total: pool.num_blocks() as u64,
            blocks_used: pool.num_used() as u64,
            blocks_cached: pool.num_cached() as u64,
            blocks_reserved: pool.num_reserved() as u64,
            host_blocks_total: host.num_blocks() as u64,
            host_blocks_used: (host.num_blocks() - host.num_free()) as u64,
            ..self.counters
        }
    }

    /// Counts every change after which a waiting sequence may be admitted that could not be before.
    pub(super) fn version(&self) -> u64 {
        self.queue.num_changes() + self.slots.num_changes() + self.kv.pool().num_releases()
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
