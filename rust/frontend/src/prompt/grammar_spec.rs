//! The grammar that a request's parameters ask for: a response format, a regex, a choice, a grammar, tool calls.

use penstock_guidance::{GrammarSpec, ToolCallSpec, ToolSpec};
use penstock_types::{FieldError, ToolLiterals};

use crate::output::OutputFormats;
use crate::params::{Function, ResponseKind, SamplingParams, ToolChoice, Tools};

const NO_TOOL_FORMAT: &str = "left out, or the engine's tool_parser must be set: the tool-call format cannot be detected \
                              in this model's chat template";
const NO_CALL_GRAMMAR: &str = "'auto' or 'none': calls in the model's format (the engine's tool_parser) cannot be \
                               constrained; 'hermes', 'llama3_json' and 'mistral' can";

/// The grammar that constrains the output, if any, and the field that asks for it.
pub fn requested_grammar(
    params: &SamplingParams,
    formats: Option<&OutputFormats>,
) -> Result<Option<(&'static str, GrammarSpec)>, FieldError> {
    if let Some(format) = &params.response_format {
        let grammar = match &format.kind {
            ResponseKind::Text => return Ok(None),
            ResponseKind::JsonObject => GrammarSpec::JsonObject,
            ResponseKind::JsonSchema { schema, ignores_unsupported: false } => {
                GrammarSpec::JsonSchema(schema.0.clone())
            }
            ResponseKind::JsonSchema { schema, ignores_unsupported: true } => {
                GrammarSpec::LenientJsonSchema(schema.0.clone())
            }
        };
        return Ok(Some(("response_format", grammar)));
    }
    if let Some(regex) = &params.regex {
        return Ok(Some(("regex", GrammarSpec::Regex(regex.clone()))));
    }
    if let Some(texts) = &params.choice {
        return Ok(Some(("choice", GrammarSpec::Choice(texts.clone()))));
    }
    if let Some(source) = &params.grammar {
        return Ok(Some(("grammar", dialect(source)(source.clone()))));
    }
    let Some(tools) = params.tools.as_ref().filter(|_| params.tool_choice != Some(ToolChoice::None)) else {
        return Ok(None);
    };
    let format = formats.and_then(|formats| formats.tools.map(|tools| (tools, formats.reasoning)));
    let (format, reasoning) = format.ok_or_else(|| params.refuse("tools", NO_TOOL_FORMAT))?;
    if !params.tool_choice.as_ref().is_some_and(ToolChoice::requires_call) {
        return Ok(None);
    }
    let literals = format.literals.ok_or_else(|| params.refuse("tool_choice", NO_CALL_GRAMMAR))?;
    let reasoning = reasoning.and_then(|(reasoning, is_opened)| {
        let (opening, closing) = (reasoning.block.open.first()?, reasoning.block.close.first()?);
        Some((if is_opened { "" } else { *opening }.to_owned(), (*closing).to_owned()))
    });
    Ok(Some(("tools", tool_calls(params, tools, literals, reasoning))))
}

/// The notation of a grammar: GBNF separates a rule's name from its body by `::=`, Lark by a colon.
fn dialect(source: &str) -> fn(String) -> GrammarSpec {
    let is_rule = |line: &str| line.split_once("::=").is_some_and(|(name, _)| is_rule_name(name.trim()));
    if source.lines().any(is_rule) { GrammarSpec::Gbnf } else { GrammarSpec::Lark }
}

fn is_rule_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|character| character.is_alphanumeric() || "-_".contains(character))
}

/// The grammar of at least one call, or of exactly one if parallel calls are off or a function is named.
fn tool_calls(
    params: &SamplingParams,
    tools: &Tools,
    literals: ToolLiterals,
    reasoning: Option<(String, String)>,
) -> GrammarSpec {
    let only = match &params.tool_choice {
        Some(ToolChoice::Function { name, .. }) => Some(name),
        _ => None,
    };
    let functions = tools.functions.iter().filter(|function| only.is_none_or(|name| *name == function.name));
    GrammarSpec::ToolCalls(ToolCallSpec {
        opening: literals.opening.to_owned(),
        call_opening: literals.call_opening.to_owned(),
        name_key: quoted(literals.name_key),
        arguments_key: quoted(literals.arguments_key),
        call_closing: literals.call_closing.strip_prefix('}').unwrap_or(literals.call_closing).to_owned(),
        separator: literals.separator.to_owned(),
        closing: literals.closing.to_owned(),
        tools: functions.map(tool).collect(),
        parallel: params.parallel_tool_calls && only.is_none(),
        reasoning,
    })
}

fn tool(function: &Function) -> ToolSpec {
    ToolSpec {
        name: function.name.clone(),
        schema: function.parameters.clone(),
        ignores_unsupported: function.ignores_unsupported,
    }
}

