//! The normaliser of a tokenizer, with bounds on the growth of a text.
//!
//! The steps of a file may replace a character by a long text, or repeat it, so that a word takes all memory. Here a
//! step has a limit on the bytes that it makes of one, and a text on its length between the steps. A `Replace` with an
//! expression is our own step, with a limit on its time.

use std::cell::RefCell;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::{NormalizedString, NormalizerWrapper};

use crate::expression::{Error, Replacement, TimeLimit};

/// Maximum number of steps of a pipeline's part.
pub(crate) const MAX_STEPS: usize = 64;
/// Maximum growth of a text by all steps together. Unicode's longest compatibility mapping makes 11 bytes of one.
pub(crate) const MAX_GROWTH: usize = 16;
/// Added to the limits, for short texts.
pub(crate) const MARGIN: usize = 1 << 10;
/// Maximum number of bytes that a replacement makes of each byte that it replaces.
const MAX_REPLACEMENT: usize = 8;
/// Maximum length of a prefix, and of a mapping of `precompiled_charsmap`, whose longest in published files is 33.
const MAX_TEXT: usize = 64;
/// The most bytes that Unicode's normal forms, changes of case and the byte-level alphabet make of one.
const UNICODE_GROWTH: usize = 12;
/// Maximum growth of a text if every byte of it grew as much as its step allows.
const MAX_POSSIBLE_GROWTH: usize = 64;

/// A sequence of steps.
pub(crate) struct Normalizer {
    steps: Vec<Step>,
}

struct Step {
    action: Action,
    /// The most bytes that it makes of one.
    growth: usize,
}

enum Action {
    Replace(Replacement),
    Other(NormalizerWrapper),
}

thread_local! {
    /// The limit of the work on this thread, and the first error: the library does not pass on those of a normaliser.
    static LIMIT: RefCell<(TimeLimit, Option<Error>)> = RefCell::new((TimeLimit::new("normalizer"), None));
}

/// Runs `work`. Its texts have one limit on time. Returns an error if one of them exceeded a limit.
pub(crate) fn within_limits<T>(work: impl FnOnce() -> T) -> tokenizers::Result<T> {
    LIMIT.set((TimeLimit::new("normalizer"), None));
    let result = work();
    LIMIT.with_borrow_mut(|(_, failure)| failure.take()).map_or(Ok(result), Err)
}

/// Ends the normalisation of a text.
fn fail(error: Error) -> Error {
    let message = error.to_string();
    LIMIT.with_borrow_mut(|(_, failure)| *failure = Some(error));
    message.into()
}

fn too_long() -> Error {
    format!("its normalizer makes the text more than {MAX_GROWTH} times longer").into()
}

impl Normalizer {
    /// The steps of a description in the form of `tokenizer.json`. The error is about the field.
    fn new(description: Value) -> Result<Self, String> {
        let mut descriptions = Vec::new();
        flatten(description, &mut descriptions)?;
        let step = |description: Value| {
            let growth = growth(&description)?;
            let normalizer =
                NormalizerWrapper::deserialize(description).map_err(|error| error.to_string())?;
            let replacement = match &normalizer {
                NormalizerWrapper::Replace(step) => {
                    Replacement::new(step).map_err(|error| error.to_string())?
                }
                _ => None,
            };
            Ok(Step { action: replacement.map_or(Action::Other(normalizer), Action::Replace), growth })
        };
        Ok(Self { steps: descriptions.into_iter().map(step).collect::<Result<_, String>>()? })
    }

    /// About the most bytes that a step makes of a byte of the text.
    pub(crate) fn growth(&self, text: &str) -> usize {
        let growth = self.steps.iter().map(|step| step.growth).max();
        if text.is_ascii() { 1 } else { growth.unwrap_or(1) }
    }
}

impl From<NormalizerWrapper> for Normalizer {
    /// The steps of our own pipelines, which are within the limits.
    fn from(normalizer: NormalizerWrapper) -> Self {
        Self { steps: vec![Step { action: Action::Other(normalizer), growth: 1 }] }
    }
}

impl<'de> Deserialize<'de> for Normalizer {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(Value::deserialize(deserializer)?)
            .map_err(|problem| D::Error::custom(format_args!("normalizer: {problem}")))
    }
}

