//! Parsing of test texts into merged deltas.

use penstock_text::parsers::Delta::{self, Content, Reasoning};
use penstock_text::parsers::{OutputParser, ReasoningFormat, ToolFormat};

pub const FORMATS: [ToolFormat; 3] = [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral];

/// Whether the prompt has opened the reasoning block, if reasoning is parsed; the tool format, if any.
pub type Formats = (Option<bool>, Option<ToolFormat>);

pub fn parser((reasoning, tools): Formats) -> OutputParser {
    let reasoning = reasoning.map(|starts_inside| (ReasoningFormat::ThinkTags, starts_inside));
    OutputParser::new(reasoning, tools)
}

/// The deltas of a text pushed in pieces, with neighbours of the same kind merged.
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

/// The deltas of a text, checked to be equal for the whole text and for single characters.
pub fn deltas(formats: Formats, text: &str) -> Vec<Delta> {
    let whole = parse(formats, [text]);
    let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
    assert_eq!(parse(formats, characters), whole, "of {text:?}");
    whole
}

/// The deltas of one call.
pub fn call(index: usize, name: &str, arguments: &str) -> [Delta; 2] {
    [Delta::ToolCall { index, name: name.to_owned() }, Delta::Arguments { index, text: arguments.to_owned() }]
}
