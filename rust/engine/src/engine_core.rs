//! The engine without its thread: a state machine with messages and the clock as inputs, plans and events as outputs.
//!
//! The `actor` drives it with a mailbox and an executor; the simulation drives it with a random number generator. It
//! never waits and never reads a clock.
//!
//! ```text
//! handle(Start)     ─▶ a slot or the queue, Admitted or Rejected
//! handle(StepDone)  ─▶ tokens are delivered, finished sequences end
//! attend()          ─▶ cancelled sequences end, paused ones with room resume, old prefixes expire
//! plan()            ─▶ the next step, up to DEPTH in flight; sequences without room wait or end
//! end_drain()       ─▶ a drained engine stops
//! ring()            ─▶ every port with new events, once
//! ```

mod completion;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

#[cfg(feature = "testing")]
use crate::kv_events::{KvNamespace, KvTier};
use crate::limits::Limits;
use crate::mailbox::{CancelSet, Gate};
use crate::message::{AdapterError, Message, NewAdapter, Outbox, Start};
use crate::port::{PortIndex, Ringer};
use crate::prefix_cache::{BlockHasher, Chain, Namespace};
use crate::request::{AdapterId, Finish, FinishReason, Rejection, Request, RequestId, StopCause};
use crate::result_queue::CancelCause;
use crate::scheduler::Scheduler;
use crate::sequence::{Arrival, GENERATED_AHEAD, SchedulingKey, Sequence};
use crate::stats::SharedStats;
use crate::step::{DEPTH, StepOutput, StepPlan};

/// The state machine that the module describes. It must be shut down before it is dropped.
pub struct EngineCore {
    limits: Limits,
    scheduler: Scheduler,
    ringer: Ringer,
    /// Steps in flight, oldest first.
    in_flight: VecDeque<InFlightStep>,
    /// Buffers of completed steps, for the next ones.
    spare: Vec<StepBuffers>,
    /// Last events of requests that have ended. They are pushed once the statistics agree with them.
    pending_finishes: Vec<(Outbox, PortIndex, Finish)>,
    cancel_set: Arc<CancelSet>,
    gate: Arc<Gate>,
    stats: Arc<SharedStats>,
    is_draining: bool,
    is_stopped: bool,
}

/// A step in flight.
struct InFlightStep {
    step: u64,
    /// The sequences of its rows; `None` for a row whose output is to be ignored. A sequence may have ended.
    owners: Vec<Option<SchedulingKey>>,
}

/// The buffers of one step.
#[derive(Default)]
struct StepBuffers {
    plan: Box<StepPlan>,
    output: Box<StepOutput>,
    owners: Vec<Option<SchedulingKey>>,
}

impl EngineCore {
    /// An engine without requests. `limits` have been validated; `hasher` is the prefix cache's.
    pub fn new(
        limits: Limits,
        hasher: BlockHasher,
        cancel_set: Arc<CancelSet>,
        gate: Arc<Gate>,
        stats: Arc<SharedStats>,
    ) -> Self {
        let core = Self {
            scheduler: Scheduler::new(&limits, hasher),
            limits,
            ringer: Ringer::default(),
            in_flight: VecDeque::with_capacity(DEPTH),
            spare: Vec::with_capacity(DEPTH),
            pending_finishes: Vec::new(),
            cancel_set,
            gate,
            stats,
            is_draining: false,
            is_stopped: false,
        };
        core.publish_stats();
        core
    }

