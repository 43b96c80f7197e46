//! The parser of one output: the reasoning parser, followed by the answer parser.

use std::sync::Arc;

use penstock_types::{ReasoningFormat, ToolFormat, Wrap};

use super::answer::AnswerParser;
use super::delta::{Delta, add};
use super::reasoning::ReasoningParser;
use super::typing::ToolSchemas;

/// Parses the text of one output into deltas.
pub struct OutputParser {
    reasoning: Option<ReasoningParser>,
    answer: Option<AnswerParser>,
}

impl OutputParser {
    /// Creates a parser for the given formats. The flag beside the reasoning format is true if the prompt has opened
    /// the reasoning block, so that the output starts inside it. `schemas` give types to arguments that the format
    /// writes as raw text.
    pub fn new(
        reasoning: Option<(&'static ReasoningFormat, bool)>,
        tools: Option<&'static ToolFormat>,
        schemas: &Arc<ToolSchemas>,
    ) -> Self {
        let wrap = reasoning.map_or(Wrap::NONE, |(format, _)| format.answer);
        let has_markers = tools.is_some() || wrap != Wrap::NONE;
        let reasoning = reasoning.map(|(format, starts_inside)| {
            ReasoningParser::new(format, tools, Arc::clone(schemas), starts_inside)
        });
        let answer = has_markers.then(|| AnswerParser::new(tools, Arc::clone(schemas), wrap));
        Self { reasoning, answer }
    }

    /// Limits the parser to one call. Later calls are content.
    pub fn with_one_call(mut self) -> Self {
        if let Some(reasoning) = &mut self.reasoning {
            reasoning.allow_one();
        }
        if let Some(answer) = &mut self.answer {
            answer.allow_one();
        }
        self
    }

    /// The answer consists of calls. A part of one at the end of the text is not content.
    pub fn with_required_call(mut self) -> Self {
        if let Some(answer) = &mut self.answer {
            answer.require_call();
        }
        self
    }

    /// Parses more text and appends the deltas that are final.
    pub fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        match &mut self.reasoning {
            Some(reasoning) => {
                let answer = reasoning.push(text, deltas);
                self.push_answer(&answer, deltas);
            }
            None => self.push_answer(text, deltas),
        }
    }

    /// Ends the text and appends what was held back. The parser must not be used again.
    pub fn finish(&mut self, deltas: &mut Vec<Delta>) {
        if let Some(reasoning) = &mut self.reasoning {
            let held = reasoning.finish(deltas);
            if !self.answer.as_ref().is_some_and(AnswerParser::requires_call) {
                self.push_answer(&held, deltas);
            }
        }
        if let Some(answer) = &mut self.answer {
            answer.finish(deltas);
        }
    }

    fn push_answer(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        match &mut self.answer {
            Some(answer) => answer.push(text, deltas),
            None => add(deltas, Delta::Content(text.to_owned())),
        }
    }
}
