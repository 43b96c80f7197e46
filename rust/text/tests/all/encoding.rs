//! Encoding, compared with the library's pipelines and with hand-computed ids.

use penstock_checkpoint::{AddedToken, GgufVocabulary, TokenType, TokenizerSource};
use penstock_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocabularies::*;

fn expression_json(expression: &str, single_digits: bool, model: Value, normalizer: Value) -> Value {
    let mut steps = vec![
        json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false}),
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}),
    ];
    if single_digits {
        steps.insert(0, json!({"type": "Digits", "individual_digits": true}));
    }
    let decoder =
        json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    let steps = json!({"type": "Sequence", "pretokenizers": steps});
    let mut json = tokenizer_json(&byte_level("gpt-2"), model, steps, decoder);
    json["normalizer"] = normalizer;
    json
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

#[test]
fn every_named_pre_tokenizer_matches_the_library() {
    // Combining marks are part of words.
    let qwen35 =
        QWEN2.replace(r"\p{L}+|\p{N}|", r"[\p{L}\p{M}]+|\p{N}|").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}");
    let cases = [
        ("gpt-2", expression_json(GPT2, false, json!({}), Value::Null)),
        ("default", byte_level_json()),
        ("smollm", expression_json(GPT2, true, json!({}), Value::Null)),
        ("llama-bpe", expression_json(LLAMA3, false, json!({"ignore_merges": true}), Value::Null)),
        ("mpt", expression_json(GPT2, false, json!({}), json!({"type": "NFC"}))),
        ("command-r", expression_json(GPT2, true, json!({}), json!({"type": "NFC"}))),
        ("smaug-bpe", expression_json(LLAMA3, false, json!({}), Value::Null)),
        ("glm4", expression_json(LLAMA3, false, json!({"ignore_merges": true}), Value::Null)),
        ("qwen2", expression_json(QWEN2, false, json!({}), json!({"type": "NFC"}))),
        ("qwen35", expression_json(&qwen35, false, json!({}), Value::Null)),
        ("tekken", expression_json(TEKKEN, false, json!({"ignore_merges": true}), Value::Null)),
    ];
    for (pre, json) in cases {
        let (from_gguf, from_json, library) = (gguf(byte_level(pre)), ours(&json), library(&json));
        proptest!(|(text in text())| {
            let expected = library.encode(text.as_str(), false).unwrap().get_ids().to_vec();
            prop_assert_eq!(&from_gguf.encode(&text, false).unwrap(), &expected, "{} from GGUF", pre);
            prop_assert_eq!(&from_json.encode(&text, false).unwrap(), &expected, "{} from JSON", pre);
        });
    }
}

#[test]
fn aliases_of_a_pre_tokenizer_have_its_ids() {
    let text = "Don't  stop123 cafe\u{301} hello world\n\n x";
    for (name, aliases) in [
        ("gpt-2", &["phi-2", "gigachat", "exaone4", "granite-docling"][..]),
        ("smollm", &["starcoder", "refact", "codeshell", "exaone", "minerva-7b"]),
        ("mpt", &["olmo"]),
        ("llama-bpe", &["llama3", "llama-v3", "falcon3", "pixtral", "lfm2"]),
        ("smaug-bpe", &["dbrx", "chatglm-bpe"]),
        ("glm4", &["glm5"]),
        ("qwen2", &["deepseek-r1-qwen", "megrez", "kormo", "stablelm2", "hunyuan", "solar-open"]),
    ] {
        let expected = gguf(byte_level(name)).encode(text, true).unwrap();
        for alias in aliases {
            assert_eq!(gguf(byte_level(alias)).encode(text, true).unwrap(), expected, "{alias}");
        }
    }
}

#[test]
fn only_some_pre_tokenizers_compose_accents() {
    let composed = |name: &str| {
        let tokenizer = gguf(byte_level(name));
        tokenizer.encode("e\u{301}", false).unwrap() == tokenizer.encode("\u{e9}", false).unwrap()
    };
    let names = ["qwen2", "deepseek-r1-qwen", "mpt", "command-r", "qwen35", "llama-bpe", "gpt-2"];
    assert_eq!(names.map(composed), [true, true, true, true, false, false, false]);
}

