//! The consumer's end of one request: the engine's events go in, text and tokens come out. No interpreter here.
//!
//! ```text
//! result queue ── advance ──> whole output so far ── take ──> what was not taken yet (a chunk)
//!                             └───────── outcome ───────────> all of it (the result)
//! ```
//!
//! What was received but not taken is a pair of cursors into the output, so nothing is lost when a waiting task is
//! cancelled and nothing is stored twice. A reader that falls `max_unread` tokens behind is not read for: its queue in
//! the engine fills up and its sequence pauses. Asking for the end means to read everything.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_engine::Consumer;
use penstock_engine::request::{Event, Finish, FinishReason, Refusal, Request, Token};
use penstock_text::TextStream;

use crate::detach::catch;
use crate::record::Tuple;
use crate::results::{Chunk, StopReason};

/// What a listener waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The engine took the request, or did not.
    Admission,
    /// There is something to take, or nothing will ever be.
    Chunk,
    /// Nothing follows.
    End,
}

/// How a request ended.
#[derive(Clone, Debug)]
pub enum End {
    /// Not taken.
    Refused(Refusal),
    /// Ended well, cancelled or interrupted: the finish reason as users know it.
    Finished(&'static str, Option<StopReason>, Finish),
    /// The step it was part of failed.
    Failed(String),
    /// The engine stopped under it.
    Stopped,
}

/// One request, shared by its Python object and the port that receives for it.
pub struct Live {
    /// The engine's name for it.
    pub id: u64,
    /// What was asked, every default resolved.
    pub request: Arc<Request>,
    state: Mutex<State>,
}

struct State {
    /// `None` once the end is known.
    consumer: Option<Consumer>,
    /// Goals somebody waits for; the end is always one.
    awaits_admission: bool,
    awaits_chunk: bool,
    /// Somebody wants the end, so everything before it is read at once.
    collects: bool,
    is_admitted: bool,
    stream: TextStream,
    stops: Vec<String>,
    /// The stop string that ended the text; the engine still has to confirm the cancel.
    stopped_by: Option<String>,
    output: Output,
    end: Option<End>,
    max_unread: usize,
}

/// Everything generated so far, and how much of it was taken.
#[derive(Default)]
struct Output {
    text: String,
    token_ids: Vec<u32>,
    logprobs: Vec<f32>,
    taken_text: usize,
    taken_tokens: usize,
}

impl Live {
    /// The consumer's end of `request`, whose events come by `consumer`.
    pub fn new(
        request: Arc<Request>,
        consumer: Consumer,
        stream: TextStream,
        stops: Vec<String>,
        max_unread: usize,
    ) -> Self {
        let state = State {
            awaits_admission: false,
            awaits_chunk: false,
            collects: false,
            is_admitted: false,
            stream,
            stops,
            stopped_by: None,
            output: Output::default(),
            end: None,
            max_unread,
            consumer: None,
        };
        let id = consumer.id().0;
        Self { id, request, state: Mutex::new(State { consumer: Some(consumer), ..state }) }
    }

    /// Receives what has arrived. Says whether that reached a goal somebody waits for.
    pub fn advance(&self) -> bool {
        let mut state = self.lock();
        state.receive(&self.request);
        let is_reached = |goal, awaited: bool| awaited && state.has_reached(goal);
        let reached = is_reached(Goal::Admission, state.awaits_admission)
            || is_reached(Goal::Chunk, state.awaits_chunk)
            || state.has_reached(Goal::End);
        if reached {
            (state.awaits_admission, state.awaits_chunk) = (false, false);
        }
        reached
    }

    /// Receives what has arrived. Says whether `goal` is reached; if not, `advance` will say when.
    pub fn aim(&self, goal: Goal) -> bool {
        let mut state = self.lock();
        state.collects |= goal == Goal::End;
        if !state.has_reached(goal) {
            state.receive(&self.request);
        }
        let is_reached = state.has_reached(goal);
        match goal {
            Goal::Admission => state.awaits_admission = !is_reached,
            Goal::Chunk => state.awaits_chunk = !is_reached,
            Goal::End => {}
        }
        is_reached
    }

    /// Takes what was received and not taken yet, if anything.
    pub fn take(&self) -> Option<Chunk> {
        let mut state = self.lock();
        let has_logprobs = self.request.reports.logprobs.is_some();
        state.output.has_unread().then(|| state.output.take(has_logprobs))
    }

