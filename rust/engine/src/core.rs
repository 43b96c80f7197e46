//! The engine without its thread: a state machine that messages and the clock go into, and plans and events come out of.
//!
//! The `actor` drives it with a mailbox and an executor; the simulation drives it with a random number
//! generator. It never waits, never reads a clock, and knows neither who computes nor who listens.
//!
//! ```text
//! handle(Start)     ─▶ a place or the queue, Admitted or Refused
//! handle(StepDone)  ─▶ tokens out, ended sequences end
//! attend()          ─▶ sequences whose consumer is gone end, paused ones with room resume, old prefixes expire
//! plan()            ─▶ the next step, up to DEPTH of them unanswered; sequences it has no room for wait or end
//! ring()            ─▶ every port that was touched, once
//! ```

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::executor::{DEPTH, StepDone, StepError, StepOutput, StepPlan, split_off};
use crate::limits::Limits;
use crate::mailbox::{Attention, Gate};
use crate::message::{Message, Outbox, Start};
use crate::port::{PortIndex, Ringer};
use crate::prefix::{BlockHasher, Chain, Namespace};
use crate::request::{Finish, FinishReason, Rejection, Request, RequestId, StopCause};
use crate::scheduler::Scheduler;
use crate::sequence::{Arrival, GENERATED_AHEAD, Sequence, Turn};
use crate::stats::SharedStats;

/// See the module. To be shut down before it is dropped.
pub struct Core {
    limits: Limits,
    scheduler: Scheduler,
    ringer: Ringer,
    /// Plans submitted and not answered, oldest first.
    flights: VecDeque<Flight>,
    /// Buffers of ended steps, for the next ones.
    spare: Vec<Buffers>,
    /// What is said to requests that have ended, once the statistics agree with it.
    last_words: Vec<(Outbox, PortIndex, Finish)>,
    /// Scratch of `attend`.
    cancelled: Vec<Sequence>,
    attention: Arc<Attention>,
    gate: Arc<Gate>,
    stats: Arc<SharedStats>,
    num_arrivals: u64,
    is_stopped: bool,
}

/// Whose rows are that nobody wants any more.
const NOBODY: RequestId = RequestId(u64::MAX);

/// What one step needs.
#[derive(Default)]
struct Buffers {
    plan: Box<StepPlan>,
    output: Box<StepOutput>,
    owners: Vec<RequestId>,
}

/// A plan in flight.
struct Flight {
    step: u64,
    /// Whose the rows are. A sequence may end while rows of it are in flight; their results are then nobody's.
    owners: Vec<RequestId>,
}

impl Core {
    /// An engine with nothing to do. `limits` have been validated; `hasher` is the prefix cache's.
    pub fn new(
        limits: Limits,
        hasher: BlockHasher,
        attention: Arc<Attention>,
        gate: Arc<Gate>,
        stats: Arc<SharedStats>,
    ) -> Self {
        let core = Self {
            scheduler: Scheduler::new(&limits, hasher),
            limits,
            ringer: Ringer::default(),
            flights: VecDeque::with_capacity(DEPTH),
            spare: Vec::with_capacity(DEPTH),
            last_words: Vec::new(),
            cancelled: Vec::new(),
            attention,
            gate,
            stats,
            num_arrivals: 0,
            is_stopped: false,
        };
        core.publish();
        core
    }

    /// Takes in one message. Events it causes are in their queues afterwards, their ports not yet rung.
    pub fn handle(&mut self, message: Message, now: Instant) {
        match message {
            Message::Start(starts) => self.start(starts, now),
            Message::Nudge => {} // its purpose was to cause a turn: `attend` does the rest
            Message::StepDone(done) => self.complete(done, now),
            Message::ResetPrefixCache => {
                self.scheduler.reset_prefix_cache();
                self.publish();
            }
            Message::Shutdown => self.stop(StopCause::Closed, now),
        }
    }

    fn start(&mut self, mut starts: Vec<Start>, now: Instant) {
        if self.is_stopped {
            return self.refuse(starts, Rejection::Stopped(self.gate.cause()));
        }
        let others = starts.split_off(1.min(starts.len()));
        let Some(first) = starts.pop() else { return };
        let leader = first.id;
        let first = self.sequence(first, now);
        let turn = first.turn;
        if let Some(Sequence { outbox, port, .. }) = self.scheduler.enqueue(first, now) {
            let (waiting, limit) = (self.scheduler.num_waiting(), self.limits.max_waiting);
            let refusal = Rejection::Overloaded { waiting, limit };
            outbox.refuse(refusal.clone());
            self.ringer.disconnect(port);
            return self.refuse(others, refusal);
        }
        let num_others = others.len() as u64;
        for other in others {
            let sequence = self.sequence(other, now);
            self.scheduler.add_choice(leader, sequence);
        }
        self.scheduler.counters.requests_admitted += 1 + num_others;
        self.publish(); // first, so that whoever knows he is admitted finds himself counted
        for arrival in turn.arrival..=turn.arrival + num_others {
            let newcomer = self.scheduler.newcomer(arrival);
            newcomer.outbox.writer().admit();
            // Its consumer may have gone while it lay in the mailbox, and that attention was taken before this.
            if newcomer.outbox.is_cancelled() {
                self.attention.raise();
            }
            self.ringer.touch(newcomer.port);
        }
    }

