//! Output parsers: properties of any text and any division of it.

use std::sync::Arc;

use penstock_text::parsers::Delta::{self, Content, Reasoning};
use penstock_text::parsers::{OutputParser, ToolSchemas, reasoning_format, tool_format};
use penstock_types::{ReasoningParser, ToolFormat, ToolParser};
use proptest::prelude::*;
use proptest::sample::Index;

use crate::parser_support::{FORMATS, Formats, call, merged, parse};

/// All formats, in all combinations.
fn formats() -> impl Strategy<Value = Formats> {
    let reasoning = proptest::option::of(any::<bool>());
    (reasoning, proptest::option::of(proptest::sample::select(&FORMATS)))
}

/// Parts of all formats, and unrelated text.
const PARTS: [&str; 33] = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<|python_tag|>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    "{\"name\": \"f\", ",
    "\"name\": \"f\"",
    "\"arguments\": ",
    "\"parameters\": {",
    "\"{\\\"a\\\": 1}\"",
    "{",
    "}",
    "[",
    "]",
    ",",
    ";",
    ":",
    "f",
    "1",
    " ",
    "\n",
    "<",
    "</",
    "<tool_",
    "é",
    "漢",
    "\u{a0}",
    "\"",
    "\\",
];

/// Random sequences of parts.
fn soup(parts: &'static [&'static str]) -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(parts), 0..24).prop_map(|parts| parts.concat())
}

/// Divides `text` at these positions.
fn cut<'a>(text: &'a str, places: &[Index]) -> Vec<&'a str> {
    let mut ends: Vec<usize> = places.iter().map(|place| place.index(text.len() + 1)).collect();
    ends.retain(|&end| text.is_char_boundary(end));
    ends.extend([0, text.len()]);
    ends.sort_unstable();
    ends.windows(2).map(|ends| &text[ends[0]..ends[1]]).collect()
}

/// The concatenated text of all deltas, with names and ids.
fn all_text(deltas: &[Delta]) -> String {
    let text = |delta: &Delta| match delta {
        Content(text) | Reasoning(text) | Delta::Arguments { text, .. } => text.clone(),
        Delta::ToolCall { name, id, .. } => format!("{name}{}", id.as_deref().unwrap_or_default()),
    };
    deltas.iter().map(text).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(20_000))]

    #[test]
    fn deltas_do_not_depend_on_how_text_is_divided(
        formats in formats(),
        text in soup(&PARTS),
        places in proptest::collection::vec(any::<Index>(), 0..6),
    ) {
        let whole = parse(formats, [text.as_str()]);
        prop_assert_eq!(parse(formats, cut(&text, &places)), whole.clone());
        let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
        prop_assert_eq!(parse(formats, characters), whole);
    }

    #[test]
    fn text_without_calls_is_unchanged_content(format in proptest::sample::select(&FORMATS), text in soup(&PARTS)) {
        let deltas = parse((None, Some(format)), [text.as_str()]);
        if !deltas.iter().any(|delta| matches!(delta, Delta::ToolCall { .. })) {
            prop_assert_eq!(all_text(&deltas), text);
        }
    }

    /// Without lone quotes among the parts, all strings are ASCII, and other letters end any call.
    #[test]
    fn no_letter_outside_calls_is_lost(formats in formats(), text in soup(&PARTS[..31])) {
        // The end of the text may be a cut call.
        let text = format!("{text} .");
        let letters = |text: &str| text.chars().filter(|letter| !letter.is_ascii()).collect::<String>();
        prop_assert_eq!(letters(&all_text(&parse(formats, [text.as_str()]))), letters(&text));
    }

    #[test]
    fn text_without_markers_is_unchanged_content(formats in formats(), text in "[^<\\[{\x0c]{0,60}") {
        let shown = if formats.0 == Some(true) { text.trim_ascii_start() } else { &text };
        prop_assert_eq!(all_text(&parse(formats, [text.as_str()])), shown);
    }
}

