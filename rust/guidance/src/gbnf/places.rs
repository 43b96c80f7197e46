//! The terminals and tokens that can begin, and those that can follow, at the places of a GBNF grammar.

use super::TranslationError;
use super::bits::Bits;
use super::grammar::{Grammar, Node, NodeId};
use super::steps::Steps;

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
        is_terminal: impl Fn(NodeId) -> bool,
        nullable: &[bool],
        steps: &mut Steps,
    ) -> Result<Self, TranslationError> {
        steps.take(grammar.nodes.len())?;
        let reached = Reached::new(grammar, is_terminal);
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
                let mut beginning = std::mem::take(&mut first[place]);
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
                            after.clear();
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
    fn new(grammar: &Grammar, is_terminal: impl Fn(NodeId) -> bool) -> Self {
        let mut reached = Self { nodes: vec![grammar.root_body()], parts: Vec::new(), leaves: Vec::new() };
        let mut places = vec![None; grammar.nodes.len()];
        places[grammar.root_body()] = Some(0);
        while let Some(&node) = reached.nodes.get(reached.parts.len()) {
            let place = reached.parts.len();
            let children = match &grammar.nodes[node] {
                _ if is_terminal(node) => {
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
