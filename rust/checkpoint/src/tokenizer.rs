//! The tokenizer data of a checkpoint: vocabulary, special tokens, added tokens. Plain values, from which the text
//! crate builds a tokenizer.

use serde::{Deserialize, Serialize};

/// The vocabulary as stored in the checkpoint.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum TokenizerSource {
    /// The unparsed bytes of a `tokenizer.json`.
    Json(#[serde(with = "serde_bytes")] Vec<u8>),
    /// The vocabulary in the metadata of a GGUF file.
    Gguf(GgufVocabulary),
}

/// The type of a token in a GGUF vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TokenType {
    /// Ordinary text.
    Normal,
    /// Replaces text that the vocabulary cannot represent.
    Unknown,
    /// Controls the model; not part of user text.
    Control,
    /// Added by the model's authors; matched verbatim in user text.
    UserDefined,
    /// An unused id.
    Unused,
    /// One byte, written `<0x41>`.
    Byte,
}

/// The vocabulary in GGUF metadata (`tokenizer.ggml.*`). Every id is below `tokens.len()`; `scores` and `types` are
/// empty or as long as `tokens`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GgufVocabulary {
    /// The algorithm: `gpt2` is byte-level BPE, `llama` is SentencePiece.
    pub model: String,
    /// Name of the pre-tokenizer of a `gpt2` vocabulary; `default` if the file does not specify it.
    pub pre: String,
    /// Tokens by id, in the algorithm's own spelling.
    pub tokens: Vec<String>,
    /// SentencePiece scores by id.
    pub scores: Vec<f32>,
    /// Types by id.
    pub types: Vec<TokenType>,
    /// BPE merges, best first, each two tokens separated by a space.
    pub merges: Vec<String>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub unk: Option<u32>,
    pub pad: Option<u32>,
    /// Whether encoding prepends `bos`; `None` means the algorithm's default.
    pub add_bos: Option<bool>,
    /// Whether encoding appends `eos`.
    pub add_eos: Option<bool>,
    /// Whether encoding prepends a space to the text.
    pub add_space_prefix: Option<bool>,
}

/// Texts of the tokens that chat templates refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpecialTokens {
    pub bos: Option<String>,
    pub eos: Option<String>,
    pub unk: Option<String>,
    pub pad: Option<String>,
}

/// A token that `tokenizer_config.json` or `added_tokens.json` adds to the vocabulary. Most are also in
/// `tokenizer.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddedToken {
    pub id: u32,
    pub content: String,
    /// Skipped when special tokens are skipped.
    pub special: bool,
    /// Matching removes whitespace before the token.
    pub lstrip: bool,
    /// Matching removes whitespace after the token.
    pub rstrip: bool,
    /// Matches only complete words.
    pub single_word: bool,
    /// Matches in normalised text.
    pub normalized: bool,
}