    /// Processes one message. The events it causes are pushed, but their ports not yet rung.
    pub fn handle(&mut self, message: Message, now: Instant) {
        match message {
            Message::Start(start) => {
                self.start(start, now);
                self.end_removed(now); // sequences that are not read, whose slots were needed
            }
            Message::Nudge => {} // it only wakes the engine thread, which calls `attend` next
            Message::StepDone(done) => self.complete(done, now),
            Message::ResetPrefixCache(salt) => {
                self.scheduler.reset_prefix_cache(salt);
                self.publish_stats();
            }
            Message::LoadAdapter(adapter, answer) => {
                let _ = answer.send(self.load_adapter(adapter)); // the caller may have gone
            }
            Message::HoldAdapter(id) => self.scheduler.hold_adapter(id),
            Message::ReleaseAdapter(id) => {
                self.scheduler.release_adapter(id);
                self.flush_finishes();
            }
            Message::UnloadAdapter(id, reason, done) => self.unload_adapter(id, reason, done, now),
            Message::ReadKvEvents(writer) => {
                if !self.is_stopped {
                    self.scheduler.add_reader(writer, self.limits.kv_hash_key);
                }
            }
            Message::Drain => self.is_draining = true,
            Message::Shutdown => self.stop(StopCause::Closed, now),
        }
    }

    fn start(&mut self, start: Start, now: Instant) {
        let Start { id, request, outboxes } = start;
        if self.is_stopped {
            return self.reject(outboxes.into_iter(), Rejection::Stopped(self.gate.cause()));
        }
        if request.adapter.is_some_and(|id| !self.scheduler.has_adapter(id)) {
            let num_adapters = self.scheduler.num_adapters();
            return self.reject(outboxes.into_iter(), Rejection::UnknownAdapter { num_adapters });
        }
        let (unfinished, choices) = (self.scheduler.num_unpaused(), outboxes.len());
        let limit = self.scheduler.max_unfinished(request.client, choices);
        if unfinished + choices > limit {
            self.stats.count_rejection(); // before the event
            let rejection = Rejection::TooManyUnfinished { unfinished, choices, limit };
            return self.reject(outboxes.into_iter(), rejection);
        }
        let mut outboxes = outboxes.into_iter();
        let first = outboxes.next().expect("a request has a choice; this is a bug");
        let first = self.sequence(&request, id, 0, first, now);
        let first_key = first.key;
        if let Some((Sequence { outbox, port, .. }, rejection)) = self.scheduler.enqueue(first, now) {
            self.stats.count_rejection(); // before the event
            let listed = outbox.reject(rejection.clone());
            self.ringer.disconnect(port, listed);
            return self.reject(outboxes, rejection);
        }
        let num_others = outboxes.len() as u64;
        for (choice, outbox) in (1..).zip(outboxes) {
            let sequence = self.sequence(&request, id, choice, outbox, now);
            self.scheduler.add_choice(sequence);
        }
        self.scheduler.counters.requests_admitted += 1 + num_others;
        self.publish_stats(); // before the events: an admitted request is counted
        for id in (id.0..=id.0 + num_others).map(RequestId) {
            let key = SchedulingKey { id, ..first_key };
            let sequence = self.scheduler.find_admitted(key).expect("it was admitted; this is a bug");
            sequence.outbox.queue_mut().admit();
            // It may have been cancelled in the mailbox, and the engine may have attended to that flag before.
            if sequence.outbox.is_cancelled() {
                self.cancel_set.raise_for(key);
            }
            self.ringer.touch(sequence.port, sequence.outbox.list());
        }
    }

    fn load_adapter(&mut self, adapter: NewAdapter) -> Result<(), AdapterError> {
        match self.is_stopped {
            true => Err(AdapterError::Stopped(self.gate.cause())),
            false => self.scheduler.register_adapter(adapter),
        }
    }

    fn unload_adapter(&mut self, id: AdapterId, reason: Option<String>, done: Box<dyn Send>, now: Instant) {
        self.scheduler.close_adapter(id, done, reason.is_some());
        if let Some(reason) = reason {
            while let Some(sequence) = self.scheduler.pop_with_adapter(id, now) {
                self.end(sequence, FinishReason::Failed(reason.clone()), now);
            }
        }
        self.flush_finishes();
    }

