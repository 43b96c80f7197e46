//! Test vocabularies, and generation of random texts from masks.

pub mod validate;

use std::sync::Arc;
use std::time::Duration;

use penstock_guidance::{
    GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits, TokenText, ToolCallSpec,
    ToolSpec, Vocabulary,
};

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

/// A vocabulary and the texts of its tokens.
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

/// Random words made of pieces of structured text, some with characters of several bytes.
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
        // Some tokens end inside a character.
        if random.below(8) == 0 && word.len() > 2 {
            word.pop();
        }
        words.insert(word);
    }
    tokens(&words.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

/// A compiler whose results do not depend on the load of the machine.
pub fn compiler(tokens: &Tokens) -> GrammarCompiler {
    compiler_with(tokens, untimed_limits())
}

pub fn compiler_with(tokens: &Tokens, limits: GuidanceLimits) -> GrammarCompiler {
    GrammarCompiler::new(Arc::clone(&tokens.vocabulary), limits).unwrap()
}

pub fn untimed_limits() -> GuidanceLimits {
    GuidanceLimits { compile_time: Duration::from_secs(600), ..GuidanceLimits::default() }
}

pub fn tool(name: &str, schema: &str) -> ToolSpec {
    ToolSpec { name: name.to_owned(), schema: schema.to_owned(), ignores_unsupported: false }
}

/// Calls with these literals (opening, call opening, call closing, separator, closing) and keys (name, arguments).
pub fn tool_calls(
    tools: Vec<ToolSpec>,
    literals: [&str; 5],
    keys: [&str; 2],
    parallel: bool,
) -> ToolCallSpec {
    let [opening, call_opening, call_closing, separator, closing] = literals.map(str::to_owned);
    let [name_key, arguments_key] = keys.map(str::to_owned);
    ToolCallSpec {
        opening,
        call_opening,
        name_key,
        arguments_key,
        call_closing,
        separator,
        closing,
        tools,
        parallel,
        reasoning: None,
    }
}

pub fn schema(source: &str) -> GrammarSpec {
    GrammarSpec::JsonSchema(source.into())
}

impl Tokens {
    /// The ids of a text, which are those of the longest words.
    pub fn spell(&self, text: &str) -> Vec<u32> {
        greedy(&self.texts[..self.end as usize], text.as_bytes())
    }

    pub fn mask(&self, matcher: &mut GrammarMatcher) -> Result<Vec<u32>, GuidanceError> {
        let mut words = vec![u32::MAX; self.texts.len().div_ceil(32) + 3];
        matcher.mask(&mut words)?;
        assert_eq!(words[words.len() - 3..], [0, 0, 0]);
        let allowed: Vec<u32> = (0..words.len() as u32 * 32)
            .filter(|id| words[*id as usize / 32] >> (id % 32) & 1 == 1)
            .collect();
        assert!(allowed.iter().all(|&id| (id as usize) < self.texts.len()));
        Ok(allowed)
    }

    /// Generates a random text. After `length` tokens, mostly tokens that tend to end the text are chosen.
    pub fn generate(
        &self,
        matcher: &mut GrammarMatcher,
        random: &mut Random,
        length: usize,
    ) -> Result<String, String> {
        let mut text = Vec::new();
        for count in 0..length + 4_000 {
            let allowed = self
                .mask(matcher)
                .map_err(|error| format!("{error} after {}", String::from_utf8_lossy(&text)))?;
            let mut forced = Vec::new();
            matcher.forced_tokens(&mut forced);
            if let Some(first) = forced.first() {
                assert_eq!(allowed, [*first], "a forced token is the only token allowed");
            }
            assert!(!allowed.is_empty());
            let token = if allowed.contains(&self.end) && (count >= length || random.below(3) == 0) {
                self.end
            } else if count >= length {
                let finishing: Vec<u32> = allowed.iter().copied().filter(|&id| self.finishes(id)).collect();
                let from = if finishing.is_empty() || random.below(4) == 0 { allowed } else { finishing };
                from[random.below(from.len())]
            } else {
                allowed[random.below(allowed.len())]
            };
            matcher.accept(token).map_err(|error| format!("{error}, which the mask allowed"))?;
            if token == self.end {
                assert!(matcher.is_complete());
                return String::from_utf8(text).map_err(|error| error.to_string());
            }
            text.extend(&self.texts[token as usize]);
        }
        Err(format!("no end after {} bytes", text.len()))
    }

    /// Whether a token tends to end texts when chosen at random.
    fn finishes(&self, id: u32) -> bool {
        let text = self.texts[id as usize].as_slice();
        matches!(text, [byte] if b"\"}],:@abz0.".contains(byte)) || text == b"</think>"
    }
}