    /// The next in the order of arrivals.
    fn sequence(&mut self, Start { id, request, outbox }: Start, now: Instant) -> Sequence {
        let port = self.ringer.connect(outbox.bell());
        let max_new_tokens = self.limits.max_new_tokens(&request);
        let blocks_needed = self.limits.blocks_needed(&request);
        let turn = Turn { priority: request.priority, arrival: self.num_arrivals };
        self.num_arrivals += 1;
        let chain = self.chain(&request, max_new_tokens);
        let arrival = Arrival { id, turn, request, outbox, port, max_new_tokens, blocks_needed, chain };
        Sequence::new(arrival, self.limits.num_speculative_tokens, now)
    }

    fn chain(&self, request: &Request, max_new_tokens: usize) -> Chain {
        let num_blocks = self.limits.num_shareable_blocks(request);
        let num_ahead = request.prompt.len() + max_new_tokens.min(GENERATED_AHEAD);
        let namespace = Namespace { salt: request.cache_salt.clone() };
        Chain::new(namespace, num_blocks, num_ahead / self.limits.block_size)
    }

    fn refuse(&mut self, starts: Vec<Start>, refusal: Rejection) {
        for Start { outbox, .. } in starts {
            let port = self.ringer.connect(outbox.bell());
            outbox.refuse(refusal.clone());
            self.ringer.disconnect(port);
        }
    }

    /// Ends the sequences whose consumers are gone and resumes those whose consumers have read, if anybody asked for
    /// attention since the last time. Forgets prefixes whose time is over.
    pub fn attend(&mut self, now: Instant) {
        if self.next_expiry().is_some_and(|expiry| expiry <= now) {
            self.scheduler.expire(now);
            self.publish();
        }
        if !self.attention.take() {
            return;
        }
        let mut cancelled = std::mem::take(&mut self.cancelled);
        self.scheduler.attend(&mut cancelled, now);
        for sequence in cancelled.drain(..) {
            self.end(sequence, FinishReason::Cancelled, now);
        }
        self.cancelled = cancelled;
        self.settle();
    }

    /// The next step, if anything can be computed now and fewer than [`DEPTH`] plans are unanswered, or none while somebody
    /// drafts. The caller submits it; plans run in the order they come out here.
    pub fn plan(&mut self, now: Instant) -> Option<(Box<StepPlan>, Box<StepOutput>)> {
        let is_full = match self.flights.len() {
            0 => false,
            DEPTH.. => true,
            // A draft follows a token that is known, and who has one waits for it. If the others did not wait as well, the
            // steps would fall apart into two halves, each as long as one of all.
            _ => self.scheduler.is_drafting(),
        };
        if is_full || self.is_stopped {
            return None;
        }
        let Buffers { mut plan, mut output, mut owners } = self.spare.pop().unwrap_or_default();
        self.scheduler.plan(&mut plan, &mut owners, now);
        while let Some(sequence) = self.scheduler.pop_interrupted() {
            self.end(sequence, FinishReason::Interrupted, now);
        }
        self.settle();
        if plan.rows.is_empty() {
            self.spare.push(Buffers { plan, output, owners });
            return None;
        }
        output.step = plan.step;
        self.flights.push_back(Flight { step: plan.step, owners });
        Some((plan, output))
    }

    fn complete(&mut self, StepDone { mut plan, mut output, result }: StepDone, now: Instant) {
        let Flight { step, mut owners } =
            self.flights.pop_front().expect("an answer to no plan; this is a bug");
        assert_eq!((plan.step, output.step), (step, step), "answers out of order; this is a bug");
        self.scheduler.counters.steps += 1;
        let check = |()| output.check(&plan, self.limits.vocabulary_size).map_err(StepError::Failed);
        match result.and_then(check) {
            Ok(()) => self.deliver(&plan, &mut output, &owners, now),
            Err(StepError::Failed(text)) => self.fail(&plan, output.copies_done, &owners, &text, now),
            Err(StepError::DeviceLost(text)) => {
                log::error!("the device was lost: {text}");
                self.stop(StopCause::DeviceLost(text.into()), now);
            }
        }
        plan.clear();
        output.clear();
        owners.clear();
        self.spare.push(Buffers { plan, output, owners });
        self.settle();
    }

