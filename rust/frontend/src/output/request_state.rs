//! The consumer's side of one request: the engine's events go in; text, tokens and results come out.
//!
//! ```text
//! result queues ── receive ──> whole output so far ── take ──> the part that was not taken yet (a chunk)
//!  one per choice              └────────── result ───────────> all of it
//! ```
//!
//! If a reader falls `max_unread` tokens of a choice behind, that choice is not received: its queue in the engine fills
//! up and its sequence pauses. Waiting for the end receives everything, and so does a request that keeps unread output.
//!
//! Each choice ends independently, with or without an error; the request is over when all have ended. Chunks are taken
//! from the choices in turn.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Instant;

use penstock_engine::request::Request;
use penstock_engine::{Engine, Port};
use penstock_types::{RequestedOutputs, Unread};

use super::choice_output::ChoiceOutput;
use super::output_text::OutputOptions;
use super::position_tensors::{self, PositionTensors};
use super::stop_checker::ChoiceEnd;
use super::{Chunk, RequestOutput, Timings, Usage};
use crate::Error;

/// A state of a request that a listener waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Milestone {
    /// The engine has admitted or rejected the request.
    Admission,
    /// There is a chunk to take, or none will follow.
    Chunk,
    /// The request is over.
    End,
}

/// One request, shared by its handle and the port that receives for it.
pub struct RequestState {
    /// The engine's id of the first choice.
    pub id: u64,
    pub num_choices: u64,
    /// Tokens of the prompt.
    pub prompt: Arc<[u32]>,
    /// Whether logits, hidden states or embeddings were requested.
    pub has_tensors: bool,
    /// The name of the adapter, if any.
    pub adapter: Option<String>,
    started: Instant,
    state: Mutex<State>,
}

struct State {
    /// At least one.
    choices: Vec<ChoiceOutput>,
    /// Choices that have not ended.
    num_unfinished: usize,
    /// All choices have ended, and their tensors are complete.
    is_over: bool,
    ended: Option<Instant>,
    /// Milestones that a listener waits for; the end always counts.
    awaits_admission: bool,
    awaits_chunk: bool,
    /// Unread output is kept, or a listener waits for the end: everything is received at once.
    receives_all: bool,
    max_unread: usize,
    /// The choice that the next chunk is taken from, if it has one.
    next_choice: usize,
}

impl RequestState {
    /// Starts a request with at least one choice. `port` is notified of its events.
    pub fn start(
        engine: &Engine,
        request: Arc<Request>,
        num_choices: usize,
        options: OutputOptions,
        port: &Port,
    ) -> Result<Self, Error> {
        let adapter = options.adapter.clone();
        let texts = options.texts(num_choices)?;
        let consumers = engine.start_choices(Arc::clone(&request), num_choices as u32, port)?;
        let id = consumers[0].id().0;
        let choices = (0..).zip(consumers.into_iter().zip(texts));
        let choices =
            choices.map(|(choice, (consumer, text))| ChoiceOutput::new(&request, choice, consumer, text));
        let choices = choices.collect();
        let prompt = Arc::clone(&request.prompt);
        let RequestedOutputs { logits, hidden_states, embeddings, .. } = request.outputs;
        let state = State {
            choices,
            num_unfinished: num_choices,
            is_over: false,
            ended: None,
            awaits_admission: false,
            awaits_chunk: false,
            receives_all: request.unread == Unread::Keep,
            max_unread: engine.limits().queue_capacity,
            next_choice: 0,
        };
        let has_tensors = [logits, hidden_states, embeddings].iter().any(Option::is_some);
        Ok(Self {
            id,
            num_choices: num_choices as u64,
            prompt,
            has_tensors,
            adapter,
            started: Instant::now(),
            state: Mutex::new(state),
        })
    }

