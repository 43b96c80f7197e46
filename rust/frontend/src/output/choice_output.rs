//! One choice of a request: the engine's events go in; text, tokens and the requested outputs come out.

use std::sync::Arc;
use std::time::Instant;

use penstock_engine::Consumer;
use penstock_engine::request::{CachedTokens, Event, Finish, PromptPosition, Request};
use penstock_types::RequestedOutputs;
use penstock_types::{Token, TokenDetails};

use super::output_text::OutputText;
use super::position_tensors::PositionTensors;
use super::stop_checker::{ChoiceEnd, StopChecker};
use super::token_output::TokenOutput;
use super::{Choice, Chunk, TopLogprobs};
use crate::panics::catch;

/// The received part of one choice.
pub struct ChoiceOutput {
    pub request: Arc<Request>,
    seed: u64,
    outputs: RequestedOutputs,
    pub is_admitted: bool,
    pub end: Option<ChoiceEnd>,
    /// Whether the last chunk was taken.
    is_end_taken: bool,
    /// The time at which the first token was received.
    pub first_token: Option<Instant>,
    pub tokens: TokenOutput,
    /// The log probability of each token of the prompt except the first.
    pub prompt_logprobs: Vec<f32>,
    pub prompt_top_logprobs: Vec<TopLogprobs>,
    pub logits: PositionTensors,
    pub hidden_states: PositionTensors,
    pub embeddings: PositionTensors,
    /// `None` after the end.
    consumer: Option<Consumer>,
    /// After the end: the prompt tokens that the prefix cache had.
    cached: CachedTokens,
    stops: StopChecker,
    text: OutputText,
    /// The stop string that ended the text; the engine has not confirmed the cancellation yet.
    stopped_by: Option<String>,
}

impl ChoiceOutput {
    /// The choice `index` of `request`, whose events `consumer` receives.
    pub fn new(request: &Arc<Request>, index: u32, consumer: Consumer, text: OutputText) -> Self {
        let outputs = request.choice_outputs(index);
        Self {
            seed: request.choice_seed(index),
            is_admitted: false,
            end: None,
            is_end_taken: false,
            first_token: None,
            tokens: TokenOutput::new(&outputs),
            prompt_logprobs: Vec::new(),
            prompt_top_logprobs: Vec::new(),
            logits: PositionTensors::new(outputs.logits, request.prompt.len()),
            hidden_states: PositionTensors::new(outputs.hidden_states, request.prompt.len()),
            embeddings: PositionTensors::new(outputs.embeddings, request.prompt.len()),
            consumer: Some(consumer),
            cached: CachedTokens::default(),
            stops: StopChecker::new(Arc::clone(request), text.includes_stops()),
            text,
            stopped_by: None,
            outputs,
            request: Arc::clone(request),
        }
    }

    /// Receives events until `max_unread` tokens are unread. A panic ends this choice and no other.
    pub fn receive(&mut self, max_unread: usize) {
        let received = catch(|| {
            while self.end.is_none() && self.tokens.num_unread() < max_unread {
                let Some(event) = self.consumer.as_mut().and_then(Consumer::pop) else { return };
                self.handle(event);
            }
        });
        if let Err(message) = received {
            self.end_as(ChoiceEnd::Failed(format!("{message}; this is a bug in penstock")));
        }
    }

    /// Marks the choice as not listed. Called when the port's list contained its id, before receiving.
    pub fn unlist(&self) {
        if let Some(consumer) = &self.consumer {
            consumer.unlist();
        }
    }

    /// The number of tokens that were not taken yet.
    pub fn num_unread(&self) -> usize {
        self.tokens.num_unread()
    }

    /// Whether there is a chunk to take: a choice that ends without an error has a last one, which may be empty.
    pub fn has_unread(&self) -> bool {
        self.tokens.num_unread() > 0
            || self.text.has_unread()
            || !self.is_end_taken && matches!(self.end, Some(ChoiceEnd::Finished(..)))
    }

    /// Takes everything that was not taken yet as a chunk of choice `index`. If the system has no memory for its rows,
    /// the choice ends.
    pub fn take(&mut self, index: usize) -> Chunk {
        let (text, content) = self.text.take();
        let (token_ids, logprobs, top_logprobs) = self.tokens.take();
        let mut chunk = Chunk {
            text,
            token_ids,
            logprobs,
            top_logprobs,
            index,
            content,
            reasoning: self.text.parsed.take_reasoning(),
            tool_calls: self.text.parsed.take_calls(),
            finish_reason: None,
            stop_reason: None,
            logits: None,
            hidden_states: None,
            embeddings: None,
        };
        if let Err(reason) = self.take_rows(&mut chunk) {
            self.end_as(ChoiceEnd::Failed(reason));
        }
        if let Some(ChoiceEnd::Finished(ending, _)) = &self.end {
            self.is_end_taken = true;
            chunk.finish_reason = Some(ending.finish_reason.to_owned());
            chunk.stop_reason.clone_from(&ending.stop_reason);
        }
        chunk
    }

    /// Asks the engine to cancel it. Has no effect after the end.
    pub fn cancel(&self) {
        if let Some(consumer) = &self.consumer {
            consumer.cancel();
        }
    }

    /// The engine's final event, unless the choice failed.
    pub fn finish(&self) -> Option<&Finish> {
        match &self.end {
            Some(ChoiceEnd::Finished(.., finish)) => Some(finish),
            _ => None,
        }
    }

