//! Output parsers: examples of each format.

use penstock_text::parsers::Delta::{self, Content, Reasoning};
use penstock_text::parsers::{MAX_HELD_WHITESPACE, detect, reasoning_format, tool_format};
use penstock_types::{FormatSpec, ReasoningParser, ToolParser};

use crate::parser_support::{FORMATS, call, deltas, parser};

fn content(text: &str) -> Delta {
    Content(text.to_owned())
}

fn reasoning(text: &str) -> Delta {
    Reasoning(text.to_owned())
}

fn hermes(text: &str) -> Vec<Delta> {
    deltas((None, Some(ToolParser::Hermes)), text)
}

fn llama(text: &str) -> Vec<Delta> {
    deltas((None, Some(ToolParser::Llama3Json)), text)
}

fn mistral(text: &str) -> Vec<Delta> {
    deltas((None, Some(ToolParser::Mistral)), text)
}

#[test]
fn reasoning_is_trimmed_and_ends_with_its_tag() {
    let think = |text| deltas((Some(false), None), text);
    assert_eq!(
        think("<think>\nWell.\n\nSo.\n</think>\n\nYes."),
        [reasoning("Well.\n\nSo."), content("Yes.")]
    );
    assert_eq!(think("<think>\n\n</think>\n\nYes."), [content("Yes.")]);
    assert_eq!(think(" \n<think>never </think ends "), [reasoning("never </think ends ")]);
    assert_eq!(think("Say <think> or </think>."), [content("Say <think> or </think>.")]);
    assert_eq!(think("<think>a</think>b<think>c</think>"), [reasoning("a"), content("b<think>c</think>")]);
    assert_eq!(think("\n <thin"), [content("\n <thin")]);
}

#[test]
fn reasoning_opened_by_the_prompt_needs_no_opening_tag() {
    let think = |text| deltas((Some(true), None), text);
    assert_eq!(think("\nWell.</think> Yes."), [reasoning("Well."), content("Yes.")]);
    assert_eq!(think("<think>\nWell.</think>\nYes."), [reasoning("Well."), content("Yes.")]);
    assert_eq!(think("</think>Yes."), [content("Yes.")]);
    assert_eq!(think("<thing"), [reasoning("<thing")]);
    assert_eq!(think("<thi"), [reasoning("<thi")]);
    let format = reasoning_format(ReasoningParser::Think).expect("a format");
    assert!(format.is_opened_by("<|assistant|><think>\n"));
    assert!(!format.is_opened_by("<|assistant|><think>\n\n</think>\n\n"));
}

#[test]
fn calls_are_found_after_reasoning_but_not_inside() {
    let text =
        "<think><tool_call></think>\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>";
    let expected = [vec![reasoning("<tool_call>")], call(0, "f", "{}").to_vec()].concat();
    assert_eq!(deltas((Some(false), Some(ToolParser::Hermes)), text), expected);
}

#[test]
fn hermes_calls_are_read_between_tags() {
    let text = "Let me see.\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"at\": [1, {\"b\": \"}\"}]}}\n</tool_call>\n\
                <tool_call>{\"arguments\": {\"s\": \"</tool_call> \\\" {\"}, \"id\": 7, \"name\": \"say \\u00e9\"}</tool_call> Done.";
    let expected = [
        vec![content("Let me see.")],
        call(0, "look", "{\"at\": [1, {\"b\": \"}\"}]}").to_vec(),
        call(1, "say é", "{\"s\": \"</tool_call> \\\" {\"}").to_vec(),
        vec![content("Done.")],
    ];
    assert_eq!(hermes(text), expected.concat());
}

#[test]
fn call_is_emitted_when_its_arguments_start_streaming() {
    let mut parser = parser((None, Some(ToolParser::Hermes)));
    let mut deltas = Vec::new();
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\"", &mut deltas);
    assert_eq!(deltas, []);
    for piece in [": {\"a", "\": 1", "}"] {
        parser.push(piece, &mut deltas);
    }
    assert_eq!(deltas, call(0, "f", "{\"a\": 1}"));
    let mut deltas = Vec::new();
    parser.push("}</tool_call", &mut deltas);
    parser.push(">", &mut deltas);
    parser.finish(&mut deltas);
    assert_eq!(deltas, []);
}

