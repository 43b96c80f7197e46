//! Regular expressions of files, with a limit on their time.
//!
//! The `tokenizers` library uses a backtracking regex engine that gives up after a million steps and silently leaves
//! the rest of the text as it is: a megabyte of spaces is enough to get different ids. So the library's steps with an
//! expression are replaced by those that use this module. Nearly every byte-level tokenizer ends its expression in
//! `\s+(?!\S)|\s+`. That look-ahead only leaves the last space to the next word; it is implemented by hand, and the
//! rest of the expression runs on an automaton. Other expressions use a backtracking engine with a higher limit; a text
//! that exceeds it is an error.
//!
//! With the expressions in use, the time is linear in the length of the text. An expression of a file can make it
//! quadratic, also on the automaton, which may search the rest of the text for each match. So the time has a linear
//! limit, which is checked after each search. The backtracking engine searches at one position at a time.

use std::cell::Cell;
use std::time::{Duration, Instant};

use regex_automata::meta::Regex;
use regex_automata::{Input, PatternID};
use tokenizers::normalizers::Replace;
use tokenizers::pattern::Pattern;
use tokenizers::{NormalizedString, Offsets};

/// End of an expression that matches whitespace but leaves its last character to the next word.
const SPACES_TAIL: &str = r"|\s+(?!\S)|\s+";

/// Cache size of the lazy automaton. With too small a cache, text in many scripts makes the automaton rebuild its
/// states or fall back to a slower engine.
const AUTOMATON_BYTES: usize = 16 << 20;

/// Maximum number of backtracking steps per match. This is seconds of time; a reasonable expression takes a few steps
/// per character.
const BACKTRACK_LIMIT: usize = 50_000_000;

/// Time that the expressions may take for a text of any length, and for each of its bytes. The expressions in use take
/// less than a tenth of that, also with the backtracking engine.
const BASE_TIME: Duration = Duration::from_secs(1);
const TIME_PER_BYTE: Duration = Duration::from_micros(10);
/// The most time that counts for a search: if one takes longer, the process was stopped meanwhile, or four of them are
/// enough.
const SEARCH_TIME: Duration = Duration::from_millis(250);

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;

/// A compiled expression.
pub(crate) enum Expression {
    /// Pattern 0 is the expression without [`SPACES_TAIL`], pattern 1 matches whitespace. Has no empty matches.
    Linear(Regex),
    /// The expression at the position where the search begins.
    Anchored(fancy_regex::Regex),
    Backtracking(fancy_regex::Regex),
}

impl Expression {
    /// An expression. Its empty matches do not count.
    pub(crate) fn of_words(expression: &str) -> Result<Self, Error> {
        if let Some(head) = expression.strip_suffix(SPACES_TAIL) {
            // The automaton parses `a?+` as a repetition of `a?`, not as a possessive quantifier.
            if !has_possessive_quantifier(head) {
                let config = Regex::config().hybrid_cache_capacity(AUTOMATON_BYTES);
                if let Ok(regex) = Regex::builder().configure(config).build_many(&[head, r"\s+"]) {
                    return Ok(Self::Linear(regex));
                }
            }
        }
        Self::new(expression)
    }

    /// An expression with the matches that the library finds.
    pub(crate) fn new(expression: &str) -> Result<Self, Error> {
        let build = |expression: &str| {
            fancy_regex::RegexBuilder::new(expression).backtrack_limit(BACKTRACK_LIMIT).build()
        };
        // The library passes an expression that needs no backtracking to the automaton, but not if it has an anchor.
        let is_regular = !has_possessive_quantifier(expression) && Regex::new(expression).is_ok();
        if !is_regular
            && !expression.contains(r"\G")
            && let Ok(regex) = build(&format!(r"\G(?:{expression})"))
        {
            return Ok(Self::Anchored(regex));
        }
        Ok(Self::Backtracking(build(expression)?))
    }

    /// Calls `on_match` with the start and end of each match, in order, and `after_search` after each search. An empty
    /// match directly after another match is none.
    fn for_each(
        &self,
        text: &str,
        mut after_search: impl FnMut() -> Result<(), Error>,
        mut on_match: impl FnMut(usize, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Linear(regex) => {
                let mut at = 0;
                while let Some(matched) = regex.search(&Input::new(text).span(at..text.len())) {
                    after_search()?;
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
                        at = after_character(text, at);
                    }
                }
            }
            Self::Anchored(regex) => {
                let (mut at, mut last_end) = (0, None);
                while at <= text.len() {
                    let found = regex.find_from_pos(text, at)?;
                    after_search()?;
                    let Some(matched) = found else {
                        at = after_character(text, at);
                        continue;
                    };
                    let (start, end) = (matched.start(), matched.end());
                    at = if start == end { after_character(text, end) } else { end };
                    if start < end || last_end != Some(end) {
                        on_match(start, end)?;
                        last_end = Some(end);
                    }
                }
            }
            Self::Backtracking(regex) => {
                for matched in regex.find_iter(text) {
                    let matched = matched?;
                    after_search()?;
                    on_match(matched.start(), matched.end())?;
                }
            }
        }
        Ok(())
    }

    /// Cuts a text into the matches for which `is_part` returns true, and what is between them, in the form of the
    /// library's patterns.
    pub(crate) fn cut(
        &self,
        text: &str,
        time: &TimeLimit,
        mut is_part: impl FnMut(usize, usize) -> Result<bool, Error>,
    ) -> Result<Vec<(Offsets, bool)>, Error> {
        if text.is_empty() {
            return Ok(vec![((0, 0), false)]);
        }
        time.add_part(text.len());
        let mut parts = Vec::new();
        let mut end = 0;
        let on_match = |from, to| {
            if is_part(from, to)? {
                if end < from {
                    parts.push(((end, from), false));
                }
                parts.push(((from, to), true));
                end = to;
            }
            Ok(())
        };
        self.for_each(text, || time.check(), on_match)?;
        if end < text.len() {
            parts.push(((end, text.len()), false));
        }
        Ok(parts)
    }
}

