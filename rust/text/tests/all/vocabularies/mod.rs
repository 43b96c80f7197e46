//! Small vocabularies of every kind, and texts that are difficult for them.

use penstock_checkpoint::{GgufVocabulary, TokenType, TokenizerSource};
use penstock_text::{TextOptions, Tokenizer};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The byte-level alphabet: the character of each byte.
pub fn alphabet() -> Vec<char> {
    let printable = |byte: u32| matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 0x100;
    (0..256)
        .map(|byte| {
            let code = if printable(byte) { byte } else { next };
            next += u32::from(!printable(byte));
            char::from_u32(code).unwrap()
        })
        .collect()
}

/// Byte-level: ids 0..256 are the bytes, then merged tokens, then `<|begin|>`, `<|end|>` and the plain
/// `<think>`.
pub fn byte_level(pre: &str) -> GgufVocabulary {
    let mut tokens: Vec<String> = alphabet().into_iter().map(String::from).collect();
    let mut types = vec![TokenType::Normal; 256];
    let merges = [
        "h e",
        "l l",
        "he ll",
        "hell o",
        "Ġ hello",
        "Ġ Ġ",
        "ĠĠ ĠĠ",
        "Ċ Ċ",
        "1 2",
        "12 3",
        "Ã ©",
        "ð Ł",
        "ðŁ ĳ",
        "Ġ 1",
    ];
    for merge in merges {
        tokens.push(merge.replace(' ', ""));
        types.push(TokenType::Normal);
    }
    // A word that merges cannot produce.
    tokens.push("world".into());
    types.push(TokenType::Normal);
    let bos = tokens.len() as u32;
    for (token, token_type) in [
        ("<|begin|>", TokenType::Control),
        ("<|end|>", TokenType::Control),
        ("<think>", TokenType::UserDefined),
    ] {
        tokens.push(token.into());
        types.push(token_type);
    }
    GgufVocabulary {
        model: "gpt2".into(),
        pre: pre.into(),
        tokens,
        scores: Vec::new(),
        types,
        merges: merges.map(String::from).to_vec(),
        bos: Some(bos),
        eos: Some(bos + 1),
        unk: None,
        pad: None,
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
    }
}

/// SentencePiece: `<unk>`, `<s>`, `</s>`, the 256 bytes from id 3 on, then pieces with falling scores.
pub fn sentencepiece() -> GgufVocabulary {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    let mut types = vec![TokenType::Unknown, TokenType::Control, TokenType::Control];
    for byte in 0..256 {
        tokens.push(format!("<0x{byte:02X}>"));
        types.push(TokenType::Byte);
    }
    let pieces = [
        "he", "ll", "▁h", "▁he", "hell", "▁hell", "▁hello", "▁▁", "▁", "h", "e", "l", "o", "w", "r", "d",
        "é", "1", "x",
    ];
    let mut scores = vec![0.0; tokens.len()];
    for (rank, piece) in pieces.into_iter().enumerate() {
        tokens.push(piece.into());
        types.push(TokenType::Normal);
        scores.push(-(rank as f32));
    }
    GgufVocabulary {
        model: "llama".into(),
        pre: "default".into(),
        tokens,
        scores,
        types,
        merges: Vec::new(),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        pad: None,
        add_bos: None,
        add_eos: None,
        add_space_prefix: None,
    }
}

/// The `tokenizer.json` with the vocabulary and merges of `from` and the given parts.
pub fn tokenizer_json(from: &GgufVocabulary, model: Value, pre_tokenizer: Value, decoder: Value) -> Value {
    let vocab: serde_json::Map<String, Value> =
        from.tokens.iter().enumerate().map(|(id, token)| (token.clone(), json!(id))).collect();
    let added: Vec<Value> = from
        .tokens
        .iter()
        .enumerate()
        .filter(|&(id, _)| {
            matches!(from.types[id], TokenType::Control | TokenType::Unknown | TokenType::UserDefined)
        })
        .map(|(id, token)| {
            json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false,
                   "normalized": false, "special": from.types[id] != TokenType::UserDefined})
        })
        .collect();
    let mut bpe = json!({"type": "BPE", "vocab": vocab, "merges": from.merges});
    bpe.as_object_mut().unwrap().extend(model.as_object().unwrap().clone());
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
           "pre_tokenizer": pre_tokenizer, "post_processor": null, "decoder": decoder, "model": bpe})
}

/// The library's own byte-level pipeline with the expression of GPT-2.
pub fn byte_level_json() -> Value {
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    tokenizer_json(&self::byte_level("gpt-2"), json!({}), byte_level.clone(), byte_level)
}

/// The decoder of SentencePiece tokenizers. `strip` removes the prefix space.
pub fn sentencepiece_decoder(strip: bool) -> Value {
    let mut decoders = vec![
        json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
        json!({"type": "ByteFallback"}),
        json!({"type": "Fuse"}),
    ];
    if strip {
        decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    }
    json!({"type": "Sequence", "decoders": decoders})
}

/// A SentencePiece vocabulary with a decoder, or without one if null.
pub fn sentencepiece_json(decoder: Value) -> Value {
    let model = json!({"byte_fallback": true, "fuse_unk": true});
    let mut json = tokenizer_json(&sentencepiece(), model, Value::Null, decoder);
    json["normalizer"] = json!({"type": "Sequence", "normalizers": [
        {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]});
    json
}

/// Every kind of decoder of text generation models.
pub fn decoders() -> Vec<(&'static str, Value)> {
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

/// Default options, with special tokens skipped or not.
pub fn skipping(skip_special_tokens: bool) -> TextOptions {
    TextOptions { skip_special_tokens, ..TextOptions::default() }
}

/// Our tokenizer.
pub fn ours(json: &Value) -> Tokenizer {
    Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).unwrap()
}

/// The library's tokenizer, as the reference.
pub fn library(json: &Value) -> tokenizers::Tokenizer {
    tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap()
}

/// Our tokenizer of a GGUF vocabulary.
pub fn gguf(vocabulary: GgufVocabulary) -> Tokenizer {
    Tokenizer::new(&TokenizerSource::Gguf(vocabulary)).unwrap()
}

/// Text that is difficult for tokenizers, with special tokens and similar text.
pub fn text() -> impl Strategy<Value = String> {
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

/// A step that applies others in turn.
pub fn sequence(kind: &str, steps: Vec<Value>) -> Value {
    json!({"type": "Sequence", kind: steps})
}

/// WordPiece with words of any length.
pub fn wordpiece_json(tokens: &[&str]) -> Value {
    let vocab: serde_json::Map<String, Value> =
        tokens.iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    let model = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 10_000_000, "vocab": vocab});
    json!({"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
           "pre_tokenizer": {"type": "Whitespace"}, "post_processor": null, "decoder": null, "model": model})
}

/// Unigram in which every token has the same score.
pub fn unigram_json(tokens: &[String]) -> Value {
    let vocab: Vec<Value> = tokens.iter().map(|token| json!([token, -1.0])).collect();
    let mut json = wordpiece_json(&[]);
    json["model"] = json!({"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": false});
    json
}
