//! Masks and forced tokens against a slow reference, the end of a text, and vocabularies.

use std::sync::Arc;

use penstock_guidance::{
    GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits, TokenText, Vocabulary,
};

use crate::common::{Random, Tokens, bytes, compiler, schema, words};

fn grammars() -> Vec<GrammarSpec> {
    vec![
        schema(
            r#"{"type":"object","properties":{"name":{"type":"string"},"b":{"type":"integer"}},"required":["name"]}"#,
        ),
        schema(r#"{"type":"array","items":{"enum":["a","ab",12,true]}}"#),
        schema(r#"{"type":"string","pattern":"^[a-b]*é+$","maxLength":9}"#),
        GrammarSpec::JsonObject,
        GrammarSpec::Regex(r"(true|name)*\d+ ?日本🙂?".into()),
        GrammarSpec::Choice(vec!["name".into(), "name, 12".into(), "日本".into(), "🙂".into()]),
        GrammarSpec::Lark("start: \"[\" start \"]\" | /[ab:]{1,3}/ | \"0\"".into()),
    ]
}

/// A slow reference: a token is allowed if a matcher over single bytes accepts its bytes one by one.
struct ByteReference {
    tokens: Tokens,
    compiler: GrammarCompiler,
    grammar: GrammarSpec,
}

impl ByteReference {
    fn after(&self, text: &[u8]) -> GrammarMatcher {
        let mut matcher = self.compiler.compile(&self.grammar).unwrap().start().unwrap();
        text.iter().for_each(|&byte| matcher.accept(u32::from(byte)).unwrap());
        matcher
    }

    fn allows(&self, text: &[u8], word: &[u8]) -> bool {
        let mut matcher = self.after(text);
        word.iter().all(|&byte| matcher.accept(u32::from(byte)).is_ok())
    }
}

#[test]
fn mask_matches_byte_by_byte_reference() {
    let words = words(3, 150);
    let fast = compiler(&words);
    let mut random = Random(17);
    for grammar in grammars() {
        let reference =
            ByteReference { tokens: bytes(), compiler: compiler(&bytes()), grammar: grammar.clone() };
        for _ in 0..2 {
            let mut matcher = fast.compile(&grammar).unwrap().start().unwrap();
            let mut text: Vec<u8> = Vec::new();
            for _ in 0..8 {
                let allowed = words.mask(&mut matcher).unwrap();
                let may_follow = |id: &u32| {
                    let word = &words.texts[*id as usize];
                    if *id >= words.end {
                        *id == words.end && reference.after(&text).accept(reference.tokens.end).is_ok()
                    } else {
                        reference.allows(&text, word)
                    }
                };
                let expected: Vec<u32> = (0..words.texts.len() as u32).filter(may_follow).collect();
                let mut forced = Vec::new();
                matcher.forced_tokens(&mut forced);
                match forced.first() {
                    None => assert_eq!(
                        allowed,
                        expected,
                        "{grammar:?} after {:?}",
                        String::from_utf8_lossy(&text)
                    ),
                    // Of all splits of forced text, only the tokenizer's is allowed.
                    Some(first) => assert!(allowed == [*first] && expected.contains(first)),
                }
                let token = allowed[random.below(allowed.len())];
                matcher.accept(token).unwrap();
                if token == words.end {
                    break;
                }
                text.extend(&words.texts[token as usize]);
            }
        }
    }
}

#[test]
fn forced_tokens_match_the_mask_and_reading_has_no_effect() {
    let words = words(5, 400);
    let grammar = schema(
        r#"{"type":"object","properties":{"name":{"enum":["日本12"]},"b":{"type":"null"}},"required":["name","b"],"additionalProperties":false}"#,
    );
    let mut matcher = compiler(&words).compile(&grammar).unwrap().start().unwrap();
    let mut text = Vec::new();
    let mut runs = 0;
    while !matcher.is_complete() {
        let (mut forced, mut again) = (Vec::new(), Vec::new());
        matcher.forced_tokens(&mut forced);
        matcher.forced_tokens(&mut again);
        assert_eq!(forced, again);
        runs += usize::from(forced.len() > 1);
        let choices = words.mask(&mut matcher).unwrap();
        let run = if forced.is_empty() { vec![choices[0]] } else { forced };
        for token in run {
            assert!(words.mask(&mut matcher).unwrap().contains(&token));
            matcher.accept(token).unwrap();
            text.extend(&words.texts[token as usize]);
        }
    }
    assert!(runs > 1);
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value, serde_json::json!({"name": "日本12", "b": null}));
}

#[test]
fn long_forced_text_is_returned_in_parts() {
    let words = words(9, 300);
    let long: String = (0..9_000).map(|index| ["name", "日本", "12"][index % 3]).collect();
    let mut matcher =
        compiler(&words).compile(&GrammarSpec::Choice(vec![long.clone()])).unwrap().start().unwrap();
    let mut text = Vec::new();
    while !matcher.is_complete() {
        let mut forced = Vec::new();
        matcher.forced_tokens(&mut forced);
        assert!(!forced.is_empty());
        for token in forced {
            matcher.accept(token).unwrap();
            text.extend(&words.texts[token as usize]);
        }
    }
    assert_eq!(String::from_utf8(text).unwrap(), long);
}

#[test]
fn only_end_ids_are_allowed_after_the_end() {
    let tokens = bytes();
    let mut matcher = compiler(&tokens)
        .compile(&GrammarSpec::Choice(vec!["ab".into(), "b".into()]))
        .unwrap()
        .start()
        .unwrap();
    assert!(
        matches!(matcher.accept(tokens.end), Err(GuidanceError::Rejected { token, .. }) if token == tokens.end)
    );
    for byte in b"ab" {
        assert!(!matcher.is_complete());
        matcher.accept(u32::from(*byte)).unwrap();
    }
    for _ in 0..3 {
        assert!(matcher.is_complete());
        assert_eq!(tokens.mask(&mut matcher).unwrap(), [tokens.end]);
        assert!(matches!(matcher.accept(u32::from(b'b')), Err(GuidanceError::Rejected { .. })));
        let mut forced = Vec::new();
        matcher.forced_tokens(&mut forced);
        assert!(forced.is_empty());
        matcher.accept(tokens.end).unwrap();
    }
}

#[test]
fn optional_continuation_also_allows_the_end() {
    let tokens = bytes();
    let mut matcher = compiler(&tokens)
        .compile(&GrammarSpec::Choice(vec!["a".into(), "ab".into()]))
        .unwrap()
        .start()
        .unwrap();
    matcher.accept(u32::from(b'a')).unwrap();
    assert!(!matcher.is_complete());
    assert_eq!(tokens.mask(&mut matcher).unwrap(), [u32::from(b'b'), tokens.end]);
    matcher.accept(tokens.end).unwrap();
    assert!(matcher.is_complete());
    assert!(matcher.accept(u32::from(b'b')).is_err());
}

#[test]
fn rejected_token_leaves_the_matcher_unchanged() {
    let tokens = words(2, 200);
    let mut matcher = compiler(&tokens)
        .compile(&schema(r#"{"type":"array","items":{"type":"null"}}"#))
        .unwrap()
        .start()
        .unwrap();
    matcher.accept(u32::from(b'[')).unwrap();
    let before = tokens.mask(&mut matcher).unwrap();
    for token in [u32::from(b'x'), tokens.end, tokens.end + 1, 1 << 20, u32::MAX] {
        assert!(matches!(matcher.accept(token), Err(GuidanceError::Rejected { .. })), "{token}");
        assert_eq!(tokens.mask(&mut matcher).unwrap(), before);
    }
    matcher.accept(u32::from(b']')).unwrap();
    assert!(matcher.is_complete());
}

#[test]
fn special_tokens_are_allowed_only_where_named() {
    let tokens = bytes();
    let special: Vec<u32> = (tokens.end..tokens.texts.len() as u32).collect();
    // A terminal that excludes some bytes contains the byte with which the library marks special tokens.
    for source in ["start: /(?s:.*)/", "start: A\nA: ~/x/", "start: A\nA: /(?s:.)*/ & ~/x/"] {
        let mut matcher =
            compiler(&tokens).compile(&GrammarSpec::Lark(source.into())).unwrap().start().unwrap();
        for _ in 0..3 {
            let allowed = tokens.mask(&mut matcher).unwrap();
            assert!(special[1..].iter().all(|id| !allowed.contains(id)), "{source}");
            special[1..].iter().for_each(|&id| assert!(matcher.accept(id).is_err()));
            matcher.accept(u32::from(b'y')).unwrap();
        }
    }
    let source = format!("start: \"a\" <[{}]> \"b\"", tokens.end + 3);
    let mut matcher = compiler(&tokens).compile(&GrammarSpec::Lark(source)).unwrap().start().unwrap();
    for token in [u32::from(b'a'), tokens.end + 3, u32::from(b'b')] {
        assert_eq!(tokens.mask(&mut matcher).unwrap(), [token]);
        matcher.accept(token).unwrap();
    }
    assert!(matcher.is_complete());
}

#[test]
fn end_id_named_by_a_grammar_still_ends_the_text() {
    let tokens = bytes();
    let source = format!("start: \"a\" <[{}]> \"b\"", tokens.end);
    let mut matcher = compiler(&tokens).compile(&GrammarSpec::Lark(source)).unwrap().start().unwrap();
    matcher.accept(u32::from(b'a')).unwrap();
    let error = tokens.mask(&mut matcher).unwrap_err();
    assert!(matches!(error, GuidanceError::DeadEnd { .. }), "{error}");
    assert_eq!(matcher.accept(tokens.end), Err(error));
}

#[test]
fn mask_shorter_than_the_vocabulary_is_truncated() {
    let tokens = bytes();
    let mut matcher =
        compiler(&tokens).compile(&GrammarSpec::Regex("[\u{20}-\u{7f}]*".into())).unwrap().start().unwrap();
    let mut short = [u32::MAX; 2];
    matcher.mask(&mut short).unwrap();
    assert_eq!(short, [0, u32::MAX]);
}

fn vocabulary(
    tokens: Vec<Option<TokenText>>,
    end_ids: &[u32],
    encode: fn(&str) -> Vec<u32>,
) -> Result<Vocabulary, GuidanceError> {
    Vocabulary::new(tokens, end_ids, Arc::new(encode))
}

fn text(bytes: &[u8]) -> Option<TokenText> {
    Some(TokenText { bytes: bytes.to_vec(), special: false })
}

#[test]
fn wrong_tokenizer_ids_fall_back_to_greedy_split() {
    let table = || vec![text(b"a"), text(b"b"), text(b"ab"), text(b" ab"), text(b"</s>")];
    for encode in [|_: &str| vec![3], |_: &str| vec![], |_: &str| vec![77], |_: &str| vec![1, 0]] {
        let vocabulary = Arc::new(vocabulary(table(), &[4], encode).unwrap());
        let compiler = GrammarCompiler::new(vocabulary, GuidanceLimits::default()).unwrap();
        let matcher = compiler.compile(&GrammarSpec::Choice(vec!["abab".into()])).unwrap().start().unwrap();
        let mut forced = Vec::new();
        matcher.forced_tokens(&mut forced);
        assert_eq!(forced, [2, 2]);
    }
}

#[test]
fn end_ids_never_match_text() {
    let table = vec![text(b"<"), text(b"/s>"), text(b"</s>"), None, text(b"x")];
    let vocabulary = Arc::new(vocabulary(table, &[2, 3], |_| Vec::new()).unwrap());
    let compiler = GrammarCompiler::new(vocabulary, GuidanceLimits::default()).unwrap();
    let mut matcher = compiler.compile(&GrammarSpec::Regex("[</s>x]+".into())).unwrap().start().unwrap();
    let mut words = [0];
    matcher.mask(&mut words).unwrap();
    assert_eq!(words, [0b10011]);
    matcher.accept(4).unwrap();
    matcher.mask(&mut words).unwrap();
    assert_eq!(words, [0b11111]);
    matcher.accept(3).unwrap();
    assert!(matcher.is_complete());
}

#[test]
fn unspellable_text_ends_only_its_sequence() {
    let vocabulary = Arc::new(vocabulary(vec![text(b"a"), text(b"b"), None], &[2], |_| Vec::new()).unwrap());
    let compiler = GrammarCompiler::new(vocabulary, GuidanceLimits::default()).unwrap();
    assert!(compiler.compile(&GrammarSpec::Choice(vec!["c".into()])).is_err());
    let compiled = compiler.compile(&GrammarSpec::Choice(vec!["ac".into(), "bb".into()])).unwrap();
    let (mut stuck, mut free) = (compiled.start().unwrap(), compiled.start().unwrap());
    stuck.accept(0).unwrap();
    assert!(stuck.mask(&mut [0]).is_err());
    for _ in 0..2 {
        free.mask(&mut [0]).unwrap();
        free.accept(1).unwrap();
    }
    assert!(free.is_complete());
}

#[test]
fn invalid_vocabulary_errors_name_the_reason() {
    for (tokens, end_ids, reason) in [
        (vec![text(b"a")], vec![], "no end ids"),
        (vec![text(b"a")], vec![1], "end id 1 is not among the 1 tokens"),
        (vec![], vec![0], "end id 0 is not among the 0 tokens"),
    ] {
        let error = vocabulary(tokens, &end_ids, |_| Vec::new()).unwrap_err();
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn vocabulary_accepts_long_duplicate_and_empty_tokens() {
    let table = vec![
        text(&[b'a'; 5_000]),
        text(b"a"),
        text(b"a"),
        text(b""),
        text(&[0xff]),
        text(&[0xff, b'<']),
        None,
    ];
    let vocabulary = Arc::new(vocabulary(table, &[6], |_| Vec::new()).unwrap());
    let compiler = GrammarCompiler::new(vocabulary, GuidanceLimits::default()).unwrap();
    let mut matcher = compiler.compile(&GrammarSpec::Regex("a{3}".into())).unwrap().start().unwrap();
    let mut words = [0];
    matcher.mask(&mut words).unwrap();
    assert_eq!(words[0].count_ones(), 1);
    assert_ne!(words[0] & 0b110, 0);
    for token in [1, 2, 1] {
        matcher.accept(token).unwrap();
    }
    assert!(matcher.is_complete());
}
