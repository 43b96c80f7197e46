//! A guide that takes the tokens of another at once goes on as the other does: what a preempted request relies on.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::{Random, Tokens, bytes, compiler, compiler_with, patient, words};
use penstock_guidance::{Compiled, Grammar, Guide, Limits, TokenText, ToolCalls, Vocabulary};
use serde_json::Value;

/// A guide that has taken the tokens and was asked for nothing else.
fn replayed(compiled: &Compiled, said: &[u32]) -> Guide {
    let mut guide = compiled.start().unwrap();
    said.iter().for_each(|&token| guide.accept(token).unwrap());
    guide
}

fn forced(guide: &mut Guide) -> Vec<u32> {
    let mut tokens = Vec::new();
    guide.forced(&mut tokens);
    tokens
}

/// Walks at random. A second guide takes the tokens, and says at each what is forced; after every `stride` tokens a third
/// one starts anew and says its mask.
fn check(tokens: &Tokens, grammar: &Grammar, random: &mut Random, limit: usize, stride: usize) {
    let name = format!("{:.200}", format!("{grammar:?}"));
    let compiled = compiler(tokens).compile(grammar).unwrap();
    let (mut walk, mut silent) = (compiled.start().unwrap(), compiled.start().unwrap());
    let mut said = Vec::new();
    while said.len() < limit {
        let Ok(allowed) = tokens.mask(&mut walk) else { return };
        assert_eq!(forced(&mut walk), forced(&mut silent), "{name} after {said:?}");
        if said.len() % stride == 0 {
            let mut again = replayed(&compiled, &said);
            assert_eq!(tokens.mask(&mut again).unwrap(), allowed, "{name} after {said:?}");
            assert_eq!(forced(&mut again), forced(&mut walk), "{name} after {said:?}");
        }
        let token = allowed[random.below(allowed.len())];
        if token == tokens.end {
            return;
        }
        walk.accept(token).unwrap();
        silent.accept(token).unwrap();
        said.push(token);
    }
}

/// Every byte and some words, one of which the tokenizer never says where text is long enough for two others.
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

fn call(opening: &str) -> Grammar {
    let schema =
        r#"{"properties":{"name 🙂 name":{"enum":["name 🙂","日本 name"]}},"required":["name 🙂 name"]}"#;
    Grammar::ToolCalls(ToolCalls {
        opening: opening.to_owned(),
        call_opening: "🙂 name <tool_call>".to_owned(),
        name_key: "name".to_owned(),
        arguments_key: "arguments".to_owned(),
        call_closing: "</tool_call>".to_owned(),
        separator: "🙂".to_owned(),
        closing: "name".to_owned(),
        tools: vec![("name".to_owned(), schema.to_owned()), ("na🙂me".to_owned(), "true".to_owned())],
        parallel: true,
        thinking: None,
    })
}

#[test]
fn a_replayed_guide_splits_forced_text_where_the_other_did() {
    let long = "name 🙂 ".repeat(300);
    for tokens in [unmerged(), bytes(), words(11, 1_500)] {
        let mut random = Random(7);
        for grammar in [
            Grammar::Choice(vec!["x🙂 name".into(), "y🙂 name".into()]),
            Grammar::Regex("[a-z]{1,3}🙂 name(日本 name)+".into()),
            call(""),
            call("name 🙂 "),
        ] {
            (0..3).for_each(|_| check(&tokens, &grammar, &mut random, 120, 1));
        }
        check(&tokens, &Grammar::Choice(vec![long.clone()]), &mut random, 4_000, 97);
    }
}

#[test]
fn a_replayed_guide_has_the_masks_of_the_other() {
    let listed: Vec<Value> =
        serde_json::from_str(include_str!("../../../tests/data/json_schemas.json")).unwrap();
    let (tokens, mut random) = (words(11, 1_500), Random(1));
    for entry in &listed {
        check(&tokens, &Grammar::JsonSchema(entry["schema"].to_string()), &mut random, 100, 23);
    }
}

#[test]
fn a_replayed_guide_goes_on_as_long_as_the_other() {
    let tokens = bytes();
    let compiler = compiler_with(&tokens, Limits { mask_nodes: 20_000, ..patient() });
    for source in ["(.*a.{20}){3}", "([ab]*a[ab]{40})+", "(.*[a-m].{100}){5}"] {
        let compiled = compiler.compile(&Grammar::Regex(source.into())).unwrap();
        let (mut walk, mut random) = (compiled.start().unwrap(), Random(5));
        let mut said = Vec::new();
        while said.len() < 400 && tokens.mask(&mut walk).is_ok() {
            if said.len() % 50 == 0 {
                let mut again = replayed(&compiled, &said);
                tokens.mask(&mut again).unwrap();
            }
            said.push(u32::from(b'a') + random.below(2) as u32);
            walk.accept(*said.last().unwrap()).unwrap();
        }
        assert!(said.len() > 100, "{source}: {}", said.len());
    }
}

#[test]
fn an_automaton_that_grows_too_large_ends_its_sequence() {
    let tokens = bytes();
    let compiler = compiler_with(&tokens, Limits { lexer_bytes: 100_000, ..patient() });
    let compiled = compiler.compile(&Grammar::Regex("(.*a.{20}){3}".into())).unwrap();
    let (mut guide, mut random) = (compiled.start().unwrap(), Random(5));
    let error = (0..1_000)
        .find_map(|_| {
            let token = u32::from(b'a') + random.below(2) as u32;
            tokens.mask(&mut guide).and_then(|_| guide.accept(token)).err()
        })
        .unwrap();
    assert!(error.to_string().contains("bytes of automaton; the limit is"), "{error}");
    assert_eq!(tokens.mask(&mut guide).unwrap_err(), error);
}
