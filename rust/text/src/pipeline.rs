//! The `tokenizers` library's encoding pipeline with our splitter, and its loop over the words, which can be cancelled.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_checkpoint::{AddedToken, TRUNCATED};
use tokenizers::tokenizer::Model;
use tokenizers::{
    DecoderWrapper, Encoding, ModelWrapper, NormalizerWrapper, OffsetType, PostProcessorWrapper,
    TokenizerImpl,
};

use crate::error::TextError;
use crate::splitter::Splitter;

pub(crate) type Pipeline =
    TokenizerImpl<ModelWrapper, NormalizerWrapper, Splitter, PostProcessorWrapper, DecoderWrapper>;

/// Parses a `tokenizer.json`. The library panics on some malformed files, such as those with merges longer than any
/// token. Parsing touches only its own result, so the panic is returned as an error.
pub(crate) fn parse(bytes: &[u8]) -> Result<Pipeline, TextError> {
    let reason = |error: serde_json::Error| match error.is_eof() {
        true => format!("{error}; {TRUNCATED}"),
        false => error.to_string(),
    };
    match catch_unwind(AssertUnwindSafe(|| serde_json::from_slice(bytes))) {
        Ok(parsed) => parsed.map_err(|error| TextError::Json { reason: reason(error) }),
        Err(_) => Err(TextError::Json { reason: "its parts are inconsistent".into() }),
    }
}

/// Number of words between two cancellation checks: about a millisecond of encoding.
const WORDS_PER_CHECK: u32 = 256;

/// The encoding was cancelled.
#[derive(Debug)]
pub(crate) struct Cancelled;

impl fmt::Display for Cancelled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("cancelled")
    }
}

impl std::error::Error for Cancelled {}

/// Counts the words of an encoding and checks at intervals whether it is still wanted.
pub(crate) struct CancelCheck<'a> {
    is_wanted: RefCell<&'a mut dyn FnMut() -> bool>,
    words_left: Cell<u32>,
}

impl<'a> CancelCheck<'a> {
    pub(crate) fn new(is_wanted: &'a mut dyn FnMut() -> bool) -> Self {
        Self { is_wanted: RefCell::new(is_wanted), words_left: Cell::new(WORDS_PER_CHECK) }
    }

    /// Counts one word.
    pub(crate) fn count_word(&self) -> Result<(), Cancelled> {
        let left = self.words_left.get() - 1;
        self.words_left.set(if left == 0 { WORDS_PER_CHECK } else { left });
        if left > 0 || (self.is_wanted.borrow_mut())() { Ok(()) } else { Err(Cancelled) }
    }
}

/// Encodes a text, like the library's `encode_fast`.
pub(crate) fn encode(
    pipeline: &Pipeline,
    text: &str,
    add_special_tokens: bool,
    check: &CancelCheck<'_>,
) -> tokenizers::Result<Encoding> {
    let mut words = pipeline.get_added_vocabulary().extract_and_normalize(pipeline.get_normalizer(), text);
    if let Some(splitter) = pipeline.get_pre_tokenizer() {
        splitter.split(&mut words, check)?;
    }
    words.tokenize(|word| {
        check.count_word()?;
        pipeline.get_model().tokenize(word.get())
    })?;
    let encoding = words.into_encoding(None, 0, OffsetType::None)?;
    pipeline.post_process(encoding, None, add_special_tokens)
}

/// Adds tokens in the order of their ids and checks that they get these ids.
pub(crate) fn add_tokens(pipeline: &mut Pipeline, added: &[AddedToken]) -> Result<(), TextError> {
    let mut added: Vec<&AddedToken> = added.iter().collect();
    added.sort_by_key(|token| token.id);
    let tokens = added.iter().map(|token| tokenizers::AddedToken {
        content: token.content.clone(),
        single_word: token.single_word,
        lstrip: token.lstrip,
        rstrip: token.rstrip,
        normalized: token.normalized,
        special: token.special,
    });
    let tokens: Vec<_> = tokens.collect();
    pipeline.add_tokens(tokens).map_err(|error| TextError::Json { reason: error.to_string() })?;
    for token in added {
        // The library ignores tokens without text.
        let Some(actual) = pipeline.token_to_id(&token.content) else { continue };
        if actual != token.id {
            return Err(TextError::AddedToken { content: token.content.clone(), id: token.id, actual });
        }
    }
    Ok(())
}
