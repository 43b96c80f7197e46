//! A request on the inside: its tokens, how far they are computed, and where its results go.
//!
//! There is no state named prefill or decode. A sequence has tokens, and its computed tokens chase them:
//!
//! ```text
//!   prompt ───────────────┬─ generated ──┬─ on their way ─┐
//!   0 ......... num_planned ......................... num_tokens
//!               └──────── pending ────────────────────────┘
//! ```
//!
//! `num_planned` tokens are computed or in a plan in flight. The last of the tokens may itself be on its way (sampled by
//! a plan in flight): a row for it follows the sample instead of naming its input.

use std::sync::Arc;
use std::time::Instant;

use crate::executor::{BlockId, DEPTH, Sample, StepPlan, Work};
use crate::kv::BlockList;
use crate::message::Outbox;
use crate::port::PortIndex;
use crate::request::{CachedTokens, Finish, FinishReason, Request, RequestId, Token};

/// A request that waits or runs. Its place (slot and blocks) is the scheduler's to give and take.
pub struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) request: Arc<Request>,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    /// Generate at most this many tokens (the request's wish, clipped to the model's length).
    pub(crate) max_new_tokens: usize,
    /// Blocks that hold it at its longest.
    pub(crate) blocks_needed: usize,
    /// Set while it waits for its consumer to read; it is not planned then.
    pub(crate) is_paused: bool,
    generated: Vec<u32>,
    /// Tokens whose computation is done or in flight.
    num_planned: usize,
    /// Tokens that plans in flight will sample for it; at most their number.
    num_sampling: usize,
    arrival: Instant,
    first_planned: Option<Instant>,
    first_token: Option<Instant>,
}

/// What a sequence is made of.
pub(crate) struct Arrival {
    pub(crate) id: RequestId,
    pub(crate) request: Arc<Request>,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    pub(crate) max_new_tokens: usize,
    pub(crate) blocks_needed: usize,
}

/// Most generated tokens for which room is made in advance; longer outputs grow as vectors do.
const GENERATED_AHEAD: usize = 1024;

impl Sequence {
    pub(crate) fn new(arrival: Arrival, now: Instant) -> Self {
        let Arrival { id, request, outbox, port, max_new_tokens, blocks_needed } = arrival;
        Self {
            id,
            request,
            outbox,
            port,
            max_new_tokens,
            blocks_needed,
            is_paused: false,
            generated: Vec::with_capacity(max_new_tokens.min(GENERATED_AHEAD)),
            num_planned: 0,
            num_sampling: 0,
            arrival: now,
            first_planned: None,
            first_token: None,
        }
    }

    /// Tokens whose computation is done or in flight.
    pub(crate) fn num_planned(&self) -> usize {
        self.num_planned
    }

    /// How many tokens could be computed in the next step. What would sample a token the consumer has no room for is
    /// left out, and if then nothing is left and nothing is on its way, the sequence pauses.
    pub(crate) fn num_pending(&mut self) -> usize {
        // Known in advance: the last token is never computed, so a length end costs nothing.
        if self.is_paused || self.generated.len() + self.num_sampling == self.max_new_tokens {
            return 0;
        }
        let pending = self.num_tokens() - self.num_planned;
        if self.outbox.writer().has_room_for(self.num_sampling + 1) {
            return pending;
        }
        if pending == 1 && self.num_sampling == 0 {
            self.is_paused = self.outbox.writer().arm();
            return pending - usize::from(self.is_paused);
        }
        pending - 1
    }