    /// Receives the events that have arrived for some choices, which the port's list contained. Returns whether a
    /// milestone that a listener waits for is reached.
    pub(super) fn receive_choices(&self, choices: impl Iterator<Item = usize>) -> bool {
        let mut state = self.lock();
        for choice in choices {
            state.choices[choice].unlist();
            state.receive_choice(choice);
        }
        state.end_if_over();
        let is_reached = |milestone, awaited: bool| awaited && state.has_reached(milestone);
        let reached = is_reached(Milestone::Admission, state.awaits_admission)
            || is_reached(Milestone::Chunk, state.awaits_chunk)
            || state.has_reached(Milestone::End);
        if reached {
            (state.awaits_admission, state.awaits_chunk) = (false, false);
        }
        reached
    }

    /// Receives the events that have arrived, for a caller that does not wait. A listener that waits for a milestone is
    /// told by the next `receive_choices` as before.
    pub fn poll(&self) {
        self.lock().receive();
    }

    /// Receives the events that have arrived. Returns whether `milestone` is reached; if not, a later
    /// `receive_choices` returns true when it is.
    pub fn wait_for(&self, milestone: Milestone) -> bool {
        let mut state = self.lock();
        state.receives_all |= milestone == Milestone::End;
        if !state.has_reached(milestone) {
            state.receive();
        }
        let is_reached = state.has_reached(milestone);
        match milestone {
            Milestone::Admission => state.awaits_admission = !is_reached,
            Milestone::Chunk => state.awaits_chunk = !is_reached,
            Milestone::End => {}
        }
        is_reached
    }

    /// Whether [`poll_next`](Self::poll_next) would be ready. If not, a later `receive_choices` returns true once it is.
    /// It leaves the queues alone: a drain receives what is in them.
    pub fn is_readable(&self) -> bool {
        let mut state = self.lock();
        let is_reached = state.has_reached(Milestone::Chunk);
        state.awaits_chunk = !is_reached;
        is_reached
    }

    /// Takes the unread part of one choice, of what was received; `None` if nothing follows. If it is pending, a later
    /// `receive_choices` returns true once it is ready.
    pub fn poll_next(&self) -> Poll<Option<Chunk>> {
        let mut state = self.lock();
        let chunk = state.take();
        state.awaits_chunk = chunk.is_none() && !state.is_over;
        if state.awaits_chunk { Poll::Pending } else { Poll::Ready(chunk) }
    }

    /// Takes the unread part of one choice, if there is any.
    pub fn take(&self) -> Option<Chunk> {
        self.lock().take()
    }

    /// Whether the engine admitted the request.
    pub fn was_admitted(&self) -> bool {
        self.lock().choices[0].is_admitted
    }

    /// Whether nothing follows.
    pub fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// The end of the first choice that failed, else of the first choice; `None` before the request is over.
    pub fn end(&self) -> Option<ChoiceEnd> {
        let State { choices, is_over: true, .. } = &*self.lock() else { return None };
        let mut ends = choices.iter().filter_map(|choice| choice.end.as_ref());
        let failed = ends.clone().find(|end| !matches!(end, ChoiceEnd::Finished(..)));
        failed.or_else(|| ends.next()).cloned()
    }

    /// The complete output, if the request is over and no choice failed.
    pub fn result(&self) -> Option<RequestOutput> {
        let State { choices, is_over: true, .. } = &*self.lock() else { return None };
        let finishes: Vec<_> = choices.iter().filter_map(ChoiceOutput::finish).collect();
        let first = &choices[0];
        let complete = |(index, choice): (usize, &ChoiceOutput)| choice.choice(index).map(Arc::new);
        Some(RequestOutput {
            prompt_token_ids: Arc::clone(&self.prompt),
            prompt_logprobs: first.prompt_logprobs(),
            prompt_top_logprobs: first.prompt_top_logprobs(),
            adapter: self.adapter.clone(),
            usage: usage(choices),
            timings: Timings::new(&finishes),
            choices: choices.iter().enumerate().map(complete).collect::<Option<_>>()?,
        })
    }

    /// The token counts so far. The prefix cache's share is known when the first choice has ended.
    pub fn usage(&self) -> Usage {
        usage(&self.lock().choices)
    }

