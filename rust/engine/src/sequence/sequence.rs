//! [`Sequence`]: its state, its life in slots, and the delivery of its outputs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::drafting::Drafting;
use super::prompt_outputs::PromptOutputs;
use crate::kv_cache::SwappedBlocks;
use crate::message::Outbox;
use crate::port::PortIndex;
use crate::prefix_cache::{Chain, Tokens};
use crate::request::{CachedTokens, Finish, FinishReason, PromptPosition, Request, RequestId};
use crate::step::{DEPTH, ScheduledRow};
use penstock_types::Token;

/// Identifies a sequence, and is its place in the scheduling order: the least key is scheduled first and preempted
/// last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SchedulingKey {
    /// The priority of the request.
    pub priority: i32,
    /// Ids are assigned in the order in which requests are started.
    pub id: RequestId,
}

/// A request that waits or runs. The scheduler owns its slot and its blocks.
pub struct Sequence {
    pub(crate) key: SchedulingKey,
    pub(crate) request: Arc<Request>,
    /// Its index among the choices of the request.
    pub(crate) choice: u32,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    /// The most tokens it may generate: `max_tokens` of the request, limited by the model's length.
    pub(crate) max_new_tokens: usize,
    /// The most tokens that it ever has in the KV cache.
    pub(crate) max_kv_tokens: usize,
    /// The time since which it waits for its consumer to read.
    pub(super) paused_since: Option<Instant>,
    /// Set while it waits for another choice of its request to compute the prompt.
    pub(crate) is_follower: bool,
    /// The step before which it was first found to be the next without room for its adapter, since it last had a slot.
    pub(crate) blocked_since: Option<u64>,
    /// Its key in the prefix cache.
    chain: Chain,
    /// Its blocks in the host tier while it is preempted.
    pub(crate) swapped: Option<SwappedBlocks>,
    /// Tokens that were loaded from the host tier into the prefix cache for its next allocation.
    pub(crate) num_staged: usize,
    /// The tokens that the scheduler's `backlog` has counted for it.
    pub(crate) backlog_tokens: Option<u32>,
    /// The prefixes that the scheduler's `backlog` has counted for it.
    pub(crate) prefix_hashes: Vec<u64>,
    /// See [`NewSequence::lifetime`](crate::step::NewSequence::lifetime).
    pub(super) lifetime: Arc<()>,
    pub(super) generated: Vec<u32>,
    pub(super) prompt_outputs: PromptOutputs,
    pub(super) drafting: Drafting,
    /// Tokens that are computed or in a plan in flight.
    pub(super) num_planned: usize,
    /// Tokens that were computed, or found in the cache, since the request arrived.
    num_computed_once: usize,
    /// Whether the executor knows this sequence and its slot from a plan.
    pub(super) has_slot_state: bool,
    pub(super) num_rows_in_flight: usize,
    /// Rows in flight that sample. Each yields one token, or with drafts at least one.
    pub(super) num_samples_in_flight: usize,
    /// The tokens found in the prefix cache when it was first scheduled.
    cached: Option<CachedTokens>,
    arrived: Instant,
    pub(super) first_planned: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

/// A request on arrival.
pub(crate) struct Arrival {
    pub(crate) key: SchedulingKey,
    pub(crate) request: Arc<Request>,
    pub(crate) choice: u32,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    pub(crate) max_new_tokens: usize,
    pub(crate) max_kv_tokens: usize,
    pub(crate) chain: Chain,
}

/// The tokens of a row that was computed.
#[derive(Clone, Copy)]
pub(crate) struct ComputedTokens {
    /// The position after the last one.
    pub(crate) end: usize,
    /// The number of prompt tokens that were computed for the first time.
    pub(crate) prompt: usize,
    /// The number of tokens that were computed before.
    pub(crate) again: usize,
}

/// The most generated tokens for which memory is allocated when a sequence first runs.
pub(crate) const GENERATED_AHEAD: usize = 1024;

impl Sequence {
    pub(crate) fn new(arrival: Arrival, num_speculative_tokens: usize, now: Instant) -> Self {
        let Arrival { key, request, choice, outbox, port, max_new_tokens, max_kv_tokens, chain } = arrival;
        Self {
            key,
            prompt_outputs: PromptOutputs::new(&request, choice),
            drafting: Drafting::new(num_speculative_tokens),
            request,
            choice,
            outbox,
            port,
            max_new_tokens,
            max_kv_tokens,
            paused_since: None,
            is_follower: false,
            blocked_since: None,
            chain,
            swapped: None,
            num_staged: 0,
            backlog_tokens: None,
            prefix_hashes: Vec::new(),
            lifetime: Arc::new(()),
            generated: Vec::new(),
            num_planned: 0,
            num_computed_once: 0,
            has_slot_state: false,
            num_rows_in_flight: 0,
            num_samples_in_flight: 0,
            cached: None,
            arrived: now,
            first_planned: None,
            first_token: None,
            last_token: None,
        }
    }

    pub(crate) fn id(&self) -> RequestId {
        self.key.id
    }

