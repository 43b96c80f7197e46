//! Encoding, compared with the library's pipelines and with hand-computed ids.

use penstock_checkpoint::{AddedToken, GgufVocabulary, TokenType, TokenizerSource};
use penstock_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocabularies::*;

/// Text that is difficult for tokenizers, with special tokens and similar text.
fn text() -> impl Strategy<Value = String> {
    let part = prop_oneof![
        4 => "[a-zA-Z' ]{0,6}",
        2 => "[ \t\r\n\u{85}\u{3000}]{0,5}",
        2 => "[0-9٣½Ⅷ .,!-]{0,5}",
        2 => "[éß漢字한שع👍🏽\u{200d}\u{301}\u{308}]{0,4}",
        1 => any::<char>().prop_map(String::from),
        1 => proptest::sample::select(vec!["hello", "world", " hello", "<|begin|>", "<|end|>", "<think>", "<|end|", "<s>", "<0x41>", "Ġ", "▁"])
            .prop_map(String::from),
    ];
    proptest::collection::vec(part, 0..8).prop_map(|parts| parts.concat())
}

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

fn error(vocabulary: GgufVocabulary) -> String {
    Tokenizer::new(&TokenizerSource::Gguf(vocabulary)).err().expect("an error").to_string()
}

#[test]
fn gguf_vocabulary_errors_name_field_and_value() {
    let unknown = error(byte_level("missing"));
    let names = "gpt-2, default, phi-2, gigachat, a.x-4.0, mellum, exaone4, jais, trillion, granite-docling, mpt, \
                 olmo, smollm, starcoder, refact, codeshell, exaone, minerva-7b, mellum2, command-r, llama-bpe, \
                 llama3, llama-v3, falcon3, falcon-h1, pixtral, midm-2.0, lfm2, jina-v5-nano, glm4, glm5, chatglm-bpe, \
                 smaug-bpe, dbrx, qwen2, deepseek-r1-qwen, kormo, f2llmv2, megrez, stablelm2, hunyuan, solar-open, \
                 qwen35, tekken";
    let expected = "GGUF field tokenizer.ggml.pre: unknown pre-tokenizer \"missing\"; supported are ";
    assert_eq!(unknown, format!("{expected}{names}"));
    let model = error(GgufVocabulary { model: "bert".into(), ..sentencepiece() });
    assert!(model.starts_with("GGUF field tokenizer.ggml.model: \"bert\" is not supported"), "{model}");
    let merge = error(GgufVocabulary { merges: vec!["h e".into(), "h z".into()], ..byte_level("gpt-2") });
    assert_eq!(
        merge,
        "GGUF field tokenizer.ggml.merges: entry 1, \"h z\", requires the token \"hz\", which is not in the vocabulary"
    );
    let line = error(GgufVocabulary { merges: vec!["he".into()], ..byte_level("gpt-2") });
    assert!(line.contains("entry 0, \"he\", is not two tokens separated by a space"), "{line}");
    assert!(error(GgufVocabulary { merges: vec![], ..byte_level("gpt-2") }).contains("ggml.merges: missing"));
    let scores = error(GgufVocabulary { scores: vec![0.0], ..sentencepiece() });
    assert_eq!(scores, "GGUF field tokenizer.ggml.scores: 1 scores for 278 tokens");
    let bos = error(GgufVocabulary { bos: None, add_bos: Some(true), ..byte_level("gpt-2") });
    assert!(bos.contains("ggml.bos_token_id: missing, but the file asks to add it"), "{bos}");
}

#[test]
fn malformed_tokenizer_json_is_an_error() {
    let new = |bytes: &[u8]| Tokenizer::new(&TokenizerSource::Json(bytes.to_vec())).err();
    assert!(matches!(new(b""), Some(TextError::Json { .. })));
    assert!(matches!(new(b"{\"version\": \"1.0\"}"), Some(TextError::Json { .. })));
    let json = byte_level_json().to_string();
    let message = new(&json.as_bytes()[..json.len() / 2]).unwrap().to_string();
    assert!(
        message.contains("tokenizer.json: EOF") && message.contains("the file is truncated"),
        "{message}"
    );
    let mut overlong = byte_level_json();
    overlong["model"]["vocab"] = json!({"aaaa": 0, "bbbb": 1});
    overlong["model"]["merges"] = json!(["aaaa bbbb"]);
    assert!(matches!(new(overlong.to_string().as_bytes()), Some(TextError::Json { .. })));
    let mut sparse = byte_level_json();
    sparse["model"]["vocab"]["zzz"] = json!(4_000_000_000_u32);
    assert!(matches!(
        new(sparse.to_string().as_bytes()),
        Some(TextError::Vocabulary { largest: 4_000_000_000, .. })
    ));
    let mut decoder = byte_level_json();
    decoder["decoder"] =
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    let message = new(decoder.to_string().as_bytes()).unwrap().to_string();
    assert!(message.contains("\"type\":\"CTC\""), "{message}");
}

