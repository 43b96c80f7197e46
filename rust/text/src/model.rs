//! The model of a tokenizer: a word to tokens, with bounds on the work and the memory for a byte of the word.
//!
//! The library's models take what a file says. A long token, prefix or unknown token multiplies the time or the memory
//! of each byte, so their lengths have limits here, far above those of published files. WordPiece is our own: the
//! library tries all ends of a word for each token, which is cubic in the length that the file allows for a word.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::BPE;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::{self, WordPiece};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{Model, ModelWrapper, Token};

use crate::encode_check::EncodeCheck;

/// Maximum length of a token of `Unigram` and `WordPiece` in bytes. At each position of a text, WordPiece tries as many
/// pieces, in up to 35 µs. To free the tokens of `Unigram`, the library recurses as deep as the longest one is long.
const MAX_TOKEN: usize = 512;
/// Maximum number of tokens of `Unigram` of which each begins with the one before. At each position of a text, the
/// library copies all tokens that begin there, in up to 35 µs.
const MAX_NESTED_TOKENS: usize = 64;
/// Maximum length in bytes of a text that is added to each piece of a word, or stands for each piece that is unknown or
/// has the id of another token.
pub(crate) const MAX_AFFIX: usize = 64;
/// Maximum probability that a merge is skipped. Merging takes the longer the closer it is to one.
const MAX_DROPOUT: f64 = 0.9;

/// A model within the limits.
pub(crate) struct WordModel {
    model: ModelWrapper,
    /// The length of the longest token of WordPiece in bytes.
    longest: usize,
    /// Whether `BPE` has a token for each character of the byte-level alphabet.
    has_bytes: bool,
}

impl WordModel {
    /// Whether a word always has a token, or is an error. `BPE` without an unknown token leaves characters out.
    pub(crate) fn has_token_for_each_word(&self, is_bytes: bool) -> bool {
        match &self.model {
            ModelWrapper::BPE(model) => model.unk_token.is_some() || is_bytes && self.has_bytes,
            ModelWrapper::Unigram(_) | ModelWrapper::WordLevel(_) | ModelWrapper::WordPiece(_) => true,
        }
    }

    /// The tokens of a word.
    pub(crate) fn tokenize_while(
        &self,
        word: &str,
        check: &EncodeCheck<'_>,
    ) -> tokenizers::Result<Vec<Token>> {
        match &self.model {
            ModelWrapper::WordPiece(model) => split_into_pieces(model, self.longest, word, check),
            model => model.tokenize(word),
        }
    }
}

impl From<ModelWrapper> for WordModel {
    fn from(model: ModelWrapper) -> Self {
        let longest = match &model {
            ModelWrapper::WordPiece(model) => model.get_vocab().keys().map(String::len).max().unwrap_or(0),
            _ => 0,
        };
        let has_bytes = match &model {
            ModelWrapper::BPE(model) => {
                let has_token = |character: &char| model.token_to_id(&character.to_string()).is_some();
                model.end_of_word_suffix.is_none() && ByteLevel::alphabet().iter().all(has_token)
            }
            _ => false,
        };
        Self { model, longest, has_bytes }
    }
}

impl<'de> Deserialize<'de> for WordModel {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut description = Value::deserialize(deserializer)?;
        check(&description).map_err(|problem| D::Error::custom(format_args!("model: {problem}")))?;
        // The library's own type copies the description twice more. It is needed for files without `type` only.
        let kind = description["type"].as_str().map(str::to_owned);
        let mut fields = || {
            description.as_object_mut().map(|fields| fields.remove("type"));
            description.take()
        };
        let model = match kind.as_deref() {
            Some("BPE") => BPE::deserialize(fields()).map(ModelWrapper::BPE),
            Some("Unigram") => Unigram::deserialize(fields()).map(ModelWrapper::Unigram),
            Some("WordLevel") => WordLevel::deserialize(fields()).map(ModelWrapper::WordLevel),
            Some("WordPiece") => WordPiece::deserialize(fields()).map(ModelWrapper::WordPiece),
            _ => ModelWrapper::deserialize(description),
        };
        Ok(model.map_err(D::Error::custom)?.into())
    }
}

