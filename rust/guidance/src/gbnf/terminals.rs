//! The choice of terminals: which parts of a GBNF grammar are one terminal of the translated grammar.
//!
//! The grammar library divides the text into terminals, each as long as possible, before its parser sees them; llama.cpp
//! has no terminals and follows all divisions. Both accept the same texts if every terminal is one character, but then
//! masks are slow. So a part without recursion becomes one terminal, unless the longest match could be the wrong one:
//! where the text of a terminal, with a character that can follow it, is also the beginning of a terminal that can stand
//! at the same place. Such terminals are divided into their parts, until there are none.
//!
//! The check overestimates: a terminal is followed by all that follows it anywhere in the grammar, and repetitions count
//! as unlimited.

use super::TranslationError;
use super::automaton::{Automaton, compare};
use super::bits::Bits;
use super::grammar::{CharacterSet, Grammar, Node, NodeId};
use super::places::Places;
use super::steps::Steps;

/// Maximum number of characters in a terminal that another can follow, each repetition counted once.
const MAX_POSITIONS: usize = 500;

/// Steps for a pair of leaves that is stored.
const STEPS_OF_A_PAIR: usize = 8;

pub(super) struct Terminals<'a> {
    grammar: &'a Grammar,
    /// By node: the number of characters in it, each repetition counted once. None if it contains recursion or tokens.
    sizes: Vec<Option<usize>>,
    /// By rule without recursion: its body, or the body of the rule that it only refers to.
    bodies: Vec<NodeId>,
    /// By node: whether it is divided into its parts.
    divided: Vec<bool>,
}

impl<'a> Terminals<'a> {
    /// Chooses the terminals.
    ///
    /// # Errors
    /// [`TranslationError::Invalid`] for a reference to a token where the same token can also be text.
    pub(super) fn choose(grammar: &'a Grammar, steps: &mut Steps) -> Result<Self, TranslationError> {
        let divided = vec![false; grammar.nodes.len()];
        let nullable = grammar.matches_finite(true);
        let (sizes, bodies) = measure_rules(grammar);
        let mut terminals = Self { grammar, sizes, bodies, divided };
        // Nothing follows a terminal that is the whole text.
        while terminals.terminal(grammar.root_body()).is_none() && terminals.divide(&nullable, steps)? {}
        Ok(terminals)
    }

    /// The node that is a terminal, if the node is one or refers to one.
    pub(super) fn terminal(&self, node: NodeId) -> Option<NodeId> {
        self.sizes[node].filter(|&size| size > 0)?;
        let node = match self.grammar.nodes[node] {
            Node::Rule(rule) => self.bodies[rule],
            _ => node,
        };
        (!self.divided[node]).then_some(node)
    }

    pub(super) fn is_terminal(&self, node: NodeId) -> bool {
        self.terminal(node) == Some(node)
    }

    /// Divides the terminals for which the longest match could be the wrong one. Returns whether there were any.
    fn divide(&mut self, nullable: &[bool], steps: &mut Steps) -> Result<bool, TranslationError> {
        let places = Places::new(self.grammar, |node| self.is_terminal(node), nullable, steps)?;
        let mut found = Vec::new();
        let mut automata = Vec::with_capacity(places.leaves.len());
        for &leaf in &places.leaves {
            match self.sizes[leaf] {
                Some(size) if size > MAX_POSITIONS => found.push(leaf),
                Some(_) => automata.push(Automaton::new(self.grammar, &self.sizes, leaf, steps)?),
                None => automata.push(Automaton::default()),
            }
        }
        if found.is_empty() {
            self.find_conflicts(&places, &automata, &mut found, steps)?;
        }
        found.retain(|&leaf| !matches!(self.grammar.nodes[leaf], Node::Characters(_)));
        found.iter().for_each(|&leaf| self.divided[leaf] = true);
        Ok(!found.is_empty())
    }

    /// Compares the leaves that can stand at the same place.
    fn find_conflicts(
        &self,
        places: &Places,
        automata: &[Automaton],
        found: &mut Vec<NodeId>,
        steps: &mut Steps,
    ) -> Result<(), TranslationError> {
        let following = self.following(places, automata, steps)?;
        let mut pairs = Pairs::new(places.leaves.len(), steps)?;
        pairs.add([places.start(); 2], steps)?;
        while let Some([left, right]) = pairs.pending.pop() {
            let [left_node, right_node] = [left, right].map(|leaf| places.leaves[leaf]);
            let is_same_text = match [left_node, right_node].map(|node| &self.grammar.nodes[node]) {
                [Node::Token(first), Node::Token(second)] if first == second => true,
                [Node::Token(first), Node::Token(second)] if first.intersects(*second) => {
                    return Err(self.ambiguous(left_node, "another reference to the same token"));
                }
                [Node::Token(_), Node::Token(_)] => false,
                [Node::Token(token), _] if token.matches_text => {
                    return Err(self.ambiguous(left_node, "text"));
                }
                [_, Node::Token(token)] if token.matches_text => {
                    return Err(self.ambiguous(right_node, "text"));
                }
                [Node::Token(_), _] | [_, Node::Token(_)] => false,
                _ => {
                    let follow = [&following[left], &following[right]];
                    let result = compare([&automata[left], &automata[right]], follow, steps)?;
                    if result.extends {
                        found.extend([left_node, right_node]);
                    }
                    result.is_same_text
                }
            };
            if is_same_text || left == right {
                pairs.add([left, right].map(|leaf| places.follow_of_leaf(leaf)), steps)?;
            }
        }
        Ok(())
    }

