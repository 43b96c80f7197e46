//! The reasoning and tool-call formats of a model, and those that a request's output is parsed for.

use std::sync::Arc;

use penstock_text::parsers::{ToolSchemas, detect, reasoning_format, tool_format};
use penstock_types::{Auto, FormatSpec, ReasoningFormat, ReasoningParser, ToolFormat, ToolParser};

use crate::output::OutputFormats;
use crate::params::{SamplingParams, ToolChoice};

/// The formats of a model's reasoning and tool calls.
pub struct ModelFormats(FormatSpec);

impl ModelFormats {
    /// The formats that the configuration names; "auto" detects them in the chat templates.
    pub fn new<'a>(
        reasoning_parser: Auto<ReasoningParser>,
        tool_parser: Auto<ToolParser>,
        templates: impl Iterator<Item = &'a String>,
    ) -> Self {
        let templates: Vec<_> = templates.map(String::as_str).collect();
        let detected = detect(&templates.join("\n"));
        Self(FormatSpec {
            reasoning: reasoning_parser.0.map_or(detected.reasoning, reasoning_format),
            tools: tool_parser.0.map_or(detected.tools, tool_format),
        })
    }

    /// The formats for a chat with this rendered prompt: reasoning always, tool calls if tools can be called. A
    /// constrained output follows its grammar from the first token, so it does not continue the prompt's reasoning.
    pub fn of_chat(&self, params: &SamplingParams, prompt: Option<&str>) -> Option<OutputFormats> {
        let Self(FormatSpec { reasoning, tools }) = self;
        let is_opened = |format: &ReasoningFormat| {
            params.constraints().is_empty() && prompt.is_some_and(|prompt| format.is_opened_by(prompt))
        };
        let callable = params.tools.as_ref().filter(|_| params.tool_choice != Some(ToolChoice::None));
        let typed = callable.filter(|_| tools.is_some_and(ToolFormat::needs_schemas));
        let functions = typed.into_iter().flat_map(|tools| &tools.functions);
        let schemas = functions.map(|function| (function.name.as_str(), function.parameters.as_str()));
        let formats = OutputFormats {
            reasoning: reasoning.map(|format| (format, is_opened(format))),
            tools: tools.filter(|_| callable.is_some()),
            schemas: Arc::new(ToolSchemas::new(schemas)),
            one_call: !params.parallel_tool_calls,
            requires_call: params.tool_choice.as_ref().is_some_and(ToolChoice::requires_call),
        };
        (formats.reasoning.is_some() || formats.tools.is_some()).then_some(formats)
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::{Json, Named};

    use super::*;
    use crate::params::{Function, Tools};

    const TEMPLATE: &str = r#"<think> <tool_call>{"name": "f", "arguments": {}}</tool_call>"#;

    fn tools() -> Option<Tools> {
        let function =
            Function { name: "f".to_owned(), parameters: "{}".to_owned(), ignores_unsupported: false };
        Some(Tools { functions: vec![function], json: Json("[]".to_owned()) })
    }

    fn formats(reasoning: &str, tools: &str) -> ModelFormats {
        let reasoning = Named::from_name(reasoning).expect("a reasoning parser");
        let tools = Named::from_name(tools).expect("a tool parser");
        ModelFormats::new(reasoning, tools, [TEMPLATE.to_owned()].iter())
    }

    #[test]
    fn formats_are_detected_unless_the_configuration_names_them() {
        let detected = formats("auto", "auto");
        let reasoning = reasoning_format(ReasoningParser::Think);
        assert_eq!(detected.0, FormatSpec { reasoning, tools: tool_format(ToolParser::Hermes) });
        let named = formats("none", "mistral");
        assert_eq!(named.0, FormatSpec { reasoning: None, tools: tool_format(ToolParser::Mistral) });
        let none = ModelFormats::new(Auto(None), Auto(Some(ToolParser::None)), [].iter());
        assert_eq!(none.0, FormatSpec::default());
    }

    #[test]
    fn a_chat_is_parsed_for_calls_only_if_tools_can_be_called() {
        let of_chat = |tools: Option<Tools>, tool_choice| {
            let params = SamplingParams { tools, tool_choice, ..SamplingParams::default() };
            formats("none", "hermes").of_chat(&params, None).map(|formats| formats.tools)
        };
        assert_eq!(of_chat(None, None), None);
        assert_eq!(of_chat(tools(), Some(ToolChoice::None)), None);
        assert_eq!(of_chat(tools(), None), Some(tool_format(ToolParser::Hermes)));
    }

    #[test]
    fn reasoning_is_open_if_the_prompt_ends_with_its_tag() {
        let opened = |prompt| {
            let formats = formats("think", "none").of_chat(&SamplingParams::default(), prompt);
            formats.and_then(|formats| formats.reasoning).map(|(_, is_opened)| is_opened)
        };
        assert_eq!(opened(Some("hello <think>\n")), Some(true));
        assert_eq!(opened(Some("<think> hello")), Some(false));
        assert_eq!(opened(None), Some(false));
    }

    #[test]
    fn constrained_output_does_not_continue_prompt_reasoning() {
        let params = SamplingParams { choice: Some(vec!["yes".to_owned()]), ..SamplingParams::default() };
        let formats = formats("think", "none").of_chat(&params, Some("hello <think>\n"));
        assert_eq!(
            formats.and_then(|formats| formats.reasoning).map(|(_, is_opened)| is_opened),
            Some(false)
        );
    }
}
