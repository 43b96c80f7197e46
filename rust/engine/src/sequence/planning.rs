//! The part of a sequence that the next step may compute, and its row in the plan.

use std::sync::Arc;
use std::time::Instant;

use penstock_types::BlockId;

use super::sequence::Sequence;
use crate::step::{NewSequence, Sample, ScheduledRow, StepPlan};

impl Sequence {
    /// The number of tokens that the next step may compute. Tokens whose events would not fit the result queue are left
    /// out.
    pub(crate) fn num_schedulable(&self) -> usize {
        // The last token is never computed, and known in advance to be the last if it ends the request by length.
        if self.is_paused() || self.is_all_planned() {
            return 0;
        }
        let (start, end) = (self.num_planned, self.num_tokens());
        let num_events = self.num_events_in_flight();
        let outputs = self.prompt_outputs.within(start..end);
        let samples = self.max_new_tokens > 0;
        let queue = self.outbox.queue();
        if queue.has_room_for(num_events + usize::from(!outputs.is_empty()) + usize::from(samples)) {
            return end - start;
        }
        // With room for one event: all but the last token, after which a token is sampled; or all, if there are only
        // prompt outputs.
        let silent_end = match outputs.is_empty() {
            true => end - 1,
            false if queue.has_room_for(num_events + 1) => end - usize::from(samples),
            false => outputs.start,
        };
        silent_end - start
    }

    /// Whether a sequence of which no token is schedulable can only proceed once its consumer reads: tokens are
    /// pending, and no events are in flight. Does not look at the result queue again, because the consumer may have
    /// read since [`num_schedulable`](Self::num_schedulable); then [`try_pause`](Self::try_pause) notices.
    pub(crate) fn is_blocked(&self) -> bool {
        !self.is_paused() && !self.is_all_planned() && self.num_events_in_flight() == 0
    }

    /// Pauses a blocked sequence until its consumer has read half of the result queue. False if it has meanwhile: then
    /// one token at least can be scheduled.
    pub(crate) fn try_pause(&mut self, now: Instant) -> bool {
        self.paused_since = self.outbox.queue_mut().arm().then_some(now);
        self.is_paused()
    }

    /// Ends the pause of a sequence whose consumer has read.
    pub(crate) fn resume(&mut self) {
        self.paused_since = None;
    }

    /// Whether a waiting sequence can only proceed once its consumer reads.
    pub(crate) fn needs_reader(&self) -> bool {
        self.is_blocked() && !self.outbox.queue().has_room_for(1)
    }

    /// The most events that plans in flight will cause.
    pub(super) fn num_events_in_flight(&self) -> usize {
        self.num_samples_in_flight + self.drafting.num_in_flight + self.prompt_outputs.num_rows()
    }

    /// Whether its next row will probably have drafts, provided that the step has budget left for them, or a row in
    /// flight has drafts. Its next row cannot be planned before the one in flight is done then.
    pub(crate) fn is_drafting(&self, num_running: usize, has_budget: bool) -> bool {
        if self.drafting.num_in_flight > 0 {
            return true;
        }
        let computes_last_next = self.num_planned + 1 >= self.num_tokens();
        // The predictions follow the last known token; the tokens in flight come between.
        let has_drafts = || self.drafting.num_wanted(self.num_samples_in_flight, num_running) > 0;
        has_budget && computes_last_next && !self.is_paused() && self.num_left() > 1 && has_drafts()
    }

    /// The number of tokens it may still generate besides those in flight.
    fn num_left(&self) -> usize {
        self.max_new_tokens - self.generated.len() - self.num_samples_in_flight
    }

    /// Appends to `drafts` the draft tokens of its next row, which computes `num_tokens` tokens: at most `max_drafts`,
    /// and no more than it may generate and the result queue has room for. None if the row does not compute the last
    /// token, or that is not known.
    pub(crate) fn propose_drafts(
        &self,
        num_tokens: usize,
        max_drafts: usize,
        num_running: usize,
        drafts: &mut Vec<u32>,
    ) {
        if self.num_events_in_flight() > 0
            || self.num_planned + num_tokens < self.num_tokens()
            || self.generated.is_empty()
        {
            return;
        }
        let num_wanted = self.drafting.num_wanted(0, num_running);
        let mut num_drafts = num_wanted.min(max_drafts).min(self.num_left().saturating_sub(1));
        while num_drafts > 0 && !self.outbox.queue().has_room_for(num_drafts + 1) {
            num_drafts -= 1;
        }
        drafts.extend_from_slice(&self.drafting.candidates()[..num_drafts]);
    }

