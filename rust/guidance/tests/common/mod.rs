//! Vocabularies, and a walk through a grammar that chooses among the allowed tokens at random.
#![allow(dead_code, reason = "each test binary uses a part")]

pub mod validate;

use std::sync::Arc;
use std::time::Duration;

use penstock_guidance::{Compiler, Grammar, GuidanceError, Guide, Limits, TokenText, Vocabulary};

/// SplitMix64.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        ((u128::from(self.next()) * limit as u128) >> 64) as usize
    }
}

/// A vocabulary and what its tokens say.
pub struct Tokens {
    pub texts: Vec<Vec<u8>>,
    pub end: u32,
    pub vocabulary: Arc<Vocabulary>,
}

pub const SPECIAL: [&str; 5] = ["<|end|>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "</think>"];

/// Every byte, then `words`, then the special tokens.
pub fn tokens(words: &[&[u8]]) -> Tokens {
    let mut texts: Vec<Vec<u8>> = (0..=255).map(|byte| vec![byte]).collect();
    texts.extend(words.iter().map(|word| word.to_vec()));
    let end = texts.len() as u32;
    texts.extend(SPECIAL.map(|name| name.as_bytes().to_vec()));
    let table = texts.iter().enumerate();
    let table = table
        .map(|(id, bytes)| Some(TokenText { bytes: bytes.clone(), special: id >= end as usize }))
        .collect();
    let plain = texts[..end as usize].to_vec();
    let encode = move |text: &str| greedy(&plain, text.as_bytes());
    let vocabulary = Vocabulary::new(table, &[end], Arc::new(encode)).unwrap();
    Tokens { texts, end, vocabulary: Arc::new(vocabulary) }
}

fn greedy(texts: &[Vec<u8>], mut rest: &[u8]) -> Vec<u32> {
    let mut ids = Vec::new();
    while !rest.is_empty() {
        let begins = |id: &usize| rest.starts_with(&texts[*id]);
        let id = (0..texts.len()).filter(begins).max_by_key(|&id| texts[id].len()).unwrap();
        ids.push(id as u32);
        rest = &rest[texts[id].len()..];
    }
    ids
}

pub fn bytes() -> Tokens {
    tokens(&[])
}

/// Words of two to six bytes out of what structured texts are made of, some of them characters of several bytes.
pub fn words(seed: u64, count: usize) -> Tokens {
    const PIECES: [&str; 24] = [
        "\"", "{", "}", "[", "]", ":", ",", " ", ", ", "\": ", "\":", "\",", "a", "b", "name", "0", "12",
        "true", "é", "日本", "🙂", "\\", "\n", "e",
    ];
    let mut random = Random(seed);
    let mut words = std::collections::BTreeSet::new();
    while words.len() < count {
        let text: String = (0..2 + random.below(2)).map(|_| PIECES[random.below(PIECES.len())]).collect();
        let mut word = text.into_bytes();
        // Some tokens begin or end within a character.
        if random.below(8) == 0 && word.len() > 2 {
            word.pop();
        }
        words.insert(word);
    }
    tokens(&words.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// Its results do not depend on how busy the machine is.
pub fn compiler(tokens: &Tokens) -> Compiler {
    compiler_with(tokens, patient())
}

pub fn compiler_with(tokens: &Tokens, limits: Limits) -> Compiler {
    Compiler::new(Arc::clone(&tokens.vocabulary), limits).unwrap()
}

pub fn patient() -> Limits {
    Limits { compile_time: Duration::from_secs(600), ..Limits::default() }
}

pub fn schema(source: &str) -> Grammar {
    Grammar::JsonSchema(source.into())
}

impl Tokens {
    pub fn mask(&self, guide: &mut Guide) -> Result<Vec<u32>, GuidanceError> {
        let mut words = vec![u32::MAX; self.texts.len().div_ceil(32) + 3];
        guide.mask(&mut words)?;
        assert_eq!(words[words.len() - 3..], [0, 0, 0]);
        let allowed: Vec<u32> = (0..words.len() as u32 * 32)
            .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
            .collect();
        assert!(allowed.iter().all(|&id| (id as usize) < self.texts.len()));
        Ok(allowed)
    }

    /// Chooses until the end. After `patience` tokens mostly what brings a text to its end.
    pub fn walk(&self, guide: &mut Guide, random: &mut Random, patience: usize) -> Result<String, String> {
        let mut text = Vec::new();
        for count in 0..patience + 4_000 {
            let allowed = self
                .mask(guide)
                .map_err(|error| format!("{error} after {}", String::from_utf8_lossy(&text)))?;
            let mut forced = Vec::new();
            guide.forced(&mut forced);
            if let Some(first) = forced.first() {
                assert_eq!(allowed, [*first], "what is forced is the only token allowed");
            }
            assert!(!allowed.is_empty());
            let token = if allowed.contains(&self.end) && (count >= patience || random.below(3) == 0) {
                self.end
            } else if count >= patience {
                let finishing: Vec<u32> = allowed.iter().copied().filter(|&id| self.finishes(id)).collect();
                let from = if finishing.is_empty() || random.below(4) == 0 { allowed } else { finishing };
                from[random.below(from.len())]
            } else {
                allowed[random.below(allowed.len())]
            };
            guide.accept(token).map_err(|error| format!("{error}, which the mask allowed"))?;
            if token == self.end {
                assert!(guide.is_complete());
                return String::from_utf8(text).map_err(|error| error.to_string());
            }
            text.extend(&self.texts[token as usize]);
        }
        Err(format!("no end after {} bytes", text.len()))
    }

    /// Whether a token is among those that bring most texts to their end, if they are chosen from at random.
    fn finishes(&self, id: u32) -> bool {
        let text = self.texts[id as usize].as_slice();
        matches!(text, [byte] if b"\"}],:@abz0.".contains(byte)) || text == b"</think>"
    }
}