/// The text between the first two quotation marks.
fn quoted(literal: &str) -> String {
    literal.split('"').nth(1).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use penstock_text::parsers::{reasoning_format, tool_format};
    use penstock_types::{Json, ReasoningParser, ToolParser};

    use std::sync::Arc;

    use super::*;
    use crate::params::ResponseFormat;

    /// The format `parser`, after reasoning that the prompt opens if `is_opened`.
    fn formats(parser: ToolParser, is_opened: bool) -> OutputFormats {
        OutputFormats {
            reasoning: reasoning_format(ReasoningParser::Think).map(|format| (format, is_opened)),
            tools: tool_format(parser),
            schemas: Arc::default(),
            one_call: false,
            requires_call: false,
        }
    }

    fn hermes() -> OutputFormats {
        formats(ToolParser::Hermes, false)
    }

    fn with_tools(tool_choice: Option<ToolChoice>) -> SamplingParams {
        let function = |name: &str| Function {
            name: name.to_owned(),
            parameters: format!("{{\"title\":\"{name}\"}}"),
            ignores_unsupported: name == "b",
        };
        let tools = Tools { functions: vec![function("a"), function("b")], json: Json("[]".to_owned()) };
        SamplingParams { tools: Some(tools), tool_choice, ..SamplingParams::default() }
    }

    fn named(name: &str) -> ToolChoice {
        ToolChoice::Function { name: name.to_owned(), json: Json("{}".to_owned()) }
    }

    fn calls(params: &SamplingParams, formats: &OutputFormats) -> ToolCallSpec {
        match requested_grammar(params, Some(formats)) {
            Ok(Some(("tools", GrammarSpec::ToolCalls(calls)))) => calls,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_constraint_has_its_grammar_and_names_its_field() {
        let none = SamplingParams::default;
        let format = |kind| Some(ResponseFormat { kind, json: Json(String::new()) });
        let text = |text: &str| Some(text.to_owned());
        let schema = ResponseKind::JsonSchema { schema: Json("{}".to_owned()), ignores_unsupported: false };
        let cases = [
            (none(), None),
            (SamplingParams { response_format: format(ResponseKind::Text), ..none() }, None),
            (
                SamplingParams { response_format: format(ResponseKind::JsonObject), ..none() },
                Some(("response_format", GrammarSpec::JsonObject)),
            ),
            (
                SamplingParams { response_format: format(schema), ..none() },
                Some(("response_format", GrammarSpec::JsonSchema("{}".to_owned()))),
            ),
            (
                SamplingParams { regex: text("a+"), ..none() },
                Some(("regex", GrammarSpec::Regex("a+".to_owned()))),
            ),
            (
                SamplingParams { choice: Some(vec!["a".to_owned()]), ..none() },
                Some(("choice", GrammarSpec::Choice(vec!["a".to_owned()]))),
            ),
            (
                SamplingParams { grammar: text("root ::= \"a\""), ..none() },
                Some(("grammar", GrammarSpec::Gbnf("root ::= \"a\"".to_owned()))),
            ),
            (
                SamplingParams { grammar: text("start: \"::=\""), ..none() },
                Some(("grammar", GrammarSpec::Lark("start: \"::=\"".to_owned()))),
            ),
        ];
        for (params, expected) in cases {
            assert_eq!(requested_grammar(&params, None), Ok(expected));
        }
    }

    #[test]
    fn tools_constrain_the_output_only_if_a_call_is_required() {
        for choice in [None, Some(ToolChoice::Auto), Some(ToolChoice::None)] {
            assert_eq!(requested_grammar(&with_tools(choice), Some(&hermes())), Ok(None));
        }
        let calls = calls(&with_tools(Some(ToolChoice::Required)), &hermes());
        assert_eq!((calls.name_key.as_str(), calls.arguments_key.as_str()), ("name", "arguments"));
        assert_eq!(calls.tools.len(), 2);
        assert!(calls.parallel);
        assert_eq!(calls.reasoning, Some(("<think>".to_owned(), "</think>".to_owned())));
    }

    #[test]
    fn named_function_is_called_exactly_once() {
        let calls = calls(&with_tools(Some(named("b"))), &hermes());
        let schema = "{\"title\":\"b\"}".to_owned();
        assert_eq!(calls.tools, [ToolSpec { name: "b".to_owned(), schema, ignores_unsupported: true }]);
        assert!(!calls.parallel);
    }

    #[test]
    fn reasoning_that_the_prompt_opens_has_no_opening_tag() {
        let formats = formats(ToolParser::Hermes, true);
        let calls = calls(&with_tools(Some(ToolChoice::Required)), &formats);
        assert_eq!(calls.reasoning, Some((String::new(), "</think>".to_owned())));
    }

    #[test]
    fn tools_without_a_known_format_are_refused() {
        let error = requested_grammar(&with_tools(None), None).expect_err("there is no format");
        assert_eq!((error.field, error.limit.as_str()), ("tools", NO_TOOL_FORMAT));
    }
}