    /// The sequence of the next arrival: a choice of `request`, whose first choice has the id `first`.
    fn sequence(
        &mut self,
        request: &Arc<Request>,
        first: RequestId,
        choice: u32,
        outbox: Outbox,
        now: Instant,
    ) -> Sequence {
        let (id, request) = (RequestId(first.0 + u64::from(choice)), Arc::clone(request));
        let port = self.ringer.connect(outbox.bell());
        let max_new_tokens = self.limits.max_new_tokens(&request);
        let max_kv_tokens = self.limits.max_kv_tokens(&request);
        let key = SchedulingKey { priority: request.priority, id };
        let chain = self.chain(&request, max_new_tokens);
        let arrival = Arrival { key, request, choice, outbox, port, max_new_tokens, max_kv_tokens, chain };
        Sequence::new(arrival, self.limits.num_speculative_tokens, now)
    }

    fn chain(&self, request: &Request, max_new_tokens: usize) -> Chain {
        let num_blocks = self.limits.num_shareable_blocks(request);
        let num_ahead = request.prompt.len() + max_new_tokens.min(GENERATED_AHEAD);
        let namespace = Namespace { salt: request.cache_salt.clone(), adapter: request.adapter };
        Chain::new(namespace, num_blocks, num_ahead / self.limits.block_size)
    }

    fn reject(&mut self, outboxes: impl Iterator<Item = Outbox>, rejection: Rejection) {
        for outbox in outboxes {
            let port = self.ringer.connect(outbox.bell());
            let listed = outbox.reject(rejection.clone());
            self.ringer.disconnect(port, listed);
        }
    }

    /// Ends the cancelled sequences and resumes those whose consumers have read, if the flag of the cancel set was
    /// raised since the last call; stops if the gate was closed. Removes expired prefixes.
    pub fn attend(&mut self, now: Instant) {
        if self.next_expiry().is_some_and(|expiry| expiry <= now) {
            self.scheduler.expire(now);
            self.publish_stats();
        }
        if !self.cancel_set.take() {
            return;
        }
        if !self.is_stopped && !self.gate.is_open() {
            return self.stop(self.gate.cause(), now);
        }
        while let Some(key) = self.cancel_set.next() {
            let Some(sequence) = self.scheduler.attend(key, now) else { continue };
            let reason = match sequence.outbox.cancel_cause() {
                Some(CancelCause::StopString) => FinishReason::StopString,
                _ => FinishReason::Cancelled,
            };
            self.end(sequence, reason, now);
        }
        self.scheduler.admit_if_due(now);
        self.end_removed(now);
    }

    /// The next step, if anything can be computed now and fewer than [`DEPTH`] steps are in flight, or none while a
    /// sequence drafts (see `scheduler::rows`). The caller submits it; steps complete in the order they are returned
    /// here.
    pub fn plan(&mut self, now: Instant) -> Option<(Box<StepPlan>, Box<StepOutput>)> {
        let is_full = match self.in_flight.len() {
            0 => false,
            DEPTH.. => true,
            _ => self.scheduler.is_drafting(),
        };
        if is_full || self.is_stopped {
            return None;
        }
        let StepBuffers { mut plan, mut output, mut owners } = self.spare.pop().unwrap_or_default();
        self.scheduler.plan(&mut plan, &mut owners, now);
        self.end_removed(now);
        if plan.rows.is_empty() {
            self.spare.push(StepBuffers { plan, output, owners });
            return None;
        }
        output.step = plan.step;
        if self.in_flight.is_empty() {
            self.stats.set_step_progress(Some(now));
        }
        self.in_flight.push_back(InFlightStep { step: plan.step, owners });
        Some((plan, output))
    }

    /// Ends the sequences that the scheduler took out.
    fn end_removed(&mut self, now: Instant) {
        while let Some((sequence, reason)) = self.scheduler.pop_ended() {
            self.end(sequence, reason, now);
        }
        self.flush_finishes();
    }

    /// Ends the sequence of a row, unless it has ended.
    fn finish(&mut self, slot: u32, key: SchedulingKey, reason: FinishReason, now: Instant) {
        if let Some(sequence) = self.scheduler.finish(slot, key, now) {
            self.end(sequence, reason, now);
        }
    }