    /// The durations so far. Before the end, `queued` is an upper bound: the time until the first token or until `now`.
    pub fn timings(&self, now: Instant) -> Timings {
        let state = &*self.lock();
        let finishes: Vec<_> = state.choices.iter().filter_map(ChoiceOutput::finish).collect();
        if finishes.len() == state.choices.len() {
            return Timings::new(&finishes);
        }
        let elapsed = |moment: Instant| moment.saturating_duration_since(self.started).as_secs_f64();
        let first_token = state.choices.iter().filter_map(|choice| choice.first_token).min().map(elapsed);
        let total = elapsed(state.ended.unwrap_or(now));
        Timings { queued: first_token.unwrap_or(total), first_token, total }
    }

    /// Asks the engine to cancel the request. Has no effect after the end.
    pub fn cancel(&self) {
        self.lock().choices.iter().for_each(ChoiceOutput::cancel);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_reached(&self, milestone: Milestone) -> bool {
        self.is_over
            || match milestone {
                Milestone::Admission => self.choices[0].is_admitted,
                Milestone::Chunk => self.choices.iter().any(ChoiceOutput::has_unread),
                Milestone::End => false,
            }
    }

    /// Takes the unread part of one choice, if there is any. The choices take turns.
    fn take(&mut self) -> Option<Chunk> {
        let num_choices = self.choices.len();
        let mut order = (0..num_choices).map(|offset| (self.next_choice + offset) % num_choices);
        let index = order.find(|index| self.choices[*index].has_unread())?;
        self.next_choice = (index + 1) % num_choices;
        let was_full = self.choices[index].num_unread() >= self.max_unread;
        let was_open = self.choices[index].end.is_none();
        let chunk = self.choices[index].take(index);
        if was_open && self.choices[index].end.is_some() {
            self.num_unfinished -= 1;
            self.end_if_over();
        }
        if was_full {
            // Its queue has events that no drain will receive, because they were listed before.
            self.receive_choice(index);
            self.end_if_over();
        }
        Some(chunk)
    }

    fn receive(&mut self) {
        if self.is_over {
            return;
        }
        (0..self.choices.len()).for_each(|choice| self.receive_choice(choice));
        self.end_if_over();
    }

    fn receive_choice(&mut self, choice: usize) {
        let max_unread = if self.receives_all { usize::MAX } else { self.max_unread };
        let choice = &mut self.choices[choice];
        let was_open = choice.end.is_none();
        choice.receive(max_unread);
        self.num_unfinished -= usize::from(was_open && choice.end.is_some());
    }

    fn end_if_over(&mut self) {
        if self.num_unfinished == 0 && !self.is_over {
            self.complete();
            self.is_over = true;
            self.ended = Some(Instant::now());
        }
    }

    fn complete(&mut self) {
        let completed = complete_tensors(&mut self.choices, |choice| &mut choice.logits)
            .and_then(|()| complete_tensors(&mut self.choices, |choice| &mut choice.hidden_states))
            .and_then(|()| complete_tensors(&mut self.choices, |choice| &mut choice.embeddings));
        if let Err(reason) = completed {
            self.choices[0].end = Some(ChoiceEnd::Failed(reason));
        }
    }
}

fn usage(choices: &[ChoiceOutput]) -> Usage {
    let num_tokens = choices.iter().map(|choice| choice.tokens.token_ids.len()).sum();
    let cached = choices.iter().find_map(ChoiceOutput::finish).map(|finish| finish.cached);
    let cached = cached.unwrap_or_else(|| choices[0].cached());
    Usage::new(choices[0].request.prompt.len(), num_tokens, cached)
}

fn complete_tensors(
    choices: &mut [ChoiceOutput],
    tensors_of: impl Fn(&mut ChoiceOutput) -> &mut PositionTensors,
) -> Result<(), String> {
    let num_prompt = choices[0].request.prompt.len() - 1;
    let mut tensors: Vec<_> = choices.iter_mut().map(tensors_of).collect();
    position_tensors::complete(&mut tensors, num_prompt)
}
