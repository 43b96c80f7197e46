//! Hostile grammars: each is rejected with a typed error or stays within the limits while it is used.

use std::time::Duration;

use penstock_guidance::{
    GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits, ToolSpec,
};

use crate::common::{
    Random, Tokens, compiler, compiler_with, schema, tool, tool_calls, untimed_limits, words,
};

fn lark(source: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Lark(source.into())
}

fn gbnf(source: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Gbnf(source.into())
}

fn regex(source: impl Into<String>) -> GrammarSpec {
    GrammarSpec::Regex(source.into())
}

fn calls_of(tools: Vec<ToolSpec>) -> GrammarSpec {
    GrammarSpec::ToolCalls(tool_calls(tools, [""; 5], ["name", "arguments"], true))
}

/// Joins `part(0)` to `part(count - 1)`.
fn repeat(count: usize, separator: &str, part: impl Fn(usize) -> String) -> String {
    (0..count).map(part).collect::<Vec<_>>().join(separator)
}

fn properties(count: usize) -> String {
    repeat(count, ",", |index| format!(r#""p{index}":{{}}"#))
}

fn all_of(count: usize, part: impl Fn(usize) -> String) -> GrammarSpec {
    schema(&format!(
        r#"{{"type":"object","allOf":[{}]}}"#,
        repeat(count, ",", |index| format!("{{{}}}", part(index)))
    ))
}

fn names(part: usize, count: usize) -> String {
    repeat(count, ",", |index| format!(r#""n{part}_{index}""#))
}

fn patterned(part: usize) -> String {
    repeat(3, ",", |index| format!(r#""^p{part}_{index}":{{}}"#))
}

fn definitions(count: usize, definition: impl Fn(usize) -> String) -> GrammarSpec {
    let all = repeat(count, ",", |index| format!(r#""a{index}":{}"#, definition(index + 1)));
    schema(&format!(r##"{{"$defs":{{{all},"a{count}":{{"type":"null"}}}},"$ref":"#/$defs/a0"}}"##))
}

fn error(compiler: &GrammarCompiler, grammar: &GrammarSpec) -> GuidanceError {
    match compiler.compile(grammar) {
        Ok(_) => panic!("{:.200} was compiled", format!("{grammar:?}")),
        Err(error) => error,
    }
}

/// Compiles each grammar and checks the kind of its error and a part of the message.
fn check(expected: fn(&GuidanceError) -> bool, grammars: &[(GrammarSpec, &str)]) {
    let compiler = compiler(&words(1, 300));
    for (grammar, text) in grammars {
        let error = error(&compiler, grammar);
        assert!(
            expected(&error) && error.to_string().contains(text),
            "{:.200}: {error}",
            format!("{grammar:?}")
        );
    }
}

fn is_invalid(error: &GuidanceError) -> bool {
    matches!(error, GuidanceError::Invalid { .. } | GuidanceError::Unsupported { .. })
}

fn is_too_complex(error: &GuidanceError) -> bool {
    matches!(error, GuidanceError::TooComplex { .. })
}

fn is_dead_end(error: &GuidanceError) -> bool {
    matches!(error, GuidanceError::DeadEnd { .. })
}

#[test]
fn deep_nesting_is_rejected_before_recursion() {
    let deep = 100_000;
    let limit = "brackets nested 100000 deep; the limit is 64";
    check(
        is_too_complex,
        &[
            (schema(&"[".repeat(deep)), limit),
            (schema(&format!("{}true{}", r#"{"not":"#.repeat(deep), "}".repeat(deep))), limit),
            (regex(format!("{}{}", "(".repeat(deep), ")".repeat(deep))), limit),
            (lark(format!("start: {}\"a\"{}", "(".repeat(deep), ")".repeat(deep))), limit),
            (lark(format!("start: /{}a{}/", "(".repeat(deep), ")".repeat(deep))), limit),
            (lark(format!("start: <\"> {}", "[".repeat(deep))), limit),
            (
                lark(format!("start: %json {}{}", "[".repeat(100), "]".repeat(100))),
                "brackets nested 100 deep",
            ),
            (lark(format!("start: %json {}{}", "[".repeat(deep), "]".repeat(deep))), limit),
            (
                gbnf(format!("root ::= {}\"a\"{}", "(".repeat(deep), ")".repeat(deep))),
                "brackets nested more than 64 deep",
            ),
        ],
    );
    check(is_invalid, &[(lark(format!("start: %json {}", "[".repeat(deep))), "EOF while parsing")]);
}

#[test]
fn comment_with_another_end_of_line_hides_no_brackets() {
    let deep = "(".repeat(1_000_000);
    check(
        is_too_complex,
        &[(gbnf(format!("root ::= \"a\"\n#\rb ::= {deep}")), "brackets nested more than 64 deep")],
    );
}

#[test]
fn deep_recursion_of_gbnf_stays_within_the_stack() {
    let chain = repeat(10_000, "", |index| format!("a{index} ::= (a{}* \"\" | \"\")+\n", index + 1));
    check(
        is_too_complex,
        &[
            (gbnf(format!("root ::= \"a\"{}", "*".repeat(1_000_000))), "more than 20000 rules and brackets"),
            (
                gbnf(format!("root ::= \"a\"{}", "*".repeat(19_000))),
                "brackets nested 18999 deep; the limit is 64",
            ),
            (
                gbnf(format!("root ::= \"(\" root | \"a\"{}", "*".repeat(19_000))),
                "its translation takes more than",
            ),
            (gbnf(format!("root ::= \"(\" root | a0\n{chain}a10000 ::= \"a\"")), "rules and brackets"),
        ],
    );
}

/// A class of this many characters, which are apart from each other.
fn scattered_class(count: u32) -> String {
    let members =
        (0..).map(|index| 0x100 + 2 * index).filter(|code_point| !(0xd7ff..0xe001).contains(code_point));
    format!("[{}]", members.filter_map(char::from_u32).take(count as usize).collect::<String>())
}

#[test]
fn long_translation_is_too_complex() {
    let source = format!("c ::= {}\nroot ::= {}(root | \"x\")", scattered_class(8), "c ".repeat(400_000));
    check(is_too_complex, &[(gbnf(source), "its translation has more than 1048576 bytes")]);
}

#[test]
fn terminal_with_a_hyphen_is_a_part_of_a_chain() {
    let chain = repeat(9_000, "\n", |index| format!("T-{index}: T-{} \"b\"?", index + 1));
    let source = format!("start: T-0\n{chain}\nT-9000: \"a\"");
    let limit = "9001 terminals that refer to one another; the limit is 400";
    check(
        is_too_complex,
        &[(lark(source.clone()), limit), (lark(format!("start: %lark {{\n{source}\n}}")), limit)],
    );
}

#[test]
fn every_part_of_the_choice_of_terminals_takes_steps() {
    let (list, limit) = ("root ::= \"(\" root \")\" | ", "its translation takes more than 40000000 steps");
    let names = |count| repeat(count, "|", |index| format!("t{index}"));
    let rules = |count, body: &str| repeat(count, "", |index| format!("t{index} ::= {body} \"x\"\n"));
    let choice = vec!["c"; 490].join("|");
    let empty = "\"\" ".repeat(100_000);
    check(
        is_too_complex,
        &[
            // The characters that each terminal begins with.
            (
                gbnf(format!(
                    "c ::= {}\n{}{list}{}",
                    scattered_class(15_000),
                    rules(400, &format!("({choice})")),
                    names(400)
                )),
                limit,
            ),
            // Parts of terminals that match only the empty text.
            (gbnf(format!("e ::= {empty} \"a\"\n{}{list}{}", rules(400, "e"), names(400))), limit),
        ],
    );
}

#[test]
fn oversized_source_is_rejected() {
    let limit = "1048577 bytes; the limit is 1048576";
    let long = "a".repeat((1 << 20) + 1);
    let grammars = [
        schema(&long),
        regex(long.clone()),
        lark(long.clone()),
        GrammarSpec::Choice(vec![long.clone()]),
        gbnf(long),
    ];
    grammars.into_iter().for_each(|grammar| check(is_too_complex, &[(grammar, limit)]));
}

#[test]
fn expensive_grammars_are_rejected_as_too_complex() {
    let alternatives = vec![r#"{"type":"string","minLength":1}"#; 15_000].join(",");
    let choices = repeat(10, ",", |index| format!(r#"{{"properties":{{"k{index}":{{}}}}}}"#));
    let patterns = |count| repeat(count, ",", |index| format!(r#"{{"pattern":"w{index}"}}"#));
    check(
        is_too_complex,
        &[
            (
                lark(format!("start: %regex {{\"substring_chars\": \"{}\"}}", "ab".repeat(100_000))),
                "200024 bytes after %regex",
            ),
            (
                definitions(11_000, |next| format!(r##"{{"$ref":"#/$defs/a{next}"}}"##)),
                "levels of definitions",
            ),
            (
                definitions(400, |next| {
                    format!(
                        r##"{}{{"$ref":"#/$defs/a{next}"}}{}"##,
                        r#"{"items":"#.repeat(60),
                        "}".repeat(60)
                    )
                }),
                "levels",
            ),
            (schema(&format!(r#"{{"properties":{{{}}}}}"#, properties(30_000))), "levels"),
            (schema(&format!(r#"{{"properties":{{{}}}}}"#, properties(1_100))), "pairs of properties"),
            (
                schema(&format!(r#"{{"properties":{{{}}},"minProperties":1}}"#, properties(60))),
                "pairs of properties",
            ),
            (schema(&format!(r#"{{"patternProperties":{{{}}}}}"#, properties(40))), "pairs of properties"),
            (all_of(1000, |part| format!(r#""required":[{}]"#, names(part, 31))), "pairs of properties"),
            (all_of(100, |part| format!(r#""required":[{}]"#, names(part, 90))), "pairs of properties"),
            (
                all_of(100, |part| format!(r#""patternProperties":{{{}}}"#, patterned(part))),
                "pairs of properties",
            ),
            (
                all_of(12, |part| format!(r#""anyOf":[{{"required":[{}]}}]"#, names(part, 280))),
                "pairs of properties",
            ),
            (
                schema(&format!(r#"{{"pattern":"{}","anyOf":[{alternatives}]}}"#, "a".repeat(400_000))),
                "bytes copied to combine alternatives",
            ),
            (
                schema(&format!(
                    r#"{{"type":"object","allOf":[{}]}}"#,
                    vec![format!(r#"{{"anyOf":[{choices}]}}"#); 10].join(",")
                )),
                "bytes copied to combine alternatives",
            ),
            (
                schema(&format!(
                    r#"{{"type":"object","allOf":[{}]}}"#,
                    repeat(300, ",", |index| format!(r#"{{"properties":{{"p{index}":{{"type":"null"}}}}}}"#))
                )),
                "schema too large",
            ),
            (
                schema(&format!(
                    r#"{{"type":"object","required":[{}]}}"#,
                    repeat(1_001, ",", |index| format!(r#""p{index}""#))
                )),
                "pairs of properties",
            ),
            (
                schema(
                    r##"{"$ref":"#/$defs/0","$defs":[{"allOf":[{"$ref":"#/$defs/1"},{"properties":{"a":{"$ref":"#/$defs/2"}}}]},{"properties":{"a":{"$ref":"#/$defs/0"}}},{"properties":{"a":{"$ref":"#/$defs/1"}},"anyOf":[{},{},{}]}]}"##,
                ),
                "parts that are combined",
            ),
            (
                schema(&format!(r#"{{"allOf":[{}]}}"#, patterns(60))),
                "60 patterns that may apply to the same value; the limit is 12",
            ),
            (
                lark(format!(
                    "start: A\nA: {}",
                    repeat(60, " & ", |index| format!("/(?s:.*)w{index}(?s:.*)/"))
                )),
                "59 intersections (&); the limit is 12",
            ),
            (
                lark(format!(
                    "start: T0\nT2000: \"a\"\n{}",
                    repeat(2_000, "\n", |index| format!("T{index}: T{} \"b\"?", index + 1))
                )),
                "2001 terminals that refer to one another; the limit is 400",
            ),
            (
                lark(format!(
                    "start: a1\n{}",
                    repeat(30_000, "\n", |index| format!("a{index}: a{}", index + 1))
                )),
                "rules and brackets",
            ),
            (
                lark(format!(
                    "start: A0\n{}\nA63: \"y\"",
                    repeat(63, "\n", |index| format!("A{index}: A{0} A{0}", index + 1))
                )),
                "too big",
            ),
            (
                gbnf(format!(
                    "root ::= a1\n{}",
                    repeat(30_000, "\n", |index| format!("a{index} ::= a{}", index + 1))
                )),
                "rules and brackets",
            ),
            (
                gbnf(format!(
                    "root ::= a0\n{}\na63 ::= [xy]",
                    repeat(63, "\n", |index| format!("a{index} ::= a{0} a{0}", index + 1))
                )),
                "too big",
            ),
            (
                gbnf(format!(
                    "root ::= \"(\" root | {}",
                    repeat(20_000, "|", |index| format!("\"{index}\""))
                )),
                "its translation takes more than",
            ),
            (
                gbnf(format!("root ::= root {} |", "[ab]{0,1000}".repeat(400))),
                "its translation takes more than",
            ),
            (regex("a?".repeat(250_000)), "too big"),
            (regex("a?".repeat(5_000) + &"a".repeat(5_000)), "out of fuel"),
        ],
    );
}

#[test]
fn definition_with_many_names_is_measured_once() {
    let references = repeat(1_600, ",", |count| format!(r##"{{"$ref":"#{}"}}"##, "/".repeat(count + 1)));
    let high = format!("{}{}", "[".repeat(40), "]".repeat(40));
    let long = repeat(1_000_000, ",", |_| "0".to_owned());
    let source = format!(r#"{{"anyOf":[{references}],"examples":[{high},[{long}]]}}"#);
    let limits = GuidanceLimits { source_bytes: 4 << 20, ..GuidanceLimits::default() };
    let error = error(&compiler_with(&words(1, 300), limits), &schema(&source));
    assert!(is_too_complex(&error) && error.to_string().contains("levels of definitions"), "{error}");
}

#[test]
fn unsatisfiable_grammars_are_rejected() {
    check(
        is_invalid,
        &[
            (schema("false"), "false"),
            (schema(r#"{"enum":[]}"#), "no value is valid"),
            (
                schema(r#"{"type":"string","minLength":5,"maxLength":2}"#),
                "minLength (5) is greater than maxLength (2)",
            ),
            (
                schema(r#"{"type":"integer","minimum":5,"maximum":2}"#),
                "minimum (5) is greater than maximum (2)",
            ),
            (
                schema(r#"{"type":"object","properties":{"a":false},"required":["a"]}"#),
                "required property 'a'",
            ),
            (schema(r#"{"allOf":[{"type":"string"},{"type":"integer"}]}"#), "incompatible types"),
            (schema(r#"{"type":"string","pattern":"[a-z]","maxLength":0}"#), "no value is valid"),
            (GrammarSpec::Choice(vec![]), "the list of texts is empty"),
            (GrammarSpec::Choice(vec!["a".into(), String::new()]), "text 1 is empty"),
        ],
    );
}

#[test]
fn captures_are_refused() {
    // The library keeps a name and a text for each completion of such a rule.
    let refused = "captures are not supported: remove the attributes capture and stop_capture";
    check(
        is_invalid,
        &[
            (lark("start: s\ns[capture]: s /[a-z]/ | /[a-z]/"), refused),
            (lark("start: s\ns[capture=\"name\"]: /[a-z]+/ \"!\""), refused),
            (lark("start: \"a\" s\ns[stop=\"x\", stop_capture=\"name\"]: /[a-z]+/"), refused),
            (lark("start: \"a\" s\ns[max_tokens=3, capture]: /[a-z]+/"), refused),
            (lark("start: %lark { start: \"a\" s\ns[capture]: /[a-z]+/\n}"), refused),
        ],
    );
    // The optional rule has the name of the attribute.
    compiler(&words(1, 300)).compile(&lark("start: \"a\" [capture]\ncapture: \"b\"")).unwrap();
}

#[test]
fn infinite_recursion_is_a_dead_end() {
    check(
        is_dead_end,
        &[
            (schema(r##"{"$ref":"#"}"##), "no text that matches is finite"),
            (
                schema(r##"{"anyOf":[{"$ref":"#"},{"allOf":[{"$ref":"#"}]}]}"##),
                "no text that matches is finite",
            ),
            (
                schema(r##"{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}"##),
                "no text that matches is finite",
            ),
            (
                schema(r##"{"type":"array","items":{"$ref":"#"},"minItems":1}"##),
                "no text that matches is finite",
            ),
            (lark("start: \"a\" start"), "no text that matches is finite"),
            (lark("start: a\na: b\nb: a"), "no text that matches is finite"),
            (gbnf("root ::= \"a\" root"), "no text that matches is finite"),
        ],
    );
}

#[test]
fn lenient_schema_ignores_unsupported_features() {
    let compiler = compiler(&words(1, 300));
    for source in [
        r#"{"type":"array","items":{"type":"integer"},"uniqueItems":true}"#,
        r#"{"type":"string","format":"binary"}"#,
        r#"{"oneOf":[{"type":"integer"},{"type":"number"}]}"#,
    ] {
        let error = error(&compiler, &schema(source));
        assert!(matches!(error, GuidanceError::Unsupported { .. }), "{source}: {error}");
        compiler.compile(&GrammarSpec::LenientJsonSchema(source.to_owned())).unwrap();
    }
}

#[test]
fn unsupported_features_are_named_in_the_error() {
    check(
        is_invalid,
        &[
            (schema(r#"{"not":{"type":"null"}}"#), r#"["not"]"#),
            (
                schema(r#"{"type":"array","uniqueItems":true,"contains":{}}"#),
                r#"["contains", "uniqueItems"]"#,
            ),
            (schema(r#"{"type":"object","properties":{"a":{"if":true}}}"#), r#"["if"]"#),
            (schema(r#"{"type":"object","propertyNames":{}}"#), r#"["propertyNames"]"#),
            (schema(r#"{"type":"string","format":"colour"}"#), "format that is not supported: colour"),
            (schema(r#"{"type":"text"}"#), "Invalid type: text"),
            (schema(r#"{"type":"string","pattern":"a(?=b)"}"#), "look-around"),
            (schema(r#"{"oneOf":[{"type":"integer"},{"type":"number"}]}"#), "oneOf is supported only where"),
            (
                schema(r#"{"$ref":"https://example.com/schema.json"}"#),
                "$ref leads out of the schema: 'https://example.com/schema.json'",
            ),
            (schema(r#"{"$ref":"file:///etc/passwd"}"#), "$ref leads out of the schema"),
            (schema(r##"{"$ref":"#/$defs/missing"}"##), "'$defs' not found"),
            (schema(r#"{"x-guidance":{"lenient":true}}"#), "x-guidance"),
            (schema(r#"{"type":"number","multipleOf":0}"#), "multipleOf 0"),
            (schema(r#"{"type":"integer","multipleOf":999999937}"#), "multipleOf 999999937"),
            (schema(r#"{"type":"integer","multipleOf":50021}"#), "multipleOf 50021"),
            (schema(r#"{"allOf":[{"multipleOf":9973},{"multipleOf":9967}]}"#), "common multiple"),
            (schema("[1]"), "a schema must be an object or true"),
            (schema("{"), "not JSON"),
            (regex("a(?=b)"), "look-around"),
            (regex("["), "unclosed character class"),
            (lark("start: missing"), "unknown name"),
            (lark("start: too_big_fuel_limit"), "unknown name"),
            (
                schema(r#"{"type":"object","properties":{"stack level":false},"required":["stack level"]}"#),
                "required property 'stack level'",
            ),
            (lark("begin: \"a\""), "no start rule found"),
            (lark("start: <|missing|>"), "unknown special token"),
            (lark("start: <[999999]>"), "999999"),
        ],
    );
}

#[test]
fn tool_schemas_are_checked_one_by_one() {
    let calls =
        |tools: &[(&str, &str)]| calls_of(tools.iter().map(|(name, schema)| tool(name, schema)).collect());
    check(
        is_invalid,
        &[
            (calls(&[]), "the list of tools is empty"),
            (calls(&[("a", "true"), ("a", "{}")]), r#"two tools have the name "a""#),
            (
                calls(&[("a", "true"), ("b", r#"{"type":"string"}"#)]),
                r#"arguments of "b": arguments must have the type object"#,
            ),
            (calls(&[("a", r#"{"not":{}}"#)]), r#"tool calls: keywords that are not supported: ["not"]"#),
            (calls(&[("a", "false")]), r#"arguments of "a""#),
        ],
    );
    check(is_too_complex, &[(calls(&[("a", &"[".repeat(1_000))]), "brackets nested 1000 deep")]);
}

/// Generates up to 200 random tokens. A mask that exceeds its limits is an error.
fn follow(tokens: &Tokens, compiler: &GrammarCompiler, grammar: &GrammarSpec) -> Result<(), GuidanceError> {
    let mut matcher = compiler.compile(grammar)?.start()?;
    let mut random = Random(3);
    for _ in 0..200 {
        let allowed = tokens.mask(&mut matcher)?;
        let token = allowed[random.below(allowed.len())];
        matcher.accept(token)?;
        if token == tokens.end {
            break;
        }
    }
    Ok(())
}

#[test]
fn compiled_grammars_stay_within_the_limits_in_use() {
    let tokens = words(1, 300);
    let compiler = compiler(&tokens);
    for grammar in [
        regex("(a{1,1000}){1,1000}"),
        regex("((a{1,100}){1,100}){1,100}b"),
        regex("(x+x+)+y"),
        regex("(.*a.{20}){3}"),
        regex(r"(\w{1,1000}\d{1,1000}){1,1000}"),
        regex(repeat(20_000, "|", |index| format!("w{index}x"))),
        schema(r#"{"type":"string","pattern":"^(a|b|[^x]{1,900}){900}$"}"#),
        schema(r#"{"type":"string","minLength":1000000000}"#),
        schema(r#"{"type":"array","minItems":1000000000,"items":{"type":"array","maxItems":1000000000}}"#),
        lark("start: ((((\"x\" y){1,2000000000}){1,2000000000}){1,2000000}){1000000}\ny: \"z\""),
        lark("start: a\na: \"x\" | a a | a a a | a a a a"),
        lark("start: ((\"a\"{0,200}){0,200}){0,200}"),
        schema(r#"{"type":"integer","multipleOf":49999}"#),
        lark(format!(
            "start: a0\n{}\na40: \"y\" | \"\"",
            repeat(40, "\n", |index| format!("a{index}: a{0} a{0}", index + 1))
        )),
        lark(format!("start: A\nA: {}", repeat(10, " & ", |index| format!("/(?s:.*)w{index}(?s:.*)/")))),
    ] {
        match follow(&tokens, &compiler, &grammar) {
            Ok(()) | Err(GuidanceError::TooComplex { .. }) => {}
            Err(error) => panic!("{:.200}: {error}", format!("{grammar:?}")),
        }
    }
}

#[test]
fn mask_beyond_its_limits_ends_only_its_sequence() {
    let tokens = words(1, 300);
    let compiler = compiler_with(&tokens, GuidanceLimits { mask_items: 500, ..untimed_limits() });
    let expensive = compiler.compile(&lark("start: a\na: \"x\" | a a | a a a | a a a a")).unwrap();
    let cheap = compiler.compile(&regex("[0-9]{3}")).unwrap();
    let (mut expensive, mut cheap) = (expensive.start().unwrap(), cheap.start().unwrap());
    let error = (0..1_000)
        .find_map(|_| tokens.mask(&mut expensive).and_then(|_| expensive.accept(u32::from(b'x'))).err())
        .unwrap();
    assert!(is_too_complex(&error), "{error}");
    assert_eq!(tokens.mask(&mut expensive).unwrap_err(), error);
    assert_eq!(expensive.accept(tokens.end).unwrap_err(), error);
    for _ in 0..3 {
        tokens.mask(&mut cheap).unwrap();
        cheap.accept(u32::from(b'7')).unwrap();
    }
    assert!(cheap.is_complete());
}

/// The number of tokens `x` that a grammar allows, up to `most`, and the error after them.
fn follow_x(tokens: &Tokens, matcher: &mut GrammarMatcher, most: usize) -> (usize, Option<GuidanceError>) {
    for index in 0..most {
        if let Err(error) = tokens.mask(matcher).and_then(|_| matcher.accept(u32::from(b'x'))) {
            return (index, Some(error));
        }
    }
    (most, None)
}

#[test]
fn ambiguous_grammar_ends_its_sequence_before_long_steps() {
    let tokens = words(1, 300);
    let compiler = compiler(&tokens);
    for source in ["start: s\ns: s s s | s s | /[w-y ]/ | ", "start: s\ns: s s s s | s s s | s s | \"x\" | "]
    {
        let compiled = compiler.compile(&lark(source)).unwrap();
        let (number, error) = follow_x(&tokens, &mut compiled.start().unwrap(), 1_000);
        let error = error.expect("it ends");
        assert!(number > 10 && error.to_string().contains("parser items; the limit is 1000000"), "{error}");
    }
}

#[test]
fn grammars_that_compare_many_items_at_once_are_refused() {
    let alternatives = |number| {
        let rules = repeat(number, "\n", |index| format!("x{index}: x{index} C | C"));
        lark(format!("start: {}\n{rules}\nC: /[a-z]/", repeat(number, " | ", |index| format!("x{index}"))))
    };
    let compiler = compiler(&words(1, 300));
    for grammar in [alternatives(600), lark("start: ((\"a\"{0,200}){0,200}){0,200}")] {
        let error = compiler.compile(&grammar).err().unwrap();
        assert!(is_too_complex(&error), "{error}");
    }
    assert!(compiler.compile(&alternatives(40)).is_ok());
}

#[test]
fn lists_by_right_recursion_are_followed_for_some_hundred_items() {
    let tokens = words(1, 300);
    let compiled = compiler(&tokens).compile(&lark("start: l\nl: \"x\" l | \"x\"")).unwrap();
    assert_eq!(follow_x(&tokens, &mut compiled.start().unwrap(), 400), (400, None));
    let compiled = compiler(&tokens).compile(&lark("start: l\nl: l \"x\" | \"x\"")).unwrap();
    assert_eq!(follow_x(&tokens, &mut compiled.start().unwrap(), 20_000), (20_000, None));
}

#[test]
fn parser_items_of_a_sequence_are_limited() {
    let tokens = words(1, 300);
    let compiler = compiler_with(&tokens, GuidanceLimits { sequence_items: 1_000, ..untimed_limits() });
    let compiled = compiler.compile(&lark("start: l\nl: l \"x\" | \"x\"")).unwrap();
    let (number, error) = follow_x(&tokens, &mut compiled.start().unwrap(), 2_000);
    let expected = format!("{} tokens have ", number + 1);
    let error = error.expect("it ends").to_string();
    assert!(error.contains(&expected) && error.ends_with("parser items; the limit is 1000"), "{error}");
    assert!(number > 100, "{number}");
}

#[test]
fn regex_that_exceeds_a_limit_with_its_first_token_is_rejected() {
    for source in ["x{100000}", "(a?){3000}a{3000}"] {
        check(is_too_complex, &[(regex(source), "too many expressions")]);
    }
}

#[test]
fn work_of_all_schemas_of_a_grammar_is_limited() {
    let embedded = |count: usize, part: &dyn Fn(usize) -> String| {
        lark(format!(
            "start: {}\n{}",
            repeat(count, " | ", |index| format!("\"{index} \" a{index}")),
            repeat(count, "\n", |index| format!("a{index}: %json {}", part(index)))
        ))
    };
    let tools = |count: usize, part: &dyn Fn(usize) -> String| {
        let property = |index| format!(r#"{{"type":"object","properties":{{"a":{}}}}}"#, part(index));
        let tools = (0..count).map(|index| tool(&format!("t{index}"), &property(index))).collect();
        calls_of(tools)
    };
    let multiple = |index| format!(r#"{{"type":"integer","multipleOf":{}}}"#, 9_999 - index);
    let object = |_| format!(r#"{{"type":"object","properties":{{{}}}}}"#, properties(400));
    let patterned =
        |_| format!(r#"{{"allOf":[{}]}}"#, repeat(11, ",", |index| format!(r#"{{"pattern":"{index}"}}"#)));
    check(
        |error| is_invalid(error) || is_too_complex(error),
        &[
            (embedded(6, &multiple), "have the sum"),
            (tools(6, &multiple), "have the sum"),
            (embedded(40, &object), "pairs of properties"),
            (tools(40, &object), "pairs of properties"),
            (embedded(10, &patterned), "combinations of patterns"),
        ],
    );
    for grammar in [embedded(5, &multiple), tools(5, &multiple)] {
        compiler(&words(1, 300)).compile(&grammar).unwrap();
    }
}

#[test]
fn sequences_share_the_memory_of_matchers() {
    let tokens = words(1, 300);
    let compiler = compiler_with(&tokens, GuidanceLimits { matcher_bytes: 100 << 20, ..untimed_limits() });
    let large = compiler.compile(&schema(r#"{"type":"integer","multipleOf":49999}"#)).unwrap();
    let started: Vec<_> = (0..100).map_while(|_| large.start().ok()).collect();
    assert!((1..20).contains(&started.len()), "{} of {} bytes", started.len(), large.start_bytes());
    let Err(error) = large.start() else { panic!("there is room for another one") };
    assert!(error.to_string().contains("a quarter of what others leave"), "{error}");
    assert!(started[0].fork().is_err());
    // There is room for a small one, and for large ones after the others.
    compiler.compile(&schema(r#"{"type":"string","maxLength":20}"#)).unwrap().start().unwrap();
    drop(started);
    large.start().unwrap();
}

#[test]
fn text_that_is_forced_without_an_end_is_too_complex() {
    let tokens = words(1, 300);
    let compile_time = Duration::from_secs(4);
    let compiler = compiler_with(&tokens, GuidanceLimits { compile_time, ..GuidanceLimits::default() });
    let spaces = format!("start: {}\n%ignore / +/", repeat(40, " ", |_| "\" \"".into()));
    for grammar in [lark("start: A \"a\"\nA: /a+/"), lark(spaces)] {
        // On a busy machine, its caller gives up first.
        let error = error(&compiler, &grammar);
        assert!(is_too_complex(&error) || matches!(error, GuidanceError::TimedOut { .. }), "{error}");
    }
    // One grammar of a client is compiled at a time, so the compilation has ended.
    while matches!(compiler.compile(&lark("start: \"a\"")), Err(GuidanceError::Overloaded { .. })) {}
    // A sequence reaches it later than the tokens that a new grammar is tried with.
    let late = lark("start: \"b\" /[bc]/ /[bc]/ (\"b\" | A \"a\")\nA: /a+/");
    let compiled = compiler.compile(&late).unwrap();
    let mut matcher = compiled.start().unwrap();
    let token = |text: &str| u32::from(text.as_bytes()[0]);
    for text in ["b", "b", "c"] {
        matcher.accept(token(text)).unwrap();
    }
    let error = matcher.accept(token("a")).unwrap_err();
    assert!(is_too_complex(&error), "{error}");
    assert_eq!(matcher.mask(&mut [0; 20]), Err(error), "it is final");
    let errors = [compiled.start().err().unwrap(), compiler.compile(&late).err().unwrap()];
    assert!(errors.iter().all(is_too_complex), "other sequences with the grammar end: {errors:?}");
}