#[test]
fn malformed_call_is_content_unless_already_emitted() {
    for text in [
        "<tool_call>",
        " \n<tool_call>\n{\"name\": \"f\"",
        "<tool_call>\n{'name': 'f', 'arguments': {}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"\", \"arguments\": {}}\n</tool_call>",
        "<tool_call>\n{\"name\": {\"arguments\": {}}}\n</tool_call>",
        "<tool_call>\n{\"arguments\": {\"a\": [1}}}\n</tool_call>",
        "<tool_call>\n{\"name\": \"f\", \"arguments\": <none>}\n</tool_call>",
        "<tool_call>\nf(1)\n</tool_call> and <tool_call",
    ] {
        assert_eq!(hermes(text), [content(text)]);
    }
    let after = |text: &str, arguments: &str, rest: &[Delta]| {
        let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {text}");
        assert_eq!(hermes(&text), [&call(0, "f", arguments), rest].concat(), "of {text}");
    };
    after("{\"a\": 1", "{\"a\": 1", &[]);
    after("{\"a\": 1</tool_call> So.", "{\"a\": 1", &[content("So.")]);
    after("{\"a\": 1}}}</tool_call>", "{\"a\": 1}", &[content("}")]);
    after("{\"a\": 1}}<tool_call>no</tool_call>", "{\"a\": 1}", &[content("<tool_call>no</tool_call>")]);
    after("{\"a\": [1}}</tool_call>", "{\"a\": [1", &[content("}}")]);
    let doubled = "<tool_call>\n<tool_call>{\"name\": \"f\"}</tool_call>";
    assert_eq!(hermes(doubled), [vec![content("<tool_call>\n")], call(0, "f", "{}").to_vec()].concat());
}

#[test]
fn later_call_that_is_cut_is_no_content() {
    for rest in ["\n<tool_call>", "<tool_call>\n{\"na", "\n<tool_call>{\"name\": \"g\""] {
        let text = format!("<tool_call>{{\"name\": \"f\"}}</tool_call>{rest}");
        assert_eq!(hermes(&text), call(0, "f", "{}"), "of {text}");
        let text = format!("So.{rest}");
        assert_eq!(hermes(&text), [content(&text)]);
    }
    let text = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g";
    assert_eq!(mistral(text), call(0, "f", "{}"));
}

#[test]
fn first_name_and_first_arguments_win() {
    let text = "<tool_call>{\"id\": {\"name\": \"x\"}, \"name\": \"f\", \"arguments\": {\"a\": 1}, \"parameters\": {}, \"name\": \"g\"}";
    assert_eq!(hermes(text), call(0, "f", "{\"a\": 1}"));
}