/// The position after the character at `at`.
fn after_character(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

/// A `Replace` with an expression, of a normaliser or a decoder.
pub(crate) struct Replacement {
    expression: Expression,
    content: String,
}

impl Replacement {
    /// `None` if the step replaces a text: the library takes linear time for it.
    pub(crate) fn new(step: &Replace) -> Result<Option<Self>, Error> {
        let description = serde_json::to_value(step)?;
        let Some(expression) = description["pattern"]["Regex"].as_str() else { return Ok(None) };
        Ok(Some(Self { expression: Expression::new(expression)?, content: step.content.clone() }))
    }

    pub(crate) fn normalize(&self, text: &mut NormalizedString, time: &TimeLimit) -> Result<(), Error> {
        text.replace(Matches { expression: &self.expression, time }, &self.content)
    }

    pub(crate) fn replace(&self, text: &str, time: &TimeLimit) -> Result<String, Error> {
        let parts = self.expression.cut(text, time, |_, _| Ok(true))?;
        let part = |&((from, to), is_match): &(Offsets, bool)| {
            if is_match { self.content.as_str() } else { &text[from..to] }
        };
        Ok(parts.iter().map(part).collect())
    }
}

/// All matches of an expression.
struct Matches<'a> {
    expression: &'a Expression,
    time: &'a TimeLimit,
}

impl Pattern for Matches<'_> {
    fn find_matches(&self, text: &str) -> tokenizers::Result<Vec<(Offsets, bool)>> {
        self.expression.cut(text, self.time, |_, _| Ok(true))
    }
}

/// The time that the expressions take for a text.
pub(crate) struct TimeLimit {
    /// The field that has the expressions.
    field: &'static str,
    checked: Cell<Instant>,
    taken: Cell<Duration>,
    allowed: Cell<Duration>,
}

impl TimeLimit {
    pub(crate) fn new(field: &'static str) -> Self {
        Self {
            field,
            checked: Cell::new(Instant::now()),
            taken: Cell::new(Duration::ZERO),
            allowed: Cell::new(BASE_TIME),
        }
    }

    /// Allows the time for a part of the text, which begins now.
    pub(crate) fn add_part(&self, bytes: usize) {
        self.checked.set(Instant::now());
        let time = TIME_PER_BYTE.saturating_mul(u32::try_from(bytes).unwrap_or(u32::MAX));
        self.allowed.set(self.allowed.get().saturating_add(time));
    }

    /// Counts the time since the last check.
    pub(crate) fn check(&self) -> Result<(), Error> {
        self.check_at(Instant::now())
    }

    fn check_at(&self, now: Instant) -> Result<(), Error> {
        let search = now.saturating_duration_since(self.checked.replace(now));
        self.taken.set(self.taken.get().saturating_add(search.min(SEARCH_TIME)));
        if self.taken.get() <= self.allowed.get() {
            return Ok(());
        }
        let limit = format!("{BASE_TIME:?} and {TIME_PER_BYTE:?} per byte");
        Err(format!("the {} of its tokenizer.json takes more than {limit}", self.field).into())
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
    use tokenizers::normalizers::replace::ReplacePattern;
    use tokenizers::{Decoder, Normalizer};

    use super::*;
    use crate::splitter::GPT2;

    fn find(words: &Expression, text: &str) -> Result<Vec<(Offsets, bool)>, Error> {
        words.cut(text, &TimeLimit::new("pre_tokenizer"), |from, to| Ok(from < to))
    }

    fn found(words: &Expression, text: &str) -> Vec<(Offsets, bool)> {
        find(words, text).unwrap()
    }

    fn words(expression: &str, text: &str) -> Vec<(Offsets, bool)> {
        found(&Expression::of_words(expression).unwrap(), text)
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
            let linear = Expression::of_words(expression).unwrap();
            assert!(matches!(linear, Expression::Linear(_)), "{expression}");
            let backtracking = Expression::Backtracking(fancy_regex::Regex::new(expression).unwrap());
            proptest!(|(text in "([a-zA-Z']{0,3}|[ \t\r\n\u{85}\u{3000}]{0,4}|[0-9٣½]{0,4}|[é漢👍\u{301}x.!]{0,3}|\\PC){0,8}")| {
                prop_assert_eq!(found(&linear, &text), found(&backtracking, &text));
            });
        }
    }

