//! One choice of a request being put together: the engine's events go in, text, tokens and what was asked to be told
//! come out.

use std::sync::Arc;

use penstock_engine::Consumer;
use penstock_engine::request::{
    Event, Finish, FinishReason, PromptPosition, Rejection, Request, RequestId, StopCause, Token,
    TokenDetails,
};
use penstock_types::{OutputScope, RequestedOutputs};

use crate::detach::catch;
use crate::output::Output;
use crate::record::{Shared, Tuple};
use crate::results::{Choice, StopReason, TopLogprobs};
use crate::rows::Rows;
use crate::wording::Wording;

/// How a choice ended.
#[derive(Clone, Debug)]
pub enum End {
    /// Not taken.
    Rejected(Rejection),
    /// Ended well, cancelled or interrupted: the finish reason as users know it.
    Finished(&'static str, Option<StopReason>, Finish),
    /// The step it was part of failed, or something that only it asked for.
    Failed(String),
    /// The engine stopped.
    Stopped(StopCause),
}

/// One choice: what was received of it.
pub struct Assembly {
    /// The engine's name for it.
    pub id: RequestId,
    /// What was asked of the engine.
    pub request: Arc<Request>,
    pub is_admitted: bool,
    /// How it ended, once that is known.
    pub end: Option<End>,
    pub output: Output,
    /// Of each token of the prompt but the first.
    pub prompt_logprobs: Vec<f32>,
    pub prompt_top_logprobs: Vec<TopLogprobs>,
    pub logits: Rows,
    pub hidden_states: Rows,
    /// `None` once the end is known.
    consumer: Option<Consumer>,
    wording: Wording,
    /// The stop string that ended the text; the engine still has to confirm the cancel.
    stopped_by: Option<String>,
}

impl Assembly {
    /// A choice whose events come by `consumer`.
    pub fn new(request: Arc<Request>, consumer: Consumer, wording: Wording) -> Self {
        Self {
            id: consumer.id(),
            is_admitted: false,
            end: None,
            output: Output::new(&request.outputs, wording.is_parsed()),
            prompt_logprobs: Vec::new(),
            prompt_top_logprobs: Vec::new(),
            logits: Rows::default(),
            hidden_states: Rows::default(),
            consumer: Some(consumer),
            wording,
            stopped_by: None,
            request,
        }
    }

    /// Receives what has arrived, until `max_unread` tokens wait to be taken. A panic in here ends this choice and no
    /// other.
    pub fn receive(&mut self, max_unread: usize) {
        let received = catch(|| {
            while self.end.is_none() && self.output.num_unread() < max_unread {
                let Some(event) = self.consumer.as_mut().and_then(Consumer::pop) else { return };
                self.take_in(event);
            }
        });
        if let Err(defect) = received {
            self.end_as(End::Failed(format!("{defect}; this is a bug in penstock")));
        }
    }

    /// Asks the engine to end it. Nothing happens when it has ended.
    pub fn cancel(&self) {
        if let Some(consumer) = &self.consumer {
            consumer.cancel();
        }
    }

    /// The last word on it, if it ended well.
    pub fn finish(&self) -> Option<&Finish> {
        match &self.end {
            Some(End::Finished(.., finish)) => Some(finish),
            _ => None,
        }
    }

    /// One for each token of the prompt, but none for the first, if that was asked for.
    pub fn prompt_logprobs(&self) -> Option<Shared<Tuple<Option<f32>>>> {
        self.request.outputs.prompt_logprobs.map(|_| behind_none(&self.prompt_logprobs))
    }

    /// Likewise.
    pub fn prompt_top_logprobs(&self) -> Option<Shared<Tuple<Option<TopLogprobs>>>> {
        let count = self.request.outputs.prompt_logprobs.filter(|count| *count > 0);
        count.map(|_| behind_none(&self.prompt_top_logprobs))
    }

    /// The whole of it as number `index`, if it ended well.
    pub fn choice(&self, index: usize) -> Option<Choice> {
        let Some(End::Finished(finish_reason, stop_reason, _)) = &self.end else { return None };
        let Output { told, text, echoed, parsed, token_ids, logprobs, top_logprobs, .. } = &self.output;
        let text = Shared::from(text.clone());
        let content = match told.parsed {
            true => parsed.content.clone().into(),
            false if *echoed == 0 => text.clone(),
            false => text[*echoed..].to_owned().into(),
        };
        Some(Choice {
            index,
            text,
            token_ids: Tuple(token_ids.clone()).into(),
            logprobs: told.logprobs.then(|| Tuple(logprobs.clone()).into()),
            top_logprobs: told.top_logprobs.then(|| Tuple(top_logprobs.clone()).into()),
            cumulative_logprob: told.logprobs.then(|| logprobs.iter().copied().map(f64::from).sum()),
            finish_reason: (*finish_reason).to_owned(),
            stop_reason: stop_reason.clone(),
            seed: self.request.sampling.seed,
            score: None,
            content,
            reasoning: parsed.reasoning.clone().into(),
            tool_calls: Tuple(parsed.calls.clone()).into(),
            logits: self.logits.tensor(),
            hidden_states: self.hidden_states.tensor(),
        })
    }

