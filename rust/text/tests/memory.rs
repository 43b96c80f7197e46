//! Encoding with little memory. The only test of its process, because it limits the allocations of the process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_checkpoint::TokenizerSource;
use penstock_text::{TextError, Tokenizer};
use serde_json::{Value, json};

struct Limited;

static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Blocks are refused beyond this size of all of them.
static LIMIT: AtomicUsize = AtomicUsize::new(usize::MAX);

// SAFETY: every call goes to the system's allocator unchanged, or is refused; counting touches no memory it hands out.
unsafe impl GlobalAlloc for Limited {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        if live > LIMIT.load(Ordering::Relaxed) {
            LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's obligations are passed on as they are.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static LIMITED: Limited = Limited;

fn alphabet() -> Vec<char> {
    let is_plain = |byte: &u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let others = (256..).take(256 - (0..256).filter(is_plain).count());
    (0..256).filter(is_plain).chain(others).filter_map(char::from_u32).collect()
}

fn byte_level(expression: &str, normalizer: Value) -> Tokenizer {
    let vocabulary: serde_json::Map<String, Value> =
        alphabet().iter().enumerate().map(|(id, letter)| (letter.to_string(), json!(id))).collect();
    let steps = json!({"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": false},
        {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
    ]});
    tokenizer(json!({
        "version": "1.0", "added_tokens": [], "normalizer": normalizer, "pre_tokenizer": steps, "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }))
}

fn unigram() -> Tokenizer {
    let pieces: Vec<_> = (0..256).map(|byte| json!([format!("<0x{byte:02X}>"), -20.0])).collect();
    let mut pieces = [vec![json!(["<unk>", 0.0])], pieces].concat();
    pieces.extend(["\u{2581}", "a", "b", "ab"].map(|piece| json!([piece, -2.0])));
    let metaspace =
        json!({"type": "Metaspace", "replacement": "\u{2581}", "prepend_scheme": "always", "split": true});
    tokenizer(json!({
        "version": "1.0", "added_tokens": [], "normalizer": {"type": "NFKC"}, "pre_tokenizer": metaspace,
        "post_processor": null, "decoder": metaspace,
        "model": {"type": "Unigram", "unk_id": 0, "vocab": pieces, "byte_fallback": true},
    }))
}

fn tokenizer(json: Value) -> Tokenizer {
    Tokenizer::new(&TokenizerSource::Json(json.to_string().into_bytes())).unwrap()
}

/// A refused block ends the process, unless it is the one that the encoding asks for first.
#[test]
fn encoding_with_little_memory_fails_before_it_begins() {
    const WORDS: &str = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+";
    let tokenizers = [byte_level(WORDS, Value::Null), byte_level(WORDS, json!({"type": "NFKD"})), unigram()];
    let (mut num_refused, mut num_encoded) = (0, 0);
    for tokenizer in &tokenizers {
        for unit in ["a ", "1", "word ", ",", "\u{e9}", "\u{4f60}\u{597d}", "\u{fdfa}"] {
            let text = unit.repeat((32 << 10) / unit.len());
            tokenizer.encode(&text, true).unwrap(); // fills the caches
            for step in 0..32 {
                LIMIT.store(LIVE.load(Ordering::Relaxed) + (step << 21) + (4 << 10), Ordering::Relaxed);
                let encoded = tokenizer.encode(&text, true);
                LIMIT.store(usize::MAX, Ordering::Relaxed);
                match encoded {
                    Ok(_) => num_encoded += 1,
                    Err(TextError::OutOfMemory { bytes, needed }) => {
                        assert!(bytes == text.len() && needed > 100 * bytes);
                        num_refused += 1;
                    }
                    Err(error) => panic!("{error}"),
                }
            }
        }
    }
    assert!(num_refused > 100 && num_encoded > 100, "{num_refused} {num_encoded}");
}
