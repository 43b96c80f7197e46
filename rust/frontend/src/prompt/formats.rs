//! The reasoning and tool-call formats of a model, and those that a request's output is parsed for.

use penstock_text::parsers::{self, ReasoningFormat, ToolFormat};

use crate::output::OutputFormats;
use crate::params::{SamplingParams, ToolChoice};

/// The formats of a model's reasoning and tool calls.
pub struct ModelFormats {
    reasoning: Option<ReasoningFormat>,
    tools: Option<ToolFormat>,
}

impl ModelFormats {
    /// The formats that the configuration names; "auto" detects them in the chat templates.
    pub fn new<'a>(
        reasoning_parser: &str,
        tool_parser: &str,
        templates: impl Iterator<Item = &'a String>,
    ) -> Self {
        let templates: Vec<_> = templates.map(String::as_str).collect();
        let (reasoning, tools) = parsers::detect(&templates.join("\n"));
        Self {
            reasoning: match reasoning_parser {
                "think" => Some(ReasoningFormat::ThinkTags),
                "none" => None,
                _ => reasoning,
            },
            tools: match tool_parser {
                "hermes" => Some(ToolFormat::Hermes),
                "llama3_json" => Some(ToolFormat::Llama3Json),
                "mistral" => Some(ToolFormat::Mistral),
                "none" => None,
                _ => tools,
            },
        }
    }

    /// The formats for a chat with this rendered prompt: reasoning always, tool calls if tools can be called.
    pub fn of_chat(&self, params: &SamplingParams, prompt: Option<&str>) -> Option<OutputFormats> {
        let is_opened = |format: ReasoningFormat| prompt.is_some_and(|prompt| format.is_opened_by(prompt));
        let has_tools = params.tools.is_some() && params.tool_choice != Some(ToolChoice::None);
        let formats = OutputFormats {
            reasoning: self.reasoning.map(|format| (format, is_opened(format))),
            tools: self.tools.filter(|_| has_tools),
            one_call: !params.parallel_tool_calls,
        };
        (formats.reasoning.is_some() || formats.tools.is_some()).then_some(formats)
    }
}
