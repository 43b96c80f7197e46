//! The consumer's end of one request: the engine's events go in, text and tokens come out. No interpreter here.
//!
//! ```text
//! result queues ── advance ──> whole output so far ── take ──> what was not taken yet (a chunk)
//!    one a choice              └───────── result ────────────> all of it
//! ```
//!
//! A reader that falls `max_unread` tokens of a choice behind is not read for: that choice's queue in the engine fills
//! up and its sequence pauses. Asking for the end means to read everything.
//!
//! Choices go their own ways: each ends by itself, well or not, and the request is over when all have ended. They are
//! taken from in turns.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_engine::request::Request;
use penstock_engine::{Engine, Port};
use penstock_types::{OutputScope, RequestedOutputs};

use crate::assembly::{Assembly, End};
use crate::errors::Error;
use crate::record::Tuple;
use crate::results::{Chunk, Result as Answer, Timings, Usage};
use crate::rows::{self, Rows};
use crate::wording::Style;

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

/// One request, shared by its Python object and the port that receives for it.
pub struct Live {
    /// The engine's name for it: that of its first choice.
    pub id: u64,
    /// Whether logits or hidden states come.
    pub has_rows: bool,
    state: Mutex<State>,
}

struct State {
    /// At least one.
    choices: Vec<Assembly>,
    /// All have ended, and their rows are whole.
    is_over: bool,
    /// Goals somebody waits for; the end is always one.
    awaits_admission: bool,
    awaits_chunk: bool,
    /// Somebody wants the end, so everything before it is read at once.
    collects: bool,
    max_unread: usize,
    /// Whose turn it is to be taken from.
    turn: usize,
}

impl Live {
    /// Hands a request over: one for each of its choices, at least one. What comes of it is heard on `port`.
    pub fn start(
        engine: &Engine,
        requests: Vec<Arc<Request>>,
        style: Style,
        port: &Port,
    ) -> Result<Self, Error> {
        let wordings = style.wordings(requests.len())?;
        let consumers = engine.start_choices(requests.clone(), port)?;
        let choices = requests.into_iter().zip(consumers).zip(wordings);
        let choices = choices.map(|((request, consumer), wording)| Assembly::new(request, consumer, wording));
        let choices: Vec<_> = choices.collect();
        let id = choices[0].id.0;
        let RequestedOutputs { logits, hidden_states, .. } = choices[0].request.outputs;
        let state = State {
            choices,
            is_over: false,
            awaits_admission: false,
            awaits_chunk: false,
            collects: false,
            max_unread: engine.limits().queue_capacity,
            turn: 0,
        };
        let has_rows = logits.is_some() || hidden_states.is_some();
        Ok(Self { id, has_rows, state: Mutex::new(state) })
    }

    /// Receives what has arrived. Says whether that reached a goal somebody waits for.
    pub fn advance(&self) -> bool {
        let mut state = self.lock();
        state.receive();
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
            state.receive();
        }
        let is_reached = state.has_reached(goal);
        match goal {
            Goal::Admission => state.awaits_admission = !is_reached,
            Goal::Chunk => state.awaits_chunk = !is_reached,
            Goal::End => {}
        }
        is_reached
    }

    /// Takes what was received and not taken yet of one choice, if there is anything.
    pub fn take(&self) -> Option<Chunk> {
        let state = &mut *self.lock();
        let num_choices = state.choices.len();
        let mut turns = (0..num_choices).map(|offset| (state.turn + offset) % num_choices);
        let index = turns.find(|index| state.choices[*index].output.has_unread())?;
        state.turn = (index + 1) % num_choices;
        Some(state.choices[index].output.take(index))
    }

    /// Whether the engine took it, whatever came of it later.
    pub fn was_admitted(&self) -> bool {
        self.lock().choices[0].is_admitted
    }

    /// Whether nothing follows.
    pub fn is_over(&self) -> bool {
        self.lock().is_over
    }

    /// How it ended, once all of it has: as the first choice that did not end well, else as the first.
    pub fn end(&self) -> Option<End> {
        let State { choices, is_over: true, .. } = &*self.lock() else { return None };
        let mut ends = choices.iter().filter_map(|choice| choice.end.as_ref());
        let failed = ends.clone().find(|end| !matches!(end, End::Finished(..)));
        failed.or_else(|| ends.next()).cloned()
    }

    /// Everything, once all choices have ended well.
    pub fn result(&self) -> Option<Answer> {
        let State { choices, is_over: true, .. } = &*self.lock() else { return None };
        let finishes: Vec<_> = choices.iter().filter_map(Assembly::finish).collect();
        let numbered = choices.iter().enumerate();
        let first = &choices[0];
        let prompt = &first.request.prompt;
        let num_tokens = choices.iter().map(|choice| choice.output.token_ids.len()).sum();
        Some(Answer {
            prompt_token_ids: Tuple(prompt.to_vec()).into(),
            prompt_logprobs: first.prompt_logprobs(),
            prompt_top_logprobs: first.prompt_top_logprobs(),
            usage: Usage::of(prompt.len(), num_tokens, finishes.first()?.cached),
            timings: Timings::of(&finishes),
            choices: Tuple(numbered.map(|(index, choice)| choice.choice(index)).collect::<Option<_>>()?),
        })
    }

    /// Asks the engine to end it. Nothing happens when it has ended.
    pub fn cancel(&self) {
        self.lock().choices.iter().for_each(Assembly::cancel);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn has_reached(&self, goal: Goal) -> bool {
        self.is_over
            || match goal {
                Goal::Admission => self.choices[0].is_admitted,
                Goal::Chunk => self.choices.iter().any(|choice| choice.output.has_unread()),
                Goal::End => false,
            }
    }

    fn receive(&mut self) {
        if self.is_over {
            return;
        }
        let max_unread = if self.collects { usize::MAX } else { self.max_unread };
        self.choices.iter_mut().for_each(|choice| choice.receive(max_unread));
        if self.choices.iter().all(|choice| choice.end.is_some()) {
            self.complete();
            self.is_over = true;
        }
    }

    fn complete(&mut self) {
        let RequestedOutputs { logits, hidden_states, .. } = self.choices[0].request.outputs;
        let completed =
            complete_rows(&mut self.choices, logits, |choice| &mut choice.logits).and_then(|()| {
                complete_rows(&mut self.choices, hidden_states, |choice| &mut choice.hidden_states)
            });
        if let Err(reason) = completed {
            self.choices[0].end = Some(End::Failed(reason));
        }
    }
}

fn complete_rows(
    choices: &mut [Assembly],
    extent: Option<OutputScope>,
    rows_of: impl Fn(&mut Assembly) -> &mut Rows,
) -> Result<(), String> {
    let Some(extent) = extent else { return Ok(()) };
    let num_prompt = choices[0].request.prompt.len() - 1;
    let mut rows: Vec<_> = choices.iter_mut().map(rows_of).collect();
    rows::complete(&mut rows, extent, num_prompt)
}
