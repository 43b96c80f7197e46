//! Keywords that the library reads differently from the specification: large numbers, references, formats.

use penstock_guidance::{GrammarCompiler, GrammarSpec, GuidanceError};

use crate::common::{bytes, compiler, schema};

/// Whether a text is complete under a grammar.
fn matches(compiler: &GrammarCompiler, grammar: &GrammarSpec, text: &str) -> bool {
    let compiled = compiler.compile(grammar).unwrap_or_else(|error| panic!("{grammar:?}: {error}"));
    let mut matcher = compiled.start().unwrap();
    let accepted = text.bytes().all(|byte| matcher.accept(u32::from(byte)).is_ok());
    accepted && matcher.accept(bytes().end).is_ok()
}

/// Checks which texts are valid under schemas.
fn check(cases: &[(&str, &[&str], &[&str])]) {
    let compiler = compiler(&bytes());
    for (source, valid, invalid) in cases {
        for (text, expected) in
            valid.iter().map(|text| (text, true)).chain(invalid.iter().map(|text| (text, false)))
        {
            assert_eq!(matches(&compiler, &schema(source), text), expected, "{text} under {source}");
        }
    }
}

fn check_rejected(cases: &[(GrammarSpec, &str)]) {
    let compiler = compiler(&bytes());
    for (grammar, text) in cases {
        match compiler.compile(grammar) {
            Err(GuidanceError::Invalid { reason, .. }) => {
                assert!(reason.contains(text), "{grammar:?}: {reason}")
            }
            Err(error) => panic!("{grammar:?}: {error}"),
            Ok(_) => panic!("{grammar:?} was compiled"),
        }
    }
}

