//! What the output of a chat is parsed for: the formats of the model, and which of them a request asks for.

use penstock_frontend::output::OutputFormats;
use penstock_frontend::params::{SamplingParams, ToolChoice};
use penstock_text::parsers::{self, ReasoningFormat, ToolFormat};

use crate::config::EngineConfig;

/// How a model sets reasoning and tool calls apart.
pub struct ModelFormats {
    reasoning: Option<ReasoningFormat>,
    tools: Option<ToolFormat>,
}

impl ModelFormats {
    /// As the configuration says, or, where it leaves that to us, as the chat templates do.
    pub fn new<'a>(config: &EngineConfig, templates: impl Iterator<Item = &'a String>) -> Self {
        let templates: Vec<_> = templates.map(String::as_str).collect();
        let (reasoning, tools) = parsers::detect(&templates.join("\n"));
        Self {
            reasoning: match config.reasoning_parser.as_str() {
                "think" => Some(ReasoningFormat::ThinkTags),
                "none" => None,
                _ => reasoning,
            },
            tools: match config.tool_parser.as_str() {
                "hermes" => Some(ToolFormat::Hermes),
                "llama3_json" => Some(ToolFormat::Llama3Json),
                "mistral" => Some(ToolFormat::Mistral),
                "none" => None,
                _ => tools,
            },
        }
    }

    /// For a chat of this prompt: reasoning always, tool calls where there are tools that may be called.
    pub fn of(&self, params: &SamplingParams, prompt: Option<&str>) -> Option<OutputFormats> {
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
