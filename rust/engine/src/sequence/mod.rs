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
//! a plan in flight): a row for it follows the sample instead of naming its input. Only a row whose tokens are all known
//! may go on with drafts (`drafting`).
//!
//! A sequence that loses its place keeps all its tokens and forgets what was computed, but for what the prefix cache or
//! the host tier has when it gets the next one. It gets none before all its rows in flight are answered.

mod drafting;
mod reporting;

use std::sync::Arc;
use std::time::Instant;

use penstock_types::BlockId;

use crate::executor::{DEPTH, NewSequence, Sample, ScheduledRow, StepPlan};
use crate::kv::{BlockList, Saved};
use crate::message::Outbox;
use crate::port::PortIndex;
use crate::prefix::{Chain, Tokens};
use crate::request::{CachedTokens, Finish, FinishReason, PromptPosition, Request, RequestId, Token};
use drafting::Drafting;
use reporting::Reporting;

/// Where a sequence stands among the others: the lesser is served first, and the greater loses its place first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    /// The request's.
    pub(crate) priority: i32,
    /// Counts arrivals, so no two are equal.
    pub(crate) arrival: u64,
}

/// A request that waits or runs. Its place (slot and blocks) is the scheduler's to give and take.
pub struct Sequence {
    pub(crate) id: RequestId,
    pub(crate) turn: Turn,
    pub(crate) request: Arc<Request>,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    /// Generate at most this many tokens (the request's wish, clipped to the model's length).
    pub(crate) max_new_tokens: usize,
    /// Blocks that hold it at its longest.
    pub(crate) blocks_needed: usize,
    /// Set while it waits for its consumer to read; it is not planned then.
    pub(crate) is_paused: bool,
    /// What it is known by in the prefix cache.
    chain: Chain,
    /// What it has in the host tier while it waits for its next place.
    pub(crate) saved: Option<Saved>,
    /// Blocks that were loaded into the prefix cache for its next place.
    pub(crate) num_brought_over: usize,
    generated: Vec<u32>,
    reporting: Reporting,
    drafting: Drafting,
    /// Tokens whose computation is done or in flight.
    num_planned: usize,
    /// Tokens that were computed, or found in the cache, in some place it had.
    num_computed_once: usize,
    /// Whether the executor was told of its place.
    is_seated: bool,
    /// Plans in flight that it has a row in.
    num_rows: usize,
    /// Rows in flight that sample for it: each brings a token, or if it has drafts, one at least.
    num_sampling: usize,
    /// What the prefix cache had of it when it got its first place.
    cached: Option<CachedTokens>,
    arrived: Instant,
    first_planned: Option<Instant>,
    first_token: Option<Instant>,
}

/// What a sequence is made of.
pub(crate) struct Arrival {
    pub(crate) id: RequestId,
    pub(crate) turn: Turn,
    pub(crate) request: Arc<Request>,
    pub(crate) outbox: Outbox,
    pub(crate) port: PortIndex,
    pub(crate) max_new_tokens: usize,
    pub(crate) blocks_needed: usize,
    pub(crate) chain: Chain,
}

/// Tokens of a row that were computed.
#[derive(Clone, Copy)]
pub(crate) struct Computed {
    /// The position after the last one.
    pub(crate) end: usize,
    /// Of the prompt, for the first time.
    pub(crate) prompt: usize,
    /// Not for the first time.
    pub(crate) again: usize,
}

/// Most generated tokens for which room is made in advance; longer outputs grow as vectors do.
pub(crate) const GENERATED_AHEAD: usize = 1024;

impl Sequence {
    pub(crate) fn new(arrival: Arrival, num_speculative_tokens: usize, now: Instant) -> Self {
        let Arrival { id, turn, request, outbox, port, max_new_tokens, blocks_needed, chain } = arrival;
        Self {
            id,
            turn,
            reporting: Reporting::new(&request),
            drafting: Drafting::new(num_speculative_tokens),
            request,
            outbox,
            port,
            max_new_tokens,
            blocks_needed,
            is_paused: false,
            chain,
            saved: None,
            num_brought_over: 0,
            generated: Vec::with_capacity(max_new_tokens.min(GENERATED_AHEAD)),
            num_planned: 0,
            num_computed_once: 0,
            is_seated: false,
            num_rows: 0,
            num_sampling: 0,
            cached: None,
            arrived: now,
            first_planned: None,
            first_token: None,
        }
    }

    /// Tokens whose computation is done or in flight.
    pub(crate) fn num_planned(&self) -> usize {
        self.num_planned
    }

    /// Its tokens, those on their way included.
    pub(crate) fn num_tokens(&self) -> usize {
        self.request.prompt.len() + self.generated.len() + self.num_sampling
    }

    /// What the prefix cache wants to know of it.
    pub(crate) fn contents(&mut self) -> (&mut Chain, Tokens<'_>) {
        (&mut self.chain, Tokens { prompt: &self.request.prompt, generated: &self.generated })
    }

    /// Whether it has, or had, a place.
    pub(crate) fn has_had_place(&self) -> bool {
        self.cached.is_some()
    }