/// A step that replaces a text.
fn replace(text: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"String": text}, "content": content})
}

fn sequence(kind: &str, steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", kind: steps})
}

#[test]
fn parts_that_make_texts_much_longer_are_refused() {
    let bytes = |regex: bool| {
        let mut step = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        step["use_regex"] = json!(regex);
        step
    };
    let prepend = |text: &str| json!({"type": "Prepend", "prepend": text});
    let charsmap = |text: &str| json!({"type": "Precompiled", "precompiled_charsmap": text});
    let special = json!({"SpecialToken": {"id": "x", "type_id": 0}});
    let own = json!({"Sequence": {"id": "A", "type_id": 0}});
    let template = |parts: Vec<&Value>, ids: usize| {
        let tokens = json!({"x": {"id": "x", "ids": vec![0; ids], "tokens": vec!["x"; ids]}});
        json!({"type": "TemplateProcessing", "single": parts, "pair": [], "special_tokens": tokens})
    };
    let twice = template(vec![&own, &own], 0);
    let regex = json!({"type": "Replace", "pattern": {"Regex": "a|b"}, "content": "123456789"});
    // A trie of no bytes, then a mapping of 77 bytes.
    let mapping = format!("AAAAAGFh{}", "YWFh".repeat(25));
    for (part, value, expected) in [
        (
            "normalizer",
            replace("a", &"a".repeat(1000)),
            "the content of a Replace has 1000 bytes; the limit is 8",
        ),
        (
            "normalizer",
            sequence("normalizers", vec![replace("abc", &"a".repeat(25))]),
            "25 bytes; the limit is 24",
        ),
        ("normalizer", regex, "9 bytes; the limit is 8"),
        ("normalizer", replace("", "aaaa"), "the pattern of a Replace is empty"),
        ("normalizer", sequence("normalizers", vec![prepend("a"); 65]), "more than 64 steps"),
        ("normalizer", prepend(&"a".repeat(65)), "prepend has 65 bytes; the limit is 64"),
        (
            "normalizer",
            charsmap("/////w=="),
            "precompiled_charsmap has a trie of 4294967295 bytes; there are 0",
        ),
        ("normalizer", charsmap(&mapping), "precompiled_charsmap has a mapping of"),
        ("normalizer", charsmap(&"A".repeat(4000)), "its parts are inconsistent"),
        ("pre_tokenizer", sequence("pretokenizers", vec![bytes(true); 200]), "400 steps; the limit is 64"),
        (
            "pre_tokenizer",
            sequence("pretokenizers", vec![bytes(false); 5]),
            "steps that make 32 bytes of one; the limit is 16",
        ),
        ("post_processor", template(vec![&special; 100_000], 1000), "100000000 added ids; the limit is 256"),
        ("post_processor", template(vec![&own; 1000], 0), "the text 1000 times; the limit is 4"),
        ("post_processor", sequence("processors", vec![twice; 3]), "the text 8 times; the limit is 4"),
        ("post_processor", sequence("processors", vec![bytes(true); 65]), "more than 64 steps"),
        ("decoder", sequence("decoders", vec![replace("a", "aa"); 65]), "decoder: more than 64 steps"),
        (
            "decoder",
            sequence("decoders", vec![replace("e", "ee"); 40]),
            "decoder: it makes a token more than 16 times longer",
        ),
        ("decoder", sequence("decoders", vec![replace("a", &"a".repeat(9))]), "9 bytes; the limit is 8"),
    ] {
        let mut json = byte_level_json();
        json[part] = value;
        let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err();
        let message = error.expect(expected).to_string();
        assert!(
            message.starts_with("tokenizer.json: ") && message.contains(expected),
            "{message}\nexpected: {expected}"
        );
    }
}