#[test]
fn sentencepiece_with_implied_merges_matches_the_library() {
    let mut json = sentencepiece_json(sentencepiece_decoder(true));
    // Best score first. "hell" is only "he" + "ll", because "hel" is not a token. Longer left parts before shorter.
    json["model"]["merges"] =
        json!(["h e", "l l", "▁ h", "▁h e", "▁ he", "he ll", "▁he ll", "▁ hell", "▁hell o", "▁ ▁"]);
    let (from_gguf, library) = (gguf(sentencepiece()), library(&json));
    proptest!(|(text in text())| {
        let expected = library.encode(text.as_str(), false).unwrap().get_ids().to_vec();
        prop_assert_eq!(from_gguf.encode(&text, false).unwrap(), expected);
    });
}

#[test]
fn sentencepiece_scores_choose_between_merges() {
    let tokenizer = gguf(sentencepiece());
    let spelt = |text: &str| -> Vec<String> {
        let ids = tokenizer.encode(text, false).unwrap();
        ids.into_iter().map(|id| tokenizer.id_to_token(id).unwrap()).collect()
    };
    assert_eq!(spelt("hello"), ["▁hello"]);
    assert_eq!(spelt("x  hello"), ["▁", "x", "▁", "▁hello"]);
    assert_eq!(spelt("ü"), ["▁", "<0xC3>", "<0xBC>"]);
}

#[test]
fn sentencepiece_marks_every_text_between_special_tokens() {
    let vocabulary = || {
        let mut vocabulary = sentencepiece();
        vocabulary.tokens.push("<|user|>".into());
        vocabulary.types.push(TokenType::UserDefined);
        vocabulary.scores.push(0.0);
        vocabulary
    };
    let without = GgufVocabulary { add_space_prefix: Some(false), ..vocabulary() };
    let (marked, unmarked) = (gguf(vocabulary()), gguf(without));
    let spelt = |tokenizer: &Tokenizer, text: &str| -> Vec<String> {
        let ids = tokenizer.encode(text, false).unwrap();
        ids.into_iter().map(|id| tokenizer.id_to_token(id).unwrap()).collect()
    };
    for (text, expected, expected_unmarked) in [
        ("<s>hello", &["<s>", "▁hello"][..], &["<s>", "hell", "o"][..]),
        ("<s> hello", &["<s>", "▁", "▁hello"], &["<s>", "▁hello"]),
        (" hello", &["▁", "▁hello"], &["▁hello"]),
        ("  hello", &["▁▁", "▁hello"], &["▁", "▁hello"]),
        (
            "x</s>x<|user|>x",
            &["▁", "x", "</s>", "▁", "x", "<|user|>", "▁", "x"],
            &["x", "</s>", "x", "<|user|>", "x"],
        ),
        ("<s></s>", &["<s>", "</s>"], &["<s>", "</s>"]),
        (" ", &["▁▁"], &["▁"]),
        ("", &[], &[]),
        ("▁hello", &["▁", "▁hello"], &["▁hello"]),
    ] {
        assert_eq!(spelt(&marked, text), expected, "{text:?}");
        assert_eq!(spelt(&unmarked, text), expected_unmarked, "{text:?}");
    }
    assert_eq!(marked.decode(&marked.encode("  hello", false).unwrap(), skipping(false)), "  hello");
}

#[test]
fn digits_are_split_first_if_the_config_says_so() {
    let (smollm, gpt2) = (gguf(byte_level("smollm")), gguf(byte_level("gpt-2")));
    let spelt = |tokenizer: &Tokenizer, text: &str| -> Vec<String> {
        tokenizer
            .encode(text, false)
            .unwrap()
            .into_iter()
            .map(|id| tokenizer.id_to_token(id).unwrap())
            .collect()
    };
    assert_eq!(spelt(&smollm, "  123"), ["ĠĠ", "1", "2", "3"]);
    assert_eq!(spelt(&gpt2, "  123"), ["Ġ", "Ġ", "123"]);
}