    /// By leaf: the characters that can follow it.
    fn following(
        &self,
        places: &Places,
        automata: &[Automaton],
        steps: &mut Steps,
    ) -> Result<Vec<CharacterSet>, TranslationError> {
        let mut initial = Vec::with_capacity(places.leaves.len());
        for (&leaf, automaton) in places.leaves.iter().zip(automata) {
            initial.push(match &self.grammar.nodes[leaf] {
                Node::Token(token) if token.matches_text => CharacterSet::all(),
                _ => automaton.initial(steps)?,
            });
        }
        let mut following = Vec::with_capacity(places.leaves.len());
        for leaf in 0..places.leaves.len() {
            let follow = places.follow_of_leaf(leaf);
            steps.take(follow.num_words())?;
            following.push(CharacterSet::union(follow.iter().map(|other| &initial[other]), steps)?);
        }
        Ok(following)
    }

    fn ambiguous(&self, node: NodeId, other: &str) -> TranslationError {
        let rule = self.grammar.rule_of(node);
        let (line, name) = (rule.line, &rule.name);
        TranslationError::Invalid(format!(
            "line {line}, rule {name:?}: a reference to a token stands where {other} can stand, too"
        ))
    }
}

/// Pairs of leaves that can stand at the same place.
struct Pairs {
    /// By leaf: the leaves of its pairs.
    together: Vec<Bits>,
    /// The pairs that are not compared yet.
    pending: Vec<[usize; 2]>,
}

impl Pairs {
    fn new(num_leaves: usize, steps: &mut Steps) -> Result<Self, TranslationError> {
        let together = Bits::table(num_leaves, num_leaves, steps)?;
        Ok(Self { together, pending: Vec::new() })
    }

    /// Adds each pair of a leaf in one set and a leaf in the other.
    fn add(&mut self, [left, right]: [&Bits; 2], steps: &mut Steps) -> Result<(), TranslationError> {
        steps.take(left.num_words())?;
        for first in left.iter() {
            steps.take(2 * right.num_words())?;
            for second in right.without(&self.together[first]).iter() {
                steps.take(STEPS_OF_A_PAIR)?;
                self.together[first].insert(second);
                self.together[second].insert(first);
                self.pending.push([first, second]);
            }
        }
        Ok(())
    }
}

/// [`Terminals::sizes`] and [`Terminals::bodies`].
fn measure_rules(grammar: &Grammar) -> (Vec<Option<usize>>, Vec<NodeId>) {
    let rules = &grammar.rules;
    let mut sizes = vec![None; grammar.nodes.len()];
    let mut bodies: Vec<NodeId> = rules.iter().map(|rule| rule.body).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); rules.len()];
    // Per rule: the number of references to rules of unknown size.
    let mut missing = vec![0; rules.len()];
    for (index, rule) in rules.iter().enumerate() {
        for node in &grammar.nodes[rule.nodes.clone()] {
            if let Node::Rule(used) = *node {
                users[used].push(index);
                missing[index] += 1;
            }
        }
    }
    let mut known: Vec<usize> = (0..rules.len()).filter(|&rule| missing[rule] == 0).collect();
    let mut is_known = vec![false; rules.len()];
    while let Some(rule) = known.pop() {
        is_known[rule] = true;
        measure(grammar, rule, &mut sizes);
        if let Node::Rule(used) = grammar.nodes[rules[rule].body] {
            bodies[rule] = bodies[used];
        }
        for &user in &users[rule] {
            missing[user] -= 1;
            if missing[user] == 0 {
                known.push(user);
            }
        }
    }
    // The other rules are recursive, or use recursive ones.
    (0..rules.len()).filter(|&rule| !is_known[rule]).for_each(|rule| measure(grammar, rule, &mut sizes));
    (sizes, bodies)
}

fn measure(grammar: &Grammar, rule: usize, sizes: &mut [Option<usize>]) {
    for node in grammar.rules[rule].nodes.clone() {
        sizes[node] = match &grammar.nodes[node] {
            Node::Characters(_) => Some(1),
            Node::Token(_) => None,
            Node::Rule(used) => sizes[grammar.rules[*used].body],
            parent => parent
                .children()
                .iter()
                .try_fold(0_usize, |sum, &child| sizes[child].map(|size| sum.saturating_add(size))),
        };
    }
}
