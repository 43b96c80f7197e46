//! Configurations of byte-level tokenizers by their names in GGUF files.
//!
//! A GGUF file contains the vocabulary, but of the pre-tokenizer only the name, in `tokenizer.ggml.pre`. Each
//! configuration here corresponds to the `tokenizer.json` of the models with these names: a converter gives the
//! tokenizers that differ in anything, for example in their BOS token, different names.

use tokenizers::SplitDelimiterBehavior;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};

use crate::error::TextError;
use crate::splitter::GPT2;

/// The configuration of a byte-level tokenizer apart from its vocabulary.
#[derive(Debug)]
pub(crate) struct TokenizerConfig {
    names: &'static [&'static str],
    /// Regular expression of the words.
    pub(crate) expression: &'static str,
    /// Split every digit into a word of its own, before the expression is applied.
    single_digits: bool,
    /// Normalise text to Unicode's NFC first.
    pub(crate) nfc: bool,
    /// Encode a word that is a token as that token, even if the merges lead to others.
    pub(crate) ignore_merges: bool,
    /// Default for adding the BOS token, if the file does not specify it.
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

const BASE: TokenizerConfig = TokenizerConfig {
    names: &[
        "gpt-2",
        "default",
        "phi-2",
        "gigachat",
        "a.x-4.0",
        "mellum",
        "exaone4",
        "jais",
        "trillion",
        "granite-docling",
    ],
    expression: GPT2,
    single_digits: false,
    nfc: false,
    ignore_merges: false,
    add_bos: false,
};

pub(crate) const CONFIGS: &[TokenizerConfig] = &[
    BASE,
    TokenizerConfig { names: &["mpt", "olmo"], nfc: true, ..BASE },
    TokenizerConfig {
        names: &["smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2"],
        single_digits: true,
        ..BASE
    },
    TokenizerConfig { names: &["command-r"], single_digits: true, nfc: true, ..BASE },
    TokenizerConfig {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        expression: LLAMA3,
        ignore_merges: true,
        add_bos: true,
        ..BASE
    },
    TokenizerConfig { names: &["glm4", "glm5"], expression: LLAMA3, ignore_merges: true, ..BASE },
    TokenizerConfig { names: &["chatglm-bpe", "smaug-bpe", "dbrx"], expression: LLAMA3, ..BASE },
    TokenizerConfig {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "megrez",
            "stablelm2",
            "hunyuan",
            "solar-open",
        ],
        expression: QWEN2,
        nfc: true,
        ..BASE
    },
    TokenizerConfig { names: &["qwen35"], expression: QWEN35, ..BASE },
    TokenizerConfig { names: &["tekken"], expression: TEKKEN, ignore_merges: true, add_bos: true, ..BASE },
];

impl TokenizerConfig {
    pub(crate) fn named(name: &str) -> Result<&'static Self, TextError> {
        CONFIGS.iter().find(|config| config.names.contains(&name)).ok_or_else(|| {
            let known: Vec<_> = CONFIGS.iter().flat_map(|config| config.names).copied().collect();
            TextError::Gguf {
                field: "pre",
                reason: format!("unknown pre-tokenizer {name:?}; supported are {}", known.join(", ")),
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