/// A JSON object with random whitespace.
fn object() -> impl Strategy<Value = String> {
    let string = prop_oneof![
        "[a-zé漢 ]{0,5}".prop_map(|text| format!("\"{text}\"")),
        proptest::sample::select(&[
            "\"</tool_call>\"",
            "\"\\\"}{][\"",
            "\"\\\\\"",
            "\"a\\u00e9\\n\"",
            "\"[TOOL_CALLS];\""
        ])
        .prop_map(str::to_owned),
    ];
    let scalar = prop_oneof![
        string.clone(),
        "-?[1-9][0-9]{0,3}(\\.5e-3)?",
        Just("true".to_owned()),
        Just("null".to_owned())
    ];
    let space = || proptest::sample::select(&["", "", " ", "\n  "]);
    let value = scalar.prop_recursive(3, 12, 3, move |inner| {
        let list = (proptest::collection::vec(inner.clone(), 0..3), space())
            .prop_map(|(items, space)| format!("[{space}{}]", items.join(&format!(",{space}"))));
        let object = (proptest::collection::vec((string.clone(), inner), 0..3), space())
            .prop_map(|(members, space)| write_object(&members, space));
        prop_oneof![list, object]
    });
    (proptest::collection::vec(("[a-z]{1,4}".prop_map(|key| format!("\"{key}\"")), value), 0..4), space())
        .prop_map(|(members, space)| write_object(&members, space))
}

fn write_object(members: &[(String, String)], space: &str) -> String {
    let members: Vec<String> = members.iter().map(|(key, value)| format!("{key}:{space}{value}")).collect();
    format!("{{{space}{}{space}}}", members.join(&format!("{space},")))
}

