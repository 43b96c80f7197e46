//! Stop strings, compared with a naive search of the whole text.

use penstock_text::{MAX_STOP_BYTES, StopMatch, TextOptions, TextStream, Tokenizer};
use proptest::prelude::*;

use crate::reader::Reader;
use crate::vocabularies::*;

/// The end of the text and the stop string: the first position where one is complete, and the longest one there.
fn search(text: &str, stops: &[String], include: bool) -> (usize, Option<StopMatch>) {
    let first = (0..=text.len()).find_map(|end| {
        let ending =
            stops.iter().enumerate().filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        let (stop, found) = ending.max_by_key(|&(index, stop)| (stop.len(), std::cmp::Reverse(index)))?;
        Some((if include { end } else { end - found.len() }, Some(StopMatch { stop })))
    });
    first.unwrap_or((text.len(), None))
}

/// All combinations of options.
fn options() -> impl Strategy<Value = TextOptions> {
    any::<[bool; 3]>().prop_map(|[skip, spaces, include]| TextOptions {
        skip_special_tokens: skip,
        spaces_between_special_tokens: spaces,
        include_stop_str_in_output: include,
    })
}

/// Streams `ids`, takes text after the pushes selected by `takes`, and compares the text with a naive search after
/// every push and at the end.
fn check(
    tokenizer: &Tokenizer,
    options: TextOptions,
    stops: &[String],
    ids: &[u32],
    takes: &[bool],
) -> Result<(), TestCaseError> {
    let text = tokenizer.decode(ids, options);
    let (end, stopped) = search(&text, stops, options.include_stop_str_in_output);
    let mut stream = Reader::new(tokenizer, options, stops);
    let mut shown = String::new();
    for (&id, &take) in ids.iter().zip(takes.iter().cycle()) {
        let answer = stream.push(id);
        prop_assert!(answer.is_none() || answer == stopped, "{:?} stopped by {:?}", text, answer);
        if take {
            shown += &stream.take();
        }
        prop_assert!(text[..end].starts_with(&shown), "{:?} of {:?}", shown, text);
    }
    prop_assert_eq!(stream.finish(), stopped, "{:?}", text);
    shown += &stream.take();
    prop_assert_eq!(&shown, &text[..end], "of {:?}", text);
    prop_assert_eq!(stream.take(), "");
    Ok(())
}

/// Stop strings over a small alphabet, so that they overlap with each other and with the text.
fn stops() -> impl Strategy<Value = Vec<String>> {
    proptest::collection::vec(
        prop_oneof![6 => "[ab]{1,5}", 1 => "[abé\u{FFFD} h]{1,4}", 1 => "hel", 1 => "[a]{1,12}"],
        0..5,
    )
}

#[test]
fn stop_strings_match_a_naive_search() {
    for (_, json) in decoders() {
        let tokenizer = ours(&json);
        let id = |token: &str| tokenizer.token_to_id(token);
        let tokens = [
            "a", "b", "h", "hell", "Ã", "©", "▁", "<0x61>", "<0x62>", "<0xC3>", "<0xA9>", "<|end|>", "▁h",
            "é",
        ];
        let tokens: Vec<u32> = tokens.into_iter().filter_map(id).collect();
        let ids = proptest::collection::vec(proptest::sample::select(tokens), 0..40);
        proptest!(ProptestConfig::with_cases(1000), |(ids in ids, stops in stops(), options in options())| {
            check(&tokenizer, options, &stops, &ids, &[true])?;
        });
    }
}

/// Characters of several code points and of several tokens.
const UNITS: [&str; 16] = [
    "a",
    "hello",
    " hello",
    "\n\n",
    "é",
    "e\u{301}",
    "漢",
    "字漢",
    "한",
    "\u{1112}\u{1161}\u{11ab}",
    "👍🏽",
    "👩\u{200d}👩\u{200d}👧",
    "🇫🇷",
    "\u{feff}",
    "<|end|>",
    "<think>",
];

/// Parts of a text as ids: mostly complete characters, some single tokens that are not.
fn parts(tokenizer: &Tokenizer) -> impl Strategy<Value = Vec<Vec<u32>>> {
    let units = UNITS.map(|unit| tokenizer.encode(unit, false).unwrap());
    let any_id = 0..tokenizer.vocabulary_size() as u32 + 2;
    let part =
        prop_oneof![5 => proptest::sample::select(units.to_vec()), 1 => any_id.prop_map(|id| vec![id])];
    proptest::collection::vec(part, 1..12)
}