/// Checks the limits of a description, before the library builds a model.
fn check(description: &Value) -> Result<(), String> {
    let within = |name: &str, limit: usize, bytes: usize| match bytes <= limit {
        true => Ok(()),
        false => Err(format!("{name} has {bytes} bytes; the limit is {limit}")),
    };
    for affix in ["unk_token", "continuing_subword_prefix", "end_of_word_suffix"] {
        let bytes = description[affix].as_str().map_or(0, str::len);
        within(affix, MAX_AFFIX, bytes)?;
        if bytes > 0 && affix != "unk_token" && description["byte_fallback"] == true {
            return Err(format!("{affix} is not supported with byte_fallback"));
        }
    }
    if let Some(dropout) = description["dropout"].as_f64().filter(|&dropout| dropout > MAX_DROPOUT) {
        return Err(format!("dropout is {dropout}; the limit is {MAX_DROPOUT}"));
    }
    // The vocabulary of `Unigram` is a list of tokens and scores, that of the others has an id for each token.
    let mut tokens = Vec::new();
    for (id, token) in description["vocab"].as_array().into_iter().flatten().enumerate() {
        let token = token[0].as_str().unwrap_or_default();
        within(&format!("token {id}"), MAX_TOKEN, token.len())?;
        tokens.push(token);
    }
    let nested = longest_nesting(tokens);
    if nested > MAX_NESTED_TOKENS {
        return Err(format!(
            "vocab has {nested} tokens that begin with each other; the limit is {MAX_NESTED_TOKENS}"
        ));
    }
    let is_wordpiece = description.get("max_input_chars_per_word").is_some();
    let mut lengths = HashMap::new();
    for (token, id) in description["vocab"].as_object().into_iter().flatten() {
        if is_wordpiece {
            within(&format!("token {id}"), MAX_TOKEN, token.len())?;
        }
        if let Some(other) = lengths.insert(id.as_u64(), token.len()) {
            within(&format!("one of the tokens {id}"), MAX_AFFIX, token.len().max(other))?;
        }
    }
    Ok(())
}

/// The largest number of tokens of which each begins with the one before.
fn longest_nesting(mut tokens: Vec<&str>) -> usize {
    tokens.sort_unstable();
    tokens.dedup();
    let mut nested: Vec<&str> = Vec::new();
    let length_with = |token| {
        while nested.pop_if(|outer| !str::starts_with(token, &**outer)).is_some() {}
        nested.push(token);
        nested.len()
    };
    tokens.into_iter().map(length_with).max().unwrap_or(0)
}

/// WordPiece: at each position the longest token; the whole word is unknown if there is none. Pieces of more bytes than
/// `longest` are no tokens, so they are not tried.
fn split_into_pieces(
    model: &WordPiece,
    longest: usize,
    word: &str,
    check: &EncodeCheck<'_>,
) -> tokenizers::Result<Vec<Token>> {
    let unknown = || {
        let id = model.token_to_id(&model.unk_token).ok_or(wordpiece::Error::MissingUnkToken)?;
        Ok(vec![Token::new(id, model.unk_token.clone(), (0, word.len()))])
    };
    if word.chars().nth(model.max_input_chars_per_word).is_some() {
        return unknown();
    }
    let (mut tokens, mut piece) = (Vec::new(), String::new());
    let mut start = 0;
    while start < word.len() {
        piece.clear();
        if start > 0 {
            piece.push_str(&model.continuing_subword_prefix);
        }
        let prefix = piece.len();
        let mut end = word.len().min(start + longest.saturating_sub(prefix));
        while !word.is_char_boundary(end) {
            end -= 1;
        }
        piece.push_str(&word[start..end]);
        let id = loop {
            if piece.len() == prefix {
                return unknown();
            }
            match model.token_to_id(&piece) {
                Some(id) => break id,
                None => piece.pop(),
            };
        };
        let end = start + piece.len() - prefix;
        tokens.push(Token::new(id, piece.clone(), (start, end)));
        start = end;
        check.count_word()?;
    }
    Ok(tokens)
}

impl Model for WordModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        self.tokenize_while(word, &EncodeCheck::new(&mut || true, usize::MAX))
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.model.token_to_id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.model.id_to_token(id)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.model.get_vocab()
    }

    fn get_vocab_size(&self) -> usize {
        self.model.get_vocab_size()
    }

    fn save(&self, folder: &Path, prefix: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        self.model.save(folder, prefix)
    }

    fn get_trainer(&self) -> TrainerWrapper {
        self.model.get_trainer()
    }
}
