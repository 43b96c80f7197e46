//! Content, reasoning and tool calls of one choice, as its parser finds them.

use std::hash::{BuildHasher, RandomState};

use penstock_text::parsers::Delta;

use super::{ToolCall, ToolCallDelta};

/// Everything parsed so far, and how much of it was taken.
#[derive(Default)]
pub struct ParsedOutput {
    pub content: String,
    pub reasoning: String,
    pub calls: Vec<ToolCall>,
    taken_content: usize,
    taken_reasoning: usize,
    /// For each call of which something was taken, the bytes of its arguments that were.
    taken_calls: Vec<usize>,
}

impl ParsedOutput {
    /// Adds the deltas of the parser.
    pub fn extend(&mut self, deltas: impl Iterator<Item = Delta>) {
        for delta in deltas {
            match delta {
                Delta::Content(text) => self.content += &text,
                Delta::Reasoning(text) => self.reasoning += &text,
                Delta::ToolCall { name, id, .. } => {
                    let id = id.unwrap_or_else(new_call_id);
                    self.calls.push(ToolCall { id, name, arguments: String::new() });
                }
                Delta::Arguments { index, text } => self.calls[index].arguments += &text,
            }
        }
    }

    /// Whether there are calls, with the whole text of their arguments.
    pub fn has_complete_calls(&self) -> bool {
        let is_complete =
            |call: &ToolCall| serde_json::from_str::<serde_json::Value>(&call.arguments).is_ok();
        !self.calls.is_empty() && self.calls.iter().all(is_complete)
    }

    /// Whether there is something to take.
    pub fn has_unread(&self) -> bool {
        self.content.len() > self.taken_content
            || self.reasoning.len() > self.taken_reasoning
            || self.calls.len() > self.taken_calls.len()
            || self.calls.iter().zip(&self.taken_calls).any(|(call, taken)| call.arguments.len() > *taken)
    }

    /// Takes the content that was not taken yet.
    pub fn take_content(&mut self) -> String {
        take(&self.content, &mut self.taken_content)
    }

    /// Takes the reasoning that was not taken yet.
    pub fn take_reasoning(&mut self) -> String {
        take(&self.reasoning, &mut self.taken_reasoning)
    }

    /// Takes the part of each call that was not taken yet; the first part of a call has its id and name.
    pub fn take_calls(&mut self) -> Vec<ToolCallDelta> {
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
        deltas.filter(|delta| delta.id.is_some() || !delta.arguments.is_empty()).collect()
    }
}

fn take(text: &str, taken: &mut usize) -> String {
    let start = std::mem::replace(taken, text.len());
    text[start..].to_owned()
}

/// A unique id: 96 random bits. The standard library keys every hasher differently.
fn new_call_id() -> String {
    let state = RandomState::new();
    let bits = u128::from(state.hash_one(0)) << 32 ^ u128::from(state.hash_one(1));
    format!("call_{bits:024x}")
}
