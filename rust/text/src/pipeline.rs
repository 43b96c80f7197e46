//! The `tokenizers` library's encoding pipeline with our splitter, and its loop over the words, which can end early.

use std::cell::Cell;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use penstock_checkpoint::{AddedToken, TRUNCATED};
use serde_json::Value;
use tokenizers::{
    DecoderWrapper, Encoding, OffsetReferential, OffsetType, PostProcessorWrapper, TokenizerImpl,
};

use crate::encode_check::EncodeCheck;
use crate::error::TextError;
use crate::expression_limits::{self, check_added_bytes};
use crate::model::WordModel;
use crate::normalizer::{MAX_STEPS, Normalizer, within_limits};
use crate::splitter::Splitter;

pub(crate) type Pipeline =
    TokenizerImpl<WordModel, Normalizer, Splitter, PostProcessorWrapper, DecoderWrapper>;

/// Parses a `tokenizer.json`. The library panics on some malformed files, such as those with merges longer than any
/// token. Parsing touches only its own result, so the panic is returned as an error.
pub(crate) fn parse(bytes: &[u8]) -> Result<Pipeline, TextError> {
    let reason = |error: serde_json::Error| match error.is_eof() {
        true => format!("{error}; {TRUNCATED}"),
        false => error.to_string(),
    };
    let parse = || expression_limits::check(bytes).and_then(|()| serde_json::from_slice(bytes));
    let parse = || catch_unwind(AssertUnwindSafe(parse));
    // Added tokens are normalised.
    let parsed = within_limits(parse).map_err(|error| TextError::Json { reason: error.to_string() })?;
    let pipeline: Pipeline = match parsed {
        Ok(parsed) => parsed.map_err(|error| TextError::Json { reason: reason(error) })?,
        Err(_) => return Err(inconsistent()),
    };
    check_post_processor(pipeline.get_post_processor())?;
    Ok(pipeline)
}

fn inconsistent() -> TextError {
    TextError::Json { reason: "its parts are inconsistent".into() }
}

/// Encodes a text with characters of every kind. The library panics on some malformed files only then.
pub(crate) fn probe(pipeline: &Pipeline) -> Result<(), TextError> {
    const TEXT: &str = " Hello, World's  12\t\r\n\n caf\u{e9} e\u{301} \u{6f22}\u{1f44d} <s>\u{0}";
    let encode = || encode(pipeline, TEXT, true, &EncodeCheck::new(&mut || true, usize::MAX)).map(|_| ());
    // A vocabulary need not have all of these characters.
    catch_unwind(AssertUnwindSafe(encode)).map_or_else(|_| Err(inconsistent()), |_| Ok(()))
}

/// Maximum number of ids that a post-processor adds to a text.
const MAX_ADDED_IDS: usize = 256;
/// Maximum number of times that a post-processor repeats a text.
const MAX_COPIES: usize = 4;

/// Checks that the post-processor of a file adds few ids: a template may have any number of parts.
fn check_post_processor(processor: Option<&PostProcessorWrapper>) -> Result<(), TextError> {
    let refused = |problem: String| TextError::Json { reason: format!("post_processor: {problem}") };
    let Some(processor) = processor else { return Ok(()) };
    let mut steps = vec![processor];
    let (mut num_steps, mut copies, mut added) = (0, 1_usize, 0_usize);
    while let Some(step) = steps.pop() {
        if let PostProcessorWrapper::Sequence(sequence) = step {
            steps.extend(sequence.as_ref().iter().rev());
            continue;
        }
        num_steps += 1;
        if num_steps > MAX_STEPS {
            return Err(refused(format!("more than {MAX_STEPS} steps")));
        }
        let PostProcessorWrapper::Template(template) = step else { continue };
        let template = serde_json::to_value(template).map_err(|error| refused(error.to_string()))?;
        let (texts, ids) = template_size(&template);
        copies = copies.saturating_mul(texts.max(1));
        added = added.saturating_mul(texts.max(1)).saturating_add(ids);
        if copies > MAX_COPIES {
            return Err(refused(format!("the text {copies} times; the limit is {MAX_COPIES}")));
        }
        if added > MAX_ADDED_IDS {
            return Err(refused(format!("{added} added ids; the limit is {MAX_ADDED_IDS}")));
        }
    }
    Ok(())
}

/// The number of times that a template has the text, and the number of ids that it adds.
fn template_size(template: &Value) -> (usize, usize) {
    let parts = template["single"].as_array().map_or(&[][..], Vec::as_slice);
    let (mut texts, mut ids) = (0, 0);
    for part in parts {
        match part.get("SpecialToken").and_then(|token| token["id"].as_str()) {
            None => texts += 1,
            Some(name) => ids += template["special_tokens"][name]["ids"].as_array().map_or(0, Vec::len),
        }
    }
    (texts, ids)
}

