//! The grammar that a request's parameters ask for: a response format, a regex, a choice, a grammar, tool calls.

use penstock_guidance::{GrammarSpec, ToolCallSpec};
use penstock_text::parsers::ToolLiterals;
use penstock_types::FieldError;

use crate::output::OutputFormats;
use crate::params::{ResponseKind, SamplingParams, ToolChoice, Tools};

const NO_TOOL_FORMAT: &str = "left out, or the engine's tool_parser must be set: the tool-call format cannot be detected \
                              in this model's chat template";

/// The grammar that constrains the output, if any, and the field that asks for it.
pub fn requested_grammar(
    params: &SamplingParams,
    formats: Option<OutputFormats>,
) -> Result<Option<(&'static str, GrammarSpec)>, FieldError> {
    if let Some(format) = &params.response_format {
        let grammar = match &format.kind {
            ResponseKind::Text => return Ok(None),
            ResponseKind::JsonObject => GrammarSpec::JsonObject,
            ResponseKind::JsonSchema(schema) => GrammarSpec::JsonSchema(schema.0.clone()),
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
    let reasoning = reasoning.and_then(|(reasoning, is_opened)| match reasoning.markers() {
        [opening, closing] => Some((if is_opened { "" } else { *opening }.to_owned(), (*closing).to_owned())),
        _ => None,
    });
    Ok(Some(("tools", tool_calls(params, tools, format.literals(), reasoning))))
}

/// GBNF separates a rule's name from its body by `::=`, Lark by a colon.
fn dialect(source: &str) -> fn(String) -> GrammarSpec {
    let is_rule = |line: &str| line.split_once("::=").is_some_and(|(name, _)| is_rule_name(name.trim()));
    if source.lines().any(is_rule) { GrammarSpec::Gbnf } else { GrammarSpec::Lark }
}

fn is_rule_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|character| character.is_alphanumeric() || "-_".contains(character))
}

/// At least one call; exactly one if parallel calls are off or a function is named.
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
        tools: functions.map(|function| (function.name.clone(), function.parameters.clone())).collect(),
        parallel: params.parallel_tool_calls && only.is_none(),
        reasoning,
    })
}

/// The text between the first two quotation marks.
fn quoted(literal: &str) -> String {
    literal.split('"').nth(1).unwrap_or_default().to_owned()
}