    /// Whether nothing of it is in flight.
    pub(crate) fn is_settled(&self) -> bool {
        self.num_rows == 0
    }

    /// Whether all tokens it may generate, and all that is told of its prompt, are there or on their way: nothing of it
    /// is left to compute.
    pub(crate) fn is_all_planned(&self) -> bool {
        self.generated.len() + self.num_sampling == self.max_new_tokens && self.reporting.is_all_planned()
    }

    /// How many of its first tokens may come from elsewhere. Not those that it has to tell of, nor the last one:
    /// something has to be sampled after it.
    pub(crate) fn num_reusable(&self) -> usize {
        self.reporting.num_reusable().min(self.num_tokens() - 1)
    }

    /// Whether it is looked up in the prefix cache when it gets its first place.
    pub(crate) fn may_find_prefix(&self) -> bool {
        self.chain.max_blocks() > 0 && self.reporting.is_all_planned()
    }

    /// It gets a place whose blocks hold its first `num_computed` tokens. Returns whether it is its first, of which
    /// `cached` is remembered.
    pub(crate) fn take_place(&mut self, num_computed: usize, cached: CachedTokens) -> bool {
        let is_first = self.cached.is_none();
        if is_first {
            self.cached = Some(cached);
        }
        self.num_computed_once = self.num_computed_once.max(num_computed);
        self.num_planned = num_computed;
        is_first
    }

    /// It loses its place; returns how many tokens were planned. What is in flight is still counted on.
    pub(crate) fn leave_place(&mut self) -> usize {
        self.is_seated = false;
        std::mem::take(&mut self.num_planned)
    }

    /// What is in flight for it will not be counted on.
    pub(crate) fn forget_flights(&mut self) {
        self.num_rows = 0;
        self.num_sampling = 0;
        self.reporting.forget_flights();
        self.drafting.forget_flights();
    }

    /// One of its rows was computed, and what it sampled was appended.
    pub(crate) fn row_computed(&mut self, work: &ScheduledRow) -> Computed {
        self.num_rows -= 1;
        self.num_sampling -= usize::from(work.sample.is_some());
        let (start, mut end) = (work.start as usize, (work.start + work.num_tokens) as usize);
        if work.num_drafts > 0 {
            // What follows the last confirmed draft is no token of the sequence, and is computed again.
            let num_confirmed = self.num_tokens() - 1 - (end - work.num_drafts as usize);
            end -= work.num_drafts as usize - num_confirmed;
            self.num_planned += if self.is_seated { num_confirmed } else { 0 };
            self.drafting.num_drafts = 0;
        }
        let known = self.num_computed_once.clamp(start, end);
        self.num_computed_once = self.num_computed_once.max(end);
        let prompt = self.request.prompt.len().clamp(known, end) - known;
        Computed { end, prompt, again: known - start }
    }

    /// How many tokens could be computed in the next step. What would tell the consumer something it has no room for is
    /// left out, and if then nothing is left and nothing is on its way, the sequence pauses.
    pub(crate) fn num_pending(&mut self) -> usize {
        // Known in advance: the last token is never computed, so a length end costs nothing.
        if self.is_paused || self.is_all_planned() {
            return 0;
        }
        let (start, end) = (self.num_planned, self.num_tokens());
        let num_coming = self.num_coming();
        let reported = self.reporting.within(start..end);
        let samples = self.max_new_tokens > 0;
        let writer = self.outbox.writer();
        if writer.has_room_for(num_coming + usize::from(!reported.is_empty()) + usize::from(samples)) {
            return end - start;
        }
        // With room for one event: all but the last token, after which one is sampled; or all, if it only outputs.
        let silent_end = match reported.is_empty() {
            true => end - 1,
            false if writer.has_room_for(num_coming + 1) => end - usize::from(samples),
            false => reported.start,
        };
        if silent_end == start && num_coming == 0 {
            self.is_paused = self.outbox.writer().arm();
            // If it does not, half the queue is free: at least one event has room, and that is the next one.
            return usize::from(!self.is_paused);
        }
        silent_end - start
    }

    /// Events that plans in flight will have for it, at most.
    fn num_coming(&self) -> usize {
        self.num_sampling + self.drafting.num_drafts + self.reporting.num_rows()
    }

