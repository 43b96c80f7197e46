//! Masks and forced tokens against a slow twin, and guides at the end of their text.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{Random, Tokens, bytes, compiler, schema, words};
use penstock_guidance::{Compiler, Grammar, GuidanceError, Guide, Limits, TokenText, Vocabulary};

fn grammars() -> Vec<Grammar> {
    vec![
        schema(
            r#"{"type":"object","properties":{"name":{"type":"string"},"b":{"type":"integer"}},"required":["name"]}"#,
        ),
        schema(r#"{"type":"array","items":{"enum":["a","ab",12,true]}}"#),
        schema(r#"{"type":"string","pattern":"^[a-b]*é+$","maxLength":9}"#),
        Grammar::JsonObject,
        Grammar::Regex(r"(true|name)*\d+ ?日本🙂?".into()),
        Grammar::Choice(vec!["name".into(), "name, 12".into(), "日本".into(), "🙂".into()]),
        Grammar::Lark("start: \"[\" start \"]\" | /[ab:]{1,3}/ | \"0\"".into()),
    ]
}

/// A guide for bytes alone that has read the same text says of a token whether its bytes may follow one by one.
struct Twin {
    tokens: Tokens,
    compiler: Compiler,
    grammar: Grammar,
}

impl Twin {
    fn after(&self, text: &[u8]) -> Guide {
        let mut guide = self.compiler.compile(&self.grammar).unwrap().start().unwrap();
        text.iter().for_each(|&byte| guide.accept(u32::from(byte)).unwrap());
        guide
    }

    fn allows(&self, text: &[u8], word: &[u8]) -> bool {
        let mut guide = self.after(text);
        word.iter().all(|&byte| guide.accept(u32::from(byte)).is_ok())
    }
}

#[test]
fn a_mask_has_exactly_the_tokens_whose_bytes_may_follow_one_by_one() {
    let words = words(3, 150);
    let fast = compiler(&words);
    let mut random = Random(17);
    for grammar in grammars() {
        let twin = Twin { tokens: bytes(), compiler: compiler(&bytes()), grammar: grammar.clone() };
        for _ in 0..2 {
            let mut guide = fast.compile(&grammar).unwrap().start().unwrap();
            let mut text: Vec<u8> = Vec::new();
            for _ in 0..8 {
                let allowed = words.mask(&mut guide).unwrap();
                let may_follow = |id: &u32| {
                    let word = &words.texts[*id as usize];
                    if *id >= words.end {
                        *id == words.end && twin.after(&text).accept(twin.tokens.end).is_ok()
                    } else {
                        twin.allows(&text, word)
                    }
                };
                let expected: Vec<u32> = (0..words.texts.len() as u32).filter(may_follow).collect();
                let mut forced = Vec::new();
                guide.forced(&mut forced);
                match forced.first() {
                    None => assert_eq!(
                        allowed,
                        expected,
                        "{grammar:?} after {:?}",
                        String::from_utf8_lossy(&text)
                    ),
                    // Of the splits of forced text the tokenizer's own one is left.
                    Some(first) => assert!(allowed == [*first] && expected.contains(first)),
                }
                let token = allowed[random.below(allowed.len())];
                guide.accept(token).unwrap();
                if token == words.end {
                    break;
                }
                text.extend(&words.texts[token as usize]);
            }
        }
    }
}

#[test]
fn forced_tokens_are_what_the_mask_allows_and_asking_for_them_changes_nothing() {
    let words = words(5, 400);
    let grammar = schema(
        r#"{"type":"object","properties":{"name":{"enum":["日本12"]},"b":{"type":"null"}},"required":["name","b"],"additionalProperties":false}"#,
    );
    let mut guide = compiler(&words).compile(&grammar).unwrap().start().unwrap();
    let mut text = Vec::new();
    let mut runs = 0;
    while !guide.is_complete() {
        let (mut forced, mut again) = (Vec::new(), Vec::new());
        guide.forced(&mut forced);
        guide.forced(&mut again);
        assert_eq!(forced, again);
        runs += usize::from(forced.len() > 1);
        let choices = words.mask(&mut guide).unwrap();
        let run = if forced.is_empty() { vec![choices[0]] } else { forced };
        for token in run {
            assert!(words.mask(&mut guide).unwrap().contains(&token));
            guide.accept(token).unwrap();
            text.extend(&words.texts[token as usize]);
        }
    }
    assert!(runs > 1);
    let value: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(value, serde_json::json!({"name": "日本12", "b": null}));
}

#[test]
fn a_long_forced_text_comes_in_parts_and_is_the_text() {
    let words = words(9, 300);
    let long: String = (0..9_000).map(|index| ["name", "日本", "12"][index % 3]).collect();
    let mut guide = compiler(&words).compile(&Grammar::Choice(vec![long.clone()])).unwrap().start().unwrap();
    let mut text = Vec::new();
    while !guide.is_complete() {
        let mut forced = Vec::new();
        guide.forced(&mut forced);
        assert!(!forced.is_empty());
        for token in forced {
            guide.accept(token).unwrap();
            text.extend(&words.texts[token as usize]);
        }
    }
    assert_eq!(String::from_utf8(text).unwrap(), long);
}

#[test]
fn past_the_end_nothing_but_end_ids_may_follow() {
    let tokens = bytes();
    let mut guide =
        compiler(&tokens).compile(&Grammar::Choice(vec!["ab".into(), "b".into()])).unwrap().start().unwrap();
    assert!(
        matches!(guide.accept(tokens.end), Err(GuidanceError::Refused { token, .. }) if token == tokens.end)
    );
    for byte in b"ab" {
        assert!(!guide.is_complete());
        guide.accept(u32::from(*byte)).unwrap();
    }
    for _ in 0..3 {
        assert!(guide.is_complete());
        assert_eq!(tokens.mask(&mut guide).unwrap(), [tokens.end]);
        assert!(matches!(guide.accept(u32::from(b'b')), Err(GuidanceError::Refused { .. })));
        let mut forced = Vec::new();
        guide.forced(&mut forced);
        assert!(forced.is_empty());
        guide.accept(tokens.end).unwrap();
    }
}

#[test]
fn a_text_that_may_go_on_may_end_too() {
    let tokens = bytes();
    let mut guide =
        compiler(&tokens).compile(&Grammar::Choice(vec!["a".into(), "ab".into()])).unwrap().start().unwrap();
    guide.accept(u32::from(b'a')).unwrap();
    assert!(!guide.is_complete());
    assert_eq!(tokens.mask(&mut guide).unwrap(), [u32::from(b'b'), tokens.end]);
    guide.accept(tokens.end).unwrap();
    assert!(guide.is_complete());
    assert!(guide.accept(u32::from(b'b')).is_err());
}

#[test]
fn a_refused_token_leaves_the_guide_as_it_was() {
    let tokens = words(2, 200);
    let mut guide = compiler(&tokens)
        .compile(&schema(r#"{"type":"array","items":{"type":"null"}}"#))
        .unwrap()
        .start()
        .unwrap();
    guide.accept(u32::from(b'[')).unwrap();
    let before = tokens.mask(&mut guide).unwrap();
    for token in [u32::from(b'x'), tokens.end, tokens.end + 1, 1 << 20, u32::MAX] {
        assert!(matches!(guide.accept(token), Err(GuidanceError::Refused { .. })), "{token}");
        assert_eq!(tokens.mask(&mut guide).unwrap(), before);
    }
    guide.accept(u32::from(b']')).unwrap();
    assert!(guide.is_complete());
}

#[test]
fn special_tokens_come_only_where_a_grammar_asks_for_them() {
    let tokens = bytes();
    let special: Vec<u32> = (tokens.end..tokens.texts.len() as u32).collect();
    // The second terminal leaves out some bytes, and so takes the one that the library marks special tokens with.
    for source in ["start: /(?s:.*)/", "start: A\nA: ~/x/", "start: A\nA: /(?s:.)*/ & ~/x/"] {
        let mut guide = compiler(&tokens).compile(&Grammar::Lark(source.into())).unwrap().start().unwrap();
        for _ in 0..3 {
            let allowed = tokens.mask(&mut guide).unwrap();
            assert!(special[1..].iter().all(|id| !allowed.contains(id)), "{source}");
            special[1..].iter().for_each(|&id| assert!(guide.accept(id).is_err()));
            guide.accept(u32::from(b'y')).unwrap();
        }
    }
    let source = format!("start: \"a\" <[{}]> \"b\"", tokens.end + 3);
    let mut guide = compiler(&tokens).compile(&Grammar::Lark(source)).unwrap().start().unwrap();
    for token in [u32::from(b'a'), tokens.end + 3, u32::from(b'b')] {
        assert_eq!(tokens.mask(&mut guide).unwrap(), [token]);
        guide.accept(token).unwrap();
    }
    assert!(guide.is_complete());
}

#[test]
fn an_end_id_that_a_grammar_names_is_no_more_than_the_end() {
    let tokens = bytes();
    let source = format!("start: \"a\" <[{}]> \"b\"", tokens.end);
    let mut guide = compiler(&tokens).compile(&Grammar::Lark(source)).unwrap().start().unwrap();
    guide.accept(u32::from(b'a')).unwrap();
    let error = tokens.mask(&mut guide).unwrap_err();
    assert!(matches!(error, GuidanceError::DeadEnd { .. }), "{error}");
    assert_eq!(guide.accept(tokens.end), Err(error));
}

#[test]
fn a_mask_shorter_than_the_vocabulary_leaves_the_rest_out() {
    let tokens = bytes();
    let mut guide =
        compiler(&tokens).compile(&Grammar::Regex("[\u{20}-\u{7f}]*".into())).unwrap().start().unwrap();
    let mut short = [u32::MAX; 2];
    guide.mask(&mut short).unwrap();
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
fn a_tokenizer_whose_ids_say_something_else_is_not_believed() {
    let table = || vec![text(b"a"), text(b"b"), text(b"ab"), text(b" ab"), text(b"</s>")];
    for encode in [|_: &str| vec![3], |_: &str| vec![], |_: &str| vec![77], |_: &str| vec![1, 0]] {
        let vocabulary = Arc::new(vocabulary(table(), &[4], encode).unwrap());
        let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
        let guide = compiler.compile(&Grammar::Choice(vec!["abab".into()])).unwrap().start().unwrap();
        let mut forced = Vec::new();
        guide.forced(&mut forced);
        assert_eq!(forced, [2, 2]);
    }
}

#[test]
fn an_end_id_is_no_text_whatever_its_text_is() {
    let table = vec![text(b"<"), text(b"/s>"), text(b"</s>"), None, text(b"x")];
    let vocabulary = Arc::new(vocabulary(table, &[2, 3], |_| Vec::new()).unwrap());
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    let mut guide = compiler.compile(&Grammar::Regex("[</s>x]+".into())).unwrap().start().unwrap();
    let mut words = [0];
    guide.mask(&mut words).unwrap();
    assert_eq!(words, [0b10011]);
    guide.accept(4).unwrap();
    guide.mask(&mut words).unwrap();
    assert_eq!(words, [0b11111]);
    guide.accept(3).unwrap();
    assert!(guide.is_complete());
}

#[test]
fn a_text_that_the_vocabulary_cannot_say_ends_that_sequence_alone() {
    let vocabulary = Arc::new(vocabulary(vec![text(b"a"), text(b"b"), None], &[2], |_| Vec::new()).unwrap());
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    assert!(compiler.compile(&Grammar::Choice(vec!["c".into()])).is_err());
    let compiled = compiler.compile(&Grammar::Choice(vec!["ac".into(), "bb".into()])).unwrap();
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
fn a_vocabulary_says_what_is_wrong_with_it() {
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
fn tokens_of_any_length_and_the_same_text_make_a_vocabulary() {
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
    let compiler = Compiler::new(vocabulary, Limits::default()).unwrap();
    let mut guide = compiler.compile(&Grammar::Regex("a{3}".into())).unwrap().start().unwrap();
    let mut words = [0];
    guide.mask(&mut words).unwrap();
    assert_eq!(words[0].count_ones(), 1);
    assert_ne!(words[0] & 0b110, 0);
    for token in [1, 2, 1] {
        guide.accept(token).unwrap();
    }
    assert!(guide.is_complete());
}
