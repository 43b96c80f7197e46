//! Files that are refused: malformed ones, and those that would make encoding cost too much.

use penstock_checkpoint::{AddedToken, GgufVocabulary, TokenType, TokenizerSource};
use penstock_text::{TextError, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

use crate::vocabularies::*;

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
fn text_of_a_token_has_a_limit() {
    for (bytes, is_allowed) in [(1024, true), (1025, false)] {
        let token = "a".repeat(bytes);
        let mut bpe = byte_level_json();
        let id = bpe["model"]["vocab"].as_object().unwrap().len();
        bpe["model"]["vocab"][token.as_str()] = json!(id);
        let mut word_level = byte_level_json();
        word_level["model"] =
            json!({"type": "WordLevel", "vocab": {"b": 0, token.as_str(): 1}, "unk_token": "b"});
        word_level["added_tokens"] = json!([]);
        for (json, id) in [(bpe, id), (word_level, 1)] {
            let made = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes()));
            let error = made.err().map(|error| error.to_string());
            let expected =
                format!("token {id} of the vocabulary has a text of {bytes} bytes; the limit is 1024");
            assert_eq!(error, (!is_allowed).then_some(expected));
        }
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
fn added_tokens_of_many_bytes_are_refused() {
    let content = |index: usize| format!("{index:0>1000}");
    let mut json = byte_level_json();
    let token = |index| {
        json!({"id": 274 + index, "content": content(index), "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": false})
    };
    json["added_tokens"] = (0..4195).map(token).collect();
    let error = Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).err().unwrap();
    let expected = "tokenizer.json: added_tokens: 4195000 bytes in all; the limit is 4194304";
    assert!(error.to_string().starts_with(expected), "{error}");
    let mut vocabulary = byte_level("gpt-2");
    vocabulary.tokens.extend((0..4195).map(content));
    vocabulary.types.extend([TokenType::UserDefined; 4195]);
    let message = self::error(vocabulary);
    assert!(message.starts_with("GGUF field tokenizer.ggml.tokens: verbatim tokens: 4195"), "{message}");
    let token = |id: u32| AddedToken {
        id,
        content: content(id as usize),
        special: false,
        lstrip: false,
        rstrip: false,
        single_word: false,
        normalized: false,
    };
    let added: Vec<_> = (274..4469).map(token).collect();
    let source = TokenizerSource::Json(byte_level_json().to_string().into_bytes());
    let error = Tokenizer::with_added_tokens(&source, &added).err().unwrap();
    assert!(error.to_string().contains("added tokens: 4195000 bytes in all"), "{error}");
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
fn wordpiece_encodes_a_long_word_in_linear_time() {
    let tokenizer = ours(&wordpiece_json(&["[UNK]", "a", "##a"]));
    let word = "a".repeat(200_000);
    let ids = tokenizer.encode(&word, false).unwrap();
    assert_eq!((ids.len(), ids[0], ids[1]), (200_000, 1, 2));
    assert_eq!(tokenizer.encode(&(word.clone() + "b"), false).unwrap(), [0]);
    let error = tokenizer.encode_while(&word, false, usize::MAX, || false).unwrap_err();
    assert!(matches!(error, TextError::Cancelled { .. }), "{error}");
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