    /// Adds a row that computes its next `num_tokens` tokens and verifies `drafts`. `blocks` are all its blocks, grown to
    /// hold them.
    pub(crate) fn plan(
        &mut self,
        slot: u32,
        num_tokens: usize,
        drafts: &[u32],
        blocks: &[BlockId],
        plan: &mut StepPlan,
        now: Instant,
    ) {
        if !self.is_seated {
            self.is_seated = true;
            let first = plan.tokens.len() as u32;
            plan.tokens.extend_from_slice(&self.generated);
            let generated = first..plan.tokens.len() as u32;
            plan.new_sequences.push(NewSequence { slot, request: Arc::clone(&self.request), generated });
        }
        let start = self.num_planned;
        let end = start + num_tokens;
        let follows_sample = self.num_sampling > 0;
        let first_token = plan.tokens.len();
        if follows_sample {
            debug_assert_eq!(
                (end, num_tokens, drafts.len()),
                (self.num_tokens(), 1, 0),
                "only the last is on its way; this is a bug"
            );
        } else {
            self.contents().1.copy(start..end, &mut plan.tokens);
            plan.tokens.extend_from_slice(drafts);
        }
        let first_block = plan.blocks.len();
        plan.blocks.extend_from_slice(blocks);
        let index = (self.generated.len() + self.num_sampling) as u32;
        let is_last = end == self.num_tokens() && self.max_new_tokens > 0;
        let sample = is_last.then_some(Sample { index });
        let reported = self.reporting.plan(start..end);
        self.num_planned = end;
        self.drafting.num_drafts = drafts.len();
        self.num_rows += 1;
        self.num_sampling += usize::from(sample.is_some());
        self.first_planned.get_or_insert(now);
        plan.rows.push(ScheduledRow {
            slot,
            start: start as u32,
            prompt_len: self.request.prompt.len() as u32,
            num_tokens: (num_tokens + drafts.len()) as u32,
            tokens: first_token as u32..plan.tokens.len() as u32,
            follows_sample,
            blocks: first_block as u32..plan.blocks.len() as u32,
            num_drafts: drafts.len() as u32,
            prompt_outputs: reported.start as u32..reported.end as u32,
            sample,
        });
    }

    /// Takes what a plan in flight had to tell of its prompt, and says whether nothing more was asked for. There was
    /// room when it was planned, so there is room now.
    pub(crate) fn report(
        &mut self,
        work: &ScheduledRow,
        positions: &mut [PromptPosition],
    ) -> Option<FinishReason> {
        if positions.is_empty() {
            return None;
        }
        self.reporting.deliver(work.prompt_outputs.end as usize);
        let positions = positions.iter_mut().map(PromptPosition::take).collect();
        self.outbox.writer().push_positions(positions);
        let is_end = self.max_new_tokens == 0 && self.reporting.is_all_delivered();
        is_end.then_some(FinishReason::Length)
    }

    /// Takes a token that a plan in flight has sampled, and says whether it was the last. There was room when it was
    /// planned, so there is room now.
    pub(crate) fn append(&mut self, token: Token, now: Instant) -> Option<FinishReason> {
        let (id, index) = (token.id, self.generated.len());
        self.generated.push(id);
        self.drafting.token_came(id);
        self.first_token.get_or_insert(now);
        self.outbox.writer().push_token(token);
        // The id at `index` was chosen when so many tokens had been generated, and the sequence has one more.
        if index >= self.request.min_tokens && self.request.stop_token_ids.contains(&id) {
            return Some(FinishReason::Stop(id));
        }
        if self.generated.len() >= self.request.min_tokens {
            let ends_with = |sequence: &Vec<u32>| self.generated.ends_with(sequence);
            if let Some(sequence) = self.request.stop_token_sequences.iter().position(ends_with) {
                return Some(FinishReason::StopSequence(sequence));
            }
        }
        (self.generated.len() == self.max_new_tokens).then_some(FinishReason::Length)
    }

    pub(crate) fn finish(&self, reason: FinishReason, now: Instant) -> Finish {
        let since_arrival = |moment: Instant| moment.saturating_duration_since(self.arrived);
        Finish {
            reason,
            cached: self.cached.unwrap_or_default(),
            queued: self.first_planned.map_or_else(Default::default, since_arrival),
            first_token: self.first_token.map(since_arrival),
            total: since_arrival(now),
        }
    }

    /// Panics unless its counts agree with each other and with `blocks`, its place if it has one.
    pub(crate) fn check_integrity(&self, blocks: Option<&BlockList>, block_size: usize) {
        let id = self.id;
        assert!(self.num_rows <= DEPTH, "{id}: more rows than plans; this is a bug");
        assert!(self.num_sampling <= self.num_rows, "{id}: more samples than rows; this is a bug");
        assert!(
            self.generated.len() + self.num_sampling <= self.max_new_tokens,
            "{id} too long; this is a bug"
        );
        assert!(self.num_planned <= self.num_tokens(), "{id} computed beyond its tokens; this is a bug");
        assert!(
            !self.is_paused || self.num_coming() == 0,
            "{id} paused with events on their way; this is a bug"
        );
        self.reporting.check_integrity(id, self.num_rows);
        let is_last = self.drafting.num_drafts == 0 || self.num_sampling == 1;
        assert!(is_last, "{id}: a row follows drafts; this is a bug");
        match blocks {
            Some(blocks) => {
                let held = blocks.blocks().len();
                assert_eq!(
                    held,
                    (self.num_planned + self.drafting.num_drafts).div_ceil(block_size),
                    "{id} holds wrong blocks; this is a bug"
                );
                assert!(
                    held + blocks.num_reserved() <= self.blocks_needed,
                    "{id} was promised too much; this is a bug"
                );
                assert!(self.saved.is_none(), "{id} has a place and saved blocks; this is a bug");
            }
            None => assert_eq!(self.num_planned, 0, "{id} computed without a place; this is a bug"),
        }
    }
}
