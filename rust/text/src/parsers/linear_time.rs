//! Tests that parsing takes linear time, measured in bytes read or copied.

use super::format::{ReasoningFormat, ToolFormat};
use super::output_parser::OutputParser;
use super::visits::take_visits;

/// Number of bytes read to parse `text` in pieces of `size` bytes.
fn visited(text: &str, size: usize, starts_inside: bool, tools: ToolFormat) -> usize {
    let mut parser = OutputParser::new(Some((ReasoningFormat::ThinkTags, starts_inside)), Some(tools));
    let mut deltas = Vec::new();
    take_visits();
    for piece in text.as_bytes().chunks(size) {
        parser.push(std::str::from_utf8(piece).expect("the texts are ASCII"), &mut deltas);
    }
    parser.finish(&mut deltas);
    take_visits()
}

/// Texts of a given length that are slow for a parser that rereads its input.
fn hostile(length: usize) -> Vec<String> {
    let opened = [
        "",
        "<think>",
        "<tool_call>",
        "<tool_call>{",
        "<tool_call>{\"arguments\": ",
        "<tool_call>{\"name\": \"f\", \"arguments\": ",
        "<tool_call>{\"name\": \"f\", \"arguments\": \"",
        "[TOOL_CALLS]",
        "[TOOL_CALLS] [",
        "{\"name\": \"f\", \"parameters\": {\"a\": ",
        "<|python_tag|>",
    ];
    let repeated = [
        " ",
        "x",
        "<",
        "[",
        "{",
        "\\",
        "{\"a\":",
        "\"\",",
        "</",
        "<tool_call",
        "<tool_call>",
        "<tool_call>{\"name\": \"f\", ",
        "</think>",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "{\"name\": \"f\"};",
        "                                                                <tool_cal",
    ];
    let text = |opened: &&str, part: &str| format!("{opened}{}", part.repeat(length / part.len()));
    opened.iter().flat_map(|opened| repeated.map(|part| text(opened, part))).collect()
}

#[test]
fn every_byte_is_read_a_bounded_number_of_times() {
    for (short, long) in hostile(1000).iter().zip(hostile(4000)) {
        for tools in [ToolFormat::Hermes, ToolFormat::Llama3Json, ToolFormat::Mistral] {
            for (size, starts_inside) in [(1, false), (1, true), (7, false), (usize::MAX, false)] {
                let few = visited(short, size, starts_inside, tools);
                let many = visited(&long, size, starts_inside, tools);
                let beginning = &short[..short.len().min(60)];
                assert!(few >= short.len(), "{few} visits of {beginning}");
                assert!(few <= 8 * short.len(), "{few} visits of {beginning}");
                assert!(many <= 5 * few, "{few} visits, then {many}, of {beginning} in pieces of {size}");
            }
        }
    }
}
