//! Tests that parsing takes linear time, measured in bytes read or copied.

use std::sync::Arc;

use penstock_types::{CallForm, ReasoningParser, ToolParser};

use super::output_parser::OutputParser;
use super::table::{reasoning_format, tool_format};
use super::typing::ToolSchemas;
use super::visits::take_visits;

/// Number of bytes read to parse `text` in pieces of `size` bytes.
fn visited(text: &str, size: usize, starts_inside: bool, tools: ToolParser) -> usize {
    let reasoning = reasoning_format(ReasoningParser::Think).map(|format| (format, starts_inside));
    let mut parser = OutputParser::new(reasoning, tool_format(tools), &Arc::new(ToolSchemas::default()));
    let mut deltas = Vec::new();
    take_visits();
    let mut rest = text;
    while !rest.is_empty() {
        // At least a character.
        let end = (size.min(rest.len())..=rest.len()).find(|&end| rest.is_char_boundary(end));
        let (piece, after) = rest.split_at(end.unwrap_or(rest.len()));
        parser.push(piece, &mut deltas);
        rest = after;
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

/// Texts of a given length of the markers of a format, each repeated after the opening of its calls.
fn repeated_markers(parser: ToolParser, length: usize) -> Vec<String> {
    let format = tool_format(parser).expect("a format");
    let opened = format.section.open.iter().take(1).chain(format.call.open.iter().take(1)).copied();
    let opened: String = opened.collect();
    let name = match format.form {
        CallForm::Tagged(_) => "f>",
        CallForm::Json(_) | CallForm::Literal(_) => "f(a=",
    };
    let texts = format.markers().flat_map(|marker| {
        let half: String = marker.chars().take(marker.chars().count() - 1).collect();
        [marker.to_owned(), half, format!("{marker}\n"), format!("{marker}x")]
    });
    let text = |part: String| {
        let repeated = part.repeat(length / part.len());
        [format!("{opened}{repeated}"), format!("{opened}{name}{repeated}")]
    };
    texts.filter(|part| !part.is_empty()).flat_map(text).collect()
}

#[test]
fn markers_are_read_in_linear_time() {
    for &tools in &ToolParser::ALL[1..] {
        for (short, long) in repeated_markers(tools, 1000).iter().zip(repeated_markers(tools, 4000)) {
            for size in [1, usize::MAX] {
                let pieces = |text: &str| visited(text, size, false, tools);
                let (few, many) = (pieces(short), pieces(&long));
                let beginning: String = short.chars().take(60).collect();
                // A marker that arrives in pieces is compared again with each of them.
                assert!(few <= 128 * short.len(), "{few} visits of {beginning}");
                assert!(many <= 5 * few, "{few} visits, then {many}, of {beginning} in pieces of {size}");
            }
        }
    }
}

#[test]
fn every_byte_is_read_a_bounded_number_of_times() {
    for (short, long) in hostile(1000).iter().zip(hostile(4000)) {
        for &tools in &ToolParser::ALL[1..] {
            for (size, starts_inside) in [(1, false), (1, true), (7, false), (usize::MAX, false)] {
                let few = visited(short, size, starts_inside, tools);
                let many = visited(&long, size, starts_inside, tools);
                let beginning = &short[..short.len().min(60)];
                assert!(few >= short.len(), "{few} visits of {beginning}");
                assert!(few <= 64 * short.len(), "{few} visits of {beginning}");
                assert!(many <= 5 * few, "{few} visits, then {many}, of {beginning} in pieces of {size}");
            }
        }
    }
}