    /// All text and tokens so far.
    pub fn output(&self) -> Chunk {
        let output = &self.lock().output;
        Chunk {
            text: output.text.clone(),
            token_ids: Tuple(output.token_ids.clone()),
            logprobs: self.request.reports.logprobs.is_some().then(|| Tuple(output.logprobs.clone())),
        }
    }

    /// Whether the engine took it, whatever came of it later.
    pub fn was_admitted(&self) -> bool {
        self.lock().is_admitted
    }

    /// How it ended, once that is known.
    pub fn end(&self) -> Option<End> {
        self.lock().end.clone()
    }

    /// Asks the engine to end it. Nothing happens when it has ended.
    pub fn cancel(&self) {
        if let Some(consumer) = &self.lock().consumer {
            consumer.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_reached(&self, goal: Goal) -> bool {
        self.end.is_some()
            || match goal {
                Goal::Admission => self.is_admitted,
                Goal::Chunk => self.output.has_unread(),
                Goal::End => false,
            }
    }

    /// A panic in here ends this request and no other.
    fn receive(&mut self, request: &Request) {
        if let Err(defect) = catch(|| self.pop_events(request)) {
            self.finish(End::Failed(format!("{defect}; this is a bug in penstock")));
        }
    }

    fn pop_events(&mut self, request: &Request) {
        while self.end.is_none() && (self.collects || self.output.num_unread() < self.max_unread) {
            let Some(event) = self.consumer.as_mut().and_then(Consumer::pop) else { return };
            match event {
                Event::Admitted => self.is_admitted = true,
                Event::Prompt(_) => {}
                Event::Token(token) => self.push(token, request),
                Event::Refused(refusal) => self.finish(End::Refused(refusal)),
                Event::Finished(finish) => {
                    let end = self.close(finish);
                    self.finish(end);
                }
            }
        }
    }

    /// A stop string ends the output here and now; what the engine computes until it hears of that is dropped.
    fn push(&mut self, token: Token, request: &Request) {
        if self.stopped_by.is_some() {
            return;
        }
        self.output.token_ids.push(token.id);
        if request.reports.logprobs.is_some() {
            self.output.logprobs.push(token.logprob);
        }
        if request.stop_token_ids.contains(&token.id) {
            return;
        }
        let stop = self.stream.push(token.id);
        self.output.text += &self.stream.take();
        if let Some(stop) = stop {
            self.stopped_by = Some(self.stops[stop.stop].clone());
            if let Some(consumer) = &self.consumer {
                consumer.cancel();
            }
        }
    }

    /// The end as users see it; releases the text that was held back.
    fn close(&mut self, finish: Finish) -> End {
        if self.stopped_by.is_none() {
            let stop = self.stream.finish();
            self.output.text += &self.stream.take();
            self.stopped_by = stop.map(|stop| self.stops[stop.stop].clone());
        }
        if let Some(stop) = self.stopped_by.take() {
            return End::Finished("stop", Some(StopReason::Text(stop)), finish);
        }
        match &finish.reason {
            FinishReason::Stop(token) => End::Finished("stop", Some(StopReason::Token(*token)), finish),
            FinishReason::StopSequence(_) => End::Finished("stop", None, finish),
            FinishReason::Length => End::Finished("length", None, finish),
            FinishReason::Interrupted => End::Finished("interrupted", None, finish),
            FinishReason::Cancelled => End::Finished("cancelled", None, finish),
            FinishReason::Failed(reason) => End::Failed(reason.clone()),
            FinishReason::EngineStopped => End::Stopped,
        }
    }

    fn finish(&mut self, end: End) {
        self.end = Some(end);
        self.consumer = None;
    }
}

impl Output {
    fn num_unread(&self) -> usize {
        self.token_ids.len() - self.taken_tokens
    }

    fn has_unread(&self) -> bool {
        self.num_unread() > 0 || self.text.len() > self.taken_text
    }

    fn take(&mut self, has_logprobs: bool) -> Chunk {
        let chunk = Chunk {
            text: self.text[self.taken_text..].to_owned(),
            token_ids: Tuple(self.token_ids[self.taken_tokens..].to_vec()),
            logprobs: has_logprobs.then(|| Tuple(self.logprobs[self.taken_tokens..].to_vec())),
        };
        self.taken_text = self.text.len();
        self.taken_tokens = self.token_ids.len();
        chunk
    }
}
