//! Pre-tokenisations by the name that GGUF files give them in `tokenizer.ggml.pre`.
//!
//! A GGUF file carries the vocabulary but not how text was cut before its merges were learned; it only names
//! it. Each recipe says what the name stands for in the models' own `tokenizer.json`.

use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::TextError;
use crate::splitter::GPT2;

/// How a byte-level vocabulary is to be used.
#[derive(Debug)]
pub(crate) struct Recipe {
    names: &'static [&'static str],
    /// Cuts the text into words.
    expression: &'static str,
    /// Whether every digit is a word of its own, cut before anything else.
    single_digits: bool,
    /// Whether text is brought to Unicode's composed form first.
    pub(crate) composed: bool,
    /// Whether a word that is a token is that token, even if the merges lead elsewhere.
    pub(crate) whole_words_first: bool,
    /// Whether encoding begins with the BOS token where the file does not say.
    pub(crate) add_bos: bool,
}

const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const QWEN35: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}",
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const TEKKEN: &str = concat!(
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);

const BASE: Recipe = Recipe {
    names: &["gpt-2", "default"],
    expression: GPT2,
    single_digits: false,
    composed: false,
    whole_words_first: false,
    add_bos: false,
};

const RECIPES: &[Recipe] = &[
    BASE,
    Recipe { names: &["smollm", "starcoder"], single_digits: true, ..BASE },
    Recipe {
        names: &["llama-bpe", "llama3", "llama-v3"],
        expression: LLAMA3,
        whole_words_first: true,
        add_bos: true,
        ..BASE
    },
    Recipe { names: &["qwen2"], expression: QWEN2, composed: true, ..BASE },
    Recipe { names: &["qwen35"], expression: QWEN35, composed: true, ..BASE },
    Recipe { names: &["tekken"], expression: TEKKEN, whole_words_first: true, add_bos: true, ..BASE },
];

impl Recipe {
    pub(crate) fn named(name: &str) -> Result<&'static Self, TextError> {
        RECIPES.iter().find(|recipe| recipe.names.contains(&name)).ok_or_else(|| {
            let known: Vec<_> = RECIPES.iter().flat_map(|recipe| recipe.names).copied().collect();
            TextError::Gguf {
                field: "pre",
                reason: format!("{name:?} is not known; known are {}", known.join(", ")),
            }
        })
    }

    pub(crate) fn pre_tokenizer(&self) -> tokenizers::Result<PreTokenizerWrapper> {
        let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
        if self.single_digits {
            steps.push(Digits::new(true).into());
        }
        let pattern = SplitPattern::Regex(self.expression.to_owned());
        steps.push(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into());
        steps.push(ByteLevel::new(false, false, false).into());
        Ok(Sequence::new(steps).into())
    }
}