    /// Adds a row that computes its next `num_tokens` tokens. `blocks` are all its blocks, grown to hold them.
    pub(crate) fn plan(
        &mut self,
        slot: u32,
        num_tokens: usize,
        blocks: &[BlockId],
        plan: &mut StepPlan,
        now: Instant,
    ) {
        let start = self.num_planned;
        let end = start + num_tokens;
        let follows_sample = self.num_sampling > 0;
        let first_token = plan.tokens.len();
        if follows_sample {
            debug_assert_eq!(
                (end, num_tokens),
                (self.num_tokens(), 1),
                "only the last is on its way; this is a bug"
            );
        } else {
            self.copy_tokens(start, end, &mut plan.tokens);
        }
        let first_block = plan.blocks.len();
        plan.blocks.extend_from_slice(blocks);
        let sample = (end == self.num_tokens()).then(|| {
            let index = self.generated.len() + self.num_sampling;
            let suppress_stops = index < self.request.min_tokens;
            Sample { request: Arc::clone(&self.request), index: index as u32, suppress_stops }
        });
        self.num_planned = end;
        self.num_sampling += usize::from(sample.is_some());
        self.first_planned.get_or_insert(now);
        plan.work.push(Work {
            slot,
            start: start as u32,
            prompt_len: self.request.prompt.len() as u32,
            num_tokens: num_tokens as u32,
            tokens: first_token as u32..plan.tokens.len() as u32,
            follows_sample,
            blocks: first_block as u32..plan.blocks.len() as u32,
            sample,
        });
    }

    /// Takes a token that a plan in flight has sampled, and says whether it was the last. There was room when it was
    /// planned, so there is room now.
    pub(crate) fn append(&mut self, token: Token, now: Instant) -> Option<FinishReason> {
        let index = self.generated.len();
        self.num_sampling -= 1;
        self.generated.push(token.id);
        self.first_token.get_or_insert(now);
        self.outbox.writer().push_token(token);
        if index >= self.request.min_tokens && self.request.stop_token_ids.contains(&token.id) {
            return Some(FinishReason::Stop(token.id));
        }
        (self.generated.len() == self.max_new_tokens).then_some(FinishReason::Length)
    }

    pub(crate) fn finish(&self, reason: FinishReason, now: Instant) -> Finish {
        let since_arrival = |moment: Instant| moment.saturating_duration_since(self.arrival);
        Finish {
            reason,
            cached: CachedTokens::default(),
            queued: self.first_planned.map_or_else(Default::default, since_arrival),
            first_token: self.first_token.map(since_arrival),
            total: since_arrival(now),
        }
    }

    fn num_tokens(&self) -> usize {
        self.request.prompt.len() + self.generated.len() + self.num_sampling
    }

    /// Appends the tokens at positions `start..end`, none of them on its way.
    fn copy_tokens(&self, start: usize, end: usize, out: &mut Vec<u32>) {
        let prompt = &self.request.prompt;
        let split = prompt.len();
        out.extend_from_slice(&prompt[start.min(split)..end.min(split)]);
        out.extend_from_slice(&self.generated[start.max(split) - split..end.max(split) - split]);
    }

    /// Panics unless its counts agree with each other and with `blocks`, its place if it has one.
    pub(crate) fn check_integrity(&self, blocks: Option<&BlockList>, block_size: usize) {
        let id = self.id;
        assert!(self.num_sampling <= DEPTH, "{id}: more samples than plans; this is a bug");
        assert!(
            self.generated.len() + self.num_sampling <= self.max_new_tokens,
            "{id} too long; this is a bug"
        );
        assert!(self.num_planned <= self.num_tokens(), "{id} computed beyond its tokens; this is a bug");
        assert!(
            !self.is_paused || self.num_sampling == 0,
            "{id} paused with tokens on their way; this is a bug"
        );
        match blocks {
            Some(blocks) => {
                let held = blocks.blocks().len();
                assert_eq!(
                    held,
                    self.num_planned.div_ceil(block_size),
                    "{id} holds wrong blocks; this is a bug"
                );
                assert_eq!(
                    held + blocks.num_reserved(),
                    self.blocks_needed,
                    "{id} lost a promise; this is a bug"
                );
            }
            None => assert_eq!(self.num_planned, 0, "{id} computed without a place; this is a bug"),
        }
    }
}