#[test]
fn non_object_arguments_are_unquoted_or_passed_on() {
    let arguments = |text: &str, expected: &str| {
        let text = format!("<tool_call>{{\"name\": \"f\", \"arguments\": {text}}}</tool_call>");
        assert_eq!(hermes(&text), call(0, "f", expected), "of {text}");
    };
    arguments(r#""{\"a\": \"\\u00e9\"}""#, r#"{"a": "\u00e9"}"#);
    arguments(r#""a \"city\"""#, r#""a \"city\"""#);
    arguments("null", "null");
    arguments("-1.5e3 ", "-1.5e3");
    arguments("[1, 2]", "[1, 2]");
    assert_eq!(hermes("<tool_call>{\"name\": \"f\"}</tool_call>"), call(0, "f", "{}"));
    let cut = "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a";
    assert_eq!(hermes(cut), call(0, "f", "\"{\\\"a"));
}

#[test]
fn llama_calls_are_objects_at_the_start_of_the_output() {
    let text = "\n{\"name\": \"f\", \"parameters\": {\"a\": 1}}; {\"type\": \"function\", \"name\": \"g\", \"arguments\": {}}";
    assert_eq!(llama(text), [call(0, "f", "{\"a\": 1}"), call(1, "g", "{}")].concat());
    let tagged = "<|python_tag|>{\"name\": \"f\"}\nDone.";
    assert_eq!(llama(tagged), [&call(0, "f", "{}")[..], &[content("Done.")]].concat());
    for text in [
        "Call {\"name\": \"f\", \"parameters\": {}}",
        "{\"city\": \"Paris\"}",
        " {\"name\": \"Ada\", \"born\": 1815}",
        "<|python_tag|>print({})",
        "<|python {\"name\": \"f\", \"parameters\": {}}",
        "{}",
        "<|pyth",
    ] {
        assert_eq!(llama(text), [content(text)]);
    }
    let followed = "{\"name\": \"f\", \"parameters\": {}}; then {\"name\": \"g\", \"parameters\": {}}";
    let rest = content("; then {\"name\": \"g\", \"parameters\": {}}");
    assert_eq!(llama(followed), [&call(0, "f", "{}")[..], &[rest]].concat());
}

#[test]
fn mistral_calls_are_a_list_or_follow_their_names() {
    let two = [call(0, "f", "{\"a\": []}"), call(1, "g", "{}")].concat();
    let list =
        "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": []}, \"id\": \"x\"}, {\"name\": \"g\"}]";
    assert_eq!(mistral(list), two);
    assert_eq!(mistral("[TOOL_CALLS]f{\"a\": []}[TOOL_CALLS]g[ARGS]{}"), two);
    let with_id = mistral("[TOOL_CALLS]f[CALL_ID]a1[ARGS]{\"a\": []}\n[TOOL_CALLS]{\"name\": \"g\"}");
    assert_eq!(with_id[0], Delta::ToolCall { index: 0, name: "f".to_owned(), id: Some("a1".to_owned()) });
    assert_eq!(with_id[1..], two[1..]);
    let around = "Yes. [TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": []}}] [TOOL_CALLS]g{} So.";
    assert_eq!(mistral(around), [&[content("Yes.")], &two[..], &[content("So.")]].concat());
    for text in [
        "[TOOL_CALLS] []",
        "[TOOL_CALLS] call f",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS][{\"name\": 1}]",
        "[1, 2] [TOOL",
    ] {
        assert_eq!(mistral(text), [content(text)]);
    }
    let long = format!("[TOOL_CALLS]{}[TOOL_CALLS]f{{}}", "x".repeat(300));
    assert_eq!(mistral(&long), [&[content(&long[..312])][..], &call(0, "f", "{}")].concat());
}

#[test]
fn text_of_a_formats_literals_is_parsed_back() {
    for parser in FORMATS {
        let format = tool_format(parser).expect("a format");
        let literals = format.literals.expect("literals");
        let one = |name: &str, arguments: &str| {
            [
                literals.call_opening,
                literals.name_key,
                name,
                literals.arguments_key,
                arguments,
                literals.call_closing,
            ]
            .concat()
        };
        let calls = [one("\"f\"", "{\"a\": 1}"), one("\"g\"", "{}")].join(literals.separator);
        let text = format!("{}{calls}{}", literals.opening, literals.closing);
        let expected = [call(0, "f", "{\"a\": 1}"), call(1, "g", "{}")].concat();
        assert_eq!(deltas((None, Some(parser)), &text), expected);
        // Llama writes the tag only before calls of its built-in tools.
        let is_marked = text.contains(format.call.open[0]);
        assert_eq!(is_marked, parser != ToolParser::Llama3Json);
    }
}