    fn take_in(&mut self, event: Event) {
        match event {
            Event::Admitted => self.is_admitted = true,
            Event::Prompt(positions) => positions.into_iter().for_each(|position| self.report(position)),
            Event::Token(token) => self.push(token),
            Event::Rejected(refusal) => self.end_as(End::Rejected(refusal)),
            Event::Finished(finish) => self.close(finish),
        }
    }

    fn report(&mut self, position: PromptPosition) {
        let mut details = position.details.map_or_else(TokenDetails::default, |details| *details);
        // After the last position, reported where nothing is generated, no token of the prompt follows.
        let is_followed = self.prompt_logprobs.len() + 1 < self.request.prompt.len();
        if is_followed && self.request.outputs.prompt_logprobs.is_some() {
            self.prompt_logprobs.push(position.logprob);
            self.prompt_top_logprobs.push(Tuple(std::mem::take(&mut details.top)));
        }
        self.keep_rows(&details);
    }

    /// A stop string ends the output here and now; what the engine computes until it hears of that is dropped.
    fn push(&mut self, token: Token) {
        if self.stopped_by.is_some() {
            return;
        }
        self.wording.begin(&mut self.output);
        let mut details = token.details.map_or_else(TokenDetails::default, |details| *details);
        self.output.push(token.id, token.logprob, std::mem::take(&mut details.top));
        self.keep_rows(&details);
        if self.request.stop_token_ids.contains(&token.id) && !self.wording.includes_stops() {
            return;
        }
        if let Some(stop) = self.wording.push(token.id, &mut self.output) {
            self.stopped_by = Some(stop.to_owned());
            self.cancel();
        }
    }

    /// Memory that the system does not have ends this choice and no other.
    fn keep_rows(&mut self, details: &TokenDetails) {
        let RequestedOutputs { logits, hidden_states, .. } = self.request.outputs;
        let num_known = |extent: Option<OutputScope>| match extent {
            Some(extent) if extent.has_prompt() => self.request.prompt.len(),
            _ => 0,
        };
        let (num_logits, num_states) = (num_known(logits), num_known(hidden_states));
        let kept = self.logits.push(&details.logits, num_logits);
        let kept = kept.and_then(|()| self.hidden_states.push(&details.hidden_state, num_states));
        if let Err(reason) = kept {
            self.end_as(End::Failed(reason));
        }
    }

    /// The end as users see it; releases the text that was held back.
    fn close(&mut self, finish: Finish) {
        if self.stopped_by.is_none() {
            self.wording.begin(&mut self.output);
            self.stopped_by = match &finish.reason {
                FinishReason::StopSequence(which) if !self.wording.includes_stops() => {
                    let length = self.request.stop_token_sequences[*which].len();
                    self.wording.finish_without(length, &mut self.output);
                    None
                }
                _ => self.wording.finish(&mut self.output).map(str::to_owned),
            };
        }
        let stop = |reason| ("stop", Some(reason));
        let (reason, stop_reason) = match (self.stopped_by.take(), &finish.reason) {
            (Some(text), _) => stop(StopReason::Text(text)),
            (None, FinishReason::Stop(token)) => stop(StopReason::Token(*token)),
            (None, FinishReason::StopSequence(which)) => {
                stop(StopReason::Sequence(Tuple(self.request.stop_token_sequences[*which].clone())))
            }
            (None, FinishReason::Length) => ("length", None),
            (None, FinishReason::Interrupted) => ("interrupted", None),
            (None, FinishReason::Cancelled) => ("cancelled", None),
            (None, FinishReason::Failed(reason)) => return self.end_as(End::Failed(reason.clone())),
            (None, FinishReason::EngineStopped(cause)) => return self.end_as(End::Stopped(cause.clone())),
        };
        self.end_as(End::Finished(reason, stop_reason, finish));
    }

    /// Dropping the consumer cancels what the engine still computes.
    fn end_as(&mut self, end: End) {
        self.end = Some(end);
        self.consumer = None;
    }
}

fn behind_none<T: Clone>(values: &[T]) -> Shared<Tuple<Option<T>>> {
    Tuple(std::iter::once(None).chain(values.iter().cloned().map(Some)).collect()).into()
}
