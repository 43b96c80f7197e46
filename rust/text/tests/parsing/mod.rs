//! Texts parsed, and their deltas put together.

#![allow(dead_code, reason = "every test file uses some of it")]

use penstock_text::parsers::Delta::{self, Content, Reasoning};
use penstock_text::parsers::{OutputParser, ReasoningFormat, ToolFormat};

pub const FORMATS: [ToolFormat; 3] = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral];

/// A reasoning format with whether the prompt has opened it, and a tool format.
pub type Formats = (Option<bool>, Option<ToolFormat>);

pub fn parser((reasoning, tools): Formats) -> OutputParser {
    let reasoning = reasoning.map(|starts_inside| (ReasoningFormat::ThinkTags, starts_inside));
    OutputParser::new(reasoning, tools)
}

/// Deltas of a text pushed in these pieces, neighbours of the same kind put together.
pub fn parse<'a>(formats: Formats, pieces: impl IntoIterator<Item = &'a str>) -> Vec<Delta> {
    let mut parser = parser(formats);
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

/// The same whole and character by character.
pub fn deltas(formats: Formats, text: &str) -> Vec<Delta> {
    let whole = parse(formats, [text]);
    let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
    assert_eq!(parse(formats, characters), whole, "of {text:?}");
    whole
}

/// A whole call.
pub fn call(index: usize, name: &str, arguments: &str) -> [Delta; 2] {
    [Delta::ToolCall { index, name: name.to_owned() }, Delta::Arguments { index, text: arguments.to_owned() }]
}