#[test]
fn formats_are_detected_in_chat_templates() {
    let think = Some(ReasoningParser::Think);
    let detected = |template: &str, reasoning: Option<ReasoningParser>, tools: Option<ToolParser>| {
        let reasoning = reasoning.and_then(reasoning_format);
        let expected = FormatSpec { reasoning, tools: tools.and_then(tool_format) };
        assert_eq!(detect(template), expected, "of {template}");
    };
    let hermes = r#"{{- "<tool_call>\n{\"name\": <name>, \"arguments\": <object>}\n</tool_call>" }}"#;
    let llama = r#"<|start_header_id|> Respond with {"name": its name, "parameters": an object}"#;
    let mistral = "{{ '[TOOL_CALLS] [' }}";
    detected(hermes, None, Some(ToolParser::Hermes));
    detected(&format!("{hermes}<think>"), think, Some(ToolParser::Hermes));
    detected(llama, None, Some(ToolParser::Llama3Json));
    detected(mistral, None, Some(ToolParser::Mistral));
    detected("{% set content = content.split('</think>')[-1] %}", think, None);
    detected(&format!("{hermes}{mistral}"), None, None);
    detected("<tool_call>\n<function=name>\n<parameter=a>", None, Some(ToolParser::QwenXml));
    detected(&format!("{hermes}<arg_key>"), None, Some(ToolParser::GlmXml));
    detected(&format!("{hermes}<|channel|>"), None, None);
    detected("<｜tool▁calls▁begin｜>", None, Some(ToolParser::DeepseekV31));
    detected("<｜tool▁calls▁begin｜>function<｜tool▁sep｜>", None, Some(ToolParser::DeepseekV3));
    detected("<｜DSML｜function_calls>", None, Some(ToolParser::Dsml32));
    detected("<｜DSML｜tool_calls>", None, Some(ToolParser::Dsml4));
    detected("<｜DSML｜tool_calls></think>", think, Some(ToolParser::Dsml4));
    for (template, reasoning, tools) in [
        ("<|open|> <|end_of_msg|>", Some(ReasoningParser::KimiK3), Some(ToolParser::KimiK3)),
        ("<|tool_calls_section_begin|>", None, Some(ToolParser::KimiK2)),
        ("<|channel>thought <|tool_call>call:", Some(ReasoningParser::Gemma4), Some(ToolParser::Gemma4)),
        ("<start_function_call>", None, Some(ToolParser::Functiongemma)),
        ("<|START_THINKING|> <|START_ACTION|>", Some(ReasoningParser::Cohere), Some(ToolParser::CohereJson)),
        (
            "<seed:think> <seed:tool_call> <function= <parameter=",
            Some(ReasoningParser::Seed),
            Some(ToolParser::SeedXml),
        ),
        ("<think> <minimax:tool_call>", think, Some(ToolParser::MinimaxM2)),
        ("<steptml:invoke", None, Some(ToolParser::Step3)),
        ("</think:x> <tool_sep:x> <arg_key:x>", Some(ReasoningParser::Hy3), Some(ToolParser::Hy3Xml)),
        ("<|tool_list_start|>", None, Some(ToolParser::Lfm2)),
        (r#"<param name=\"a"#, None, Some(ToolParser::Minicpm5)),
        ("<|think|> <|begin|> <|tool_call:begin|>", Some(ReasoningParser::Solar), Some(ToolParser::Solar)),
        ("<|inner_prefix|> <|tools_prefix|>", Some(ReasoningParser::Apertus), Some(ToolParser::Apertus)),
        ("<|action_start|><|plugin|>", None, Some(ToolParser::Internlm2)),
        ("<TOOLCALL>", None, Some(ToolParser::NemotronNano2)),
        ("<|python_start|>", None, Some(ToolParser::Llama4Pythonic)),
        ("<function_calls>", None, Some(ToolParser::Olmo3)),
        ("[THINK] [TOOL_CALLS]", Some(ReasoningParser::Mistral), Some(ToolParser::Mistral)),
        ("◁think▷", Some(ReasoningParser::KimiVl), None),
        ("</mm:think> ]<]minimax[>[<tool_call>", Some(ReasoningParser::Mm), None),
        ("<thought>", Some(ReasoningParser::Thought), None),
        ("[BEGIN FINAL RESPONSE]", Some(ReasoningParser::Apriel), None),
        ("Here is my thought process:", Some(ReasoningParser::Granite32), None),
    ] {
        detected(template, reasoning, tools);
    }
    detected("<|im_start|>{{ message.content }}<|im_end|>", None, None);
}

#[test]
fn long_whitespace_is_not_held_back() {
    let space = "\n".repeat(MAX_HELD_WHITESPACE);
    let opened = "<tool_call>{\"name\": \"f\"}";
    let shown = |text: &str| {
        let mut deltas = Vec::new();
        parser((None, Some(ToolParser::Hermes))).push(text, &mut deltas);
        deltas
    };
    assert_eq!(shown(&format!("a{space}")), [content("a")]);
    assert_eq!(shown(&format!("a{space} ")), [content(&format!("a{space} "))]);
    assert_eq!(hermes(&format!("a{space}{opened}")), [&[content("a")][..], &call(0, "f", "{}")].concat());
    let kept = format!("a {space}");
    assert_eq!(hermes(&format!("{kept}{opened}")), [&[content(&kept)][..], &call(0, "f", "{}")].concat());
}

/// The content and the first call of a text whose later calls are content.
fn first_call(format: ToolParser, text: &str) -> (String, Vec<Delta>) {
    let read = |pieces: &mut dyn Iterator<Item = &str>| {
        let mut parser = parser((None, Some(format))).with_one_call();
        let mut deltas = Vec::new();
        pieces.for_each(|piece| parser.push(piece, &mut deltas));
        parser.finish(&mut deltas);
        let (mut shown, mut calls) = (String::new(), Vec::new());
        for delta in deltas {
            match delta {
                Delta::Content(text) => shown += &text,
                Delta::Arguments { index, text } => match calls.last_mut() {
                    Some(Delta::Arguments { text: last, .. }) => *last += &text,
                    _ => calls.push(Delta::Arguments { index, text }),
                },
                delta => calls.push(delta),
            }
        }
        (shown, calls)
    };
    let whole = read(&mut [text].into_iter());
    let characters = text.char_indices().map(|(at, character)| &text[at..at + character.len_utf8()]);
    assert_eq!(read(&mut { characters }), whole, "of {text:?}");
    whole
}

#[test]
fn with_a_required_call_a_part_of_a_call_is_no_content() {
    let (f, g) = (r#"{"name": "f", "arguments": {"a": 1}}"#, r#"{"name": "g", "arguments": {}}"#);
    let texts = [
        (ToolParser::Hermes, format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>")),
        (ToolParser::Llama3Json, format!("{f}; {g}")),
        (ToolParser::Mistral, format!("[TOOL_CALLS] [{f}, {g}]")),
        (ToolParser::Mistral, r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}"#.to_owned()),
    ];
    for (format, answer) in texts {
        let text = format!("<think>So.</think>\n\n{answer}");
        for end in 0..=text.len() {
            let mut parser = parser((Some(false), Some(format))).with_required_call();
            let mut deltas = Vec::new();
            parser.push(&text[..end], &mut deltas);
            parser.finish(&mut deltas);
            let is_content = |delta: &Delta| matches!(delta, Delta::Content(_));
            assert!(!deltas.iter().any(is_content), "{format:?} {:?}: {deltas:?}", &text[..end]);
            let num_calls = deltas.iter().filter(|delta| matches!(delta, Delta::ToolCall { .. })).count();
            assert!(end < text.len() || num_calls == 2, "{format:?}: {deltas:?}");
        }
    }
}

#[test]
fn with_one_call_allowed_later_text_is_content() {
    let (f, g) = (r#"{"name": "f", "arguments": {"a": 1}}"#, r#"{"name": "g", "arguments": {}}"#);
    let tagged = |call: &str| format!("<tool_call>\n{call}\n</tool_call>");
    let cases = [
        (ToolParser::Hermes, format!("So {}\n{}.", tagged(f), tagged(g)), format!("So{}.", tagged(g))),
        (ToolParser::Hermes, format!("{}\n Done. ", tagged(f)), "Done. ".to_owned()),
        (ToolParser::Llama3Json, format!("{f};{g}"), format!(";{g}")),
        (ToolParser::Mistral, format!("[TOOL_CALLS] [{f},{g}]"), format!(",{g}]")),
        (ToolParser::Mistral, format!("[TOOL_CALLS] [{f}] so"), "so".to_owned()),
        (
            ToolParser::Mistral,
            r#"[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}"#.to_owned(),
            "[TOOL_CALLS]g[ARGS]{}".to_owned(),
        ),
    ];
    for (format, text, shown) in cases {
        assert_eq!(
            first_call(format, &text),
            (shown, call(0, "f", "{\"a\": 1}").to_vec()),
            "{format:?} {text}"
        );
    }
}
