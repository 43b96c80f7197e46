//! Reasoning: the block that precedes an answer.
//!
//! It can only be the first thing of an output, so that an answer may speak of the tags. Without its closing
//! tag everything is reasoning.

use super::markers::{Prefix, Search, space_length};
use super::{Delta, add};

/// How a model sets its reasoning apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReasoningFormat {
    /// `<think>` … `</think>`, as DeepSeek-R1 and Qwen 3 write it.
    ThinkTags,
}

impl ReasoningFormat {
    /// Whether `prompt` ends inside the reasoning, so that the output begins there.
    pub fn is_opened_by(self, prompt: &str) -> bool {
        prompt.trim_ascii_end().ends_with(self.opening())
    }

    /// What reasoning is told from the answer by. Where a tokenizer has one of these as a special token, the text
    /// must show it.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Self::ThinkTags => &["<think>", "</think>"],
        }
    }

    fn opening(self) -> &'static str {
        match self {
            Self::ThinkTags => "<think>",
        }
    }

    fn closing(self) -> &'static [&'static str] {
        match self {
            Self::ThinkTags => &["</think>"],
        }
    }
}

/// Splits the reasoning off.
pub(super) struct ReasoningParser {
    starts_inside: bool,
    closing: &'static [&'static str],
    stage: Stage,
}

enum Stage {
    /// The opening tag may come. A model may repeat the one in its prompt.
    Before(Prefix),
    Inside(Search),
    /// White space may follow the closing tag.
    Border,
    Answer,
}

impl ReasoningParser {
    pub(super) fn new(format: ReasoningFormat, starts_inside: bool) -> Self {
        let stage = Stage::Before(Prefix::new(format.opening()));
        Self { starts_inside, closing: format.closing(), stage }
    }

    /// Appends the reasoning. Gives back what belongs to the answer: text held back before, and the rest of
    /// `text`.
    pub(super) fn push<'a>(&mut self, text: &'a str, deltas: &mut Vec<Delta>) -> (String, &'a str) {
        let mut rest = text;
        while !rest.is_empty() {
            match &mut self.stage {
                Stage::Before(prefix) => {
                    let (used, is_there) = prefix.feed(rest);
                    rest = &rest[used..];
                    let held = prefix.held();
                    match is_there {
                        None => {}
                        Some(true) => self.begin(),
                        Some(false) if self.starts_inside => {
                            self.begin();
                            self.push(&held, deltas);
                        }
                        Some(false) => {
                            self.stage = Stage::Answer;
                            return (held, rest);
                        }
                    }
                }
                Stage::Inside(search) => {
                    let mut reasoning = String::new();
                    let found = search.feed(rest, &mut reasoning);
                    add(deltas, Delta::Reasoning(reasoning));
                    let Some((used, _)) = found else { break };
                    rest = &rest[used..];
                    self.stage = Stage::Border;
                }
                Stage::Border => {
                    rest = &rest[space_length(rest)..];
                    if !rest.is_empty() {
                        self.stage = Stage::Answer;
                    }
                }
                Stage::Answer => return (String::new(), rest),
            }
        }
        (String::new(), "")
    }

    /// Appends what was held back, or gives it back if it belongs to the answer.
    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) -> String {
        if let Stage::Before(prefix) = &self.stage {
            let held = prefix.held();
            if !self.starts_inside {
                return held;
            }
            self.begin();
            self.push(&held, deltas);
        }
        if let Stage::Inside(search) = &mut self.stage {
            let mut reasoning = String::new();
            search.release(&mut reasoning);
            add(deltas, Delta::Reasoning(reasoning));
        }
        String::new()
    }

    fn begin(&mut self) {
        self.stage = Stage::Inside(Search::new(self.closing, true));
    }
}
