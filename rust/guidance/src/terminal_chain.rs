//! The longest chain of terminals that refer to one another in a Lark grammar. The library expands it, in a time that
//! grows with its third power.

use std::collections::{HashMap, HashSet};

use crate::scan::{skip_string, skip_to};

/// The number of terminals in the longest chain. It is not exact if there is a cycle, which the library refuses.
pub(crate) fn longest(source: &str) -> usize {
    let terminals = references(source);
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
fn references(source: &str) -> HashMap<&str, Vec<&str>> {
    let mut terminals = HashMap::<&str, Vec<&str>>::new();
    let mut current = None;
    let mut bytes = source.bytes().peekable();
    let mut within_regex = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'/' if within_regex => within_regex = false,
            _ if within_regex => {}
            b'/' if bytes.peek() == Some(&b'/') => skip_to(&mut bytes, b'\n'),
            b'/' => within_regex = true,
            b'#' => skip_to(&mut bytes, b'\n'),
            b'<' => skip_to(&mut bytes, b'>'),
            b'"' => skip_string(&mut bytes),
            _ if is_name(byte) => {
                let start = source.len() - bytes.len() - 1;
                while bytes.next_if(|byte| is_name(*byte)).is_some() {}
                let name = &source[start..source.len() - bytes.len()];
                let is_terminal =
                    name.trim_start_matches('_').starts_with(|first: char| first.is_ascii_uppercase());
                if byte.is_ascii_digit() {
                    continue; // a priority or a number of repetitions
                }
                if is_definition(source[start + name.len()..].trim_start()) {
                    current = is_terminal.then_some(name);
                    terminals.entry(name).or_default();
                } else if let Some(defined) = current.filter(|_| is_terminal) {
                    terminals.entry(defined).or_default().push(name);
                }
            }
            _ => {}
        }
    }
    terminals
}

fn is_name(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Whether a name before this text is defined there: a colon follows, perhaps after a priority and attributes.
fn is_definition(rest: &str) -> bool {
    let rest = rest
        .strip_prefix('.')
        .map_or(rest, |rest| rest.trim_start_matches(|byte: char| byte.is_ascii_digit()));
    let rest = rest.trim_start();
    let rest = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')).map_or(rest, |(_, rest)| rest);
    rest.trim_start().starts_with(':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_has_the_terminals_that_definitions_name() {
        for (source, length) in [
            ("start: a\na: \"x\"", 1),
            ("start: A", 1),
            ("start: A\nA: B B\nB: C | D\nC: \"c\"\nD: E\nE: \"e\"", 4),
            ("start: A\nA: \"B: C\" // D\n# E\n  | /F/ <G>\nB: \"b\"", 1),
            ("start: A\nA.2: (B)\n  | _C\nB[lazy]: \"b\"\n_C: B+", 3),
            ("start: A\nA: B [C]\nB: \"b\"\nC\n: D [\"d\"]\nD: \"d\"", 3),
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
