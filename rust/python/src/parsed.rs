//! What the text of one choice means: content, reasoning and tool calls, growing as its parser makes them out.

use std::hash::{BuildHasher, RandomState};

use penstock_text::parsers::Delta;

use crate::record::Tuple;
use crate::results::{ToolCall, ToolCallDelta};

/// Everything made out so far, and how much of it was taken.
#[derive(Default)]
pub struct Parsed {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
    taken_content: usize,
    taken_reasoning: usize,
    /// Length of the arguments taken, of each call of which something was.
    taken_calls: Vec<usize>,
}

impl Parsed {
    /// Adds what the parser made out.
    pub fn extend(&mut self, deltas: impl Iterator<Item = Delta>) {
        for delta in deltas {
            match delta {
                Delta::Content(text) => self.content += &text,
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::ToolCall { name, .. } => {
                    self.calls.push(ToolCall { id: draw_id(), name, arguments: String::new() });
                }
                Delta::Arguments { index, text } => self.calls[index].arguments += &text,
            }
        }
    }

    /// Whether there is something to take.
    pub fn has_unread(&self) -> bool {
        self.content.len() > self.taken_content
            || self.reasoning.len() > self.taken_reasoning
            || self.calls.len() > self.taken_calls.len()
            || self.calls.iter().zip(&self.taken_calls).any(|(call, taken)| call.arguments.len() > *taken)
    }

    /// Content that was not taken yet.
    pub fn take_content(&mut self) -> String {
        take(&self.content, &mut self.taken_content)
    }

    /// Reasoning that was not taken yet.
    pub fn take_reasoning(&mut self) -> String {
        take(&self.reasoning, &mut self.taken_reasoning)
    }

    /// What was not taken yet of each call; of a new one, its id and its name first.
    pub fn take_calls(&mut self) -> Tuple<ToolCallDelta> {
        let num_known = self.taken_calls.len();
        self.taken_calls.resize(self.calls.len(), 0);
        let deltas =
            self.calls.iter().zip(&mut self.taken_calls).enumerate().map(|(index, (call, taken))| {
                let is_new = index >= num_known;
                ToolCallDelta {
                    index,
                    id: is_new.then(|| call.id.clone()),
                    name: is_new.then(|| call.name.clone()),
                    arguments: take(&call.arguments, taken),
                }
            });
        Tuple(deltas.filter(|delta| delta.id.is_some() || !delta.arguments.is_empty()).collect())
    }
}

fn take(text: &str, taken: &mut usize) -> String {
    let start = std::mem::replace(taken, text.len());
    text[start..].to_owned()
}

/// A name for a call that no other call has: 96 random bits, for the standard library never keys two hashers alike.
fn draw_id() -> String {
    let state = RandomState::new();
    let bits = u128::from(state.hash_one(0)) << 32 ^ u128::from(state.hash_one(1));
    format!("call_{bits:024x}")
}
