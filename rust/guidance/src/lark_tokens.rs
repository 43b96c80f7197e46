//! The tokens of a Lark grammar, as the library's lexer divides it.
//!
//! The library does not publish its lexer, so the expressions are those of its source. A test compares the tokens with
//! the library's errors. A source that is divided differently there is refused, here or by the library.

use std::ops::Range;
use std::sync::LazyLock;

use llguidance::api::ParserLimits;
use llguidance::derivre::RegexAst;
use llguidance::earley::lexerspec::LexerSpec;
use llguidance::earley::regexvec::{LexemeSet, RegexVec};
use serde::de::IgnoredAny;
use serde_json::Deserializer;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LarkKind {
    /// Blanks or a comment.
    Space,
    Open,
    Close,
    Colon,
    /// The operator of intersections.
    And,
    Rule,
    Terminal,
    Regex,
    /// A keyword that a JSON value follows.
    JsonKeyword,
    /// The value after such a keyword.
    Json,
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LarkToken {
    pub(crate) kind: LarkKind,
    pub(crate) range: Range<usize>,
}

/// The expressions of the library's tokens. The first of two that match the same text wins.
const EXPRESSIONS: [(LarkKind, &str); 14] = [
    (LarkKind::Space, r"((#|//)[^\n]*)|[ \t]+"),
    (LarkKind::Open, r"[({\[]"),
    (LarkKind::Close, r"[)}\]]"),
    (LarkKind::Colon, ":"),
    (LarkKind::And, "&"),
    (LarkKind::JsonKeyword, "%(json|llguidance|regex)"),
    (LarkKind::Other, r"->|,|\.|\.\.|%(declare|ignore|import|override|if|lark)|~|\||=|_|::"),
    (LarkKind::Rule, r"!?[_?]?[a-z][_a-z0-9\-]*"),
    (LarkKind::Terminal, r"_?[A-Z][_A-Z0-9\-]*"),
    (LarkKind::Other, r#""(\\([\"\\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^\"\\\x00-\x1F\x7F])*"(i|)"#),
    (LarkKind::Regex, r"/(\\.|[^/\\])+/[imslux]*"),
    (LarkKind::Other, r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?|0[xX][0-9a-fA-F]+|[+*?]"),
    (LarkKind::Other, r"(\r?\n)+[ \t]*"),
    (LarkKind::Other, r"<[^<>\s]+>|@[a-zA-Z0-9_\-]+"),
];

static LEXER: LazyLock<(RegexVec, LexemeSet)> = LazyLock::new(|| {
    let mut spec = LexerSpec::new().expect("an empty lexer is valid; this is a bug");
    let [space, tokens @ ..] = EXPRESSIONS.map(|(_, expression)| RegexAst::Regex(expression.to_owned()));
    spec.setup_lexeme_class(space).expect("the expression is valid; this is a bug");
    for token in tokens {
        spec.add_greedy_lexeme(String::new(), token, false, None, usize::MAX)
            .expect("the expression is valid; this is a bug");
    }
    let lexer = spec.to_regex_vec(&mut ParserLimits::default());
    (lexer.expect("the lexer is within the limits; this is a bug"), spec.all_lexemes())
});

/// Divides a source, without its blanks and comments.
///
/// # Errors
/// The line, the column and the reason.
pub(crate) fn divide(source: &str) -> Result<Vec<LarkToken>, String> {
    // Its states are computed when they are reached.
    let (mut lexer, expressions) = LEXER.clone();
    let initial = lexer.initial_state(&expressions);
    let mut tokens = Vec::new();
    let mut start = 0;
    while start < source.len() {
        let (mut state, mut end) = (initial, start);
        // The library adds the end of the last line.
        for &byte in source.as_bytes()[start..].iter().chain(b"\n") {
            let next = lexer.transition(state, byte);
            if next.is_dead() {
                break;
            }
            (state, end) = (next, end + 1);
        }
        // A longer token that is not complete is an error, also where a shorter one is.
        let Some(index) = lexer.state_desc(state).greedy_accepting.first() else {
            return Err(error_at(source, start, "no token begins here"));
        };
        let kind = EXPRESSIONS[index.as_usize()].0;
        end = end.min(source.len());
        if kind != LarkKind::Space {
            tokens.push(LarkToken { kind, range: start..end });
        }
        start = end;
        if kind == LarkKind::JsonKeyword {
            let mut values = Deserializer::from_str(&source[start..]).into_iter::<IgnoredAny>();
            match values.next() {
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(error_at(source, start, &format!("not JSON: {error}"))),
                None => return Err(error_at(source, start, "a JSON value is missing")),
            }
            end = start + values.byte_offset();
            tokens.push(LarkToken { kind: LarkKind::Json, range: start..end });
            start = end;
        }
    }
    Ok(tokens)
}

fn error_at(source: &str, offset: usize, reason: &str) -> String {
    let before = &source[..offset];
    let line = 1 + before.matches('\n').count();
    let column = 1 + before.len() - before.rfind('\n').map_or(0, |newline| newline + 1);
    format!("at {line}({column}): {reason}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::cell::Cell;

    use llguidance::api::{GrammarInit, TopLevelGrammar};
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};

    use super::*;
    use crate::library;

    /// The library's error of a source: its text, and the offset of the line and column at its beginning.
    fn library_error(source: &str) -> Option<(String, Option<usize>)> {
        let grammar = TopLevelGrammar::from_lark(source.to_owned());
        let compile = || GrammarInit::Serialized(grammar).to_internal(None, ParserLimits::default());
        let text = library::call(compile).ok()?.err()?.to_string();
        let position = text.split_once("): ").and_then(|(position, _)| position.split_once('('));
        let position = position.and_then(|(line, column)| Some((line.parse().ok()?, column.parse().ok()?)));
        let offset = position.map(|(line, column): (usize, usize)| {
            let before: usize = source.split_inclusive('\n').take(line - 1).map(str::len).sum();
            before + column - 1
        });
        Some((text, offset))
    }

    /// Compares the tokens with the library's error. Its lexer names the line and column where it stops; its parser
    /// names those of the first token that it refuses, and that token. Returns whether it named one.
    fn check(source: &str) -> Result<bool, TestCaseError> {
        let Some((text, offset)) = library_error(source) else { return Ok(false) };
        let is_divided = divide(source).is_ok();
        // The library adds the end of the last line.
        let source = &format!("{source}\n");
        let divided = divide(source);
        prop_assert_eq!(divided.is_ok(), is_divided, "{:?}", source);
        let is_lexical = text.contains("lexer error") || text.starts_with("failed to parse");
        prop_assert_eq!(divided.is_err(), is_lexical, "{:?}\n{:?}\n{}", source, divided, text);
        if let (Ok(tokens), Some(offset), Some((_, token))) = (divided, offset, text.split_once(" (at ")) {
            // After a token that no byte can continue, the library's column is that of the token's last byte.
            let near = |found: &&LarkToken| (offset..=offset + 1).contains(&found.range.start);
            let names_it = |found: &LarkToken| {
                let text = &source[found.range.clone()];
                found.kind == LarkKind::JsonKeyword || token.starts_with(&format!("{text:?} ("))
            };
            prop_assert!(tokens.iter().filter(near).any(names_it), "{:?}\n{:?}\n{}", source, tokens, text);
            return Ok(true);
        }
        Ok(false)
    }

    #[test]
    fn random_sources_are_divided_as_the_library_divides_them() {
        const PIECES: [&str; 58] = [
            "T-0",
            "T-1: ",
            "a-b",
            "A_B",
            "_T",
            "_t",
            "?a: ",
            "!x",
            "a",
            "B",
            "-",
            "->",
            ">",
            "<",
            "<a>",
            "</b>",
            "\"",
            "\"x\"",
            "\"\\\"",
            "\\",
            "/",
            "/r/",
            "/[/]/",
            "/\\/",
            "//",
            "#",
            "\n",
            "\r",
            "\r\n",
            "\n| ",
            "|",
            "&",
            "(",
            ")",
            "[",
            "]",
            "{",
            "}",
            "{2,3}",
            ".",
            "..",
            ":",
            "::",
            "~",
            "=",
            ",",
            "+",
            "?",
            "*",
            "1",
            "0x1",
            "e",
            "%json",
            " {\"a\": [1]}",
            "%lark {",
            "%ignore ",
            "é",
            "\u{2003}",
        ];
        let pieces = || prop::sample::select(PIECES.to_vec());
        let text = |most| prop::collection::vec((pieces(), prop::bool::weighted(0.3)), 0..most);
        // A valid grammar, so that the library's parser goes on to the end, with a few random pieces within it.
        let rules = prop::collection::vec(
            prop::sample::select(vec![
                "start: A-1 b-c? /d\\/(/ # \"(\n",
                "b-c: \"\\\"/\" // <\n",
                "A-1.2: \"x\"i /[\"]/\n",
                "_T[lazy]: (\"a\" | <b>)\r\n",
                "e: %json {\"#\": [\"/\"]} f\n",
                "%ignore /[ \\t]+/\n",
            ]),
            0..6,
        );
        let sources = (rules.clone(), text(4), rules, text(12)).prop_map(|(before, few, after, more)| {
            let join = |pieces: Vec<(&str, bool)>| -> String {
                pieces
                    .iter()
                    .map(|(piece, has_space)| format!("{piece}{}", if *has_space { " " } else { "" }))
                    .collect()
            };
            format!("{}{}{}{}", before.concat(), join(few), after.concat(), join(more))
        });
        let config = Config { cases: 2_000, failure_persistence: None, ..Config::default() };
        let num_compared = Cell::new(0);
        TestRunner::new_with_rng(
            config,
            proptest::test_runner::TestRng::deterministic_rng(Default::default()),
        )
        .run(&sources, |source| {
            num_compared.set(num_compared.get() + i32::from(check(&source)?));
            Ok(())
        })
        .unwrap();
        assert!(num_compared.get() > 500, "the library named a token of {} sources", num_compared.get());
    }

    #[test]
    fn tokens_have_their_kinds_and_json_is_one_of_them() {
        let source = "start: T-0 & /[(]\\//i # (\r%json {\"a\": [1]}x?b\n\r\n[~1..2] < ";
        let error = divide(source).unwrap_err();
        assert_eq!(error, "at 3(9): no token begins here");
        let source = "st: T-0 & /[(]\\//i # (\r\n%json {\"a\": [1]}x?b";
        let tokens = divide(source).unwrap();
        let texts: Vec<_> = tokens.iter().map(|token| (token.kind, &source[token.range.clone()])).collect();
        let expected = [
            (LarkKind::Rule, "st"),
            (LarkKind::Colon, ":"),
            (LarkKind::Terminal, "T-0"),
            (LarkKind::And, "&"),
            (LarkKind::Regex, "/[(]\\//i"),
            (LarkKind::Other, "\n"),
            (LarkKind::JsonKeyword, "%json"),
            (LarkKind::Json, " {\"a\": [1]}"),
            (LarkKind::Rule, "x"),
            (LarkKind::Rule, "?b"),
        ];
        assert_eq!(texts, expected);
    }
}