    fn deliver(&mut self, plan: &StepPlan, output: &mut StepOutput, owners: &[RequestId], now: Instant) {
        let (mut sampled, mut positions) = (&mut output.sampled[..], &mut output.positions[..]);
        for ((work, answer), &owner) in plan.rows.iter().zip(&mut output.rows).zip(owners) {
            let tokens = split_off(&mut sampled, answer.num_tokens);
            let positions = split_off(&mut positions, answer.num_positions);
            if let Some(text) = answer.failure.take() {
                self.retire(work.slot, owner, FinishReason::Failed(text), now);
                continue;
            }
            let Some(sequence) = self.scheduler.owner(work.slot, owner) else { continue };
            if !(tokens.is_empty() && positions.is_empty()) {
                self.ringer.touch(sequence.port);
            }
            let (mut end, mut num_appended) = (sequence.report(work, positions), 0);
            for token in tokens {
                if end.is_none() {
                    end = sequence.append(token.take(), now);
                    num_appended += 1;
                }
            }
            if work.sample.is_some() {
                sequence.look_ahead(&output.forced[answer.forced.start as usize..answer.forced.end as usize]);
            }
            self.scheduler.counters.generation_tokens += num_appended;
            if work.num_drafts > 0 {
                self.scheduler.counters.drafted_tokens += u64::from(work.num_drafts);
                // The last token is no draft, unless an end came before it.
                self.scheduler.counters.accepted_tokens += num_appended.min(u64::from(answer.num_tokens) - 1);
            }
            let computed = self.scheduler.row_computed(work, owner, now);
            self.scheduler.counters.prompt_tokens += computed.prompt as u64;
            self.scheduler.counters.recomputed_tokens += computed.again as u64;
            if work.sample.is_some_and(|sample| sample.index == 0) {
                self.scheduler.release_choices(owner);
            }
            if let Some(reason) = end {
                self.retire(work.slot, owner, reason, now);
            }
        }
    }

    fn fail(&mut self, plan: &StepPlan, copies_done: bool, owners: &[RequestId], text: &str, now: Instant) {
        if !copies_done && !plan.copies.is_empty() {
            self.distrust_copies(plan.step, now);
        }
        for (work, &owner) in plan.rows.iter().zip(owners) {
            self.retire(work.slot, owner, FinishReason::Failed(text.to_owned()), now);
        }
    }

    fn distrust_copies(&mut self, step: u64, now: Instant) {
        let mut distrusted = Vec::new();
        self.scheduler.distrust_copies(step, &mut distrusted, now);
        for owner in self.flights.iter_mut().flat_map(|flight| &mut flight.owners) {
            if distrusted.contains(owner) {
                *owner = NOBODY;
            }
        }
    }

    /// Ends the sequence that owns a row, unless it has ended.
    fn retire(&mut self, slot: u32, owner: RequestId, reason: FinishReason, now: Instant) {
        if let Some(sequence) = self.scheduler.retire(slot, owner, now) {
            self.end(sequence, reason, now);
        }
    }

    /// Ends every request. The gate closes first: a caller that sees a request end sees that the engine has stopped.
    fn stop(&mut self, cause: StopCause, now: Instant) {
        self.is_stopped = true;
        self.gate.close(cause.clone());
        while let Some(sequence) = self.scheduler.dismiss(now) {
            let reason = match cause {
                StopCause::Closed => FinishReason::Cancelled,
                _ => FinishReason::EngineStopped(cause.clone()),
            };
            self.end(sequence, reason, now);
        }
        self.settle();
    }

    /// Prepares a sequence's last word; it has no place any more.
    fn end(&mut self, sequence: Sequence, reason: FinishReason, now: Instant) {
        self.scheduler.counters.requests_finished += 1;
        self.scheduler.succeed(sequence.id);
        let finish = sequence.finish(reason, now);
        self.last_words.push((sequence.outbox, sequence.port, finish));
    }

    /// Publishes the statistics and only then says the last words: whoever hears one finds the blocks free.
    fn settle(&mut self) {
        self.publish();
        for (outbox, port, finish) in self.last_words.drain(..) {
            outbox.finish(finish);
            self.ringer.disconnect(port);
        }
    }

    fn publish(&self) {
        self.stats.publish(self.scheduler.stats());
    }

    /// When something in the prefix cache will have expired, so that a turn is due though nobody sent a message.
    pub fn next_expiry(&self) -> Option<Instant> {
        self.scheduler.memory().next_expiry()
    }

    /// Rings every port that something was pushed for since the last time, once.
    pub fn ring(&mut self) {
        self.ringer.ring();
    }

    /// Whether it was shut down or has lost its device: every request has ended, and nothing will be planned.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Whether nothing is in flight and nobody has a place or waits for one.
    pub fn is_idle(&self) -> bool {
        self.flights.is_empty() && self.scheduler.num_running() + self.scheduler.num_waiting() == 0
    }

    /// Panics unless all books agree with themselves and each other. May be called between any two operations.
    pub fn check_integrity(&self) {
        self.scheduler.check_integrity();
        self.ringer.check_integrity(self.scheduler.num_running() + self.scheduler.num_waiting());
        assert!(self.flights.len() <= DEPTH, "too many plans in flight; this is a bug");
        assert!(self.flights.len() + self.spare.len() <= DEPTH, "plan buffers multiply; this is a bug");
        assert!(self.last_words.is_empty(), "a request was left without its last word; this is a bug");
        let counters = &self.scheduler.counters;
        let open = counters.requests_admitted - counters.requests_finished;
        let held = self.scheduler.num_running() + self.scheduler.num_waiting();
        assert_eq!(open, held as u64, "requests lost or doubled; this is a bug");
    }
}
