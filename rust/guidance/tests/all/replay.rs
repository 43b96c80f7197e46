//! A matcher that replays the tokens of another continues exactly like it. Preemption relies on this.

use std::sync::Arc;

use penstock_guidance::{
    CompiledGrammar, GrammarMatcher, GrammarSpec, GuidanceLimits, TokenText, ToolCallSpec, Vocabulary,
};
use serde_json::Value;

use crate::common::{Random, Tokens, bytes, compiler, compiler_with, tool, untimed_limits, words};

/// A matcher that has accepted the tokens without computing masks.
fn replayed(compiled: &CompiledGrammar, accepted: &[u32]) -> GrammarMatcher {
    let mut matcher = compiled.start().unwrap();
    accepted.iter().for_each(|&token| matcher.accept(token).unwrap());
    matcher
}

fn forced(matcher: &mut GrammarMatcher) -> Vec<u32> {
    let mut tokens = Vec::new();
    matcher.forced_tokens(&mut tokens);
    tokens
}

/// Generates random tokens with masks. A second matcher accepts them without masks and must force the same tokens;
/// after every `stride` tokens, a third one replays all tokens and must return the same mask.
fn check(tokens: &Tokens, grammar: &GrammarSpec, random: &mut Random, limit: usize, stride: usize) {
    let name = format!("{:.200}", format!("{grammar:?}"));
    let compiled = compiler(tokens).compile(grammar).unwrap();
    let (mut masked, mut maskless) = (compiled.start().unwrap(), compiled.start().unwrap());
    let mut accepted = Vec::new();
    while accepted.len() < limit {
        let Ok(allowed) = tokens.mask(&mut masked) else { return };
        assert_eq!(forced(&mut masked), forced(&mut maskless), "{name} after {accepted:?}");
        if accepted.len() % stride == 0 {
            let mut replay = replayed(&compiled, &accepted);
            assert_eq!(tokens.mask(&mut replay).unwrap(), allowed, "{name} after {accepted:?}");
            assert_eq!(forced(&mut replay), forced(&mut masked), "{name} after {accepted:?}");
        }
        let token = allowed[random.below(allowed.len())];
        if token == tokens.end {
            return;
        }
        masked.accept(token).unwrap();
        maskless.accept(token).unwrap();
        accepted.push(token);
    }
}

/// Every byte and some words. The tokenizer splits one of the words into two others.
fn unmerged() -> Tokens {
    let mut texts: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    texts.extend(["na", "me", "name"].map(|word| word.as_bytes().to_vec()));
    let end = texts.len() as u32;
    texts.push(b"<|end|>".to_vec());
    let token =
        |(id, bytes): (usize, &Vec<u8>)| TokenText { bytes: bytes.clone(), special: id == end as usize };
    let table = texts.iter().enumerate().map(|entry| Some(token(entry))).collect();
    let encode = |text: &str| {
        let (mut ids, mut rest) = (Vec::new(), text);
        while let Some(&first) = rest.as_bytes().first() {
            let word = [("na", 256), ("me", 257)].into_iter().find(|(word, _)| rest.starts_with(word));
            let Some((word, id)) = word else {
                let length = rest.chars().next().map_or(1, char::len_utf8);
                ids.extend(rest.as_bytes()[..length].iter().map(|&byte| u32::from(byte)));
                rest = &rest[length..];
                continue;
            };
            assert_eq!(first, word.as_bytes()[0]);
            ids.push(id);
            rest = &rest[word.len()..];
        }
        ids
    };
    let vocabulary = Arc::new(Vocabulary::new(table, &[end], Arc::new(encode)).unwrap());
    Tokens { texts, end, vocabulary }
}

fn call(opening: &str) -> GrammarSpec {
    let schema =
        r#"{"properties":{"name 🙂 name":{"enum":["name 🙂","日本 name"]}},"required":["name 🙂 name"]}"#;
    GrammarSpec::ToolCalls(ToolCallSpec {
        opening: opening.to_owned(),
        call_opening: "🙂 name <tool_call>".to_owned(),
        name_key: "name".to_owned(),
        arguments_key: "arguments".to_owned(),
        call_closing: "</tool_call>".to_owned(),
        separator: "🙂".to_owned(),
        closing: "name".to_owned(),
        tools: vec![tool("name", schema), tool("na🙂me", "true")],
        parallel: true,
        reasoning: None,
    })
}

#[test]
fn replay_splits_forced_text_at_the_same_places() {
    let long = "name 🙂 ".repeat(300);
    for tokens in [unmerged(), bytes(), words(11, 1_500)] {
        let mut random = Random(7);
        for grammar in [
            GrammarSpec::Choice(vec!["x🙂 name".into(), "y🙂 name".into()]),
            GrammarSpec::Regex("[a-z]{1,3}🙂 name(日本 name)+".into()),
            call(""),
            call("name 🙂 "),
        ] {
            (0..3).for_each(|_| check(&tokens, &grammar, &mut random, 120, 1));
        }
        check(&tokens, &GrammarSpec::Choice(vec![long.clone()]), &mut random, 4_000, 97);
    }
}

#[test]
fn replay_computes_the_same_masks() {
    let listed: Vec<Value> =
        serde_json::from_str(include_str!("../../../../tests/data/json_schemas.json")).unwrap();
    let (tokens, mut random) = (words(11, 1_500), Random(1));
    for entry in &listed {
        check(&tokens, &GrammarSpec::JsonSchema(entry["schema"].to_string()), &mut random, 100, 23);
    }
}

#[test]
fn replay_stays_within_the_limits_as_long_as_the_original() {
    let tokens = bytes();
    let compiler = compiler_with(&tokens, GuidanceLimits { mask_nodes: 20_000, ..untimed_limits() });
    for source in ["(.*a.{20}){3}", "([ab]*a[ab]{40})+", "(.*[a-m].{100}){5}"] {
        let compiled = compiler.compile(&GrammarSpec::Regex(source.into())).unwrap();
        let (mut masked, mut random) = (compiled.start().unwrap(), Random(5));
        let mut accepted = Vec::new();
        while accepted.len() < 400 && tokens.mask(&mut masked).is_ok() {
            if accepted.len() % 50 == 0 {
                let mut replay = replayed(&compiled, &accepted);
                tokens.mask(&mut replay).unwrap();
            }
            accepted.push(u32::from(b'a') + random.below(2) as u32);
            masked.accept(*accepted.last().unwrap()).unwrap();
        }
        assert!(accepted.len() > 100, "{source}: {}", accepted.len());
    }
}

#[test]
fn oversized_automaton_ends_its_sequence() {
    let tokens = bytes();
    let compiler = compiler_with(&tokens, GuidanceLimits { lexer_bytes: 100_000, ..untimed_limits() });
    let compiled = compiler.compile(&GrammarSpec::Regex("(.*a.{20}){3}".into())).unwrap();
    let (mut matcher, mut random) = (compiled.start().unwrap(), Random(5));
    let error = (0..1_000)
        .find_map(|_| {
            let token = u32::from(b'a') + random.below(2) as u32;
            tokens.mask(&mut matcher).and_then(|_| matcher.accept(token)).err()
        })
        .unwrap();
    assert!(error.to_string().contains("the automaton has "), "{error}");
    assert_eq!(tokens.mask(&mut matcher).unwrap_err(), error);
}
