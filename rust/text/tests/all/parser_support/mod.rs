//! Parsing of test texts into merged deltas.

use std::sync::Arc;

use penstock_text::parsers::Delta::{self, Content, Reasoning};
use penstock_text::parsers::{OutputParser, ToolSchemas, reasoning_format, tool_format};
use penstock_types::{ReasoningParser, ToolParser};

pub const FORMATS: [ToolParser; 3] = [ToolParser::Hermes, ToolParser::Llama3Json, ToolParser::Mistral];

/// Whether the prompt has opened the reasoning block, if reasoning is parsed; the tool format, if any.
pub type Formats = (Option<bool>, Option<ToolParser>);

pub fn parser((reasoning, tools): Formats) -> OutputParser {
    let think = reasoning_format(ReasoningParser::Think);
    let reasoning = reasoning.and_then(|starts_inside| Some((think?, starts_inside)));
    OutputParser::new(reasoning, tools.and_then(tool_format), &Arc::new(ToolSchemas::default()))
}

/// The deltas of a text pushed in pieces, with neighbours of the same kind merged.
pub fn parse<'a>(formats: Formats, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Delta> {
    merged(parser(formats), pieces)
}

/// The deltas of a parser for a text in pieces, with neighbours of the same kind merged.
pub fn merged<'a>(mut parser: OutputParser, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Delta> {
    let mut joined: Vec<Delta> = Vec::new();
    let mut join = |deltas: &mut Vec<Delta>| {
        for delta in deltas.drain(..) {
            match (joined.last_mut(), delta) {
                (Some(Content(last)), Content(text)) | (Some(Reasoning(last)), Reasoning(text)) => {
                    *last += &text
                }
                (Some(Delta::Arguments { text: last, .. }), Delta::Arguments { text, .. }) => *last += &text,
                (_, delta) => joined.push(delta),
            }
        }
    };
    let mut deltas = Vec::new();
    for piece in pieces {
        parser.push(piece, &mut deltas);
        join(&mut deltas);
    }
    parser.finish(&mut deltas);
    join(&mut deltas);
    joined
}

/// The deltas of a text, checked to be equal for the whole text and for single characters.
pub fn deltas(formats: Formats, text: &str) -> Vec<Delta> {
    let whole = parse(formats, [text]);
    let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
    assert_eq!(parse(formats, characters), whole, "of {text:?}");
    whole
}

/// The deltas of one call.
pub fn call(index: usize, name: &str, arguments: &str) -> [Delta; 2] {
    [
        Delta::ToolCall { index, name: name.to_owned(), id: None },
        Delta::Arguments { index, text: arguments.to_owned() },
    ]
}
