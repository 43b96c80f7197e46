//! Ids to text, one at a time: against the library's decoder for the text, against the obvious search for the
//! stops.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod vocabularies;

use penstock_text::{StopMatch, TextStream, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};
use vocabularies::*;

/// Every kind of decoder that text-generating models have.
fn decoders() -> Vec<(&'static str, Value)> {
    let metaspace = |scheme: &str| json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": false});
    vec![
        ("byte-level", byte_level_json()),
        ("sentencepiece", sentencepiece_json(sentencepiece_decoder(true))),
        ("sentencepiece without prefix", sentencepiece_json(sentencepiece_decoder(false))),
        ("metaspace, always", sentencepiece_json(metaspace("always"))),
        ("metaspace, never", sentencepiece_json(metaspace("never"))),
        ("none", sentencepiece_json(Value::Null)),
    ]
}

/// Ids of all kinds: bytes above all, merged and special tokens, and some outside the vocabulary.
fn ids() -> impl Strategy<Value = Vec<u32>> {
    let id =
        prop_oneof![4 => 0_u32..300, 2 => 0_u32..4, 2 => 195_u32..260, 3 => 256_u32..280, 1 => any::<u32>()];
    proptest::collection::vec(id, 0..40)
}

/// What a client sees: the text of each take, and the answer of the last call.
fn stream(
    tokenizer: &Tokenizer,
    skip: bool,
    stops: &[String],
    ids: &[u32],
) -> (Vec<String>, Option<StopMatch>) {
    let mut stream = TextStream::new(tokenizer, skip, stops).unwrap();
    let mut takes = Vec::new();
    for &id in ids {
        stream.push(id);
        takes.push(stream.take());
    }
    let stopped = stream.finish();
    takes.push(stream.take());
    (takes, stopped)
}

#[test]
fn the_takes_together_are_what_the_library_decodes_at_once() {
    for (name, json) in decoders() {
        let (ours, library) = (ours(&json), library(&json));
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids(), skip: bool)| {
            let expected = library.decode(&ids, skip).unwrap();
            prop_assert_eq!(&ours.decode(&ids, skip), &expected, "{} at once", name);
            let (takes, stopped) = stream(&ours, skip, &[], &ids);
            prop_assert_eq!(&takes.concat(), &expected, "{} in a stream", name);
            prop_assert_eq!(stopped, None);
        });
    }
}

#[test]
fn encoded_text_comes_back_character_by_character_without_delay() {
    let tokenizer = ours(&byte_level_json());
    proptest!(|(text in ".{0,40}")| {
        let mut stream = TextStream::new(&tokenizer, true, &[]).unwrap();
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
fn a_run_of_fallback_bytes_is_text_only_as_a_whole() {
    let tokenizer = ours(&sentencepiece_json(sentencepiece_decoder(true)));
    let byte = |byte: u8| u32::from(byte) + 3;
    let hello = tokenizer.token_to_id("▁hello").unwrap();
    let run = ['é', '漢'].iter().flat_map(|c| c.to_string().into_bytes()).map(byte);
    let mut ids: Vec<u32> = run.collect();
    let mut stream = TextStream::new(&tokenizer, true, &[]).unwrap();
    for &id in &ids {
        stream.push(id);
        assert_eq!(stream.take(), "");
    }
    stream.push(hello);
    assert_eq!(stream.take(), "é漢 hello");
    ids.push(byte(0xC3));
    assert_eq!(tokenizer.decode(&ids, true), "\u{FFFD}".repeat(6));
}

#[test]
fn bytes_that_never_become_a_character_appear_at_the_end_as_one_replacement() {
    let tokenizer = ours(&byte_level_json());
    let mut stream = TextStream::new(&tokenizer, true, &[]).unwrap();
    for id in [0x61, 0xE6, 0xBC] {
        stream.push(id);
    }
    assert_eq!(stream.take(), "a");
    assert_eq!(stream.finish(), None);
    assert_eq!(stream.take(), "\u{FFFD}");
    assert_eq!(stream.take(), "");
}

/// The first place where a stop string is complete, and the longest that is; where it begins, and which it
/// is.
fn search(text: &str, stops: &[String]) -> Option<(usize, usize)> {
    (0..=text.len()).find_map(|end| {
        let ending =
            stops.iter().enumerate().filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        let (stop, found) = ending.max_by_key(|&(index, stop)| (stop.len(), std::cmp::Reverse(index)))?;
        Some((end - found.len(), stop))
    })
}

/// Stop strings over a small alphabet, so that they overlap each other and the text.
fn stops() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(
        prop_oneof![6 => "[ab]{1,5}", 1 => "[abé\u{FFFD} h]{1,4}", 1 => "hel", 1 => "[a]{1,12}"],
        0..5,
    )
}

#[test]
fn stop_strings_cut_where_a_search_of_the_whole_text_would() {
    for (name, json) in decoders() {
        let tokenizer = ours(&json);
        let id = |token: &str| tokenizer.token_to_id(token);
        let wanted = [
            "a", "b", "h", "hell", "Ã", "©", "▁", "<0x61>", "<0x62>", "<0xC3>", "<0xA9>", "<|end|>", "▁h",
            "é",
        ];
        let wanted: Vec<u32> = wanted.into_iter().filter_map(id).collect();
        let ids = proptest::collection::vec(proptest::sample::select(wanted), 0..40);
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids, stops in stops(), skip: bool)| {
            let text = tokenizer.decode(&ids, skip);
            let (takes, stopped) = stream(&tokenizer, skip, &stops, &ids);
            let (expected, stop) = match search(&text, &stops) {
                Some((cut, stop)) => (&text[..cut], Some(StopMatch { stop })),
                None => (text.as_str(), None),
            };
            prop_assert_eq!(takes.concat(), expected, "{} of {:?}", name, text);
            prop_assert_eq!(stopped, stop, "{} of {:?}", name, text);
        });
    }
}

