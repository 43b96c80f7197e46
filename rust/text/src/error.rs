//! Errors of tokenizers, encoding and stop strings.

/// Each error names the file or field, its value and what is expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file is malformed or describes an unsupported tokenizer.
    #[error("tokenizer.json: {reason}")]
    Json { reason: String },
    /// A field of the GGUF metadata is missing, unsupported or inconsistent with another field.
    #[error("GGUF field tokenizer.ggml.{field}: {reason}")]
    Gguf {
        /// Name of the field after `tokenizer.ggml.`.
        field: &'static str,
        reason: String,
    },
    /// The tokenizer's decoder is not supported.
    #[error(
        "tokenizer field decoder: {decoder} is not supported; supported are ByteLevel, Metaspace, and a Sequence of \
             Replace, ByteFallback, Fuse and a leading Strip"
    )]
    Decoder {
        /// The decoder as JSON.
        decoder: String,
    },
    /// A token id exceeds the limit.
    #[error("tokenizer field vocab: the largest id is {largest}; the limit is {limit}")]
    Vocabulary { largest: u32, limit: u32 },
    /// The text of a token exceeds the limit.
    #[error("token {id} of the vocabulary has a text of {bytes} bytes; the limit is {limit}")]
    LongToken { id: u32, bytes: usize, limit: usize },
    /// The id of an added token is inconsistent with `tokenizer.json`.
    #[error(
        "tokenizer_config.json: added token {content:?} has the id {id}, but the vocabulary gives it {actual}"
    )]
    AddedToken {
        content: String,
        /// The id in `tokenizer_config.json`.
        id: u32,
        /// The id in the vocabulary, or the next free id.
        actual: u32,
    },
    /// Finding the token in a text would take long.
    #[error("added token {id} {problem}")]
    CostlyToken {
        id: u32,
        /// The property and its limit.
        problem: String,
    },
    /// The text cannot be encoded.
    #[error("text of {bytes} bytes cannot be encoded: {reason}")]
    Encode { bytes: usize, reason: String },
    /// Memory for the encoding is refused.
    #[error("a text of {bytes} bytes needs {needed} bytes of memory to be encoded, which are not available")]
    OutOfMemory {
        bytes: usize,
        /// The memory that is needed.
        needed: usize,
    },
    /// The text has more tokens than the caller allows.
    #[error("the text has more than {max_tokens} tokens")]
    TooManyTokens { max_tokens: usize },
    /// The caller cancelled the encoding.
    #[error("the encoding of a text of {bytes} bytes was cancelled")]
    Cancelled { bytes: usize },
    /// A stop string is empty.
    #[error("stop[{index}] is empty")]
    EmptyStop { index: usize },
    /// The stop strings exceed the limit on their total length.
    #[error("stop: the stop strings have {bytes} bytes in total; the limit is {limit}")]
    StopsTooLong { bytes: usize, limit: usize },
}