#[test]
fn stop_strings_match_across_token_boundaries() {
    use proptest::sample::Index;
    // Start of a stop string in the text, its length in characters, and an additional character.
    let cut =
        || (any::<Index>(), 1_usize..6, prop_oneof![3 => Just(""), 1 => proptest::sample::select(&UNITS)]);
    for (_, json) in decoders() {
        let tokenizer = ours(&json);
        let cuts = proptest::collection::vec(cut(), 1..5);
        let takes = proptest::collection::vec(any::<bool>(), 1..8);
        proptest!(ProptestConfig::with_cases(1000), |(
            parts in parts(&tokenizer), cuts in cuts, options in options(), takes in takes
        )| {
            let ids = parts.concat();
            let text: Vec<char> = tokenizer.decode(&ids, options).chars().collect();
            let stop = |(begin, length, after): (Index, usize, &str)| {
                let begin = if text.is_empty() { 0 } else { begin.index(text.len()) };
                text[begin..].iter().take(length).copied().chain(after.chars()).collect::<String>()
            };
            let stops: Vec<String> = cuts.into_iter().map(stop).filter(|stop| !stop.is_empty()).collect();
            check(&tokenizer, options, &stops, &ids, &takes)?;
        });
    }
}

#[test]
fn included_stop_string_holds_nothing_back() {
    let tokenizer = ours(&byte_level_json());
    let options = TextOptions { include_stop_str_in_output: true, ..TextOptions::default() };
    let mut stream = Reader::new(&tokenizer, options, &["abc".to_owned()]);
    let takes = b"aabcd".map(|byte| {
        stream.push(u32::from(byte));
        stream.take()
    });
    assert_eq!(takes, ["a", "a", "b", "c", ""]);
}

#[test]
fn only_prefixes_of_stop_strings_are_held_back() {
    let tokenizer = ours(&byte_level_json());
    proptest!(|(text in "[abc]{0,30}", stops in proptest::collection::vec("[ab]{2,6}", 1..4))| {
        let mut stream = Reader::new(&tokenizer, TextOptions::default(), &stops);
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
fn no_text_follows_a_stop_string() {
    let tokenizer = ours(&byte_level_json());
    let stops = ["never".to_owned(), "ab".to_owned()];
    let mut stream = Reader::new(&tokenizer, TextOptions::default(), &stops);
    let answers: Vec<_> = b"xabyzab".iter().map(|&byte| stream.push(u32::from(byte))).collect();
    let stopped = Some(StopMatch { stop: 1 });
    assert_eq!(answers, [None, None, stopped, stopped, stopped, stopped, stopped]);
    assert_eq!(stream.finish(), stopped);
    assert_eq!(stream.take(), "x");
    assert_eq!(stream.take(), "");
}

#[test]
fn stop_string_can_be_completed_by_finish() {
    let tokenizer = ours(&byte_level_json());
    let mut stream = Reader::new(&tokenizer, TextOptions::default(), &["a\u{FFFD}".to_owned()]);
    assert_eq!(stream.push(u32::from(b'a')), None);
    assert_eq!(stream.push(0xC3), None);
    assert_eq!(stream.finish(), Some(StopMatch { stop: 0 }));
    assert_eq!(stream.take(), "");
}

#[test]
fn invalid_stop_strings_are_rejected_with_index_or_size() {
    let tokenizer = ours(&byte_level_json());
    let error = |stops: &[String]| {
        TextStream::new(&tokenizer, TextOptions::default(), stops).err().unwrap().to_string()
    };
    assert_eq!(error(&["a".into(), String::new()]), "stop[1] is empty");
    assert_eq!(
        error(&["a".repeat(1 << 14), "b".into()]),
        "stop: the stop strings have 16385 bytes in total; the limit is 16384"
    );
}

#[test]
fn long_held_back_text_takes_linear_time() {
    let tokenizer = ours(&byte_level_json());
    let stop = "a".repeat(MAX_STOP_BYTES - 1) + "b";
    let mut stream = Reader::new(&tokenizer, TextOptions::default(), &[stop]);
    let mut shown = 0;
    for _ in 0..2_000_000 {
        stream.push(u32::from(b'a'));
        shown += stream.take().len();
    }
    assert_eq!(shown, 2_000_000 - (MAX_STOP_BYTES - 1));
    assert_eq!(stream.push(u32::from(b'b')), Some(StopMatch { stop: 0 }));
    assert_eq!(stream.take(), "");
}
