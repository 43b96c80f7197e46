//! A parsed GBNF grammar: its rules, and the nodes of their bodies.

use std::ops::Range;

use super::TranslationError;
use super::steps::Steps;

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

/// Steps for a range that is sorted and stored.
const STEPS_OF_A_RANGE: usize = 8;

/// A set of characters: ranges of code points, both ends included, in ascending order, apart from each other.
#[derive(Clone, Default, PartialEq, Eq)]
pub(super) struct CharacterSet {
    ranges: Vec<(u32, u32)>,
}

const MAX_CODE_POINT: u32 = char::MAX as u32;
/// The code points that are no characters.
const SURROGATES: (u32, u32) = (0xd800, 0xdfff);

impl CharacterSet {
    pub(super) fn new(mut sorted: Vec<(u32, u32)>, steps: &mut Steps) -> Result<Self, TranslationError> {
        steps.take(sorted.len() * STEPS_OF_A_RANGE)?;
        sorted.sort_unstable();
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for (first, last) in sorted {
            match ranges.last_mut() {
                Some(previous) if first <= previous.1 + 1 => previous.1 = previous.1.max(last),
                _ => ranges.push((first, last)),
            }
        }
        Ok(Self { ranges })
    }

    pub(super) fn all() -> Self {
        Self { ranges: vec![(0, SURROGATES.0 - 1), (SURROGATES.1 + 1, MAX_CODE_POINT)] }
    }

    /// The characters that are not in the set.
    pub(super) fn complement(&self, steps: &mut Steps) -> Result<Self, TranslationError> {
        let mut ranges = Vec::new();
        let mut next = 0;
        steps.take(self.ranges.len() * STEPS_OF_A_RANGE)?;
        let excluded = self.ranges.iter().copied().chain([SURROGATES]).collect();
        let excluded = Self::new(excluded, steps)?.ranges;
        for (first, last) in excluded {
            if next < first {
                ranges.push((next, first - 1));
            }
            next = last + 1;
        }
        if next <= MAX_CODE_POINT {
            ranges.push((next, MAX_CODE_POINT));
        }
        Ok(Self { ranges })
    }

    pub(super) fn union<'a>(
        sets: impl IntoIterator<Item = &'a Self>,
        steps: &mut Steps,
    ) -> Result<Self, TranslationError> {
        let mut ranges = Vec::new();
        for set in sets {
            steps.take(1 + set.ranges.len() * STEPS_OF_A_RANGE)?;
            ranges.extend_from_slice(&set.ranges);
        }
        Self::new(ranges, steps)
    }

    pub(super) fn intersects(&self, other: &Self, steps: &mut Steps) -> Result<bool, TranslationError> {
        steps.take(self.ranges.len() + other.ranges.len())?;
        let (mut left, mut right) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(&&(first, last)), Some(&&(other_first, other_last))) = (left.peek(), right.peek()) {
            if first.max(other_first) <= last.min(other_last) {
                return Ok(true);
            }
            if last < other_last {
                left.next()
            } else {
                right.next()
            };
        }
        Ok(false)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub(super) fn ranges(&self) -> &[(u32, u32)] {
        &self.ranges
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    fn set(ranges: &[(char, char)]) -> CharacterSet {
        let ranges = ranges.iter().map(|&(first, last)| (u32::from(first), u32::from(last)));
        CharacterSet::new(ranges.collect(), &mut Steps::new()).unwrap()
    }

    #[test]
    fn complement_has_the_other_characters_and_no_surrogates() {
        let complement = |set: &CharacterSet| set.complement(&mut Steps::new()).unwrap();
        let expected = [(0, 0x60), (0x7b, 0xd7ff), (0xe000, 0x10_ffff)];
        assert_eq!(complement(&set(&[('b', 'z'), ('a', 'c')])).ranges(), expected);
        assert!(complement(&CharacterSet::all()).is_empty());
        assert_eq!(complement(&CharacterSet::default()).ranges(), CharacterSet::all().ranges());
    }

    #[test]
    fn sets_intersect_if_a_character_is_in_both() {
        let digits_and_lower = set(&[('0', '9'), ('a', 'f')]);
        let intersects =
            |other: &CharacterSet| digits_and_lower.intersects(other, &mut Steps::new()).unwrap();
        assert!(intersects(&set(&[('A', 'Z'), ('f', 'z')])));
        assert!(!intersects(&set(&[('A', 'Z'), ('g', 'z')])));
        assert!(!intersects(&CharacterSet::default()));
    }

    #[test]
    fn every_operation_takes_steps_for_its_ranges() {
        let ranges: Vec<_> = (0..1_000).map(|index| (3 * index, 3 * index + 1)).collect();
        let set = CharacterSet::new(ranges.clone(), &mut Steps::new()).unwrap();
        let few = || Steps::with(999);
        assert!(CharacterSet::new(ranges, &mut few()).is_err());
        assert!(set.complement(&mut few()).is_err());
        assert!(CharacterSet::union([&set], &mut few()).is_err());
        assert!(set.intersects(&CharacterSet::default(), &mut few()).is_err());
    }
}
