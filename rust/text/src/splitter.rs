//! Pre-tokenisation: splits text into the words for BPE, in linear time.
//!
//! The `tokenizers` library uses a backtracking regex engine that gives up after a million steps and silently leaves
//! the rest of the text unsplit: a megabyte of spaces is enough to get different ids. So the library's regex steps are
//! replaced here. Nearly every byte-level tokenizer ends its expression in `\s+(?!\S)|\s+`, whose look-ahead only
//! leaves the last space to the next word; that is implemented by hand, and the rest of the expression runs on an
//! automaton. Other expressions use a backtracking engine with a higher limit; a text that exceeds it is an error.

use regex_automata::meta::Regex;
use regex_automata::{Input, PatternID};
use serde::{Deserialize, Deserializer};
use tokenizers::normalizers::byte_level::ByteLevel;
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{Normalizer, Offsets, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

use crate::normalizer::{MAX_GROWTH, MAX_STEPS};
use crate::pipeline::{CancelCheck, Cancelled};

/// End of an expression that matches whitespace but leaves its last character to the next word.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";

/// The expression of GPT-2, which is built into `ByteLevel`.
pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Cache size of the lazy automaton. With too small a cache, text in many scripts makes the automaton rebuild its
/// states or fall back to a slower engine.
const AUTOMATON_BYTES: usize = 16 << 20;

/// Maximum number of backtracking steps per match. This is seconds of time; a reasonable expression takes a few steps
/// per character.
const BACKTRACK_LIMIT: usize = 50_000_000;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A pre-tokenizer: a sequence of steps, each splitting the parts of the previous one.
pub(crate) struct Splitter {
    steps: Vec<SplitStep>,
}

enum SplitStep {
    Regex {
        /// Prepend a space to text that does not start with one.
        prefix_space: bool,
        words: WordRegex,
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
                    let words = WordPattern { words, check };
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
                SplitPattern::Regex(expression) => WordRegex::new(expression)?,
                SplitPattern::String(text) => WordRegex::new(&fancy_regex::escape(text))?,
            },
            behavior: split.behavior,
            invert: split.invert,
        }),
        PreTokenizerWrapper::ByteLevel(byte_level) if byte_level.use_regex => {
            steps.push(SplitStep::Regex {
                prefix_space: byte_level.add_prefix_space,
                words: WordRegex::new(GPT2)?,
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

/// A compiled expression.
enum WordRegex {
    /// Pattern 0 is the expression without [`SPACES_TAIL`], pattern 1 matches whitespace.
    Linear(Regex),
    Backtracking(fancy_regex::Regex),
}

impl WordRegex {
    fn new(expression: &str) -> Result<Self, Error> {
        if let Some(head) = expression.strip_suffix(SPACES_TAIL) {
            // The automaton parses `a?+` as a repetition of `a?`, not as a possessive quantifier.
            if !has_possessive_quantifier(head) {
                let config = Regex::config().hybrid_cache_capacity(AUTOMATON_BYTES);
                if let Ok(regex) = Regex::builder().configure(config).build_many(&[head, r"\s+"]) {
                    return Ok(Self::Linear(regex));
                }
            }
        }
        Ok(Self::Backtracking(
            fancy_regex::RegexBuilder::new(expression).backtrack_limit(BACKTRACK_LIMIT).build()?,
        ))
    }

    /// Calls `on_match` with the start and end of each non-empty match, in order.
    fn for_each(
        &self,
        text: &str,
        mut on_match: impl FnMut(usize, usize) -> Result<(), Cancelled>,
    ) -> Result<(), Error> {
        match self {
            Self::Linear(regex) => {
                let mut at = 0;
                while let Some(matched) = regex.search(&Input::new(text).span(at..text.len())) {
                    let mut end = matched.end();
                    if matched.pattern() == PatternID::must(1) && end < text.len() {
                        let last = text[matched.range()].chars().next_back().map_or(0, char::len_utf8);
                        if end - last > matched.start() {
                            end -= last;
                        }
                    }
                    if end > matched.start() {
                        on_match(matched.start(), end)?;
                        at = end;
                    } else {
                        at += text[at..].chars().next().map_or(1, char::len_utf8);
                    }
                }
            }
            Self::Backtracking(regex) => {
                for matched in regex.find_iter(text) {
                    let matched = matched?;
                    if !matched.as_str().is_empty() {
                        on_match(matched.start(), matched.end())?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The words of an expression, found until the check fails.
struct WordPattern<'a, 'b> {
    words: &'a WordRegex,
    check: &'a CancelCheck<'b>,
}

impl Pattern for WordPattern<'_, '_> {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if text.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut parts = Vec::new();
        let mut end = 0;
        self.words.for_each(text, |from, to| {
            if end < from {
                parts.push(((end, from), false));
            }
            parts.push(((from, to), true));
            end = to;
            self.check.count_word()
        })?;
        if end < text.len() {
            parts.push(((end, text.len()), false));
        }
        Ok(parts)
    }
}

/// Whether a quantifier outside character classes is followed by `+`.
fn has_possessive_quantifier(expression: &str) -> bool {
    let mut depth = 0_usize;
    let mut after_quantifier = false;
    let mut characters = expression.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                // The braces of `\p{L}` are not a quantifier.
                if matches!(characters.next(), Some('p' | 'P')) && characters.as_str().starts_with('{') {
                    characters.find(|&inside| inside == '}');
                }
                after_quantifier = false;
            }
            '[' => depth += 1,
            ']' => {
                depth = depth.saturating_sub(1);
                after_quantifier = false;
            }
            '+' if depth == 0 && after_quantifier => return true,
            '?' | '*' | '+' | '}' if depth == 0 => after_quantifier = true,
            _ => after_quantifier = false,
        }
    }
    false
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn found(words: &WordRegex, text: &str) -> Vec<(Offsets, bool)> {
        WordPattern { words, check: &CancelCheck::new(&mut || true) }.find_matches(text).unwrap()
    }

    fn words(expression: &str, text: &str) -> Vec<(Offsets, bool)> {
        found(&WordRegex::new(expression).unwrap(), text)
    }

    #[test]
    fn automaton_and_backtracking_engine_find_the_same_words() {
        let expressions = [
            GPT2,
            r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"x*|\s+(?!\S)|\s+",
        ];
        for expression in expressions {
            let linear = WordRegex::new(expression).unwrap();
            assert!(matches!(linear, WordRegex::Linear(_)), "{expression}");
            let backtracking = WordRegex::Backtracking(fancy_regex::Regex::new(expression).unwrap());
            proptest!(|(text in "([a-zA-Z']{0,3}|[ \t\r\n\u{85}\u{3000}]{0,4}|[0-9٣½]{0,4}|[é漢👍\u{301}x.!]{0,3}|\\PC){0,8}")| {
                prop_assert_eq!(found(&linear, &text), found(&backtracking, &text));
            });
        }
    }

    #[test]
    fn whitespace_leaves_its_last_character_to_the_next_word() {
        let cut = |text: &'static str| -> Vec<&str> {
            words(GPT2, text).into_iter().map(|((from, to), _)| &text[from..to]).collect()
        };
        assert_eq!(cut("a   b"), ["a", "  ", " b"]);
        assert_eq!(cut("a \u{3000}b"), ["a", " ", "\u{3000}", "b"]);
        assert_eq!(cut("a\nb  "), ["a", "\n", "b", "  "]);
    }

    #[test]
    fn unsupported_expressions_use_the_backtracking_engine() {
        assert!(has_possessive_quantifier(r"a++b"));
        assert!(has_possessive_quantifier(r"[^\r\n]?+\p{L}+"));
        assert!(has_possessive_quantifier(r"\p{N}{1,3}+"));
        assert!(!has_possessive_quantifier(r"\p{L}+[()*+,]+|\?+| ?a"));
        assert!(matches!(WordRegex::new(r"a++|\s+(?!\S)|\s+"), Ok(WordRegex::Backtracking(_))));
        assert!(matches!(WordRegex::new(r"(?<=a)b|\s+(?!\S)|\s+"), Ok(WordRegex::Backtracking(_))));
        assert!(matches!(WordRegex::new(r"\p{N}{1,3}"), Ok(WordRegex::Backtracking(_))));
        assert_eq!(words(r"a++a|b", "aaab"), [((0, 3), false), ((3, 4), true)]);
    }
}