#[test]
fn megabyte_without_word_breaks_encodes_like_any_text() {
    let tokenizer = gguf(byte_level("gpt-2"));
    let spaces = tokenizer.token_to_id("ĠĠĠĠ").unwrap();
    let ids = tokenizer.encode(&(" ".repeat(2_000_000) + " hello"), false).unwrap();
    assert_eq!(ids.len(), 500_001);
    assert!(ids[..500_000].iter().all(|&id| id == spaces));
    assert_eq!(ids[500_000], tokenizer.token_to_id("Ġhello").unwrap());
    assert_eq!(tokenizer.encode(&"x".repeat(1_000_000), false).unwrap(), [u32::from(b'x')].repeat(1_000_000));

    let tokenizer = gguf(sentencepiece());
    let ids = tokenizer.encode(&"hello".repeat(200_000), false).unwrap();
    assert_eq!(tokenizer.decode(&ids, skipping(false)), "hello".repeat(200_000));
}

#[test]
fn special_tokens_in_text_are_recognised_exactly() {
    let tokenizer = gguf(byte_level("gpt-2"));
    let (begin, think) =
        (tokenizer.token_to_id("<|begin|>").unwrap(), tokenizer.token_to_id("<think>").unwrap());
    let ids = tokenizer.encode("a<|begin|><think>", false).unwrap();
    assert_eq!(ids, [u32::from(b'a'), begin, think]);
    let look_alike = tokenizer.encode("<|begin |>", false).unwrap();
    assert!(!look_alike.contains(&begin));
    assert_eq!(tokenizer.decode(&ids, skipping(true)), "a<think>");
    assert_eq!(tokenizer.decode(&ids, skipping(false)), "a<|begin|><think>");
}

#[test]
fn bos_and_eos_follow_the_file_or_the_default() {
    let (bos, eos) = (271, 272);
    let x = u32::from(b'x');
    let encode = |pre: &str, add_bos, add_eos| {
        let tokenizer = gguf(GgufVocabulary { add_bos, add_eos, ..byte_level(pre) });
        assert_eq!(tokenizer.encode("x", false).unwrap(), [x]);
        tokenizer.encode("x", true).unwrap()
    };
    assert_eq!(encode("gpt-2", None, None), [x]);
    assert_eq!(encode("gpt-2", Some(true), Some(true)), [bos, x, eos]);
    assert_eq!(encode("llama-bpe", None, None), [bos, x]);
    assert_eq!(encode("llama-bpe", Some(false), Some(true)), [x, eos]);
    let tokenizer = gguf(sentencepiece());
    assert_eq!(tokenizer.encode("hello", true).unwrap()[0], 1);
    let tokenizer = gguf(GgufVocabulary { bos: None, ..sentencepiece() });
    assert_eq!(tokenizer.encode("hello", true).unwrap().len(), 1);
}

#[test]
fn space_prefix_follows_the_file() {
    let with = gguf(sentencepiece());
    let without = gguf(GgufVocabulary { add_space_prefix: Some(false), ..sentencepiece() });
    let hello = |tokenizer: &Tokenizer| tokenizer.encode("hello", false).unwrap();
    assert_eq!(hello(&with), [with.token_to_id("▁hello").unwrap()]);
    assert_ne!(hello(&with), hello(&without));
    assert_eq!(with.decode(&hello(&with), skipping(false)), "hello");
    assert_eq!(without.decode(&hello(&without), skipping(false)), "hello");
    assert_eq!(without.decode(&hello(&with), skipping(false)), " hello");
}

#[test]
fn sentencepiece_without_byte_tokens_encodes_unknown() {
    let mut vocabulary = sentencepiece();
    for token in &mut vocabulary.tokens[3..259] {
        token.insert(0, '#');
    }
    assert_eq!(gguf(vocabulary).encode("hü", false).unwrap()[1..], [0]);
}

#[test]
fn truncation_and_padding_of_the_file_are_ignored() {
    let mut json = byte_level_json();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": null, "pad_id": 0,
                             "pad_type_id": 0, "pad_token": "!"});
    assert_eq!(ours(&json).encode("xyz", false).unwrap().len(), 3);
}

