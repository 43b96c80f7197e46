//! The tokenizer: text to ids, ids to text.
//!
//! Encoding is the `tokenizers` library's pipeline with our [`Splitter`] in it. Decoding is ours, so that a
//! stream of ids and all ids at once go through the same code; tests hold it against the library's decoder.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use penstock_checkpoint::{AddedToken, TokenizerSource};
use tokenizers::{DecoderWrapper, ModelWrapper, NormalizerWrapper, PostProcessorWrapper, TokenizerImpl};

use crate::detokenizer::Detokenizer;
use crate::pieces::{Pieces, Rule, Token};
use crate::splitter::Splitter;
use crate::{TextError, TextOptions, gguf};

/// What an id adds to a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBytes<'a> {
    /// Its bytes, often not whole characters; of a special token, its name.
    pub bytes: &'a [u8],
    /// Whether it is a special token, which a text may leave out.
    pub special: bool,
}

/// The library's pipeline, cutting words with our splitter.
pub(crate) type Pipeline =
    TokenizerImpl<ModelWrapper, NormalizerWrapper, Splitter, PostProcessorWrapper, DecoderWrapper>;

/// Encodes text and decodes ids. Cloning shares the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    shared: Arc<Shared>,
}

struct Shared {
    pipeline: Pipeline,
    pieces: Pieces,
    rule: Rule,
}

impl Tokenizer {
    /// Builds the tokenizer that a file describes.
    pub fn new(source: &TokenizerSource) -> Result<Self, TextError> {
        Self::with_added_tokens(source, &[])
    }

    /// The same, with the tokens that `tokenizer_config.json` adds or describes anew.
    pub fn with_added_tokens(source: &TokenizerSource, added: &[AddedToken]) -> Result<Self, TextError> {
        let mut pipeline = match source {
            TokenizerSource::Json(bytes) => parse(bytes)?,
            TokenizerSource::Gguf(vocabulary) => gguf::build(vocabulary)?,
        };
        add_tokens(&mut pipeline, added)?;
        // Prompts are cut to length by whoever knows the model's limit, and never padded.
        pipeline.with_truncation(None).map_err(|error| TextError::Json { reason: error.to_string() })?;
        pipeline.with_padding(None);
        let largest = pipeline.get_vocab(true).into_values().max().unwrap_or(0);
        let added = pipeline.get_added_vocabulary();
        let (pieces, rule) = Pieces::new(pipeline.get_decoder(), largest, |id| {
            let spelling = pipeline.id_to_token(id)?;
            let special = added.is_special_token(&spelling);
            let added = added.get_added_tokens_decoder().contains_key(&id);
            Some(Token { spelling, special, added })
        })?;
        Ok(Self { shared: Arc::new(Shared { pipeline, pieces, rule }) })
    }

    /// The ids of `text`. The text of a special token, where it occurs, becomes that token;
    /// `add_special_tokens` adds those that the tokenizer puts around a text, such as BOS.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.shared.pipeline.encode_fast(text, add_special_tokens);
        let encoding =
            encoding.map_err(|error| TextError::Encode { bytes: text.len(), reason: error.to_string() })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of `ids`, as a [`TextStream`](crate::TextStream) without stop strings gives it. Ids outside
    /// the vocabulary say nothing; bytes that are no character become U+FFFD.
    pub fn decode(&self, ids: &[u32], options: TextOptions) -> String {
        let mut detokenizer = Detokenizer::new(self.rule(), options);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(self.pieces(), id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// One more than the largest id.
    pub fn vocabulary_size(&self) -> usize {
        self.shared.pieces.len()
    }

    /// The id of a token, spelt as the vocabulary spells it.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.shared.pipeline.token_to_id(token)
    }

    /// The token of an id, spelt as the vocabulary spells it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.shared.pipeline.id_to_token(id)
    }

    /// Whether the text of ids is the bytes of each, one after the other, so that [`Self::token_bytes`] knows
    /// them. It is not in vocabularies of words, with spaces between them.
    pub fn has_token_bytes(&self) -> bool {
        self.rule() != Rule::Spaced
    }

    /// What an id adds in the middle of a text where special tokens are shown; the first id of a text may add
    /// a space less. None for an id outside the vocabulary, and for all without [`Self::has_token_bytes`].
    pub fn token_bytes(&self, id: u32) -> Option<TokenBytes<'_>> {
        let piece = self.pieces().get(id).filter(|_| self.has_token_bytes())?;
        Some(TokenBytes { bytes: piece.bytes, special: piece.special })
    }

    pub(crate) fn pieces(&self) -> &Pieces {
        &self.shared.pieces
    }

    pub(crate) fn rule(&self) -> Rule {
        self.shared.rule
    }
}

/// Adds tokens in the order of their ids, and makes sure that they have them.
fn add_tokens(pipeline: &mut Pipeline, added: &[AddedToken]) -> Result<(), TextError> {
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

/// Parses a `tokenizer.json`. The library panics on some malformed ones, such as merges longer than any
/// token; parsing touches nothing but its own result, so a panic is an error like others.
fn parse(bytes: &[u8]) -> Result<Pipeline, TextError> {
    match catch_unwind(AssertUnwindSafe(|| serde_json::from_slice(bytes))) {
        Ok(parsed) => parsed.map_err(|error| TextError::Json { reason: error.to_string() }),
        Err(_) => Err(TextError::Json { reason: "its parts contradict each other".into() }),
    }
}
