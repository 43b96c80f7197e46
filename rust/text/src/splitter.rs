//! Pre-tokenisation: splits text into the words for BPE. The steps with an expression are our own; see [`Expression`].

use serde::{Deserialize, Deserializer};
use tokenizers::normalizers::byte_level::ByteLevel;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{Normalizer, Offsets, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

use crate::encode_check::{EncodeCheck, TokenCount};
use crate::expression::{Error, Expression, TimeLimit};
use crate::normalizer::{MAX_GROWTH, MAX_STEPS};

/// The expression of GPT-2, which is built into `ByteLevel`.
pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A pre-tokenizer: a sequence of steps, each splitting the parts of the previous one.
pub(crate) struct Splitter {
    steps: Vec<SplitStep>,
}

enum SplitStep {
    Regex {
        /// Prepend a space to text that does not start with one.
        prefix_space: bool,
        words: Expression,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    /// Replace each byte by a character of the byte-level alphabet.
    Bytes,
    Other(PreTokenizerWrapper),
}

impl SplitStep {
    /// The most bytes that the step makes of one.
    fn growth(&self) -> usize {
        match self {
            Self::Bytes | Self::Regex { prefix_space: true, .. } => 2,
            // A prefix, and the alphabet.
            Self::Other(PreTokenizerWrapper::ByteLevel(_)) => 4,
            // A marker before a word of one byte.
            Self::Other(PreTokenizerWrapper::Metaspace(_)) => 5,
            Self::Regex { .. } | Self::Other(_) => 1,
        }
    }

    /// Whether each match of the expression becomes a word.
    fn has_word_for_each_match(&self) -> bool {
        match self {
            Self::Regex { behavior: SplitDelimiterBehavior::Isolated, .. } => true,
            Self::Regex { behavior: SplitDelimiterBehavior::Removed, invert, .. } => *invert,
            _ => false,
        }
    }

    /// Whether the step can remove words.
    fn removes_words(&self) -> bool {
        match self {
            Self::Regex { behavior, .. } => *behavior == SplitDelimiterBehavior::Removed,
            Self::Bytes
            | Self::Other(
                PreTokenizerWrapper::ByteLevel(_)
                | PreTokenizerWrapper::Digits(_)
                | PreTokenizerWrapper::Metaspace(_),
            ) => false,
            Self::Other(_) => true,
        }
    }
}

impl Splitter {
    pub(crate) fn new(pre_tokenizer: PreTokenizerWrapper) -> Result<Self, Error> {
        let mut steps = Vec::new();
        add_steps(pre_tokenizer, &mut steps)?;
        if steps.len() > MAX_STEPS {
            return Err(format!("pre_tokenizer: {} steps; the limit is {MAX_STEPS}", steps.len()).into());
        }
        let growth = steps.iter().fold(1_usize, |growth, step| growth.saturating_mul(step.growth()));
        if growth > MAX_GROWTH {
            let problem = format!("steps that make {growth} bytes of one; the limit is {MAX_GROWTH}");
            return Err(format!("pre_tokenizer: {problem}").into());
        }
        Ok(Self { steps })
    }

    /// Whether the words are of the byte-level alphabet.
    pub(crate) fn ends_in_bytes(&self) -> bool {
        matches!(
            self.steps.last(),
            Some(SplitStep::Bytes | SplitStep::Other(PreTokenizerWrapper::ByteLevel(_)))
        )
    }

    /// Splits the text into words. With `counts_words`, a word has a token, so more words than tokens are an error.
    pub(crate) fn split(
        &self,
        text: &mut PreTokenizedString,
        check: &EncodeCheck<'_>,
        counts_words: bool,
    ) -> tokenizers::Result<()> {
        let time = TimeLimit::new("pre_tokenizer");
        // A later step only divides the words of this one.
        let first_counted = self.steps.iter().rposition(SplitStep::removes_words).unwrap_or(0);
        for (index, step) in self.steps.iter().enumerate() {
            let is_counted = counts_words && index >= first_counted && step.has_word_for_each_match();
            let num_words = is_counted.then(|| check.token_count());
            match step {
                SplitStep::Bytes => text.normalize(|word| {
                    check.count_word()?;
                    ByteLevel.normalize(word)
                })?,
                SplitStep::Other(other) => other.pre_tokenize(text)?,
                SplitStep::Regex { prefix_space, words, behavior, invert } => text.split(|_, mut part| {
                    if *prefix_space && !part.get().starts_with(' ') {
                        part.prepend(" ");
                    }
                    let words = WordPattern { words, check, time: &time, count: num_words.as_ref() };
                    if *invert { part.split(Invert(words), *behavior) } else { part.split(words, *behavior) }
                })?,
            }
        }
        Ok(())
    }
}

fn add_steps(pre_tokenizer: PreTokenizerWrapper, steps: &mut Vec<SplitStep>) -> Result<(), Error> {
    match pre_tokenizer {
        PreTokenizerWrapper::Sequence(sequence) => {
            for inner in sequence {
                add_steps(inner, steps)?;
            }
        }
        PreTokenizerWrapper::Split(split) => steps.push(SplitStep::Regex {
            prefix_space: false,
            words: match &split.pattern {
                SplitPattern::Regex(expression) => Expression::of_words(expression)?,
                SplitPattern::String(text) => Expression::of_words(&fancy_regex::escape(text))?,
            },
            behavior: split.behavior,
            invert: split.invert,
        }),
        PreTokenizerWrapper::ByteLevel(byte_level) if byte_level.use_regex => {
            steps.push(SplitStep::Regex {
                prefix_space: byte_level.add_prefix_space,
                words: Expression::of_words(GPT2)?,
                behavior: SplitDelimiterBehavior::Isolated,
                invert: false,
            });
            steps.push(SplitStep::Bytes);
        }
        PreTokenizerWrapper::ByteLevel(byte_level) if !byte_level.add_prefix_space => {
            steps.push(SplitStep::Bytes);
        }
        other => steps.push(SplitStep::Other(other)),
    }
    Ok(())
}

impl<'de> Deserialize<'de> for Splitter {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(PreTokenizerWrapper::deserialize(deserializer)?).map_err(serde::de::Error::custom)
    }
}

impl PreTokenizer for Splitter {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        self.split(text, &EncodeCheck::new(&mut || true, usize::MAX), false)
    }
}

/// The words of an expression, found until a check fails.
struct WordPattern<'a, 'b> {
    words: &'a Expression,
    check: &'a EncodeCheck<'b>,
    time: &'a TimeLimit,
    /// Counts the words, if each has a token.
    count: Option<&'a TokenCount>,
}

impl Pattern for WordPattern<'_, '_> {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        let is_word = |from, to| {
            if from == to {
                return Ok(false);
            }
            self.check.count_word()?;
            if let Some(count) = self.count {
                count.add(1)?;
            }
            Ok(true)
        };
        self.words.cut(text, self.time, is_word)
    }
}