#[test]
fn expression_with_look_behind_matches_the_library() {
    let json = expression_json(r"(?<=a)b+|[^\s]++|\s+(?!\S)|\s+", false, json!({}), Value::Null);
    let (ours, library) = (ours(&json), library(&json));
    for text in ["abbb  ab", "  bab\n \n b", ""] {
        assert_eq!(ours.encode(text, false).unwrap(), library.encode(text, false).unwrap().get_ids());
    }
}

#[test]
fn cancelled_encoding_ends_at_the_next_check() {
    let tokenizer = gguf(byte_level("gpt-2"));
    let text = "hello world ".repeat(2_000);
    let mut num_checks = 0;
    let whole = tokenizer.encode_while(&text, false, usize::MAX, || {
        num_checks += 1;
        true
    });
    assert_eq!(whole.unwrap(), tokenizer.encode(&text, false).unwrap());
    assert!((20..100).contains(&num_checks), "{num_checks} checks for 4000 words");
    for end in [1, 3, num_checks] {
        let mut checked = 0;
        let error = tokenizer.encode_while(&text, false, usize::MAX, || {
            checked += 1;
            checked < end
        });
        assert!(matches!(error, Err(TextError::Cancelled { bytes: 24_000 })), "{error:?}");
        assert_eq!(checked, end);
    }
}

