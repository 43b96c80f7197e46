//! What a checkpoint says about text: where the vocabulary comes from, which tokens are special, which were added.
//! Plain values; the text crate makes a tokenizer of them.

/// The vocabulary as the checkpoint holds it.
#[derive(Clone, Debug)]
pub enum TokenizerSource {
    /// The bytes of a `tokenizer.json`, not yet parsed.
    Json(Vec<u8>),
    /// The vocabulary in the metadata of a GGUF file.
    Gguf(GgufVocabulary),
}

/// What a GGUF token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TokenType {
    /// An ordinary piece of text.
    Normal,
    /// Stands for what the vocabulary cannot say.
    Unknown,
    /// Steers the model; never part of user text.
    Control,
    /// Added by whoever trained the model; matched verbatim in user text.
    UserDefined,
    /// A hole in the numbering.
    Unused,
    /// One byte, written `<0x41>`.
    Byte,
}

/// A vocabulary out of GGUF metadata (`tokenizer.ggml.*`). Every id is below `tokens.len()`; `scores` and `types` are
/// empty or as long as `tokens`.
#[derive(Clone, Debug, PartialEq)]
pub struct GgufVocabulary {
    /// The algorithm: `gpt2` is byte-level BPE, `llama` is SentencePiece.
    pub model: String,
    /// Which pre-tokenisation a `gpt2` vocabulary was trained with; `default` where the file is silent.
    pub pre: String,
    /// Texts of the tokens by id, in the algorithm's own spelling.
    pub tokens: Vec<String>,
    /// SentencePiece scores by id.
    pub scores: Vec<f32>,
    /// Types by id.
    pub types: Vec<TokenType>,
    /// BPE merges, best first, each two pieces with a space between.
    pub merges: Vec<String>,
    /// Begins a text.
    pub bos: Option<u32>,
    /// Ends a text.
    pub eos: Option<u32>,
    /// Stands for what the vocabulary cannot say.
    pub unk: Option<u32>,
    /// Fills up batches.
    pub pad: Option<u32>,
    /// Whether encoding puts `bos` in front; `None` leaves it to the algorithm's habit.
    pub add_bos: Option<bool>,
    /// Whether encoding puts `eos` at the end.
    pub add_eos: Option<bool>,
    /// Whether encoding puts a space in front of the text.
    pub add_space_prefix: Option<bool>,
}

/// Texts of the tokens that chat templates refer to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    /// `bos_token`.
    pub bos: Option<String>,
    /// `eos_token`.
    pub eos: Option<String>,
    /// `unk_token`.
    pub unk: Option<String>,
    /// `pad_token`.
    pub pad: Option<String>,
}

/// A token that `tokenizer_config.json` or `added_tokens.json` adds to the vocabulary. Most are in `tokenizer.json` as
/// well.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddedToken {
    /// Its id.
    pub id: u32,
    /// Its text.
    pub content: String,
    /// Left out when decoding for people.
    pub special: bool,
    /// Matching swallows white space before it.
    pub lstrip: bool,
    /// Matching swallows white space after it.
    pub rstrip: bool,
    /// Matches whole words only.
    pub single_word: bool,
    /// Matches in the normalised text.
    pub normalized: bool,
}