    /// Adds a row to `plan` that computes its next `num_tokens` tokens and verifies `drafts`. `blocks` hold them.
    pub(crate) fn plan(
        &mut self,
        slot: u32,
        num_tokens: usize,
        drafts: &[u32],
        blocks: &[BlockId],
        plan: &mut StepPlan,
        now: Instant,
    ) {
        if !self.has_slot_state {
            self.has_slot_state = true;
            let first = plan.tokens.len() as u32;
            plan.tokens.extend_from_slice(&self.generated);
            let generated = first..plan.tokens.len() as u32;
            plan.new_sequences.push(NewSequence {
                slot,
                request: Arc::clone(&self.request),
                choice: self.choice,
                generated,
                lifetime: Arc::downgrade(&self.lifetime),
            });
        }
        let start = self.num_planned;
        let end = start + num_tokens;
        let follows_sample = self.num_samples_in_flight > 0;
        let first_token = plan.tokens.len();
        if follows_sample {
            debug_assert_eq!(
                (end, num_tokens, drafts.len()),
                (self.num_tokens(), 1, 0),
                "only the last token is unknown; this is a bug"
            );
        } else {
            self.tokens().copy(start..end, &mut plan.tokens);
            plan.tokens.extend_from_slice(drafts);
        }
        let first_block = plan.blocks.len();
        plan.blocks.extend_from_slice(blocks);
        let index = (self.generated.len() + self.num_samples_in_flight) as u32;
        let computes_last = end == self.num_tokens() && self.max_new_tokens > 0;
        let sample = computes_last.then_some(Sample { index });
        let prompt_outputs = self.prompt_outputs.plan(start..end);
        self.num_planned = end;
        self.drafting.num_in_flight = drafts.len();
        self.num_rows_in_flight += 1;
        self.num_samples_in_flight += usize::from(sample.is_some());
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
            prompt_outputs: prompt_outputs.start as u32..prompt_outputs.end as u32,
            sample,
            adapter: None,
        });
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::Sampling;

    use super::*;
    use crate::message::Outbox;
    use crate::port::{Port, Ringer};
    use crate::prefix_cache::{Chain, Namespace};
    use crate::request::{Event, Request, RequestId};
    use crate::result_queue::{Reader, result_queue};
    use crate::sequence::{Arrival, SchedulingKey};
    use penstock_types::Token;

    /// A sequence whose result queue of four events is full, and the reader.
    fn blocked() -> (Sequence, Reader) {
        let port = Port::with_condvar();
        let (writer, reader) = result_queue(4);
        let mut outbox = Outbox::new(RequestId(1), writer, port.bell());
        outbox.queue_mut().admit();
        (1..4).for_each(|id| outbox.queue_mut().push_token(Token::new(id, 0.0)));
        let arrival = Arrival {
            key: SchedulingKey { priority: 0, id: RequestId(1) },
            request: Arc::new(Request::new(vec![1], 8, Sampling::default())),
            choice: 0,
            port: Ringer::default().connect(outbox.bell()),
            outbox,
            max_new_tokens: 8,
            max_kv_tokens: 8,
            chain: Chain::new(Namespace::default(), 0, 0),
        };
        (Sequence::new(arrival, 0, Instant::now()), reader)
    }

    #[test]
    fn blocked_sequence_stays_blocked_if_its_consumer_reads_late() {
        for (num_read, is_paused) in [(1, true), (2, false)] {
            let (mut sequence, mut reader) = blocked();
            assert_eq!(sequence.num_schedulable(), 0);
            assert_eq!(reader.pop(), Some(Event::Admitted));
            (1..num_read).for_each(|id| assert_eq!(reader.pop(), Some(Event::Token(Token::new(id, 0.0)))));
            assert!(sequence.is_blocked(), "or it would neither be scheduled nor wake the engine");
            assert_eq!(sequence.try_pause(Instant::now()), is_paused, "{num_read} events are read");
        }
    }
}
