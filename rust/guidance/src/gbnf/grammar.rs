//! A parsed GBNF grammar: its rules, and the nodes of their bodies.

use std::ops::Range;

/// The index of a node in [`Grammar::nodes`].
pub(super) type NodeId = usize;

/// The rules of a source, with the nodes of all bodies in one vector.
#[derive(Default)]
pub(super) struct Grammar {
    pub(super) nodes: Vec<Node>,
    pub(super) rules: Vec<Rule>,
    /// Index of the rule that the output matches.
    pub(super) root: usize,
}

pub(super) struct Rule {
    pub(super) name: String,
    /// Line of the definition, from 1.
    pub(super) line: usize,
    pub(super) body: NodeId,
    /// The nodes of the body, each after its children.
    pub(super) nodes: Range<NodeId>,
}

pub(super) enum Node {
    /// One character of this set.
    Characters(CharacterSet),
    /// One token of the model.
    Token(TokenReference),
    /// A text of the rule with this index.
    Rule(usize),
    Sequence(Vec<NodeId>),
    Choice(Vec<NodeId>),
    /// At least the first number of repetitions, and at most the second.
    Repeat(NodeId, u32, Option<u32>),
}

impl Grammar {
    pub(super) fn root_body(&self) -> NodeId {
        self.rules[self.root].body
    }

    /// By node: whether it matches a finite text, without characters and tokens if `is_empty`.
    pub(super) fn matches_finite(&self, is_empty: bool) -> Vec<bool> {
        let mut users: Vec<Vec<NodeId>> = vec![Vec::new(); self.nodes.len()];
        // Per node: the number of parts that must be found before it.
        let mut missing = vec![0; self.nodes.len()];
        let mut found = Vec::new();
        for (node, data) in self.nodes.iter().enumerate() {
            missing[node] = match data {
                Node::Characters(_) | Node::Token(_) => usize::from(is_empty),
                Node::Rule(rule) => {
                    users[self.rules[*rule].body].push(node);
                    1
                }
                Node::Sequence(parts) => parts.len(),
                Node::Choice(_) => 1,
                Node::Repeat(_, min, _) => usize::from(*min > 0),
            };
            data.children().iter().for_each(|&child| users[child].push(node));
            if missing[node] == 0 {
                found.push(node);
            }
        }
        let mut matches = vec![false; self.nodes.len()];
        found.iter().for_each(|&node| matches[node] = true);
        while let Some(node) = found.pop() {
            for &user in &users[node] {
                missing[user] = usize::saturating_sub(missing[user], 1);
                if missing[user] == 0 && !std::mem::replace(&mut matches[user], true) {
                    found.push(user);
                }
            }
        }
        matches
    }

    /// The rule that contains the node.
    pub(super) fn rule_of(&self, node: NodeId) -> &Rule {
        let rule = self.rules.iter().find(|rule| rule.nodes.contains(&node));
        rule.expect("every node is in the body of a rule; this is a bug")
    }
}

impl Node {
    /// The nodes within the node; a rule's body is not one of them.
    pub(super) fn children(&self) -> &[NodeId] {
        match self {
            Self::Characters(_) | Self::Token(_) | Self::Rule(_) => &[],
            Self::Sequence(children) | Self::Choice(children) => children,
            Self::Repeat(child, ..) => std::slice::from_ref(child),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct TokenReference {
    pub(super) id: u32,
    /// Whether it is every token except `id` and the end tokens.
    pub(super) negated: bool,
    /// Whether a token that it matches is text.
    pub(super) matches_text: bool,
}

impl TokenReference {
    /// Whether a token is matched by both.
    pub(super) fn intersects(self, other: Self) -> bool {
        match (self.negated, other.negated) {
            (false, false) => self.id == other.id,
            (true, true) => true,
            _ => self.id != other.id,
        }
    }
}

/// A set of characters: ranges of code points, both ends included, in ascending order, apart from each other.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct CharacterSet {
    ranges: Vec<(u32, u32)>,
}

const MAX_CODE_POINT: u32 = char::MAX as u32;
/// The code points that are no characters.
const SURROGATES: (u32, u32) = (0xd800, 0xdfff);

impl CharacterSet {
    pub(super) fn new(ranges: impl IntoIterator<Item = (u32, u32)>) -> Self {
        let mut sorted: Vec<_> = ranges.into_iter().collect();
        sorted.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (first, last) in sorted {
            match ranges.last_mut() {
                Some(previous) if first <= previous.1 + 1 => previous.1 = previous.1.max(last),
                _ => ranges.push((first, last)),
            }
        }
        Self { ranges }
    }

    pub(super) fn all() -> Self {
        Self::default().complement()
    }

    /// The characters that are not in the set.
    pub(super) fn complement(&self) -> Self {
        let mut ranges = Vec::new();
        let mut next = 0;
        let excluded = Self::new(self.ranges.iter().copied().chain([SURROGATES])).ranges;
        for (first, last) in excluded {
            if next < first {
                ranges.push((next, first - 1));
            }
            next = last + 1;
        }
        if next <= MAX_CODE_POINT {
            ranges.push((next, MAX_CODE_POINT));
        }
        Self { ranges }
    }

    pub(super) fn union<'a>(sets: impl IntoIterator<Item = &'a Self>) -> Self {
        Self::new(sets.into_iter().flat_map(|set| set.ranges.iter().copied()))
    }

    pub(super) fn intersects(&self, other: &Self) -> bool {
        let (mut left, mut right) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(&&(first, last)), Some(&&(other_first, other_last))) = (left.peek(), right.peek()) {
            if first.max(other_first) <= last.min(other_last) {
                return true;
            }
            if last < other_last {
                left.next()
            } else {
                right.next()
            };
        }
        false
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(char, char)]) -> CharacterSet {
        CharacterSet::new(ranges.iter().map(|&(first, last)| (u32::from(first), u32::from(last))))
    }

    #[test]
    fn complement_has_the_other_characters_and_no_surrogates() {
        let expected = [(0, 0x60), (0x7b, 0xd7ff), (0xe000, 0x10_ffff)];
        assert_eq!(set(&[('b', 'z'), ('a', 'c')]).complement().ranges(), expected);
        assert!(CharacterSet::all().complement().is_empty());
    }

    #[test]
    fn sets_intersect_if_a_character_is_in_both() {
        let digits_and_lower = set(&[('0', '9'), ('a', 'f')]);
        assert!(digits_and_lower.intersects(&set(&[('A', 'Z'), ('f', 'z')])));
        assert!(!digits_and_lower.intersects(&set(&[('A', 'Z'), ('g', 'z')])));
        assert!(!digits_and_lower.intersects(&CharacterSet::default()));
    }
}
