//! What a chat model's text means: reasoning, content and tool calls, told apart while the text comes.
//!
//! ```text
//! text ── reasoning ──> the rest ── tools ──> content
//!             └─> reasoning            └─> calls: a name, then arguments piece by piece
//! ```
//!
//! A model may write anything, so nothing here fails: what is not a call after all is content, letter by
//! letter. The deltas together depend on the text alone, never on how it was cut. Every byte is looked at a
//! bounded number of times. What is held back is what may be the beginning of a marker, up to
//! [`MAX_HELD_SPACE`] bytes of white space before it, and a call until its name is known and its arguments
//! begin.
//!
//! White space on either side of a marker is layout, not text. Inside arguments every character is kept.

mod call;
mod detection;
mod format;
mod json;
mod markers;
mod reasoning;
mod tools;
#[cfg(test)]
mod work;

pub use detection::detect;
pub use format::{ToolFormat, ToolLiterals};
pub use markers::MAX_HELD_SPACE;
pub use reasoning::ReasoningFormat;
use reasoning::ReasoningParser;
use tools::ToolParser;

/// A piece of a model's output. Pieces of the same kind are to be put together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Delta {
    /// Text of the answer.
    Content(String),
    /// Text of the reasoning that precedes it.
    Reasoning(String),
    /// A call begins.
    ToolCall {
        /// Its place among the calls of this output.
        index: usize,
        /// The function's name, whole.
        name: String,
    },
    /// More of a call's arguments.
    Arguments {
        /// The call, as it was begun.
        index: usize,
        /// JSON text. Together it is the object as the model wrote it; `{}` where a complete call has none.
        /// Arguments that are a string which holds an object are that object, and come all at once; other
        /// values are passed on as written.
        text: String,
    },
}

/// Turns the text of one output into deltas.
pub struct OutputParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl OutputParser {
    /// A parser of an output that has not begun. The formats are those to look for; with a reasoning format
    /// comes whether the output begins inside the reasoning because the prompt has opened it.
    pub fn new(reasoning: Option<(ReasoningFormat, bool)>, tools: Option<ToolFormat>) -> Self {
        let reasoning = reasoning.map(|(format, starts_inside)| ReasoningParser::new(format, starts_inside));
        Self { reasoning, tools: tools.map(ToolParser::new) }
    }

    /// The same, but for calls after the first: they are content.
    pub fn with_one_call(mut self) -> Self {
        if let Some(tools) = &mut self.tools {
            tools.allow_one();
        }
        self
    }

    /// Reads on, and appends to `deltas` what became certain.
    pub fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        let Some(reasoning) = &mut self.reasoning else { return self.push_answer(text, deltas) };
        let (held, answer) = reasoning.push(text, deltas);
        self.push_answer(&held, deltas);
        self.push_answer(answer, deltas);
    }

    /// Says that no text follows, and appends what was held back. The parser must not be used again.
    pub fn finish(&mut self, deltas: &mut Vec<Delta>) {
        if let Some(reasoning) = &mut self.reasoning {
            let held = reasoning.finish(deltas);
            self.push_answer(&held, deltas);
        }
        if let Some(tools) = &mut self.tools {
            tools.finish(deltas);
        }
    }

    fn push_answer(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        match &mut self.tools {
            Some(tools) => tools.push(text, deltas),
            None => add(deltas, Delta::Content(text.to_owned())),
        }
    }
}

/// Appends a delta, to the last one if that is of the same kind; nothing if it has no text.
fn add(deltas: &mut Vec<Delta>, delta: Delta) {
    match (deltas.last_mut(), delta) {
        (_, Delta::Content(text) | Delta::Reasoning(text) | Delta::Arguments { text, .. })
            if text.is_empty() => {}
        (Some(Delta::Content(last)), Delta::Content(text))
        | (Some(Delta::Reasoning(last)), Delta::Reasoning(text)) => last.push_str(&text),
        (Some(Delta::Arguments { index, text: last }), Delta::Arguments { index: same, text })
            if *index == same =>
        {
            last.push_str(&text);
        }
        (_, delta) => deltas.push(delta),
    }
}

/// Counts bytes looked at or copied, so that tests can tell linear from quadratic.
fn visit(bytes: usize) {
    #[cfg(test)]
    work::count(bytes);
    #[cfg(not(test))]
    let _ = bytes;
}