#[test]
fn maximum_refuses_the_texts_with_more_tokens_only() {
    let split = |expression: &str, behavior: &str, invert: bool| {
        let pattern = json!({"Regex": expression});
        json!({"type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert})
    };
    let bytes =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let with = |steps: Vec<Value>| {
        let mut json = byte_level_json();
        json["pre_tokenizer"] = sequence("pretokenizers", steps);
        json
    };
    let mut incomplete = byte_level_json();
    for character in ["!", ".", "a", "b"] {
        incomplete["model"]["vocab"].as_object_mut().unwrap().remove(character);
    }
    let mut with_suffix = byte_level_json();
    with_suffix["model"]["end_of_word_suffix"] = json!("</w>");
    let tokens = ["[UNK]", "a", "##a", "b", "##b", "h", "1"];
    let mut tokenizers = vec![gguf(byte_level("gpt-2")), gguf(sentencepiece())];
    let jsons = [
        byte_level_json(),
        expression_json(LLAMA3, true, json!({"ignore_merges": true}), json!({"type": "NFC"})),
        incomplete,
        with_suffix,
        // Characters outside of the byte-level alphabet have no tokens.
        with(vec![split(GPT2, "Isolated", false)]),
        with(vec![split(r"\w+|\W", "Isolated", false), split(r"\s", "Removed", false), bytes.clone()]),
        with(vec![split(r"\w|\s", "Isolated", false), split(r"\w+", "Removed", true), bytes.clone()]),
        with(vec![split(r"\w", "Contiguous", false), bytes.clone()]),
        with(vec![split(r"\w", "MergedWithNext", false), bytes.clone()]),
        with(vec![split(r"\w", "Removed", false), bytes]),
        wordpiece_json(&tokens),
        unigram_json(&tokens.map(str::to_owned)),
    ];
    tokenizers.extend(jsons.iter().map(ours));
    for (index, tokenizer) in tokenizers.iter().enumerate() {
        proptest!(ProptestConfig::with_cases(64), |(text in text())| {
            let ids = tokenizer.encode(&text, false).unwrap();
            let encode = |max_tokens| tokenizer.encode_while(&text, false, max_tokens, || true);
            prop_assert_eq!(&encode(ids.len()).unwrap(), &ids, "tokenizer {}", index);
            for max_tokens in [ids.len() / 2, ids.len().saturating_sub(1)] {
                if max_tokens < ids.len() {
                    let error = encode(max_tokens).unwrap_err();
                    let is_refused = matches!(error, TextError::TooManyTokens { max_tokens: max } if max == max_tokens);
                    prop_assert!(is_refused, "tokenizer {index}: {error}");
                }
            }
        });
    }
}

#[test]
fn tokens_around_a_text_do_not_count_towards_the_maximum() {
    let tokenizer = gguf(GgufVocabulary { add_bos: Some(true), ..byte_level("gpt-2") });
    assert_eq!(tokenizer.encode_while("xy", true, 2, || true).unwrap().len(), 3);
    assert!(tokenizer.encode_while("xy", true, 1, || true).is_err());
}

#[test]
fn words_beyond_the_maximum_are_not_looked_for() {
    let clip = r"[^\s]+|\s+";
    let mut inverted = expression_json(clip, false, json!({}), Value::Null);
    let step = &mut inverted["pre_tokenizer"]["pretokenizers"][0];
    (step["behavior"], step["invert"]) = (json!("Removed"), json!(true));
    for json in [byte_level_json(), expression_json(LLAMA3, true, json!({}), Value::Null), inverted] {
        let mut num_checks = 0;
        let encoded = ours(&json).encode_while(&"a !".repeat(100_000), false, 1_000, || {
            num_checks += 1;
            true
        });
        assert!(matches!(encoded, Err(TextError::TooManyTokens { max_tokens: 1_000 })), "{encoded:?}");
        assert!(num_checks <= 1_000 / 256 + 1, "{num_checks} checks");
    }
}

#[test]
fn longest_token_is_measured_in_bytes_of_text() {
    assert_eq!(gguf(byte_level("gpt-2")).max_token_bytes(), "<|begin|>".len());
}

#[test]
fn vocabulary_lookups_return_ids_and_tokens() {
    let tokenizer = gguf(byte_level("gpt-2"));
    assert_eq!(tokenizer.vocabulary_size(), 274);
    assert_eq!(tokenizer.token_to_id("<|end|>"), Some(272));
    assert_eq!(tokenizer.id_to_token(272).as_deref(), Some("<|end|>"));
    assert_eq!(tokenizer.id_to_token(274), None);
    assert_eq!(tokenizer.token_to_id("missing"), None);
    let types = byte_level("gpt-2").types;
    assert_eq!(types.iter().filter(|&&token_type| token_type == TokenType::Control).count(), 2);
}

#[test]
fn wordpiece_matches_the_library() {
    let tokens =
        ["[UNK]", "a", "##a", "##aa", "b", "##b", "ab", "##ba", "abba", "é", "##é", "ééé", "##", "漢"];
    let mut json = wordpiece_json(&tokens);
    for limit in [0, 4, 100] {
        json["model"]["max_input_chars_per_word"] = json!(limit);
        for prefix in ["##", ""] {
            json["model"]["continuing_subword_prefix"] = json!(prefix);
            let (ours, library) = (ours(&json), library(&json));
            proptest!(|(text in "([ab]{0,6}|[abé#]{0,4}|漢|c| ){0,6}")| {
                let expected = library.encode(text.as_str(), false).unwrap().get_ids().to_vec();
                prop_assert_eq!(ours.encode(&text, false).unwrap(), expected, "{} {:?}", limit, prefix);
            });
        }
    }
}

#[test]
fn tokens_of_tokenizer_config_keep_their_ids() {
    let token = |id, content: &str, special| AddedToken {
        id,
        content: content.into(),
        special,
        lstrip: false,
        rstrip: false,
        single_word: false,
        normalized: false,
    };
    let source = TokenizerSource::Json(byte_level_json().to_string().into_bytes());
    let added = [token(275, "<b>", false), token(274, "<a>", true), token(273, "<think>", true)];
    let tokenizer = Tokenizer::with_added_tokens(&source, &added).unwrap();
    assert_eq!(tokenizer.encode("<b><a><think>x", false).unwrap(), [275, 274, 273, u32::from(b'x')]);
    assert_eq!(tokenizer.decode(&[275, 274, 273], skipping(true)), "<b>");
    assert_eq!(tokenizer.vocabulary_size(), 276);
    let gap = Tokenizer::with_added_tokens(&source, &[token(999, "<c>", false)]).err().unwrap().to_string();
    assert_eq!(
        gap,
        "tokenizer_config.json: added token \"<c>\" has the id 999, but the vocabulary gives it 274"
    );
}
