//! The parser of one output: the reasoning parser, followed by the tool parser.

use super::delta::{Delta, add};
use super::format::{ReasoningFormat, ToolFormat};
use super::reasoning::ReasoningParser;
use super::tools::ToolParser;

/// Parses the text of one output into deltas.
pub struct OutputParser {
    reasoning: Option<ReasoningParser>,
    tools: Option<ToolParser>,
}

impl OutputParser {
    /// Creates a parser for the given formats. The flag beside the reasoning format is true if the prompt has opened
    /// the reasoning block, so that the output starts inside it.
    pub fn new(reasoning: Option<(ReasoningFormat, bool)>, tools: Option<ToolFormat>) -> Self {
        let reasoning = reasoning.map(|(format, starts_inside)| ReasoningParser::new(format, starts_inside));
        Self { reasoning, tools: tools.map(ToolParser::new) }
    }

    /// Limits the parser to one call. Later calls are content.
    pub fn with_one_call(mut self) -> Self {
        if let Some(tools) = &mut self.tools {
            tools.allow_one();
        }
        self
    }

    /// The answer consists of calls. A part of one at the end of the text is not content.
    pub fn with_required_call(mut self) -> Self {
        if let Some(tools) = &mut self.tools {
            tools.require_call();
        }
        self
    }

    /// Parses more text and appends the deltas that are final.
    pub fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        let Some(reasoning) = &mut self.reasoning else { return self.push_answer(text, deltas) };
        let (held, answer) = reasoning.push(text, deltas);
        self.push_answer(&held, deltas);
        self.push_answer(answer, deltas);
    }

    /// Ends the text and appends what was held back. The parser must not be used again.
    pub fn finish(&mut self, deltas: &mut Vec<Delta>) {
        if let Some(reasoning) = &mut self.reasoning {
            let held = reasoning.finish(deltas);
            if !self.tools.as_ref().is_some_and(ToolParser::requires_call) {
                self.push_answer(&held, deltas);
            }
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
