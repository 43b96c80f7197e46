//! Automata of terminals, and the comparison of two of them.

use super::TranslationError;
use super::bits::Bits;
use super::grammar::{CharacterSet, Grammar, Node, NodeId};
use super::steps::Steps;

/// Steps for a node that is added to an automaton.
const STEPS_OF_A_NODE: usize = 16;

/// The positions of the characters of a terminal (Glushkov's automaton). Repetitions are unlimited.
#[derive(Default)]
pub(super) struct Automaton<'a> {
    /// By position: its characters.
    characters: Vec<&'a CharacterSet>,
    /// By position: those that can come next.
    next: Vec<Vec<usize>>,
    /// The positions that a text can begin with.
    first: Vec<usize>,
    /// By position: whether a text can end with it.
    is_last: Vec<bool>,
}

/// The positions that begin and end the texts of a part of a terminal.
#[derive(Clone, Default)]
struct Part {
    first: Vec<usize>,
    last: Vec<usize>,
    is_nullable: bool,
}

impl<'a> Automaton<'a> {
    /// The automaton of a node of known size.
    pub(super) fn new(
        grammar: &'a Grammar,
        sizes: &[Option<usize>],
        node: NodeId,
        steps: &mut Steps,
    ) -> Result<Self, TranslationError> {
        let mut automaton = Self::default();
        let part = automaton.add(grammar, sizes, node, steps)?;
        automaton.first = part.first;
        automaton.is_last = vec![false; automaton.characters.len()];
        part.last.iter().for_each(|&position| automaton.is_last[position] = true);
        Ok(automaton)
    }

    fn add(
        &mut self,
        grammar: &'a Grammar,
        sizes: &[Option<usize>],
        node: NodeId,
        steps: &mut Steps,
    ) -> Result<Part, TranslationError> {
        steps.take(STEPS_OF_A_NODE)?;
        if sizes[node] == Some(0) {
            return Ok(Part { is_nullable: true, ..Part::default() });
        }
        match &grammar.nodes[node] {
            Node::Characters(set) => {
                self.characters.push(set);
                self.next.push(Vec::new());
                let position = vec![self.next.len() - 1];
                Ok(Part { first: position.clone(), last: position, is_nullable: false })
            }
            Node::Token(_) => unreachable!("a terminal contains no tokens; this is a bug"),
            Node::Rule(rule) => self.add(grammar, sizes, grammar.rules[*rule].body, steps),
            Node::Sequence(children) => {
                let mut whole = Part { is_nullable: true, ..Part::default() };
                for &child in children {
                    let part = self.add(grammar, sizes, child, steps)?;
                    steps.take(part.first.len() + part.last.len())?;
                    self.connect(&whole.last, &part.first, steps)?;
                    if whole.is_nullable {
                        whole.first.extend(&part.first);
                    }
                    if !part.is_nullable {
                        whole.last.clear();
                    }
                    whole.last.extend(&part.last);
                    whole.is_nullable &= part.is_nullable;
                }
                Ok(whole)
            }
            Node::Choice(children) => {
                let mut whole = Part::default();
                for &child in children {
                    let part = self.add(grammar, sizes, child, steps)?;
                    steps.take(part.first.len() + part.last.len())?;
                    whole.first.extend(&part.first);
                    whole.last.extend(&part.last);
                    whole.is_nullable |= part.is_nullable;
                }
                Ok(whole)
            }
            Node::Repeat(child, min, max) => {
                let mut part = self.add(grammar, sizes, *child, steps)?;
                if *max != Some(1) {
                    self.connect(&part.last, &part.first, steps)?;
                }
                part.is_nullable |= *min == 0;
                Ok(part)
            }
        }
    }

    fn connect(&mut self, from: &[usize], to: &[usize], steps: &mut Steps) -> Result<(), TranslationError> {
        steps.take(4 * from.len() * to.len())?;
        from.iter().for_each(|&position| self.next[position].extend(to));
        Ok(())
    }

    /// The characters that a text can begin with.
    pub(super) fn initial(&self, steps: &mut Steps) -> Result<CharacterSet, TranslationError> {
        CharacterSet::union(self.first.iter().map(|&position| self.characters[position]), steps)
    }
}

#[derive(Default)]
pub(super) struct Comparison {
    /// Whether a text of one, with a character that can follow it, is the beginning of a text of the other.
    pub(super) extends: bool,
    /// Whether both match the same text.
    pub(super) is_same_text: bool,
}

/// Compares two automata, each with the characters that can follow it.
pub(super) fn compare(
    [left, right]: [&Automaton<'_>; 2],
    [after_left, after_right]: [&CharacterSet; 2],
    steps: &mut Steps,
) -> Result<Comparison, TranslationError> {
    let mut result = Comparison::default();
    // Pairs of positions that the same text leads to.
    let mut seen = Bits::table(left.next.len(), right.next.len(), steps)?;
    let mut pending = Vec::new();
    let mut reach = |firsts: &[usize], seconds: &[usize], pending: &mut Vec<_>, steps: &mut Steps| {
        steps.take(firsts.len() * seconds.len())?;
        for &first in firsts {
            for &second in seconds {
                let sets = [left.characters[first], right.characters[second]];
                if seen[first].insert(second) && sets[0].intersects(sets[1], steps)? {
                    pending.push((first, second));
                }
            }
        }
        Ok(())
    };
    let can_follow =
        |automaton: &Automaton<'_>, position: usize, follow: &CharacterSet, steps: &mut Steps| {
            for &next in &automaton.next[position] {
                if automaton.characters[next].intersects(follow, steps)? {
                    return Ok(true);
                }
            }
            Ok(false)
        };
    reach(&left.first, &right.first, &mut pending, steps)?;
    while let Some((first, second)) = pending.pop() {
        result.is_same_text |= left.is_last[first] && right.is_last[second];
        result.extends |= left.is_last[first] && can_follow(right, second, after_left, steps)?;
        result.extends |= right.is_last[second] && can_follow(left, first, after_right, steps)?;
        if result.is_same_text && result.extends {
            break;
        }
        reach(&left.next[first], &right.next[second], &mut pending, steps)?;
    }
    Ok(result)
}
