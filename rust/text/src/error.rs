//! What can be wrong with a tokenizer, a text or a list of stop strings.

/// An error of this crate: each names the file or field, what it holds and what was expected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The file does not parse, or describes a tokenizer that cannot be built.
    #[error("tokenizer.json: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
    /// A field of GGUF metadata is missing, contradicts another or names something unknown.
    #[error("GGUF field tokenizer.ggml.{field}: {reason}")]
    Gguf {
        /// Name of the field after `tokenizer.ggml.`.
        field: &'static str,
        /// What is wrong with it.
        reason: String,
    },
    /// The tokenizer turns ids into text in a way that no text-generating model does.
    #[error(
        "tokenizer field decoder: {decoder} is not supported; supported are ByteLevel, Metaspace, and a Sequence of \
             Replace, ByteFallback, Fuse and a leading Strip"
    )]
    Decoder {
        /// The decoder as the file has it.
        decoder: String,
    },
    /// An id is too large for any vocabulary.
    #[error("tokenizer field vocab: the largest id is {largest}; the limit is {limit}")]
    Vocabulary {
        /// The largest id of the vocabulary.
        largest: u32,
        /// The largest one allowed.
        limit: u32,
    },
    /// A token added outside `tokenizer.json` contradicts it.
    #[error(
        "tokenizer_config.json: added token {content:?} has the id {id}, but the vocabulary gives it {actual}"
    )]
    AddedToken {
        /// Its text.
        content: String,
        /// The id it is said to have.
        id: u32,
        /// The id it has, or would get as the next one.
        actual: u32,
    },
    /// The text cannot be encoded.
    #[error("text of {bytes} bytes cannot be encoded: {reason}")]
    Encode {
        /// Length of the text.
        bytes: usize,
        /// What the tokenizer says.
        reason: String,
    },
    /// An empty stop string would stop before the first character.
    #[error("stop[{index}] is empty")]
    EmptyStop {
        /// Its place in the list.
        index: usize,
    },
    /// The stop strings are too long to keep ready.
    #[error("stop: the stop strings have {bytes} bytes together; the limit is {limit}")]
    StopsTooLong {
        /// Their length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
}