    /// The id of the first choice of its request. The ids of the choices are consecutive.
    pub(crate) fn first_choice(&self) -> RequestId {
        RequestId(self.key.id.0 - u64::from(self.choice))
    }

    /// Whether it waits for its consumer to read.
    pub(crate) fn is_paused(&self) -> bool {
        self.paused_since.is_some()
    }

    /// Its place in the order in which paused sequences end if there are too many.
    pub(crate) fn pause_order(&self) -> (Option<Instant>, RequestId) {
        (self.paused_since, self.key.id)
    }

    /// Tokens that are computed or in a plan in flight.
    pub(crate) fn num_planned(&self) -> usize {
        self.num_planned
    }

    /// Its tokens, those being sampled included.
    pub(crate) fn num_tokens(&self) -> usize {
        self.request.prompt.len() + self.generated.len() + self.num_samples_in_flight
    }

    /// Its known tokens.
    pub(crate) fn tokens(&self) -> Tokens<'_> {
        Tokens { prompt: &self.request.prompt, generated: &self.generated }
    }

    /// Its block hashes and its known tokens.
    pub(crate) fn contents(&mut self) -> (&mut Chain, Tokens<'_>) {
        (&mut self.chain, Tokens { prompt: &self.request.prompt, generated: &self.generated })
    }

    /// Its block hashes.
    pub(crate) fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Whether it has been scheduled before.
    pub(crate) fn was_scheduled(&self) -> bool {
        self.cached.is_some()
    }

    pub(crate) fn has_no_rows_in_flight(&self) -> bool {
        self.num_rows_in_flight == 0
    }

    /// Whether all tokens it may generate and all outputs of its prompt are delivered or in flight: nothing is left to
    /// schedule.
    pub(crate) fn is_all_planned(&self) -> bool {
        self.generated.len() + self.num_samples_in_flight == self.max_new_tokens
            && self.prompt_outputs.is_all_planned()
    }

    /// The number of first tokens that need not be computed if the prefix cache has them: all but those with prompt
    /// outputs, and all but the last, after which a token is sampled.
    pub(crate) fn num_reusable(&self) -> usize {
        self.prompt_outputs.num_reusable().min(self.num_tokens() - 1)
    }

    /// Whether the prefix cache is searched when it is first scheduled.
    pub(crate) fn uses_prefix_cache(&self) -> bool {
        self.chain.max_blocks() > 0 && self.prompt_outputs.is_all_planned()
    }

    /// It is scheduled, with blocks that hold its first `num_computed` tokens. Returns whether for the first time; then
    /// `cached` is reported with its first token and with its end.
    pub(crate) fn enter_slot(&mut self, num_computed: usize, cached: CachedTokens) -> bool {
        let is_first = self.cached.is_none();
        if is_first {
            self.cached = Some(cached);
            self.outbox.queue().set_cached(cached);
            self.generated.reserve(self.max_new_tokens.min(GENERATED_AHEAD));
        }
        self.num_computed_once = self.num_computed_once.max(num_computed);
        self.num_planned = num_computed;
        self.blocked_since = None;
        is_first
    }

    /// Whether the tokens that it computes next may be found in the prefix cache in place of being computed.
    pub(crate) fn may_skip(&self) -> bool {
        self.has_no_rows_in_flight() && !self.is_paused() && self.num_planned < self.num_reusable()
    }

    /// Its blocks hold `num_tokens` tokens more, which others have computed since it got its slot. Returns how many of
    /// them are of its prompt and new to it, which are reported as found in the prefix cache.
    pub(crate) fn skip(&mut self, num_tokens: usize) -> usize {
        let start = self.num_planned;
        self.num_planned += num_tokens;
        let num_new = self.count_computed(start, self.num_planned).prompt;
        if let (1.., Some(cached)) = (num_new, &mut self.cached) {
            cached.device += num_new;
            self.outbox.queue().set_cached(*cached);
        }
        num_new
    }

    /// The sequence loses its slot and its blocks; its rows in flight still deliver. Returns the number of planned
    /// tokens.
    pub(crate) fn leave_slot(&mut self) -> usize {
        self.has_slot_state = false;
        std::mem::take(&mut self.num_planned)
    }

    /// Discards its rows in flight.
    pub(crate) fn clear_in_flight(&mut self) {
        self.num_rows_in_flight = 0;
        self.num_samples_in_flight = 0;
        self.prompt_outputs.clear_in_flight();
        self.drafting.num_in_flight = 0;
    }

    /// Notes that one of its rows was computed, and that the tokens it sampled were appended.
    pub(crate) fn row_computed(&mut self, row: &ScheduledRow, is_deferred: bool) -> ComputedTokens {
        if is_deferred {
            return self.row_deferred(row);
        }
        self.num_rows_in_flight -= 1;
        self.num_samples_in_flight -= usize::from(row.sample.is_some());
        let (start, mut end) = (row.start as usize, (row.start + row.num_tokens) as usize);
        if row.num_drafts > 0 {
            // The token after the last accepted draft is not an input of this row: its position is computed again.
            let num_accepted = self.num_tokens() - 1 - (end - row.num_drafts as usize);
            end -= row.num_drafts as usize - num_accepted;
            self.num_planned += if self.has_slot_state { num_accepted } else { 0 };
            self.drafting.num_in_flight = 0;
        }
        self.count_computed(start, end)
    }

