//! Incremental decoding, compared with the library's decoder.

use penstock_text::{TextOptions, Tokenizer};
use proptest::prelude::*;

use crate::reader::Reader;
use crate::vocabularies::*;

/// Ids of all kinds: mostly bytes, merged and special tokens, and some outside the vocabulary.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let id =
        prop_oneof![4 => 0_u32..300, 2 => 0_u32..4, 2 => 195_u32..260, 3 => 256_u32..280, 1 => any::<u32>()];
    proptest::collection::vec(id, 0..40)
}

/// The text of each take.
fn takes(tokenizer: &Tokenizer, options: TextOptions, ids: &[u32]) -> Vec<String> {
    let mut stream = Reader::new(tokenizer, options, &[]);
    let mut takes = Vec::new();
    for &id in ids {
        assert_eq!(stream.push(id), None);
        takes.push(stream.take());
    }
    assert_eq!(stream.finish(), None);
    takes.push(stream.take());
    takes
}

#[test]
fn streamed_text_equals_the_librarys_decoding() {
    for (name, json) in decoders() {
        let (ours, library) = (ours(&json), library(&json));
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids(), skip: bool)| {
            let expected = library.decode(&ids, skip).unwrap();
            prop_assert_eq!(&ours.decode(&ids, skipping(skip)), &expected, "{} at once", name);
            let takes = takes(&ours, skipping(skip), &ids);
            prop_assert_eq!(&takes.concat(), &expected, "{} in a stream", name);
        });
    }
}

#[test]
fn every_complete_character_is_emitted_immediately() {
    let tokenizer = ours(&byte_level_json());
    proptest!(|(text in ".{0,40}")| {
        let mut stream = Reader::new(&tokenizer, TextOptions::default(), &[]);
        let (mut bytes, mut shown) = (0, String::new());
        for id in tokenizer.encode(&text, false).unwrap() {
            bytes += tokenizer.id_to_token(id).unwrap().chars().count();
            stream.push(id);
            shown += &stream.take();
            let whole = (0..=bytes).rev().find(|&end| text.is_char_boundary(end)).unwrap();
            prop_assert_eq!(&shown, &text[..whole]);
        }
        prop_assert_eq!(shown, text);
    });
}

#[test]
fn run_of_fallback_bytes_is_decoded_together() {
    let tokenizer = ours(&sentencepiece_json(sentencepiece_decoder(true)));
    let byte = |byte: u8| u32::from(byte) + 3;
    let hello = tokenizer.token_to_id("▁hello").unwrap();
    let run = ['é', '漢'].iter().flat_map(|c| c.to_string().into_bytes()).map(byte);
    let mut ids: Vec<u32> = run.collect();
    let mut stream = Reader::new(&tokenizer, TextOptions::default(), &[]);
    for &id in &ids {
        stream.push(id);
        assert_eq!(stream.take(), "");
    }
    stream.push(hello);
    assert_eq!(stream.take(), "é漢 hello");
    ids.push(byte(0xC3));
    assert_eq!(tokenizer.decode(&ids, TextOptions::default()), "\u{FFFD}".repeat(6));
}

#[test]
fn incomplete_character_becomes_one_replacement_at_the_end() {
    let tokenizer = ours(&byte_level_json());
    let mut stream = Reader::new(&tokenizer, TextOptions::default(), &[]);
    for id in [0x61, 0xE6, 0xBC] {
        stream.push(id);
    }
    assert_eq!(stream.take(), "a");
    assert_eq!(stream.finish(), None);
    assert_eq!(stream.take(), "\u{FFFD}");
    assert_eq!(stream.take(), "");
}

/// The result of tokenizers written in Python: each added token and each run of other tokens is decoded independently,
/// and non-empty results are joined with spaces.
fn joined(library: &tokenizers::Tokenizer, ids: &[u32]) -> String {
    let added = library.get_added_tokens_decoder();
    let runs = ids.chunk_by(|left, right| !added.contains_key(left) && !added.contains_key(right));
    let parts = runs.map(|run| match added.get(&run[0]) {
        Some(token) => token.content.clone(),
        None => library.decode(run, false).unwrap(),
    });
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join(" ")
}

#[test]
fn spaces_between_added_tokens_match_python_tokenizers() {
    let spaced = TextOptions { spaces_between_special_tokens: true, ..skipping(false) };
    for (name, json) in decoders() {
        let (ours, library) = (ours(&json), library(&json));
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids())| {
            let expected = joined(&library, &ids);
            prop_assert_eq!(&ours.decode(&ids, spaced), &expected, "{} at once", name);
            prop_assert_eq!(&takes(&ours, spaced, &ids).concat(), &expected, "{} in a stream", name);
        });
    }
    let tokenizer = ours(&byte_level_json());
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    let ids = [id("<|begin|>"), id("hello"), 0xC3, id("<think>"), id("<|end|>"), 0xA9, id("a")];
    assert_eq!(tokenizer.decode(&ids, spaced), "<|begin|> hello\u{FFFD} <think> <|end|> \u{FFFD}a");
    let skipped = TextOptions { skip_special_tokens: true, ..spaced };
    assert_eq!(tokenizer.decode(&ids, skipped), "hello\u{FFFD}<think>\u{FFFD}a");
}

#[test]
fn token_bytes_equal_the_decoded_text_of_the_token() {
    for (name, json) in decoders() {
        let tokenizer = ours(&json);
        assert_eq!(tokenizer.has_token_bytes(), name != "none");
        let bytes = |id| tokenizer.token_bytes(id).map(|token| token.bytes);
        let around = tokenizer.token_to_id("h").unwrap();
        let library = library(&json);
        let added = library.get_added_tokens_decoder();
        for id in 0..=tokenizer.vocabulary_size() as u32 {
            let Some(token) = tokenizer.token_bytes(id) else {
                assert!(name == "none" || tokenizer.id_to_token(id).is_none(), "{name} has {id}");
                continue;
            };
            let text = String::from_utf8_lossy(token.bytes);
            let decoded = tokenizer.decode(&[around, id, around], skipping(false));
            assert_eq!(decoded, format!("h{text}h"), "{name}, {id}");
            assert_eq!(token.special, added.get(&id).is_some_and(|token| token.special), "{name}, {id}");
        }
        if ["byte-level", "sentencepiece"].contains(&name) {
            let byte = |byte: &[u8]| (0..300).find(|&id| bytes(id) == Some(byte)).unwrap();
            let e_acute = [around, byte(b"\xC3"), byte(b"\xA9"), around];
            assert_eq!(tokenizer.decode(&e_acute, skipping(false)), "héh", "{name}");
        }
    }
}