    #[test]
    fn anchored_and_unanchored_searches_find_the_same_words() {
        let expressions = [
            PUBLISHED[2],
            r"(?<=a)b|\s+(?!\S)|\s+",
            r"(?=b)|a\Kb|x*+",
            r"(?i)(?<!a)B(?=\s|c)",
            r"(?<=^|a)b|c(?=$)",
            r"(?x) a++ # words",
        ];
        for expression in expressions {
            let anchored = Expression::of_words(expression).unwrap();
            assert_eq!(
                matches!(anchored, Expression::Anchored(_)),
                !expression.contains('#'),
                "{expression}"
            );
            let unanchored = Expression::Backtracking(fancy_regex::Regex::new(expression).unwrap());
            proptest!(|(text in "([abcABx]{0,4}|[ \t\r\n\u{3000}]{0,3}|[0-9é漢👍.!]{0,3}){0,8}")| {
                prop_assert_eq!(found(&anchored, &text), found(&unanchored, &text));
            });
        }
        assert!(matches!(Expression::of_words(r"\Ga++"), Ok(Expression::Backtracking(_))));
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
        assert!(matches!(Expression::of_words(r"a++|\s+(?!\S)|\s+"), Ok(Expression::Anchored(_))));
        assert!(matches!(Expression::of_words(r"(?<=a)b|\s+(?!\S)|\s+"), Ok(Expression::Anchored(_))));
        assert!(matches!(Expression::of_words(r"\p{N}{1,3}"), Ok(Expression::Backtracking(_))));
        assert_eq!(words(r"a++a|b", "aaab"), [((0, 3), false), ((3, 4), true)]);
    }

    /// Expressions of published tokenizers for each engine: GPT-2's, Qwen's, and cl100k with possessive quantifiers.
    const PUBLISHED: [&str; 3] = [
        GPT2,
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
    ];

    #[test]
    fn published_expressions_split_a_megabyte_in_time() {
        const BYTES: usize = 1 << 20;
        for expression in PUBLISHED {
            let words = Expression::of_words(expression).unwrap();
            for part in [" ", "a", "7", "\n", "Hello, it's 1234 \r\n  caf\u{e9} \u{6f22}\u{1f44d}\t"] {
                let text = part.repeat(BYTES / part.len());
                assert!(!found(&words, &text).is_empty(), "{expression} {part:?}");
            }
        }
    }

    #[test]
    fn long_search_counts_as_a_quarter_of_a_second() {
        let time = TimeLimit::new("pre_tokenizer");
        let mut now = time.checked.get();
        for _ in 0..4 {
            now += Duration::from_secs(3600);
            time.check_at(now).unwrap();
        }
        time.check_at(now).unwrap();
        time.check_at(now + Duration::from_micros(1)).unwrap_err();
    }

    #[test]
    fn quadratic_expressions_are_stopped() {
        for (expression, bytes) in [(r"(?=(a+)+b)a", 60_000), (r"a+b|a", 200_000)] {
            let words = Expression::of_words(expression).unwrap();
            let error = find(&words, &"a".repeat(bytes)).unwrap_err().to_string();
            assert_eq!(error, "the pre_tokenizer of its tokenizer.json takes more than 1s and 10µs per byte");
        }
    }
    #[test]
    fn replacements_are_those_of_the_library() {
        let expressions = [
            r"a+|\s",
            r"x*",
            r"(?=b)|a\Kb|x*+",
            r"(?<=a)b|$",
            r"^|\s+(?!\S)|\s+",
            r"(?i)(?<!a)B(?=\s|c)",
            r"\b",
            r"[^a-z]{2}|",
            r"\Ga",
        ];
        for expression in expressions {
            for content in ["", "_", "ab"] {
                let library = Replace::new(ReplacePattern::Regex(expression.to_owned()), content).unwrap();
                let ours = Replacement::new(&library).unwrap().unwrap();
                proptest!(|(text in "([abcABx]{0,4}|[ \t\r\n\u{3000}]{0,3}|[0-9é漢👍.!]{0,3}){0,8}")| {
                    let time = TimeLimit::new("normalizer");
                    let mut expected = NormalizedString::from(text.as_str());
                    let mut normalized = expected.clone();
                    library.normalize(&mut expected).unwrap();
                    ours.normalize(&mut normalized, &time).unwrap();
                    prop_assert_eq!(&normalized, &expected, "{}", expression);
                    let decoded = library.decode_chain(vec![text.clone()]).unwrap();
                    prop_assert_eq!(ours.replace(&text, &time).unwrap(), decoded.concat(), "{}", expression);
                });
            }
        }
        assert!(Replacement::new(&Replace::new("a", "b").unwrap()).unwrap().is_none());
    }
}