/// A part of a Hermes output, and the expected call, if any.
fn part() -> impl Strategy<Value = (String, Option<(String, String)>)> {
    const BROKEN: [&str; 8] = [
        "<tool_call>!",
        "<tool_call> <tool_call>]",
        "<tool_call>{\"name\": 1",
        "<tool_call>\n{\"arguments\": {\"a\": [}",
        "<tool_call>{\"name\": \"f\", \"arguments\": }</tool_call>",
        "</tool_call",
        "<tool_",
        "xyz",
    ];
    prop_oneof![
        proptest::sample::select(&BROKEN).prop_map(|text| (text.to_owned(), None)),
        ("[a-z]{1,4}", object()).prop_map(|(name, arguments)| {
            let object = format!("{{\"name\": \"{name}\", \"arguments\": {arguments}}}");
            (format!("<tool_call>{object}</tool_call>"), Some((name, arguments)))
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn broken_calls_among_valid_ones_are_content(
        parts in proptest::collection::vec(part(), 0..8),
        places in proptest::collection::vec(any::<Index>(), 0..8),
    ) {
        let text: String = parts.iter().map(|(text, _)| text.as_str()).collect();
        let (mut expected, mut index) = (Vec::new(), 0);
        for (text, good) in parts {
            match (good, expected.last_mut()) {
                (Some((name, arguments)), _) => {
                    expected.extend(call(index, &name, &arguments));
                    index += 1;
                }
                (None, Some(Content(last))) => *last += &text,
                (None, _) => expected.push(Content(text)),
            }
        }
        let deltas = parse((None, Some(ToolParser::Hermes)), cut(&text, &places));
        prop_assert_eq!(deltas, expected, "of {}", text);
    }

    #[test]
    fn valid_calls_keep_their_arguments_as_written(
        format in proptest::sample::select(&FORMATS),
        calls in proptest::collection::vec(("[a-z_]{1,8}", object(), any::<[bool; 2]>()), 1..4),
        texts in proptest::collection::vec("[a-zé漢<.]{1,6}( [a-z]{1,4})?", 4),
        places in proptest::collection::vec(any::<Index>(), 0..8),
    ) {
        let key = if format == ToolParser::Llama3Json { "parameters" } else { "arguments" };
        let objects: Vec<String> = calls.iter().map(|(name, arguments, [named_last, has_id])| {
            let id = if *has_id { "\"id\": [\"}\"], " } else { "" };
            match named_last {
                true => format!("{{{id}\"{key}\":{arguments} ,\n\"name\": \"{name}\"}}"),
                false => format!("{{\"name\":\"{name}\", {id}\"{key}\": {arguments}}}"),
            }
        }).collect();
        let mut expected = Vec::new();
        let mut expect_calls = |between: bool| {
            for (index, (name, arguments, _)) in calls.iter().enumerate() {
                expected.extend(call(index, name, arguments));
                expected.extend(between.then(|| Content(texts[index].clone())));
            }
        };
        let text = match format {
            ToolParser::Hermes => {
                expect_calls(true);
                let call = |(object, text): (&String, &String)| format!("<tool_call>\n{object}\n</tool_call> {text}\n");
                let text: String = objects.iter().zip(&texts).map(call).collect();
                text.trim_end().to_owned()
            }
            ToolParser::Llama3Json => {
                expect_calls(false);
                objects.join(" ; ")
            }
            _ => {
                expect_calls(false);
                format!("[TOOL_CALLS] [{}]", objects.join(",\n"))
            }
        };
        prop_assert_eq!(parse((None, Some(format)), cut(&text, &places)), expected, "of {}", text);
    }
}

/// Parts of calls in any format, beside the markers of one format.
const PIECES: [&str; 30] = [
    "f",
    "é",
    " ",
    "\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    "\"",
    "'",
    ":",
    "=",
    ",",
    ";",
    "1",
    "true",
    "f(a=1)",
    "call:f{a:1}",
    "{\"name\": \"f\", \"arguments\": {\"a\": 1}}",
    "{\"a\": 1}",
    ">",
    "<",
    "</",
    "<|",
    "```",
    "functions.f:0",
    "\\",
    "x y",
];

/// A text of the markers of `format`, all or a part of each, and other pieces.
fn text_of(format: &ToolFormat, reasoning: &[&'static str], choices: &[(bool, Index, Index)]) -> String {
    let markers: Vec<_> = format.markers().chain(reasoning.iter().copied()).collect();
    let part = |&(is_marker, which, length): &(bool, Index, Index)| match is_marker {
        true => {
            let marker = markers[which.index(markers.len().max(1)) % markers.len().max(1)];
            // One in eight is cut.
            let end = if length.index(8) == 0 { length.index(marker.len()) } else { marker.len() };
            let end = (0..=end).rev().find(|&end| marker.is_char_boundary(end)).unwrap_or(0);
            &marker[..end]
        }
        false => PIECES[which.index(PIECES.len())],
    };
    choices.iter().filter(|choice| !choice.0 || !markers.is_empty()).map(part).collect()
}

/// Checks the divisions of random texts in every format: all give the same parts, and indices of calls count up.
fn check_every_format(cases: u32) {
    let choices = proptest::collection::vec((any::<bool>(), any::<Index>(), any::<Index>()), 0..20);
    let strategy = (
        proptest::sample::select(&ToolParser::ALL[1..]),
        proptest::option::of((proptest::sample::select(&ReasoningParser::ALL[1..]), any::<bool>())),
        choices,
        proptest::collection::vec(any::<Index>(), 0..6),
        any::<bool>(),
    );
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    let mut runner = proptest::test_runner::TestRunner::new_with_rng(
        config,
        proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
    );
    let schemas = [("f", r#"{"properties": {"a": {"type": "integer"}, "b": {"type": ["object", "null"]}}}"#)];
    let schemas = Arc::new(ToolSchemas::new(schemas.into_iter()));
    let checked = runner.run(&strategy, |(tools, reasoning, choices, places, one_call)| {
        let format = tool_format(tools).expect("a format");
        let reasoning = reasoning.and_then(|(parser, is_open)| Some((reasoning_format(parser)?, is_open)));
        let markers: Vec<_> = reasoning.into_iter().flat_map(|(format, _)| format.markers()).collect();
        let text = text_of(format, &markers, &choices);
        let parser = || {
            let parser = OutputParser::new(reasoning, Some(format), &schemas);
            if one_call { parser.with_one_call() } else { parser }
        };
        let whole = merged(parser(), [text.as_str()]);
        prop_assert_eq!(merged(parser(), cut(&text, &places)), whole.clone(), "{:?} of {:?}", tools, &text);
        let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
        prop_assert_eq!(merged(parser(), characters), whole.clone(), "{:?} of {:?}", tools, &text);
        let indices: Vec<_> = whole
            .iter()
            .filter_map(|delta| match delta {
                Delta::ToolCall { index, .. } => Some(*index),
                _ => None,
            })
            .collect();
        prop_assert!(indices.iter().copied().eq(0..indices.len()));
        prop_assert!(!one_call || indices.len() <= 1);
        Ok(())
    });
    checked.expect("every division gives the same parts");
}

#[test]
fn text_of_every_format_can_be_divided_anywhere() {
    check_every_format(20_000);
}

#[test]
#[ignore = "takes minutes; `make test-schemas` runs it"]
fn a_million_texts_can_be_divided_anywhere() {
    check_every_format(1_000_000);
}