#[test]
fn only_what_may_begin_a_stop_string_is_held_back() {
    let tokenizer = ours(&byte_level_json());
    proptest!(|(text in "[abc]{0,30}", stops in proptest::collection::vec("[ab]{2,6}", 1..4))| {
        let mut stream = TextStream::new(&tokenizer, true, &stops).unwrap();
        let mut shown = String::new();
        for (index, byte) in text.bytes().enumerate() {
            if stream.push(u32::from(byte)).is_some() {
                break;
            }
            shown += &stream.take();
            let so_far = &text[..=index];
            let held = (0..=index + 1).rev().find(|&length| {
                stops.iter().any(|stop| stop.starts_with(&so_far[so_far.len() - length..]))
            });
            prop_assert_eq!(&shown, &so_far[..so_far.len() - held.unwrap()]);
        }
    });
}

#[test]
fn nothing_follows_a_stop() {
    let tokenizer = ours(&byte_level_json());
    let stops = ["never".to_owned(), "ab".to_owned()];
    let mut stream = TextStream::new(&tokenizer, true, &stops).unwrap();
    let answers: Vec<_> = b"xabyzab".iter().map(|&byte| stream.push(u32::from(byte))).collect();
    let stopped = Some(StopMatch { stop: 1 });
    assert_eq!(answers, [None, None, stopped, stopped, stopped, stopped, stopped]);
    assert_eq!(stream.finish(), stopped);
    assert_eq!(stream.take(), "x");
    assert_eq!(stream.take(), "");
}

#[test]
fn a_stop_string_can_be_completed_by_the_end() {
    let tokenizer = ours(&byte_level_json());
    let mut stream = TextStream::new(&tokenizer, true, &["a\u{FFFD}".to_owned()]).unwrap();
    assert_eq!(stream.push(u32::from(b'a')), None);
    assert_eq!(stream.push(0xC3), None);
    assert_eq!(stream.finish(), Some(StopMatch { stop: 0 }));
    assert_eq!(stream.take(), "");
}

#[test]
fn wrong_stop_strings_are_refused_with_their_place_or_size() {
    let tokenizer = ours(&byte_level_json());
    let error = |stops: &[String]| TextStream::new(&tokenizer, true, stops).err().unwrap().to_string();
    assert_eq!(error(&["a".into(), String::new()]), "stop[1] is empty");
    assert_eq!(
        error(&["a".repeat(1 << 20), "b".into()]),
        "stop: the stop strings have 1048577 bytes together; the limit is 1048576"
    );
}

#[test]
fn a_long_stop_string_held_back_for_long_stays_linear() {
    let tokenizer = ours(&byte_level_json());
    let stop = "a".repeat(500_000) + "b";
    let mut stream = TextStream::new(&tokenizer, true, &[stop]).unwrap();
    let mut shown = 0;
    for _ in 0..2_000_000 {
        stream.push(u32::from(b'a'));
        shown += stream.take().len();
    }
    assert_eq!(shown, 1_500_000);
    assert_eq!(stream.push(u32::from(b'b')), Some(StopMatch { stop: 0 }));
    assert_eq!(stream.take(), "");
}
