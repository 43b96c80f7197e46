//! Random texts: whichever allowed tokens are chosen, the text matches the grammar.

use penstock_guidance::{GrammarSpec, ToolCallSpec, ToolSpec};
use serde_json::{Value, json};

use crate::common::validate::{is_match, validate};
use crate::common::{Random, Tokens, bytes, compiler, tool, tool_calls, words};

/// Texts per grammar and vocabulary.
const NUM_TEXTS: usize = 6;

/// Generates random texts of each grammar and checks them.
fn check_texts(grammars: &[(String, GrammarSpec)], check: impl Fn(&str, &str) -> Result<(), String>) {
    let mut failures = Vec::new();
    for (which, tokens) in [bytes(), words(11, 1_500)].iter().enumerate() {
        let compiler = compiler(tokens);
        let mut random = Random(which as u64);
        for (name, grammar) in grammars {
            let compiled = match compiler.compile(grammar) {
                Ok(compiled) => compiled,
                Err(error) => {
                    failures.push(format!("{name}: {error}"));
                    continue;
                }
            };
            for length in (0..NUM_TEXTS).map(|index| 8 << index) {
                let text = tokens.generate(&mut compiled.start().unwrap(), &mut random, length);
                if let Err(error) = text.and_then(|text| check(name, &text)) {
                    failures.push(format!("{name}: {error}"));
                }
            }
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

fn schemas() -> Vec<(String, Value)> {
    let listed: Vec<Value> =
        serde_json::from_str(include_str!("../../../../tests/data/json_schemas.json")).unwrap();
    let entry = |entry: &Value| (entry["name"].as_str().unwrap().to_owned(), entry["schema"].clone());
    listed.iter().map(entry).collect()
}

/// Position of the first whitespace outside strings other than one space after a comma or colon.
fn stray_space(text: &str) -> Option<usize> {
    let (mut quoted, mut escaped, mut last) = (false, false, ' ');
    for (index, character) in text.char_indices() {
        if !quoted && character.is_whitespace() && !(character == ' ' && (last == ',' || last == ':')) {
            return Some(index);
        }
        quoted ^= character == '"' && !escaped;
        escaped = quoted && character == '\\' && !escaped;
        last = character;
    }
    None
}

fn check_json(text: &str, schema: &Value) -> Result<(), String> {
    if let Some(index) = stray_space(text) {
        return Err(format!("whitespace at {index} in {text}"));
    }
    match serde_json::from_str(text) {
        Ok(value) => validate(&value, schema).map_err(|error| format!("{error} in {text}")),
        Err(error) if past_64_bits(&error) => Ok(()),
        Err(error) => Err(format!("{error} in {text}")),
    }
}

/// The text is JSON, but contains a number beyond the range of a double.
fn past_64_bits(error: &serde_json::Error) -> bool {
    error.to_string().starts_with("number out of range")
}

#[test]
fn texts_of_a_schema_are_valid_json() {
    let schemas = schemas();
    assert!(schemas.len() >= 150);
    let grammars: Vec<_> = schemas
        .iter()
        .map(|(name, schema)| (name.clone(), GrammarSpec::JsonSchema(schema.to_string())))
        .collect();
    check_texts(&grammars, |name, text| {
        let (_, schema) = schemas.iter().find(|(other, _)| other == name).unwrap();
        check_json(text, schema)
    });
}

#[test]
fn texts_of_a_json_object_are_objects() {
    let grammars = [("object".to_owned(), GrammarSpec::JsonObject)];
    check_texts(&grammars, |_, text| check_json(text, &json!({"type": "object"})));
}

#[test]
fn texts_of_a_regex_match_it() {
    let patterns = [
        r"[0-9]{4}-[0-9]{2}",
        r"\d+(\.\d+)?",
        "^(yes|no|maybe)$",
        "a*",
        "",
        "^$",
        r"[^\x00-\x1f]{0,20}!",
        r#""([^"\\]|\\.)*""#,
        "(?i)straße|日本",
        r"/[a-z]+(/[a-z]+)*",
        r"price: \$",
        r"C:\\",
        "(?s:.{3})",
        r"(?x) a \  b # comment",
        r"line\nline",
        "tab\tand\nnewline",
        r"\p{Greek}{2}",
    ];
    let grammars: Vec<_> =
        patterns.map(|pattern| (pattern.to_owned(), GrammarSpec::Regex(pattern.into()))).into();
    check_texts(&grammars, |pattern, text| {
        // A comment ends with its line.
        let end = if pattern.contains("(?x)") { "\n" } else { "" };
        let whole = format!("^(?:{pattern}{end})$");
        is_match(&whole, text).then_some(()).ok_or_else(|| format!("{text:?} does not match {pattern}"))
    });
}

#[test]
fn texts_of_a_choice_are_in_the_list() {
    let lists: [&[&str]; 4] = [
        &["one"],
        &["a", "ab", "abc"],
        &["quote\"", "back\\slash", "new\nline", "\u{7f}\u{1}", "/regex/", "<tool_call>"],
        &["日本", "日", "🙂é"],
    ];
    for texts in lists {
        let texts: Vec<String> = texts.iter().map(|text| (*text).to_owned()).collect();
        check_texts(&[(String::new(), GrammarSpec::Choice(texts.clone()))], |_, text| {
            texts
                .iter()
                .any(|one| one == text)
                .then_some(())
                .ok_or_else(|| format!("{text:?} is not in the list"))
        });
    }
}

#[test]
fn texts_of_a_lark_grammar_follow_it() {
    let sums = "start: sum\nsum: product (\"+\" product)*\nproduct: atom (\"*\" atom)*\natom: /[0-9]{1,3}/ | \"(\" sum \")\"";
    let grammars = [("sums".to_owned(), GrammarSpec::Lark(sums.into()))];
    check_texts(&grammars, |_, text| {
        let open = text.matches('(').count();
        let balanced = open == text.matches(')').count();
        let shape = is_match(r"^\(*[0-9]{1,3}\)*([+*]\(*[0-9]{1,3}\)*)*$", text);
        (balanced && shape).then_some(()).ok_or_else(|| format!("{text:?} is not a sum"))
    });
}

fn tools() -> Vec<ToolSpec> {
    let weather = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
        "required": ["city", "unit"], "additionalProperties": false, "$defs": {"unit": {"enum": ["c", "f"]}}});
    let add =
        json!({"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    vec![tool("weather", &weather.to_string()), tool("add/\"2\"", &add.to_string()), tool("anything", "true")]
}

fn calls(literals: [&str; 5], keys: [&str; 2], parallel: bool) -> ToolCallSpec {
    tool_calls(tools(), literals, keys, parallel)
}

/// Parses a text as a client would and checks each call.
fn check_calls(text: &str, calls: &ToolCallSpec) -> Result<(), String> {
    let wrong = || format!("{text:?} is not a list of calls");
    let inner = text.strip_prefix(calls.opening.as_str()).ok_or_else(wrong)?;
    let mut rest = inner.strip_suffix(calls.closing.as_str()).ok_or_else(wrong)?;
    let mut count = 0;
    loop {
        rest = rest.strip_prefix(calls.call_opening.as_str()).ok_or_else(wrong)?;
        let mut values = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        let call = match values.next().ok_or_else(wrong)? {
            Ok(call) => call,
            Err(error) if past_64_bits(&error) => return Ok(()),
            Err(error) => return Err(format!("{error} in {text:?}")),
        };
        rest = rest[values.byte_offset()..].strip_prefix(calls.call_closing.as_str()).ok_or_else(wrong)?;
        let name = call[&calls.name_key].as_str().ok_or_else(wrong)?;
        let ToolSpec { schema, .. } = calls.tools.iter().find(|tool| tool.name == *name).ok_or_else(wrong)?;
        let schema: Value = serde_json::from_str(schema).unwrap();
        let arguments = &call[&calls.arguments_key];
        validate(arguments, &schema)?;
        count += 1;
        if !arguments.is_object() || call.as_object().unwrap().len() != 2 || (count > 1 && !calls.parallel) {
            return Err(wrong());
        }
        match rest.strip_prefix(calls.separator.as_str()) {
            Some(next) if !rest.is_empty() => rest = next,
            _ if rest.is_empty() => return Ok(()),
            _ => return Err(wrong()),
        }
    }
}

const HERMES: [&str; 5] = ["", "<tool_call>\n", "\n</tool_call>", "\n", ""];
const LLAMA: [&str; 5] = ["", "", "", "; ", ""];
const MISTRAL: [&str; 5] = ["[TOOL_CALLS] [", "", "", ", ", "]"];

#[test]
fn tool_calls_are_valid_in_every_format() {
    for parallel in [false, true] {
        for (literals, keys) in [
            (HERMES, ["name", "arguments"]),
            (LLAMA, ["name", "parameters"]),
            (MISTRAL, ["name", "arguments"]),
            (["<a>", "\"", "/", "\\", "é"], ["function \"name\"", "argu\\ments"]),
        ] {
            let calls = calls(literals, keys, parallel);
            check_texts(&[(literals.concat(), GrammarSpec::ToolCalls(calls.clone()))], |_, text| {
                check_calls(text, &calls)
            });
        }
    }
}

#[test]
fn reasoning_is_allowed_before_tool_calls() {
    for open in ["<think>", ""] {
        let reasoning = Some((open.to_owned(), "</think>".to_owned()));
        let calls = ToolCallSpec { reasoning, ..calls(HERMES, ["name", "arguments"], false) };
        check_texts(&[(open.to_owned(), GrammarSpec::ToolCalls(calls.clone()))], |_, text| {
            let rest = match text.split_once("</think>") {
                Some((reasoning, rest)) if reasoning.starts_with(open) => rest.trim_start(),
                None if !open.is_empty() => text,
                _ => return Err(format!("{text:?} has no reasoning block")),
            };
            check_calls(rest, &calls)
        });
    }
}

/// Whether a matcher accepts the parts and then the end: special tokens by name, other parts byte by byte.
fn accepts(tokens: &Tokens, grammar: &GrammarSpec, parts: &[&str]) -> bool {
    let mut matcher = compiler(tokens).compile(grammar).unwrap().start().unwrap();
    for part in parts {
        let special =
            (tokens.end as usize..tokens.texts.len()).find(|&id| tokens.texts[id] == part.as_bytes());
        let ids = special.map_or_else(|| part.bytes().map(u32::from).collect(), |id| vec![id as u32]);
        for id in ids {
            // The mask of forced text contains only one split; the matcher accepts others too.
            let allowed = tokens.mask(&mut matcher).unwrap();
            assert!(allowed.len() == 1 || allowed.contains(&id) || matcher.accept(id).is_err());
            if matcher.accept(id).is_err() {
                return false;
            }
        }
    }
    matcher.accept(tokens.end).is_ok()
}

#[test]
fn special_token_in_a_literal_matches_token_or_text() {
    let tokens = bytes();
    let call = r#"{"name": "add/\"2\"", "arguments": {"a": 1}}"#;
    let spelled: Vec<String> = "<tool_call>".chars().map(String::from).collect();
    let spelled: Vec<&str> = spelled.iter().map(String::as_str).collect();
    let hermes = GrammarSpec::ToolCalls(calls(HERMES, ["name", "arguments"], true));
    assert!(accepts(&tokens, &hermes, &["<tool_call>", "\n", call, "\n", "</tool_call>"]));
    assert!(accepts(&tokens, &hermes, &[spelled.as_slice(), &["\n", call, "\n", "</tool_call>"]].concat()));
    assert!(!accepts(&tokens, &hermes, &["</tool_call>", "\n", call, "\n", "</tool_call>"]));
    assert!(accepts(
        &tokens,
        &hermes,
        &[
            "<tool_call>",
            "\n",
            call,
            "\n",
            "</tool_call>",
            "\n",
            "<tool_call>",
            "\n",
            call,
            "\n",
            "</tool_call>"
        ]
    ));
    let mistral = GrammarSpec::ToolCalls(calls(MISTRAL, ["name", "arguments"], true));
    assert!(accepts(&tokens, &mistral, &["[TOOL_CALLS]", " [", call, ", ", call, "]"]));
    let reasoning = Some(("<think>".to_owned(), "</think>".to_owned()));
    let with_reasoning =
        GrammarSpec::ToolCalls(ToolCallSpec { reasoning, ..calls(HERMES, ["name", "arguments"], false) });
    assert!(accepts(
        &tokens,
        &with_reasoning,
        &["<think>", "hm", "</think>", "\n\n", "<tool_call>", "\n", call, "\n", "</tool_call>"]
    ));
    assert!(accepts(&tokens, &with_reasoning, &["<tool_call>", "\n", call, "\n", "</tool_call>"]));
    assert!(!accepts(&tokens, &with_reasoning, &["<think>", "hm", "<tool_call>", "\n"]));
}