#[test]
fn bounds_beyond_64_bits_are_narrowed() {
    check(&[
        (
            r#"{"type":"integer","minimum":-9223372036854775808,"maximum":9223372036854775807}"#,
            &["0", "-9223372036854774784", "9223372036854774784", "1234567890123456789"],
            &["9223372036854775808", "-9223372036854775809", "99999999999999999999"],
        ),
        (r#"{"type":"integer","minimum":-9223372036854775808}"#, &["-1", "7"], &["-9223372036854775809"]),
        (r#"{"type":"integer","maximum":18446744073709551615}"#, &["-1", "7"], &["18446744073709551616"]),
        (
            r#"{"type":"integer","minimum":4611686018427387904}"#,
            &["4611686018427387904", "9000000000000000000"],
            &["4611686018427387903", "0"],
        ),
        (r#"{"type":"number","minimum":4611686018427387904.0}"#, &["5000000000000000000.5"], &["4e18", "1"]),
        (r#"{"type":"number","maximum":-4611686018427387904}"#, &["-5000000000000000000.5"], &["-4e18", "1"]),
        (
            r#"{"type":"number","minimum":-3.4028234663852886e38,"maximum":3.4028234663852886e38}"#,
            &["0.5", "-9", "9223372036854774783.5"],
            &["1e39", "400000000000000000000000000000000000000"],
        ),
        (
            r#"{"type":"number","minimum":-1.7976931348623157e308,"maximum":1.7976931348623157e308}"#,
            &["6.02e23", "-1e300", "0"],
            &["true"],
        ),
        (
            r#"{"type":["integer","null"],"exclusiveMinimum":9007199254740992}"#,
            &["9007199254740994", "null"],
            &["9007199254740992"],
        ),
        (
            r#"{"type":"integer","maximum":9007199254740992,"exclusiveMaximum":true}"#,
            &["1"],
            &["9007199254740992"],
        ),
        (r#"{"type":"integer","minimum":9007199254740993}"#, &["9007199254740994"], &["9007199254740992"]),
        (r#"{"type":"integer","minimum":5,"exclusiveMinimum":-1e300}"#, &["5"], &["4"]),
        (r#"{"properties":{"minimum":{"const":1}},"required":["minimum"]}"#, &[r#"{"minimum": 1}"#], &["{}"]),
        (
            r#"{"anyOf":[{"type":"integer","maximum":0,"minimum":-9223372036854775808},{"type":"integer","minimum":0,"maximum":18446744073709551615}]}"#,
            &["-5", "5"],
            &["0.5"],
        ),
    ]);
}

#[test]
fn numbers_that_cannot_be_exact_are_rejected_by_name() {
    let lark = |schema: &str| GrammarSpec::Lark(format!("start: a\na: %json {schema}"));
    let smallest = r#"{"const":-9223372036854775808}"#;
    check_rejected(&[
        (schema(smallest), "const has the number -9223372036854775808; the limit is 9223372036854774784"),
        (schema(r#"{"enum":[1,-1e19]}"#), "enum has the number -1e+19"),
        (schema(r#"{"const":{"a":[9223372036854775807]}}"#), "const has the number 9223372036854775807"),
        (
            schema(r#"{"const":1234567890123456789}"#),
            "const has the integer 1234567890123456789, which has no exact",
        ),
        (schema(r#"{"minimum":1e300}"#), "minimum is 1e+300; the limit is 9223372036854774784"),
        (
            schema(r#"{"type":"integer","maximum":-1e300}"#),
            "maximum is -1e+300; the limit is -9223372036854774784",
        ),
        (schema(r#"{"exclusiveMaximum":-9223372036854774784}"#), "exclusiveMaximum is -9223372036854774784"),
        (schema(r##"{"$ref":"#/x/const","x":{"const":{"const":-9223372036854775808}}}"##), "the limit is"),
        (schema(r##"{"$ref":"#/x","x":{"const":-9223372036854775808}}"##), "the limit is"),
        (lark(smallest), "the limit is"),
        (lark(&format!("{{\"type\":\"null\"}}\nb: \"%json\" %json {smallest}")), "the limit is"),
        (GrammarSpec::Lark(format!("start: %lark {{ start: %json {smallest} }}")), "the limit is"),
    ]);
    check(&[(
        r#"{"enum":[9007199254740994,-4611686018427387904,"1234567890123456789"]}"#,
        &["9007199254740994", "-4611686018427387904", "\"1234567890123456789\""],
        &["9007199254740993"],
    )]);
}

#[test]
fn bounds_of_integers_combine_without_overflow() {
    let numbers = [
        "-9223372036854775808",
        "-9223372036854774784",
        "-1e18",
        "-1",
        "1e18",
        "9223372036854775807",
        "1e300",
    ];
    let keywords = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"];
    let compiler = compiler(&bytes());
    for (left, right) in numbers.iter().flat_map(|left| numbers.iter().map(move |right| (left, right))) {
        for (first, second) in
            keywords.iter().flat_map(|first| keywords.iter().map(move |second| (first, second)))
        {
            for kind in ["integer", "number"] {
                let source =
                    format!(r#"{{"allOf":[{{"{first}":{left}}},{{"{second}":{right}}}],"type":"{kind}"}}"#);
                match compiler.compile(&schema(&source)) {
                    Ok(_) | Err(GuidanceError::Invalid { .. }) => {}
                    Err(error) => panic!("{source}: {error}"),
                }
            }
        }
    }
}

#[test]
fn references_have_the_escapes_of_rfc_6901() {
    let definitions = r##""$defs":{"a/b":{"type":"null"},"c~d":{"const":1},"e f":{"const":2},"List<Item>":{"const":3},
        "名":{"const":4},"g%h":{"const":5},"i":{"properties":{"j/k":{"const":6}}},"a~1b":{"const":7},
        "l/m":{"type":"object","properties":{"n/o":{"const":8}},"required":["n/o"],"additionalProperties":false}}"##;
    for (reference, valid) in [
        ("#/$defs/a~1b", "null"),
        ("#/$defs/c~0d", "1"),
        ("#/$defs/e%20f", "2"),
        ("#/$defs/List%3CItem%3E", "3"),
        ("#/$defs/%E5%90%8D", "4"),
        ("#/$defs/g%25h", "5"),
        ("#/$defs/i/properties/j~1k", "6"),
        ("#/%24defs/a~01b", "7"),
        ("#/$defs/l~1m/properties/n~1o", "8"),
        ("#/$defs/l~1m", r#"{"n/o": 8}"#),
        ("#/$defs/名", "4"),
    ] {
        let source = format!(
            r##"{{"type":"array","items":{{"anyOf":[{{"$ref":"{reference}"}},{{"$ref":"#/$defs/l~1m"}}]}},{definitions}}}"##
        );
        check(&[(&source, &[&format!("[{valid}]"), r#"[{"n/o":8}]"#], &["[0]", "[true]"])]);
    }
    check(&[(
        r##"{"properties":{"x/y":{"type":"null"},"z":{"$ref":"#/properties/x~1y"}},"required":["x/y","z"]}"##,
        &[r#"{"x/y": null, "z": null}"#],
        &[r#"{"x/y": null, "z": 1}"#, r#"{"x/y": 1, "z": null}"#],
    )]);
    check_rejected(&[
        (schema(r##"{"$ref":"#/$defs/a~1b"}"##), "not found"),
        (schema(r##"{"$ref":"#/$defs/a~1b","$defs":7}"##), "'#/$defs/a~1b'"),
        (schema(r##"{"$ref":"other.json#/a~1b"}"##), "leads out of the schema"),
    ]);
}

#[test]
fn recursive_definitions_may_have_a_slash() {
    check(&[(
        r##"{"$ref":"#/$defs/a~1tree","$defs":{"a/tree":{"type":"array","items":{"$ref":"#/$defs/a~1tree"}}}}"##,
        &["[]", "[[], [[]]]"],
        &["[1]", "{}"],
    )]);
}

#[test]
fn many_references_beside_keywords_are_not_too_complex() {
    let each = |write: &dyn Fn(usize) -> String| (0..100).map(write).collect::<Vec<_>>().join(",");
    let words = "a description of the definition ".repeat(30);
    let definition = |index| {
        let keywords =
            format!(r#""description":"{words}","type":["object","null"],"additionalProperties":false"#);
        format!(r#""d{index}":{{{keywords},"properties":{{"a":{{"type":"string"}}}}}}"#)
    };
    let property = |index| {
        let reference = format!(r##"{{"$ref":"#/$defs/d{index}"}}"##);
        format!(r#""p{index}":{{"description":"{index}","anyOf":[{reference},{{"type":"null"}}]}}"#)
    };
    let (definitions, properties) = (each(&definition), each(&property));
    let source = format!(r#"{{"type":"object","properties":{{{properties}}},"$defs":{{{definitions}}}}}"#);
    assert!(source.len() > 100_000);
    compiler(&bytes()).compile(&schema(&source)).unwrap();
}

#[test]
fn dates_and_times_exist() {
    check(&[
        (r#"{"type":"string","format":"date"}"#, &["\"2024-02-29\""], &["\"2021-02-29\"", "\"1900-02-29\""]),
        (r#"{"format":"date-time"}"#, &["\"2024-02-29T23:59:59Z\"", "7"], &["\"2024-01-01T12:00:60Z\""]),
        (r#"{"format":"date","pattern":"^2"}"#, &["\"2024-02-29\""], &["\"1996-02-29\"", "\"2021-02-29\""]),
        (
            r#"{"format":"time","pattern":"Z$","allOf":[{"maxLength":9}]}"#,
            &["\"12:00:00Z\""],
            &["\"12:00:00.5Z\"", "\"12:00:00z\""],
        ),
    ]);
}

#[test]
fn whitespace_in_patterns_is_that_of_ecma_262() {
    check(&[
        (r#"{"type":"string","pattern":"^\\S$"}"#, &["\"a\"", "\"é\""], &["\"\u{feff}\"", "\"\u{2003}\""]),
        (
            r#"{"type":"string","pattern":"^[\\s]$"}"#,
            &["\"\u{feff}\"", "\"\u{a0}\""],
            &["\"a\"", "\"\u{85}\""],
        ),
        (
            r#"{"patternProperties":{"^\\S+$":{"type":"null"}},"additionalProperties":false}"#,
            &[r#"{"a": null}"#],
            &["{\"\u{feff}\": null}"],
        ),
    ]);
}

#[test]
fn counts_may_have_a_fraction_of_zero() {
    check(&[(
        r#"{"type":"string","minLength":2.0,"maxLength":3e0}"#,
        &["\"ab\"", "\"abc\""],
        &["\"a\"", "\"abcd\""],
    )]);
}
