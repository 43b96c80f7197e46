//! The `tokenizers` library's encoding pipeline with our splitter.

use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_checkpoint::AddedToken;
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, TokenizerImpl};

use crate::error::TextError;
use crate::splitter::Splitter;

pub(crate) type Pipeline =
    TokenizerImpl<ModelWrapper, NormalizerWrapper, Splitter, PostProcessorWrapper, DecoderWrapper>;

/// Parses a `tokenizer.json`. The library panics on some malformed files, such as those with merges longer than any
/// token. Parsing touches only its own result, so the panic is returned as an error.
pub(crate) fn parse(bytes: &[u8]) -> Result<Pipeline, TextError> {
    match catch_unwind(AssertUnwindSafe(|| serde_json::from_slice(bytes))) {
        Ok(parsed) => parsed.map_err(|error| TextError::Json { reason: error.to_string() }),
        Err(_) => Err(TextError::Json { reason: "its parts are inconsistent".into() }),
    }
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