    /// Ends every request. The gate closes first: a caller that sees a request end sees that the engine has stopped.
    fn stop(&mut self, cause: StopCause, now: Instant) {
        self.is_stopped = true;
        self.gate.close(cause.clone());
        while let Some(sequence) = self.scheduler.pop_any(now) {
            let reason = match cause {
                StopCause::Closed => FinishReason::Cancelled,
                _ => FinishReason::EngineStopped(cause.clone()),
            };
            self.end(sequence, reason, now);
        }
        self.flush_finishes();
    }

    /// Prepares the last event of a sequence, which was taken out of the scheduler.
    fn end(&mut self, sequence: Sequence, reason: FinishReason, now: Instant) {
        self.scheduler.counters.requests_finished += 1;
        *self.scheduler.counters.finished_for(&reason) += 1;
        self.scheduler.replace_leader(&sequence);
        if let Some(queue_time) = sequence.queue_time() {
            self.stats.queue_time.observe(queue_time.as_secs_f64(), 1);
        }
        let finish = sequence.finish(reason, now);
        self.pending_finishes.push((sequence.outbox, sequence.port, finish));
    }

    /// Publishes the statistics and then reports removed adapters and pushes the last events: a consumer that receives
    /// one finds its blocks freed.
    fn flush_finishes(&mut self) {
        self.publish_stats();
        self.scheduler.report_removals();
        for (outbox, port, finish) in self.pending_finishes.drain(..) {
            let listed = outbox.finish(finish);
            self.ringer.disconnect(port, listed);
        }
    }

    fn publish_stats(&self) {
        self.stats.publish(self.scheduler.stats());
        self.stats.set_overloads(self.scheduler.overloads());
    }

    /// The time at which the next block of the prefix cache expires. `attend` must be called then, even without a
    /// message.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.scheduler.next_expiry()
    }

    /// Stops if a drain was requested and its last request has ended.
    pub fn end_drain(&mut self, now: Instant) {
        if self.is_draining
            && !self.is_stopped
            && self.scheduler.num_unfinished() == 0
            && !self.gate.is_held()
        {
            self.stop(StopCause::Closed, now);
        }
    }

    /// The number of waiting sequences that operations have looked at so far.
    #[cfg(any(test, feature = "testing"))]
    pub fn num_visited(&self) -> u64 {
        self.scheduler.num_visited()
    }

    /// The number of blocks that attempts to admit sequences have looked at so far.
    #[cfg(any(test, feature = "testing"))]
    pub fn num_visited_blocks(&self) -> u64 {
        self.scheduler.num_visited_blocks()
    }

    /// The blocks that readers of KV events know, without what is still to be handed over.
    #[cfg(feature = "testing")]
    pub fn announced_blocks(&self) -> Vec<(KvNamespace, Vec<u32>, KvTier)> {
        self.scheduler.announced_blocks()
    }

    /// Rings every port that events were pushed for since the last call, once. Hands over the KV events.
    pub fn ring(&mut self) {
        self.scheduler.hand_over_events();
        self.ringer.ring();
    }

    /// Whether it was shut down or has lost its device: every request has ended, and nothing is planned any more.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Whether no step is in flight and no request is open.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.scheduler.num_unfinished() == 0
    }

    /// Panics unless all parts agree with each other. May be called between any two operations.
    pub fn check_integrity(&self) {
        self.scheduler.check_integrity();
        let num_unfinished = self.scheduler.num_unfinished();
        self.ringer.check_integrity(num_unfinished);
        assert!(self.in_flight.len() <= DEPTH, "too many steps in flight; this is a bug");
        assert!(self.in_flight.len() + self.spare.len() <= DEPTH, "step buffers multiply; this is a bug");
        assert!(self.pending_finishes.is_empty(), "a request was left without its last event; this is a bug");
        let counters = &self.scheduler.counters;
        let num_counted = counters.requests_admitted - counters.requests_finished;
        assert_eq!(num_counted, num_unfinished as u64, "requests lost or duplicated; this is a bug");
    }
}