#[test]
fn large_expressions_are_refused_before_they_are_compiled() {
    let split = |expression: String| json!({"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false});
    let replace = |expression: String| replace_matches(&expression, "a");
    let compiled = "expressions of more than 2097152 bytes if compiled, the limit for a file";
    let both =
        [("normalizer", replace("(?=[ab])".repeat(150))), ("decoder", replace("(?=[ab])".repeat(150)))];
    let text = json!({"type": "Split", "pattern": {"String": "a".repeat(16_385)}, "behavior": "Isolated",
                      "invert": false});
    for (parts, expected) in [
        (
            vec![("pre_tokenizer", split(r"(?=\w{100})".repeat(600)))],
            "pre_tokenizer: expressions of 1800 parts",
        ),
        (vec![("normalizer", replace(r"(?=\w{100})".repeat(100)))], compiled),
        (vec![("decoder", sequence("decoders", vec![replace(r"(?=\w{100})".repeat(100))]))], compiled),
        (vec![("pre_tokenizer", split(r"(?<=\w{1,4000})a".to_owned()))], compiled),
        (
            vec![(
                "pre_tokenizer",
                sequence("pretokenizers", vec![split(r"\w{130}|\s+(?!\S)|\s+".to_owned()); 60]),
            )],
            compiled,
        ),
        (both.to_vec(), "decoder: expressions of 600 parts; the limit for a file is 512"),
        (
            vec![("pre_tokenizer", text)],
            "pre_tokenizer: expressions of 16385 bytes; the limit for a file is 16384",
        ),
    ] {
        let mut json = byte_level_json();
        let field = parts[parts.len() - 1].0;
        for (part, value) in parts {
            json[part] = value;
        }
        let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err();
        let message = error.expect(expected).to_string();
        assert!(
            message.starts_with(&format!("tokenizer.json: {field}: ")) && message.contains(expected),
            "{message}\nexpected: {expected}"
        );
    }
}

#[test]
fn field_with_expressions_is_in_a_file_once() {
    let json = byte_level_json().to_string();
    let twice = json.strip_suffix('}').unwrap().to_owned() + r#","decoder":null}"#;
    let error = Tokenizer::new(&TokenizerSource::Json(twice.into_bytes())).err().unwrap().to_string();
    assert!(error.starts_with("tokenizer.json: duplicate field `decoder`"), "{error}");
}

#[test]
fn text_that_a_normalizer_makes_much_longer_is_an_error() {
    let mut json = byte_level_json();
    json["normalizer"] = sequence("normalizers", vec![replace("a", "aa"); 40]);
    let tokenizer = ours(&json);
    let error = tokenizer.encode(&"a".repeat(30), false).unwrap_err().to_string();
    let expected =
        "text of 30 bytes cannot be encoded: its normalizer makes the text more than 16 times longer";
    assert_eq!(error, expected);
    assert_eq!(tokenizer.encode("bcd", false).unwrap().len(), 3, "the next text is encoded");
    json["normalizer"] = sequence("normalizers", vec![replace("a", "aa"); 2]);
    assert_eq!(ours(&json).encode("aab", false).unwrap().len(), 9);
}

/// A step that replaces what an expression matches.
fn replace_matches(expression: &str, content: &str) -> Value {
    json!({"type": "Replace", "pattern": {"Regex": expression}, "content": content})
}

/// An expression that takes quadratic time for a run of `a`.
const QUADRATIC: &str = "(?=(a+)+b)a";

#[test]
fn quadratic_expression_of_a_normalizer_is_stopped() {
    let mut json = byte_level_json();
    json["normalizer"] = sequence("normalizers", vec![replace_matches(QUADRATIC, "c")]);
    let tokenizer = ours(&json);
    let text = "a".repeat(60_000);
    // Each part would take a second at least.
    for text in [text.clone(), vec![text; 20].join("<think>")] {
        let error = tokenizer.encode(&text, false).unwrap_err().to_string();
        let reason = "the normalizer of its tokenizer.json takes more than 1s and 10µs per byte";
        assert_eq!(error, format!("text of {} bytes cannot be encoded: {reason}", text.len()));
    }
    assert_eq!(tokenizer.encode("aab", false).unwrap().len(), 3, "the next text is encoded");
}

#[test]
fn quadratic_expression_of_a_decoder_is_stopped() {
    let mut json = byte_level_json();
    json["model"]["vocab"]["a".repeat(60_000)] = json!(274);
    json["decoder"] = sequence("decoders", vec![replace_matches(QUADRATIC, "c")]);
    let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err().unwrap();
    let reason = "the decoder of its tokenizer.json takes more than 1s and 10µs per byte";
    assert_eq!(error.to_string(), format!("tokenizer.json: {reason}"));
}

#[test]
fn added_tokens_are_normalized_in_time() {
    let mut json = byte_level_json();
    json["normalizer"] = replace_matches(QUADRATIC, "c");
    json["added_tokens"] = json!([{"id": 274, "content": "a".repeat(60_000), "single_word": false, "lstrip": false,
                                   "rstrip": false, "normalized": true, "special": false}]);
    let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err().unwrap();
    assert!(error.to_string().contains("the normalizer of its tokenizer.json takes more than"), "{error}");
}

#[test]
fn expression_of_a_normalizer_matches_the_library() {
    let mut json = byte_level_json();
    json["normalizer"] =
        sequence("normalizers", vec![replace_matches(r"(?<!\S)h+|x+", "_"), replace("_", "x")]);
    let (ours, library) = (ours(&json), library(&json));
    proptest!(|(text in text())| {
        let expected = library.encode(text.as_str(), false).unwrap().get_ids().to_vec();
        prop_assert_eq!(ours.encode(&text, false).unwrap(), expected);
    });
}

#[test]
fn growing_parts_of_published_files_are_accepted() {
    let mut json = byte_level_json();
    // The longest mapping of Unicode, of 3 bytes to 33.
    for form in ["NFKC", "NFKD"] {
        json["normalizer"] = json!({"type": form});
        let text = "\u{fdfa}".repeat(1000);
        let expected = library(&json).encode(text.as_str(), false).unwrap().get_ids().to_vec();
        assert_eq!(ours(&json).encode(&text, false).unwrap(), expected);
    }
    let part = json!({"SpecialToken": {"id": "<|begin|>", "type_id": 0}});
    json["post_processor"] = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true},
        {"type": "TemplateProcessing", "single": [part, {"Sequence": {"id": "A", "type_id": 0}}, part], "pair": [],
         "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [271], "tokens": ["<|begin|>"]}}},
    ]});
    assert_eq!(ours(&json).encode("x", true).unwrap(), [271, u32::from(b'x'), 271]);
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