impl tokenizers::Normalizer for Normalizer {
    fn normalize(&self, text: &mut NormalizedString) -> tokenizers::Result<()> {
        if LIMIT.with_borrow(|(_, failure)| failure.is_some()) {
            return Err("another part of the text exceeded a limit".into());
        }
        let limit = |growth: usize, length: usize| length.saturating_mul(growth).saturating_add(MARGIN);
        let length = text.len();
        for step in &self.steps {
            let possible = text.len().saturating_mul(step.growth);
            if possible > limit(MAX_POSSIBLE_GROWTH, length) {
                return Err(fail(too_long()));
            }
            match &step.action {
                Action::Replace(step) => {
                    let normalized = LIMIT.with_borrow(|(time, _)| step.normalize(text, time));
                    normalized.map_err(fail)?;
                }
                Action::Other(step) => step.normalize(text)?,
            }
            if text.len() > limit(MAX_GROWTH, length) {
                return Err(fail(too_long()));
            }
        }
        Ok(())
    }
}

/// The steps of nested sequences.
fn flatten(description: Value, steps: &mut Vec<Value>) -> Result<(), String> {
    match description {
        Value::Object(mut fields) if fields.contains_key("normalizers") => {
            let Some(Value::Array(inner)) = fields.remove("normalizers") else {
                return Err("normalizers is not a list".to_owned());
            };
            inner.into_iter().try_for_each(|inner| flatten(inner, steps))
        }
        _ if steps.len() == MAX_STEPS => Err(format!("more than {MAX_STEPS} steps")),
        step => {
            steps.push(step);
            Ok(())
        }
    }
}

/// The most bytes that a step makes of one, if that is within the limits.
fn growth(step: &Value) -> Result<usize, String> {
    if step.get("content").is_some() {
        return replacement_growth(step);
    }
    if let Some(prefix) = step.get("prepend").and_then(Value::as_str) {
        if prefix.len() > MAX_TEXT {
            return Err(format!("prepend has {} bytes; the limit is {MAX_TEXT}", prefix.len()));
        }
        return Ok(1);
    }
    if let Some(charsmap) = step.get("precompiled_charsmap").and_then(Value::as_str) {
        return charsmap_growth(charsmap);
    }
    Ok(UNICODE_GROWTH)
}

/// The most bytes that a `Replace` of a normaliser or a decoder makes of one, if that is within the limit.
pub(crate) fn replacement_growth(step: &Value) -> Result<usize, String> {
    let content = step.get("content").and_then(Value::as_str).unwrap_or_default();
    // An expression may match single bytes, and also nothing.
    let replaced = step.get("pattern").and_then(|pattern| pattern.get("String")).and_then(Value::as_str);
    let replaced = replaced.map_or(1, str::len);
    if replaced == 0 {
        return Err("the pattern of a Replace is empty".to_owned());
    }
    let growth = content.len().div_ceil(replaced).max(1);
    if growth > MAX_REPLACEMENT {
        let (content, limit) = (content.len(), replaced * MAX_REPLACEMENT);
        return Err(format!(
            "the content of a Replace has {content} bytes; the limit is {limit}, {MAX_REPLACEMENT} for each byte of \
             its pattern"
        ));
    }
    Ok(growth + usize::from(step.get("pattern").is_some_and(|pattern| pattern.get("Regex").is_some())))
}

/// The length of the longest mapping. The file is the size of a trie in bytes, the trie, and the mappings, each with a
/// zero at its end. The library takes the size as it is.
fn charsmap_growth(charsmap: &str) -> Result<usize, String> {
    // A text that is not valid is an error of the library.
    let Ok(bytes) = base64::decode(charsmap) else { return Ok(1) };
    let Some((size, rest)) = bytes.split_first_chunk::<4>() else { return Ok(1) };
    let size = u32::from_le_bytes(*size) as usize;
    let Some(mappings) = rest.get(size..) else {
        return Err(format!("precompiled_charsmap has a trie of {size} bytes; there are {}", rest.len()));
    };
    let longest = mappings.split(|byte| *byte == 0).map(<[u8]>::len).max().unwrap_or(0);
    if longest > MAX_TEXT {
        return Err(format!(
            "precompiled_charsmap has a mapping of {longest} bytes; the limit is {MAX_TEXT}"
        ));
    }
    Ok(longest.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn longest_mapping_of_a_charsmap_is_measured() {
        assert_eq!(charsmap_growth("AAAAAGFiY2QA"), Ok(4));
        assert_eq!(charsmap_growth("AAAAAGFi/+8AYQ=="), Ok(4));
        let error = "precompiled_charsmap has a trie of 4294967295 bytes; there are 0";
        assert_eq!(charsmap_growth("/////w=="), Err(error.to_owned()));
        for invalid in ["", "a b", "AAAAAGFiY2Q*"] {
            assert_eq!(charsmap_growth(invalid), Ok(1), "{invalid:?}");
        }
    }
}
