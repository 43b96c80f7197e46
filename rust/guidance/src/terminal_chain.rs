//! The longest chain of terminals that refer to one another in a Lark grammar. The library expands it, in a time that
//! grows with its third power.

use std::collections::{HashMap, HashSet};

use crate::lark_tokens::{LarkKind, LarkToken};

/// The number of terminals in the longest chain. It is not exact if there is a cycle, which the library refuses.
pub(crate) fn longest(source: &str, tokens: &[LarkToken]) -> usize {
    let terminals = references(source, tokens);
    let referred_by = |name: &str| terminals.get(name).map(Vec::as_slice).unwrap_or_default();
    let (mut found, mut lengths) = (HashSet::<&str>::new(), HashMap::<&str, usize>::new());
    // The path from a terminal to those that it refers to, with the number of references that were followed.
    let mut path: Vec<(&str, usize)> = Vec::new();
    for &first in terminals.keys() {
        path.extend(found.insert(first).then_some((first, 0)));
        while let Some((name, num_followed)) = path.last_mut() {
            if let Some(&referred) = referred_by(name).get(*num_followed) {
                *num_followed += 1;
                path.extend(found.insert(referred).then_some((referred, 0)));
            } else {
                let rest = referred_by(name).iter().filter_map(|referred| lengths.get(referred)).max();
                lengths.insert(name, 1 + rest.copied().unwrap_or_default());
                path.pop();
            }
        }
    }
    lengths.into_values().max().unwrap_or_default()
}

/// The terminals of a source, each with those that its definition names.
fn references<'a>(source: &'a str, tokens: &[LarkToken]) -> HashMap<&'a str, Vec<&'a str>> {
    let mut terminals = HashMap::<&str, Vec<&str>>::new();
    let mut current = None;
    for (index, token) in tokens.iter().enumerate() {
        let is_terminal = token.kind == LarkKind::Terminal;
        if !is_terminal && token.kind != LarkKind::Rule {
            continue;
        }
        let name = &source[token.range.clone()];
        if is_definition(source, &tokens[index + 1..]) {
            current = is_terminal.then_some(name);
        }
        if let (true, Some(defined)) = (is_terminal, current) {
            let referred = terminals.entry(defined).or_default();
            referred.extend((name != defined).then_some(name));
        }
    }
    terminals
}

/// Whether a name before these tokens is defined there: a colon follows, perhaps after a priority and attributes.
fn is_definition(source: &str, rest: &[LarkToken]) -> bool {
    let text = |token: &LarkToken| &source[token.range.clone()];
    let mut rest = rest;
    if let [dot, _, after @ ..] = rest
        && text(dot) == "."
    {
        rest = after;
    }
    if let [open, after @ ..] = rest
        && text(open) == "["
        && let Some(close) = after.iter().position(|token| token.kind == LarkKind::Close)
    {
        rest = &after[close + 1..];
    }
    rest.first().is_some_and(|token| token.kind == LarkKind::Colon)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use crate::lark_tokens;

    fn longest(source: &str) -> usize {
        super::longest(source, &lark_tokens::divide(source).unwrap())
    }

    #[test]
    fn chain_has_the_terminals_that_definitions_name() {
        for (source, length) in [
            ("start: a\na: \"x\"", 0),
            ("start: A", 0),
            ("start: A-0\nA-0: A-1\nA-1: \"a\"", 2),
            ("start: %lark { start: A\n A: B # C\n B: /b/\n }", 2),
            ("start: A\nA: B B\nB: C | D\nC: \"c\"\nD: E\nE: \"e\"", 4),
            ("start: A\nA: \"B: C\" // D\n# E\n  | /F/ <G>\nB: \"b\"", 1),
            ("start: A\nA.2: (B)\n  | _C\nB[lazy]: \"b\"\n_C: B+", 3),
            ("start: A\nA: B [C]\nB: \"b\"\nC: D [\"d\"]\nD: \"d\"", 3),
        ] {
            assert_eq!(longest(source), length, "{source}");
        }
    }

    #[test]
    fn cycles_end() {
        assert!(longest("start: A\nA: B\nB: C | A\nC: A B") >= 3);
    }

    #[test]
    fn long_chains_need_no_recursion() {
        let terminals = (0..100_000).map(|index| format!("T{index}: (T{} \"b\"?)\n", index + 1));
        let source = format!("start: T0\n{}T100000: \"a\"", terminals.collect::<String>());
        assert_eq!(longest(&source), 100_001);
    }
}