/// WordPiece with words of any length.
fn wordpiece_json(tokens: &[&str]) -> Value {
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let model = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 10_000_000, "vocab": vocab});
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
           "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null, "model": model})
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
fn wordpiece_encodes_a_long_word_in_linear_time() {
    let tokenizer = ours(&wordpiece_json(&["[UNK]", "a", "##a"]));
    let word = "a".repeat(200_000);
    let ids = tokenizer.encode(&word, false).unwrap();
    assert_eq!((ids.len(), ids[0], ids[1]), (200_000, 1, 2));
    assert_eq!(tokenizer.encode(&(word.clone() + "b"), false).unwrap(), [0]);
    let error = tokenizer.encode_while(&word, false, usize::MAX, || false).unwrap_err();
    assert!(matches!(error, TextError::Cancelled { .. }), "{error}");
}

fn unigram_json(tokens: &[String]) -> Value {
    let vocab: Vec<Value> = tokens.iter().map(|token| json!([token, -1.0])).collect();
    let mut json = wordpiece_json(&[]);
    json["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false});
    json
}

fn nested(count: usize) -> Vec<String> {
    (1..=count).rev().map(|length| "a".repeat(length)).collect()
}

#[test]
fn costly_models_are_refused() {
    let bpe = |field: &str, value: Value| {
        let mut json = byte_level_json();
        json["model"][field] = value;
        json
    };
    let mut fallback = bpe("byte_fallback", json!(true));
    fallback["model"]["end_of_word_suffix"] = json!("</w>");
    let mut twice = byte_level_json();
    twice["model"]["vocab"]["a".repeat(65)] = json!(0);
    let long = "a".repeat(513);
    let without_type = |mut json: Value| {
        json["model"].as_object_mut().unwrap().remove("type");
        json
    };
    for (json, expected) in [
        (wordpiece_json(&["[UNK]", &long]), "model: token 1 has 513 bytes; the limit is 512"),
        (without_type(wordpiece_json(&["[UNK]", &long])), "model: token 1 has 513 bytes; the limit is 512"),
        (unigram_json(&["b".to_owned(), long.clone()]), "model: token 1 has 513 bytes; the limit is 512"),
        // The library overflows the stack when it frees this.
        (without_type(unigram_json(&["a".repeat(1_000_000)])), "token 0 has 1000000 bytes; the limit is 512"),
        (unigram_json(&nested(65)), "model: vocab has 65 tokens that begin with each other; the limit is 64"),
        (bpe("unk_token", json!("a".repeat(65))), "model: unk_token has 65 bytes; the limit is 64"),
        (
            bpe("continuing_subword_prefix", json!("a".repeat(65))),
            "model: continuing_subword_prefix has 65 bytes; the limit is 64",
        ),
        (fallback, "model: end_of_word_suffix is not supported with byte_fallback"),
        (bpe("dropout", json!(0.99)), "model: dropout is 0.99; the limit is 0.9"),
        (twice, "model: one of the tokens 0 has 65 bytes; the limit is 64"),
    ] {
        let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err();
        let message = error.expect(expected).to_string();
        assert!(
            message.starts_with("tokenizer.json: ") && message.contains(expected),
            "{message}\n{expected}"
        );
    }
    let unknown = GgufVocabulary { unk: Some(278), ..sentencepiece() };
    let unknown = GgufVocabulary {
        tokens: [unknown.tokens.clone(), vec!["a".repeat(65)]].concat(),
        types: [unknown.types.clone(), vec![TokenType::Unknown]].concat(),
        scores: [unknown.scores.clone(), vec![0.0]].concat(),
        ..unknown
    };
    let expected = "GGUF field tokenizer.ggml.unknown_token_id: a token of 65 bytes; the limit is 64";
    assert_eq!(error(unknown), expected);
}

#[test]
fn models_at_the_limits_match_the_library() {
    let mut tokens = nested(64);
    tokens.push("b".repeat(512));
    let texts = ["a".repeat(1000), "b".repeat(1000), "aab".repeat(100)];
    for json in [unigram_json(&tokens), wordpiece_json(&["[UNK]", "a", "##a", "b", "##b", &tokens[64]])] {
        let (ours, library) = (ours(&json), library(&json));
        for text in &texts {
            let expected = library.encode(text.as_str(), false).unwrap();
            assert_eq!(ours.encode(text, false).unwrap(), expected.get_ids());
        }
    }
}

#[test]
fn costly_added_tokens_are_refused() {
    let with = |content: String, lstrip: bool, rstrip: bool| {
        let mut json = byte_level_json();
        json["added_tokens"] = json!([{"id": 274, "content": content, "single_word": false, "lstrip": lstrip,
                                       "rstrip": rstrip, "normalized": false, "special": false}]);
        Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes()))
            .map_err(|error| error.to_string())
    };
    assert!(with("a".repeat(1000), true, true).is_ok());
    assert!(with(" \n".to_owned(), false, false).is_ok());
    let long = with("a".repeat(1001), false, false).err().unwrap();
    assert_eq!(long, "added token 274 has 1001 bytes; the limit is 1000");
    for (lstrip, rstrip) in [(true, false), (false, true)] {
        let whitespace = with(" \n".to_owned(), lstrip, rstrip).err().unwrap();
        assert_eq!(whitespace, "added token 274 is whitespace; lstrip and rstrip must be false then");
    }
    let mut json = byte_level_json();
    json["normalizer"] = json!({"type": "Replace", "pattern": {"String": "_"}, "content": " "});
    json["added_tokens"] = json!([{"id": 274, "content": "__", "single_word": false, "lstrip": false, "rstrip": true,
                                   "normalized": true, "special": false}]);
    let source = TokenizerSource::Json(json.to_string().into_bytes());
    let normalized = Tokenizer::new(&source).err().unwrap().to_string();
    assert_eq!(normalized, "added token 274 is whitespace; lstrip and rstrip must be false then");
    let mut vocabulary = byte_level("gpt-2");
    vocabulary.tokens[273] = "a".repeat(1001);
    assert_eq!(error(vocabulary), "added token 273 has 1001 bytes; the limit is 1000");
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
