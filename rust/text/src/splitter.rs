//! Cuts text into the words that BPE works on, in linear time.
//!
//! The `tokenizers` library does this with a backtracking engine that, past a million steps back, silently
//! leaves the rest of the text uncut: a megabyte of spaces is enough to get other ids. Its steps that are
//! regular expressions are therefore ours. Nearly every byte-level tokenizer ends its expression in
//! `\s+(?!\S)|\s+`, whose look-ahead only says "leave the last space to the word that follows"; that is done
//! by hand here, and the rest of the expression goes to an automaton. Any other expression keeps the
//! backtracking engine, with a larger limit, past which the text is refused rather than cut wrongly.

use regex_automata::meta::Regex;
use regex_automata::{Input, PatternID};
use serde::{Deserialize, Deserializer};
use tokenizers::pattern::{Invert, Pattern};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{Offsets, PreTokenizedString, PreTokenizer, SplitDelimiterBehavior};

/// The end of an expression that takes white space but leaves its last character to a word that follows.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";

/// The expression of GPT-2, which `ByteLevel` has built in.
pub(crate) const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// Room for the states that an automaton has met. Without enough of it, text in many scripts makes the
/// automaton forget and rebuild them, or give up for a slower one.
const AUTOMATON_BYTES: usize = 16 << 20;

/// Steps back that the other expressions may take for one word: seconds, where a sound expression takes a few per character.
const BACKTRACK_LIMIT: usize = 50_000_000;

type Error = Box<dyn std::error::Error + Send + Sync>;

/// A pre-tokenizer: steps, each cutting what the one before left.
pub(crate) struct Splitter {
    steps: Vec<Step>,
}

enum Step {
    Cut {
        /// Whether text that does not begin with a space gets one.
        prefix_space: bool,
        words: Words,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    },
    Other(PreTokenizerWrapper),
}

impl Splitter {
    pub(crate) fn new(pre_tokenizer: PreTokenizerWrapper) -> Result<Self, Error> {
        let mut steps = Vec::new();
        add_steps(pre_tokenizer, &mut steps)?;
        Ok(Self { steps })
    }
}

fn add_steps(pre_tokenizer: PreTokenizerWrapper, steps: &mut Vec<Step>) -> Result<(), Error> {
    match pre_tokenizer {
        PreTokenizerWrapper::Sequence(sequence) => {
            for inner in sequence {
                add_steps(inner, steps)?;
            }
        }
        PreTokenizerWrapper::Split(split) => steps.push(Step::Cut {
            prefix_space: false,
            words: match &split.pattern {
                SplitPattern::Regex(expression) => Words::new(expression)?,
                SplitPattern::String(text) => Words::new(&fancy_regex::escape(text))?,
            },
            behavior: split.behavior,
            invert: split.invert,
        }),
        PreTokenizerWrapper::ByteLevel(byte_level) if byte_level.use_regex => {
            steps.push(Step::Cut {
                prefix_space: byte_level.add_prefix_space,
                words: Words::new(GPT2)?,
                behavior: SplitDelimiterBehavior::Isolated,
                invert: false,
            });
            let spell = ByteLevel::new(false, byte_level.trim_offsets, false);
            steps.push(Step::Other(PreTokenizerWrapper::ByteLevel(spell)));
        }
        other => steps.push(Step::Other(other)),
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
        for step in &self.steps {
            match step {
                Step::Other(other) => other.pre_tokenize(text)?,
                Step::Cut { prefix_space, words, behavior, invert } => text.split(|_, mut part| {
                    if *prefix_space && !part.get().starts_with(' ') {
                        part.prepend(" ");
                    }
                    if *invert { part.split(Invert(words), *behavior) } else { part.split(words, *behavior) }
                })?,
            }
        }
        Ok(())
    }
}

/// Finds the matches of one expression.
enum Words {
    /// Pattern 0 is the expression without [`SPACES_TAIL`], pattern 1 the white space.
    Linear(Regex),
    Backtracking(fancy_regex::Regex),
}

impl Words {
    fn new(expression: &str) -> Result<Self, Error> {
        if let Some(head) = expression.strip_suffix(SPACES_TAIL) {
            // The automaton's syntax reads `a?+` as a repetition of `a?`, not as a possessive one.
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

    /// The matches in order, none empty.
    fn for_each(&self, text: &str, mut found: impl FnMut(usize, usize)) -> Result<(), Error> {
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
                        found(matched.start(), end);
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
                        found(matched.start(), matched.end());
                    }
                }
            }
        }
        Ok(())
    }
}

impl Pattern for &Words {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        if text.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        let mut parts = Vec::new();
        let mut end = 0;
        self.for_each(text, |from, to| {
            if end < from {
                parts.push(((end, from), false));
            }
            parts.push(((from, to), true));
            end = to;
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
                // The braces of `\p{L}` are no quantifier.
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

    fn words(expression: &str, text: &str) -> Vec<(Offsets, bool)> {
        (&Words::new(expression).unwrap()).find_matches(text).unwrap()
    }

    #[test]
    fn the_automaton_finds_the_words_of_the_backtracking_engine() {
        let expressions = [
            GPT2,
            r"(?i:'s|'ll)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+|\p{N}|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"x*|\s+(?!\S)|\s+",
        ];
        for expression in expressions {
            let linear = Words::new(expression).unwrap();
            assert!(matches!(linear, Words::Linear(_)), "{expression}");
            let twin = Words::Backtracking(fancy_regex::Regex::new(expression).unwrap());
            proptest!(|(text in "([a-zA-Z']{0,3}|[ \t\r\n\u{85}\u{3000}]{0,4}|[0-9٣½]{0,4}|[é漢👍\u{301}x.!]{0,3}|\\PC){0,8}")| {
                prop_assert_eq!((&linear).find_matches(&text).unwrap(), (&twin).find_matches(&text).unwrap());
            });
        }
    }

    #[test]
    fn white_space_leaves_its_last_character_to_a_word_that_follows() {
        let cut = |text: &'static str| -> Vec<&str> {
            words(GPT2, text).into_iter().map(|((from, to), _)| &text[from..to]).collect()
        };
        assert_eq!(cut("a   b"), ["a", "  ", " b"]);
        assert_eq!(cut("a \u{3000}b"), ["a", " ", "\u{3000}", "b"]);
        assert_eq!(cut("a\nb  "), ["a", "\n", "b", "  "]);
    }

    #[test]
    fn an_expression_that_no_automaton_can_follow_keeps_its_meaning() {
        assert!(has_possessive_quantifier(r"a++b"));
        assert!(has_possessive_quantifier(r"[^\r\n]?+\p{L}+"));
        assert!(has_possessive_quantifier(r"\p{N}{1,3}+"));
        assert!(!has_possessive_quantifier(r"\p{L}+[()*+,]+|\?+| ?a"));
        assert!(matches!(Words::new(r"a++|\s+(?!\S)|\s+"), Ok(Words::Backtracking(_))));
        assert!(matches!(Words::new(r"(?<=a)b|\s+(?!\S)|\s+"), Ok(Words::Backtracking(_))));
        assert!(matches!(Words::new(r"\p{N}{1,3}"), Ok(Words::Backtracking(_))));
        assert_eq!(words(r"a++a|b", "aaab"), [((0, 3), false), ((3, 4), true)]);
    }
}