    /// One entry for each token of the prompt, `None` for the first; if requested.
    pub fn prompt_logprobs(&self) -> Option<Vec<Option<f32>>> {
        self.outputs.prompt_logprobs.map(|_| after_none(&self.prompt_logprobs))
    }

    /// The most likely tokens at each token of the prompt, `None` for the first; if requested.
    pub fn prompt_top_logprobs(&self) -> Option<Vec<Option<TopLogprobs>>> {
        let count = self.outputs.prompt_logprobs.filter(|count| *count > 0);
        count.map(|_| after_none(&self.prompt_top_logprobs))
    }

    /// The complete choice, unless it failed.
    pub fn choice(&self, index: usize) -> Option<Choice> {
        let Some(ChoiceEnd::Finished(ending, _)) = &self.end else { return None };
        let (text, content) = self.text.whole();
        let TokenOutput { token_ids, logprobs, top_logprobs, .. } = &self.tokens;
        Some(Choice {
            index,
            text,
            token_ids: token_ids.clone(),
            logprobs: logprobs.clone(),
            top_logprobs: top_logprobs.clone(),
            cumulative_logprob: logprobs
                .as_ref()
                .map(|logprobs| logprobs.iter().copied().map(f64::from).sum()),
            finish_reason: ending.finish_reason.to_owned(),
            stop_reason: ending.stop_reason.clone(),
            seed: self.seed,
            score: None,
            content,
            reasoning: self.text.parsed.reasoning.as_str().into(),
            tool_calls: self.text.parsed.calls.clone(),
            logits: self.logits.tensor(),
            hidden_states: self.hidden_states.tensor(),
            embeddings: self.embeddings.tensor(),
        })
    }

    fn take_rows(&mut self, chunk: &mut Chunk) -> Result<(), String> {
        chunk.logits = self.logits.take()?;
        chunk.hidden_states = self.hidden_states.take()?;
        chunk.embeddings = self.embeddings.take()?;
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Admitted => self.is_admitted = true,
            Event::Prompt(positions) => positions.into_iter().for_each(|position| self.report(position)),
            Event::Token(token) => self.push(token),
            Event::Rejected(rejection) => self.end_as(ChoiceEnd::Rejected(rejection)),
            Event::Finished(finish) => self.close(finish),
        }
    }

    fn report(&mut self, position: PromptPosition) {
        let mut details = position.details.map_or_else(TokenDetails::default, |details| *details);
        // The last position, reported if nothing is generated, precedes no token of the prompt.
        let is_followed = self.prompt_logprobs.len() + 1 < self.request.prompt.len();
        if is_followed && self.outputs.prompt_logprobs.is_some() {
            self.prompt_logprobs.push(position.logprob);
            self.prompt_top_logprobs.push(std::mem::take(&mut details.top));
        }
        self.push_rows(&details);
    }

    /// Adds a token. A stop string ends the output at once; tokens that the engine computes until it sees the
    /// cancellation are dropped.
    fn push(&mut self, token: Token) {
        if self.stopped_by.is_some() {
            return;
        }
        self.first_token.get_or_insert_with(Instant::now);
        self.text.begin();
        match token.details {
            Some(mut details) => {
                self.tokens.push(token.id, token.logprob, std::mem::take(&mut details.top));
                self.push_rows(&details);
            }
            None => self.tokens.push(token.id, token.logprob, TopLogprobs::new()),
        }
        if !self.stops.adds_text(token.id, self.tokens.token_ids.len() - 1) {
            return;
        }
        if let Some(stop) = self.text.push(token.id) {
            self.stopped_by = Some(stop.to_owned());
            if let Some(consumer) = &self.consumer {
                consumer.stop();
            }
        }
    }

    /// Stores logits, hidden states and embeddings. If the system has no memory, this choice ends and no other.
    fn push_rows(&mut self, details: &TokenDetails) {
        let pushed = self.logits.push(&details.logits);
        let pushed = pushed.and_then(|()| self.hidden_states.push(&details.hidden_state));
        let pushed = pushed.and_then(|()| self.embeddings.push(&details.embedding));
        if let Err(reason) = pushed {
            self.end_as(ChoiceEnd::Failed(reason));
        }
    }

    /// Ends the choice; releases the text that was held back.
    fn close(&mut self, finish: Finish) {
        if self.stopped_by.is_none() {
            self.text.begin();
            self.stopped_by = match self.stops.excluded_sequence(&finish.reason) {
                Some(sequence) => {
                    self.text.finish_without(sequence.len(), &self.tokens.token_ids);
                    None
                }
                None => self.text.finish().map(str::to_owned),
            };
        }
        let ending = self.stops.ending(&finish.reason, self.stopped_by.take());
        let ending = ending.map(|ending| match self.text.parsed.has_complete_calls() {
            true => ending.with_tool_calls(),
            false => ending,
        });
        self.end_as(ending.map_or_else(|end| *end, |ending| ChoiceEnd::Finished(ending, finish)));
    }

    /// The prompt tokens that the prefix cache had, as far as they are known.
    pub fn cached(&self) -> CachedTokens {
        self.consumer.as_ref().map_or(self.cached, Consumer::cached)
    }

    /// Ends the choice. Dropping its consumer cancels the tokens that the engine still computes.
    fn end_as(&mut self, end: ChoiceEnd) {
        self.end = Some(end);
        self.cached = self.cached();
        self.consumer = None;
    }
}

fn after_none<T: Clone>(values: &[T]) -> Vec<Option<T>> {
    std::iter::once(None).chain(values.iter().cloned().map(Some)).collect()
}
