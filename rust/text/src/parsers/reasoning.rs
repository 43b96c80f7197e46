//! The reasoning block before an answer.
//!
//! It is recognised only at the start of an output, so that an answer may mention the tags. Without a closing tag,
//! everything is reasoning.

use super::delta::{Delta, add};
use super::format::ReasoningFormat;
use super::markers::{MarkerPrefix, MarkerSearch, whitespace_length};

/// Separates the reasoning from the answer.
pub(super) struct ReasoningParser {
    starts_inside: bool,
    closing: &'static [&'static str],
    state: ReasoningState,
}

enum ReasoningState {
    /// The opening tag may follow. A model may repeat the one at the end of its prompt.
    Before(MarkerPrefix),
    Inside(MarkerSearch),
    /// Whitespace may follow the closing tag.
    AfterClosing,
    Answer,
}

impl ReasoningParser {
    pub(super) fn new(format: ReasoningFormat, starts_inside: bool) -> Self {
        let state = ReasoningState::Before(MarkerPrefix::new(format.opening()));
        Self { starts_inside, closing: format.closing(), state }
    }

    /// Appends the reasoning. Returns the text of the answer: text held back before, and the rest of `text`.
    pub(super) fn push<'a>(&mut self, text: &'a str, deltas: &mut Vec<Delta>) -> (String, &'a str) {
        let mut rest = text;
        while !rest.is_empty() {
            match &mut self.state {
                ReasoningState::Before(prefix) => {
                    let (used, found) = prefix.feed(rest);
                    rest = &rest[used..];
                    let held = prefix.held_back();
                    match found {
                        None => {}
                        Some(true) => self.begin(),
                        Some(false) if self.starts_inside => {
                            self.begin();
                            self.push(&held, deltas);
                        }
                        Some(false) => {
                            self.state = ReasoningState::Answer;
                            return (held, rest);
                        }
                    }
                }
                ReasoningState::Inside(search) => {
                    let mut reasoning = String::new();
                    let found = search.feed(rest, &mut reasoning);
                    add(deltas, Delta::Reasoning(reasoning));
                    let Some((used, _)) = found else { break };
                    rest = &rest[used..];
                    self.state = ReasoningState::AfterClosing;
                }
                ReasoningState::AfterClosing => {
                    rest = &rest[whitespace_length(rest)..];
                    if !rest.is_empty() {
                        self.state = ReasoningState::Answer;
                    }
                }
                ReasoningState::Answer => return (String::new(), rest),
            }
        }
        (String::new(), "")
    }

    /// Appends held-back reasoning. Returns held-back text that belongs to the answer.
    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) -> String {
        if let ReasoningState::Before(prefix) = &self.state {
            let held = prefix.held_back();
            if !self.starts_inside {
                return held;
            }
            self.begin();
            self.push(&held, deltas);
        }
        if let ReasoningState::Inside(search) = &mut self.state {
            let mut reasoning = String::new();
            search.release(&mut reasoning);
            add(deltas, Delta::Reasoning(reasoning));
        }
        String::new()
    }

    fn begin(&mut self) {
        self.state = ReasoningState::Inside(MarkerSearch::new(self.closing, true));
    }
}