/// Memory that an encoding takes, in bytes for each byte of the normalised text: 272 at most, if each byte is a token,
/// and what the allocator adds to small blocks.
const MEMORY_PER_BYTE: usize = 340;
/// Memory that the normalisation of a text takes, in bytes for each byte that it makes.
const NORMALIZED_BYTE: usize = 50;
/// Memory that an encoding takes in any case: the buffers and caches of regular expressions.
const MEMORY_BASE: usize = 1 << 20;
/// Bytes of a text for which no memory is checked: it takes no more than the rest of the process needs at any time.
const SMALL_TEXT: usize = 16 << 10;

/// Memory for an encoding is refused.
#[derive(Debug)]
pub(crate) struct NoMemory {
    /// The memory that is needed.
    pub(crate) bytes: usize,
}

impl fmt::Display for NoMemory {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} bytes of memory are refused", self.bytes)
    }
}

impl std::error::Error for NoMemory {}

/// Checks that there is memory for a text of this length. The library ends the process if an allocation is refused.
fn check_memory(length: usize, per_byte: usize) -> Result<(), NoMemory> {
    if length <= SMALL_TEXT {
        return Ok(());
    }
    let bytes = length.saturating_mul(per_byte).saturating_add(MEMORY_BASE);
    let mut memory: Vec<u8> = Vec::new();
    let taken = memory.try_reserve_exact(bytes).map_err(|_| NoMemory { bytes });
    std::hint::black_box(&mut memory); // an unused allocation is optimised away
    taken
}

/// Encodes a text, like the library's `encode_fast`. The tokens of a post-processor do not count towards the maximum.
pub(crate) fn encode(
    pipeline: &Pipeline,
    text: &str,
    add_special_tokens: bool,
    check: &EncodeCheck<'_>,
) -> tokenizers::Result<Encoding> {
    let growth = pipeline.get_normalizer().map_or(1, |normalizer| normalizer.growth(text));
    check_memory(text.len(), MEMORY_PER_BYTE.max(growth * NORMALIZED_BYTE))?;
    let vocabulary = pipeline.get_added_vocabulary();
    let mut words = within_limits(|| vocabulary.extract_and_normalize(pipeline.get_normalizer(), text))?;
    let length = Cell::new(0);
    words.normalize(|part| {
        length.set(length.get() + part.len());
        Ok(())
    })?;
    check_memory(length.get(), MEMORY_PER_BYTE)?;
    let num_tokens = check.token_count();
    let parts = words.get_splits(OffsetReferential::Normalized, OffsetType::None);
    num_tokens.add(parts.iter().filter(|(_, _, added)| added.is_some()).count())?;
    drop(parts);
    let model = pipeline.get_model();
    if let Some(splitter) = pipeline.get_pre_tokenizer() {
        let counts_words = model.has_token_for_each_word(splitter.ends_in_bytes());
        splitter.split(&mut words, check, counts_words)?;
    }
    words.tokenize(|word| {
        check.count_word()?;
        let tokens = model.tokenize_while(word.get(), check)?;
        num_tokens.add(tokens.len())?;
        Ok(tokens)
    })?;
    let encoding = words.into_encoding(None, 0, OffsetType::None)?;
    pipeline.post_process(encoding, None, add_special_tokens)
}

/// Adds tokens in the order of their ids and checks that they get these ids.
pub(crate) fn add_tokens(pipeline: &mut Pipeline, added: &[AddedToken]) -> Result<(), TextError> {
    check_added_bytes(added.iter().map(|token| token.content.len()).sum())
        .map_err(|problem| TextError::Json { reason: format!("added tokens: {problem}") })?;
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
    let num_added = within_limits(|| pipeline.add_tokens(tokens)).flatten();
    num_added.map_err(|error| TextError::Json { reason: error.to_string() })?;
    for token in added {
        // The library ignores tokens without text.
        let Some(actual) = pipeline.token_to_id(&token.content) else { continue };
        if actual != token.id {
            return Err(TextError::AddedToken { content: token.content.clone(), id: token.id, actual });
        }
    }
    Ok(())
}

/// Maximum length of an added token in bytes. At each position of a text, the library may compare as many.
const MAX_ADDED_TOKEN: usize = 1000;

/// Checks that the library finds the added tokens in linear time.
pub(crate) fn check_added_tokens(pipeline: &Pipeline) -> Result<(), TextError> {
    let vocabulary = pipeline.get_added_vocabulary();
    let mut added: Vec<_> = vocabulary.get_added_tokens_decoder().iter().collect();
    added.sort_unstable_by_key(|(id, _)| **id);
    for (&id, token) in added {
        let normalized = vocabulary.simple_id_to_token(id);
        let forms = || [Some(&token.content), normalized.as_ref()].into_iter().flatten();
        let bytes = forms().map(String::len).max().unwrap_or(0);
        if bytes > MAX_ADDED_TOKEN {
            let problem = format!("has {bytes} bytes; the limit is {MAX_ADDED_TOKEN}");
            return Err(TextError::CostlyToken { id, problem });
        }
        // Each token of a run of whitespace would be searched for the rest of the run.
        let is_whitespace = forms().any(|form| form.chars().all(char::is_whitespace));
        if (token.lstrip || token.rstrip) && is_whitespace {
            let problem = "is whitespace; lstrip and rstrip must be false then".to_owned();
            return Err(TextError::CostlyToken { id, problem });
        }
    }
    Ok(())
}
