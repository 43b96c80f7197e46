//! The tokenizer: encodes text to ids and decodes ids to text.
//!
//! Encoding uses the `tokenizers` library's pipeline with our splitter. Decoding is our own code, shared by streaming
//! and one-shot decoding; tests compare it with the library's decoder.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use penstock_checkpoint::{AddedToken, TokenizerSource};

use crate::detokenizer::Detokenizer;
use crate::encode_check::{Cancelled, EncodeCheck, TooManyTokens};
use crate::error::TextError;
use crate::gguf;
use crate::options::TextOptions;
use crate::pipeline::{self, NoMemory, Pipeline};
use crate::token_table::{DecodeRule, TokenTable, VocabularyToken};

/// The text of one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBytes<'a> {
    /// The token's bytes, not always complete characters; for a special token its name.
    pub bytes: &'a [u8],
    pub special: bool,
}

/// Encodes text and decodes ids. Cloning shares the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<TokenizerInner>,
}

struct TokenizerInner {
    pipeline: Pipeline,
    table: TokenTable,
    rule: DecodeRule,
}

impl Tokenizer {
    /// Builds a tokenizer from a file's description.
    pub fn new(source: &TokenizerSource) -> Result<Self, TextError> {
        Self::with_added_tokens(source, &[])
    }

    /// Like [`new`](Self::new), with the added tokens of `tokenizer_config.json`.
    pub fn with_added_tokens(source: &TokenizerSource, added: &[AddedToken]) -> Result<Self, TextError> {
        let mut pipeline = match source {
            TokenizerSource::Json(bytes) => pipeline::parse(bytes)?,
            TokenizerSource::Gguf(vocabulary) => gguf::build(vocabulary)?,
        };
        pipeline::add_tokens(&mut pipeline, added)?;
        pipeline::check_added_tokens(&pipeline)?;
        // The caller truncates prompts to the model's limit. Prompts are never padded.
        pipeline.with_truncation(None).map_err(|error| TextError::Json { reason: error.to_string() })?;
        pipeline.with_padding(None);
        pipeline::probe(&pipeline)?;
        let largest = pipeline.get_vocab(true).into_values().max().unwrap_or(0);
        let added = pipeline.get_added_vocabulary();
        let (table, rule) = TokenTable::new(pipeline.get_decoder(), largest, |id| {
            let spelling = pipeline.id_to_token(id)?;
            let special = added.is_special_token(&spelling);
            let added = added.get_added_tokens_decoder().contains_key(&id);
            Some(VocabularyToken { spelling, special, added })
        })?;
        Ok(Self { inner: Arc::new(TokenizerInner { pipeline, table, rule }) })
    }

    /// Encodes text. The text of a special token is encoded as that token. `add_special_tokens` adds the tokens that
    /// the tokenizer puts around a text, such as BOS.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, TextError> {
        self.encode_while(text, add_special_tokens, usize::MAX, || true)
    }

    /// Like [`encode`](Self::encode), but ends with [`TextError::Cancelled`] when `is_wanted` returns false. It is
    /// called about once per millisecond, except within a single word. Ends with [`TextError::TooManyTokens`] if the
    /// text has more than `max_tokens`, as soon as that is certain. The tokens that `add_special_tokens` adds do not
    /// count.
    pub fn encode_while(
        &self,
        text: &str,
        add_special_tokens: bool,
        max_tokens: usize,
        mut is_wanted: impl FnMut() -> bool,
    ) -> Result<Vec<u32>, TextError> {
        let check = EncodeCheck::new(&mut is_wanted, max_tokens);
        let failed = |reason: String| TextError::Encode { bytes: text.len(), reason };
        let encode = || pipeline::encode(&self.inner.pipeline, text, add_special_tokens, &check);
        // The library panics with some malformed files. It changes nothing but its result and a cache of words.
        match catch_unwind(AssertUnwindSafe(encode)) {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(error)) if error.is::<Cancelled>() => Err(TextError::Cancelled { bytes: text.len() }),
            Ok(Err(error)) if error.is::<TooManyTokens>() => Err(TextError::TooManyTokens { max_tokens }),
            Ok(Err(error)) => Err(match error.downcast_ref() {
                Some(&NoMemory { bytes: needed }) => TextError::OutOfMemory { bytes: text.len(), needed },
                None => failed(error.to_string()),
            }),
            Err(_) => Err(failed("the parts of its tokenizer.json are inconsistent".to_owned())),
        }
    }

    /// Decodes ids like a [`TextStream`](crate::TextStream) without stop strings. Ids outside the vocabulary are
    /// ignored; invalid bytes become U+FFFD.
    pub fn decode(&self, ids: &[u32], options: TextOptions) -> String {
        let mut detokenizer = Detokenizer::new(self.rule(), options);
        let mut text = String::new();
        for &id in ids {
            detokenizer.push(self.table(), id, &mut text);
        }
        detokenizer.finish(&mut text);
        text
    }

    /// One more than the largest id.
    pub fn vocabulary_size(&self) -> usize {
        self.inner.table.len()
    }

    /// The id of a token in the vocabulary's spelling.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.pipeline.token_to_id(token)
    }

    /// The token of an id in the vocabulary's spelling.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.pipeline.id_to_token(id)
    }

    /// Whether decoded text is the concatenation of each token's bytes, so that [`Self::token_bytes`] is available. It
    /// is not for vocabularies of words, which are joined with spaces.
    pub fn has_token_bytes(&self) -> bool {
        self.rule() != DecodeRule::Words
    }

    /// The text of a token in the middle of a text with special tokens shown. At the start of a text, a token may lack
    /// its leading space. `None` for ids outside the vocabulary, and for all ids without [`Self::has_token_bytes`].
    pub fn token_bytes(&self, id: u32) -> Option<TokenBytes<'_>> {
        let entry = self.table().get(id).filter(|_| self.has_token_bytes())?;
        Some(TokenBytes { bytes: entry.bytes, special: entry.special })
    }

    /// The length of the longest token in bytes.
    pub fn max_token_bytes(&self) -> usize {
        self.table().longest()
    }

    pub(crate) fn table(&self) -> &TokenTable {
        &self.inner.table
    }

    pub(crate) fn rule(&self) -> DecodeRule {
        self.inner.rule
    }
}