    /// A row that was computed is deferred. Its last token that is not a draft is to be computed again; rows
    /// in flight are discarded.
    fn row_deferred(&mut self, row: &ScheduledRow) -> ComputedTokens {
        self.clear_in_flight();
        let (start, end) = (row.start as usize, (row.start + row.num_tokens - row.num_drafts) as usize);
        self.num_planned = if self.has_slot_state { end - 1 } else { 0 };
        self.count_computed(start, end - 1)
    }

    /// Counts the tokens `start..end` of a row.
    fn count_computed(&mut self, start: usize, end: usize) -> ComputedTokens {
        let known = self.num_computed_once.clamp(start, end);
        self.num_computed_once = self.num_computed_once.max(end);
        let prompt = self.request.prompt.len().clamp(known, end) - known;
        ComputedTokens { end, prompt, again: known - start }
    }

    /// Pushes the prompt outputs of a row that was computed. Returns the reason if the request ends with them. There
    /// was room for them when the row was planned.
    pub(crate) fn deliver_positions(
        &mut self,
        row: &ScheduledRow,
        positions: &mut [PromptPosition],
    ) -> Option<FinishReason> {
        if positions.is_empty() {
            return None;
        }
        self.prompt_outputs.deliver(row.prompt_outputs.end as usize);
        let positions = positions.iter_mut().map(PromptPosition::take).collect();
        self.outbox.queue_mut().push_positions(positions);
        let is_end = self.max_new_tokens == 0 && self.prompt_outputs.is_all_delivered();
        is_end.then_some(FinishReason::Length)
    }

    /// Appends and pushes a token that a row has sampled. Returns the reason if the request ends with it. There was
    /// room for it when the row was planned.
    pub(crate) fn append(&mut self, token: Token, now: Instant) -> Option<FinishReason> {
        self.generated.push(token.id);
        self.drafting.observe(token.id);
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
        self.outbox.queue_mut().push_token(token);
        self.request.finish_reason(&self.generated, self.max_new_tokens)
    }

    /// Predicts the tokens after the last generated one, after which the grammar allows only `forced`.
    /// A request with logits processors has no drafts: its processors see only tokens that were generated.
    pub(crate) fn update_drafts(&mut self, forced: &[u32]) {
        if !self.request.processors.is_empty() {
            return;
        }
        let tokens = Tokens { prompt: &self.request.prompt, generated: &self.generated };
        self.drafting.update(tokens, forced);
    }

    /// The time from its arrival to `moment`.
    pub(crate) fn age(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.arrived)
    }

    /// The time from its arrival to the first step that computed a token of it.
    pub(crate) fn queue_time(&self) -> Option<Duration> {
        self.first_planned.map(|moment| self.age(moment))
    }

    /// The time at which its last token was appended.
    pub(crate) fn last_token(&self) -> Option<Instant> {
        self.last_token
    }

    /// The last event of the request.
    pub(crate) fn finish(&self, reason: FinishReason, now: Instant) -> Finish {
        Finish {
            reason,
            cached: self.cached.unwrap_or_default(),
            queued: self.queue_time().unwrap_or_default(),
            first_token: self.first_token.map(|moment| self.age(moment)),
            total: self.age(now),
        }
    }

    /// The number of tokens that its block table holds, drafts in flight included.
    pub(crate) fn num_kv_tokens(&self) -> usize {
        self.num_planned + self.drafting.num_in_flight
    }

    /// Panics unless its counts agree with each other.
    pub(crate) fn check_integrity(&self, is_running: bool) {
        let id = self.id();
        assert!(self.num_rows_in_flight <= DEPTH, "{id}: more rows than plans in flight; this is a bug");
        assert!(
            self.num_samples_in_flight <= self.num_rows_in_flight,
            "{id}: more samples than rows; this is a bug"
        );
        assert!(
            self.generated.len() + self.num_samples_in_flight <= self.max_new_tokens,
            "{id} too long; this is a bug"
        );
        assert!(self.num_planned <= self.num_tokens(), "{id} computed beyond its tokens; this is a bug");
        assert!(
            !self.is_paused() || self.num_events_in_flight() == 0,
            "{id} paused with events in flight; this is a bug"
        );
        self.prompt_outputs.check_integrity(id, self.num_rows_in_flight);
        let is_last = self.drafting.num_in_flight == 0 || self.num_samples_in_flight == 1;
        assert!(is_last, "{id}: a row follows drafts; this is a bug");
        match is_running {
            true => assert!(self.swapped.is_none(), "{id} runs and has swapped blocks; this is a bug"),
            false => assert_eq!(self.num_planned, 0, "{id} has computed tokens but no blocks; this is a bug"),
        }
    }
}
