//! The terminals and tokens that can begin, and those that can follow, at the places of a GBNF grammar.

use super::TranslationError;
use super::grammar::{Grammar, Node, NodeId};
use super::steps::Steps;
use super::terminals::Terminals;

/// Steps for a word of memory.
const STEPS_OF_A_WORD: usize = 8;

/// A set of small integers.
#[derive(Clone)]
pub(super) struct Bits {
    words: Vec<u64>,
}

impl Bits {
    /// Sets of integers below `size`.
    pub(super) fn table(count: usize, size: usize, steps: &mut Steps) -> Result<Vec<Self>, TranslationError> {
        let words = size.div_ceil(64);
        steps.take(count.saturating_mul(words).saturating_mul(STEPS_OF_A_WORD))?;
        Ok(vec![Self { words: vec![0; words] }; count])
    }

    /// Returns whether it was not in the set.
    pub(super) fn insert(&mut self, index: usize) -> bool {
        let (word, bit) = (&mut self.words[index / 64], 1 << (index % 64));
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }

    /// Adds the members of another set. Returns whether there were new ones.
    fn extend(&mut self, other: &Self) -> bool {
        let mut changed = false;
        for (word, &other) in self.words.iter_mut().zip(&other.words) {
            changed |= other & !*word != 0;
            *word |= other;
        }
        changed
    }

    /// The members that are not in another set.
    pub(super) fn without(&self, other: &Self) -> Self {
        Self { words: self.words.iter().zip(&other.words).map(|(word, other)| word & !other).collect() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = usize> {
        self.words.iter().enumerate().flat_map(|(index, &word)| {
            let without_lowest = |rest: &u64| Some(rest & (rest - 1)).filter(|&rest| rest != 0);
            std::iter::successors(Some(word).filter(|&word| word != 0), without_lowest)
                .map(move |rest| index * 64 + rest.trailing_zeros() as usize)
        })
    }

    pub(super) fn num_words(&self) -> usize {
        self.words.len()
    }
}

/// The nodes that are reached from the root without entering a terminal.
pub(super) struct Places {
    /// Terminals and tokens. The sets are of indices into it.
    pub(super) leaves: Vec<NodeId>,
    /// By leaf: its index among the reached nodes.
    leaf_places: Vec<usize>,
    /// By reached node, of which the first is the root: the leaves that it can begin with.
    first: Vec<Bits>,
    /// By reached node: the leaves that can follow it.
    follow: Vec<Bits>,
}

impl Places {
    /// `nullable` has, by node, whether it matches the empty text.
    pub(super) fn new(
        grammar: &Grammar,
        terminals: &Terminals<'_>,
        nullable: &[bool],
        steps: &mut Steps,
    ) -> Result<Self, TranslationError> {
        steps.take(grammar.nodes.len())?;
        let reached = Reached::new(grammar, terminals);
        let (num_places, num_leaves) = (reached.nodes.len(), reached.leaves.len());
        let mut first = Bits::table(num_places, num_leaves, steps)?;
        let mut follow = Bits::table(num_places, num_leaves, steps)?;
        for (leaf, &place) in reached.leaves.iter().enumerate() {
            first[place].insert(leaf);
        }
        let pass = reached.parts.iter().map(|parts| 1 + parts.len()).sum::<usize>() * num_leaves.div_ceil(64);
        let is_nullable = |place: usize| nullable[reached.nodes[place]];
        let mut changed = true;
        while std::mem::take(&mut changed) {
            steps.take(pass)?;
            for place in (0..num_places).rev() {
                let mut beginning = std::mem::replace(&mut first[place], Bits { words: Vec::new() });
                let is_sequence = matches!(grammar.nodes[reached.nodes[place]], Node::Sequence(_));
                for &part in &reached.parts[place] {
                    // A place that contains itself adds nothing.
                    changed |= part != place && beginning.extend(&first[part]);
                    if is_sequence && !is_nullable(part) {
                        break;
                    }
                }
                first[place] = beginning;
            }
        }
        changed = true;
        while std::mem::take(&mut changed) {
            steps.take(pass)?;
            for place in 0..num_places {
                let node = &grammar.nodes[reached.nodes[place]];
                let mut after = follow[place].clone();
                if let (Node::Repeat(_, _, max), [part]) = (node, &reached.parts[place][..])
                    && *max != Some(1)
                {
                    after.extend(&first[*part]);
                }
                for &part in reached.parts[place].iter().rev() {
                    changed |= follow[part].extend(&after);
                    if matches!(node, Node::Sequence(_)) {
                        if !is_nullable(part) {
                            after.words.fill(0);
                        }
                        after.extend(&first[part]);
                    }
                }
            }
        }
        let leaves = reached.leaves.iter().map(|&place| reached.nodes[place]).collect();
        Ok(Self { leaves, leaf_places: reached.leaves, first, follow })
    }

    /// The leaves at the beginning of the text.
    pub(super) fn start(&self) -> &Bits {
        &self.first[0]
    }

    pub(super) fn follow_of_leaf(&self, leaf: usize) -> &Bits {
        &self.follow[self.leaf_places[leaf]]
    }
}

struct Reached {
    /// In the order in which they are reached.
    nodes: Vec<NodeId>,
    /// By reached node: the indices of its parts.
    parts: Vec<Vec<usize>>,
    /// The indices of terminals and tokens.
    leaves: Vec<usize>,
}

impl Reached {
    fn new(grammar: &Grammar, terminals: &Terminals<'_>) -> Self {
        let mut reached = Self { nodes: vec![grammar.root_body()], parts: Vec::new(), leaves: Vec::new() };
        let mut places = vec![None; grammar.nodes.len()];
        places[grammar.root_body()] = Some(0);
        while let Some(&node) = reached.nodes.get(reached.parts.len()) {
            let place = reached.parts.len();
            let children = match &grammar.nodes[node] {
                _ if terminals.is_terminal(node) => {
                    reached.leaves.push(place);
                    &[]
                }
                Node::Token(_) => {
                    reached.leaves.push(place);
                    &[]
                }
                Node::Rule(rule) => std::slice::from_ref(&grammar.rules[*rule].body),
                parent => parent.children(),
            };
            let mut parts = Vec::with_capacity(children.len());
            for &child in children {
                parts.push(*places[child].get_or_insert_with(|| {
                    reached.nodes.push(child);
                    reached.nodes.len() - 1
                }));
            }
            reached.parts.push(parts);
        }
        reached
    }
}
