//! Translation of GBNF, llama.cpp's notation of grammars, to llguidance's dialect of Lark.
//!
//! `parser` reads the source into a [`Grammar`], `terminals` chooses which parts of it are terminals, with the sets of
//! `places` and the automata of `automaton`; this file writes the rules and the terminals.

mod automaton;
mod grammar;
mod parser;
mod places;
mod terminals;

use grammar::{CharacterSet, Grammar, Node, NodeId};
use terminals::{AnalysisError, Terminals};

use crate::{GuidanceError, Vocabulary};

/// A Lark grammar of the same texts. The nesting of brackets in the source must be limited.
pub(crate) fn translate(
    kind: &'static str,
    source: &str,
    vocabulary: &Vocabulary,
) -> Result<String, GuidanceError> {
    let grammar =
        parser::parse(source, vocabulary).map_err(|reason| GuidanceError::Invalid { kind, reason })?;
    let is_finite = grammar.matches_finite(false);
    if !is_finite[grammar.root_body()] {
        return Err(GuidanceError::DeadEnd { kind, reason: "no text that matches is finite".into() });
    }
    let terminals = Terminals::choose(&grammar).map_err(|error| match error {
        AnalysisError::Ambiguous(reason) => GuidanceError::Invalid { kind, reason },
        AnalysisError::TooComplex(limit) => GuidanceError::TooComplex { kind, limit },
    })?;
    let mut writer = Writer {
        grammar: &grammar,
        is_finite,
        terminals,
        vocabulary,
        lark: String::new(),
        pending: Vec::new(),
        named: vec![[false; 2]; grammar.nodes.len()],
    };
    writer.write();
    Ok(writer.lark)
}

/// A definition of the translated grammar, of what a node matches.
#[derive(Clone, Copy)]
struct Definition {
    node: NodeId,
    is_terminal: bool,
}

/// The precedence of an expression, from the loosest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Binding {
    Choice,
    Sequence,
    Repeat,
    Atom,
}

struct Writer<'a> {
    grammar: &'a Grammar,
    /// By node: whether it matches a finite text. Others are left out.
    is_finite: Vec<bool>,
    terminals: Terminals<'a>,
    vocabulary: &'a Vocabulary,
    lark: String,
    /// Definitions that are named, but not written yet.
    pending: Vec<Definition>,
    /// By node: whether a rule and whether a terminal of it is named.
    named: Vec<[bool; 2]>,
}

impl Writer<'_> {
    fn write(&mut self) {
        self.push("start: ");
        self.write_name(Definition { node: self.grammar.root_body(), is_terminal: false });
        while let Some(definition) = self.pending.pop() {
            self.push("\n");
            self.write_name(definition);
            self.push(": ");
            self.write_node(definition, Binding::Choice);
        }
    }

    /// Writes the name of a definition, which is written later.
    fn write_name(&mut self, definition: Definition) {
        let Definition { node, is_terminal } = definition;
        self.push(&format!("{}{node}", if is_terminal { "T" } else { "rule" }));
        if !std::mem::replace(&mut self.named[node][usize::from(is_terminal)], true) {
            self.pending.push(definition);
        }
    }

    /// Writes an expression, in brackets if it is bound less tightly than `least`.
    fn write_node(&mut self, within: Definition, least: Binding) {
        let Definition { node, is_terminal } = within;
        let part = |node| Definition { node, is_terminal };
        let grammar = self.grammar;
        match &grammar.nodes[node] {
            Node::Characters(set) => self.push(&format!("/{}/", pattern(set))),
            _ if !is_terminal && let Some(terminal) = self.terminals.terminal(node) => {
                match &grammar.nodes[terminal] {
                    Node::Characters(_) => self.write_node(part(terminal), Binding::Atom),
                    _ => self.write_name(Definition { node: terminal, is_terminal: true }),
                }
            }
            Node::Token(token) => {
                let mut ids = vec![token.id];
                if token.negated {
                    ids.extend(self.vocabulary.end_ids());
                }
                let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
                self.push(&format!("<[{}{}]>", if token.negated { "^" } else { "" }, ids.join(",")));
            }
            Node::Rule(rule) => self.write_name(part(grammar.rules[*rule].body)),
            Node::Sequence(parts) if parts.is_empty() => self.push("\"\""),
            Node::Sequence(parts) => match self.literal(parts).filter(|_| is_terminal) {
                Some(literal) => self.push(&literal),
                None => self.write_parts(parts, is_terminal, [Binding::Sequence, least]),
            },
            Node::Choice(parts) => {
                let finite: Vec<_> = parts.iter().copied().filter(|&part| self.is_finite[part]).collect();
                self.write_parts(&finite, is_terminal, [Binding::Choice, least]);
            }
            Node::Repeat(child, ..) if !self.is_finite[*child] => self.push("\"\""),
            Node::Repeat(child, min, max) => {
                let is_bracketed = least > Binding::Repeat;
                self.push(if is_bracketed { "(" } else { "" });
                self.write_node(part(*child), Binding::Atom);
                self.push(&match (min, max) {
                    (0, None) => "*".to_owned(),
                    (1, None) => "+".to_owned(),
                    (0, Some(1)) => "?".to_owned(),
                    (min, None) => format!("{{{min},}}"),
                    (min, Some(max)) => format!("{{{min},{max}}}"),
                });
                self.push(if is_bracketed { ")" } else { "" });
            }
        }
    }

    /// Writes the parts of a sequence or a choice.
    fn write_parts(&mut self, parts: &[NodeId], is_terminal: bool, [own, least]: [Binding; 2]) {
        let is_bracketed = own < least;
        self.push(if is_bracketed { "(" } else { "" });
        for (index, &node) in parts.iter().enumerate() {
            if index > 0 {
                self.push(if own == Binding::Choice { " | " } else { " " });
            }
            self.write_node(Definition { node, is_terminal }, Binding::Sequence);
        }
        self.push(if is_bracketed { ")" } else { "" });
    }

    /// One regular expression for a sequence of characters.
    fn literal(&self, parts: &[NodeId]) -> Option<String> {
        let patterns = parts.iter().map(|&part| match &self.grammar.nodes[part] {
            Node::Characters(set) => Some(pattern(set)),
            _ => None,
        });
        Some(format!("/{}/", patterns.collect::<Option<String>>()?))
    }

    fn push(&mut self, text: &str) {
        self.lark.push_str(text);
    }
}

/// A regular expression of one character of the set, without brackets outside of a class.
fn pattern(set: &CharacterSet) -> String {
    if let [(first, last)] = set.ranges()
        && first == last
    {
        return escaped(*first);
    }
    let mut pattern = "[".to_owned();
    for &(first, last) in set.ranges() {
        pattern.push_str(&escaped(first));
        if first < last {
            pattern.push('-');
            pattern.push_str(&escaped(last));
        }
    }
    pattern.push(']');
    pattern
}

fn escaped(code_point: u32) -> String {
    match char::from_u32(code_point) {
        Some(character) if character.is_ascii_alphanumeric() => character.to_string(),
        _ => format!("\\U{code_point:08X}"),
    }
}
