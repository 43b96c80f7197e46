//! Pre-tokenisation: splits text into the words for BPE. The steps with an expression are our own; see
//! [`Expression`](crate::expression::Expression).

use serde::{Deserialize, Deserializer};
use tokenizers::normalizers::byte_level::ByteLevel;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{Normalizer, Offsets, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

use crate::expression::{Error, Expression, TimeLimit};
use crate::normalizer::{MAX_GROWTH, MAX_STEPS};
use crate::pipeline::CancelCheck;

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

    /// Splits the text into words.
    pub(crate) fn split(
        &self,
        text: &mut PreTokenizedString,
        check: &CancelCheck<'_>,
    ) -> tokenizers::Result<()> {
        let time = TimeLimit::new("pre_tokenizer");
        for step in &self.steps {
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
                    let words = WordPattern { words, check, time: &time };
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
        self.split(text, &CancelCheck::new(&mut || true))
    }
}

/// The words of an expression, found until a check fails.
struct WordPattern<'a, 'b> {
    words: &'a Expression,
    check: &'a CancelCheck<'b>,
    time: &'a TimeLimit,
}

impl Pattern for WordPattern<'_, '_> {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        let is_word = |from, to| {
            if from == to {
                return Ok(false);
            }
            self.check.count_word()?;
            Ok(true)
        };
        self.words.cut(text, self.time, is_word)
    }
}
