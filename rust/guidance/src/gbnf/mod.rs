//! Translation of GBNF, llama.cpp's notation of grammars, to llguidance's dialect of Lark.
//!
//! `parser` reads the source into a [`Grammar`], `terminals` chooses which parts of it are terminals, with the sets of
//! `places` and the automata of `automaton`; this file writes the rules and the terminals.

mod automaton;
mod bits;
mod grammar;
mod parser;
mod places;
mod steps;
mod terminals;

use grammar::{CharacterSet, Grammar, Node, NodeId};
use steps::Steps;
use terminals::Terminals;

use crate::{GuidanceError, GuidanceLimits, Vocabulary};

/// Maximum number of ranges of a character class that is copied to each reference to a rule of it.
const MAX_COPIED_RANGES: usize = 8;

#[derive(Debug)]
enum TranslationError {
    /// The reason, with line and rule.
    Invalid(String),
    /// The limit.
    TooComplex(String),
}

/// A Lark grammar of the same texts.
pub(crate) fn translate(
    kind: &'static str,
    source: &str,
    vocabulary: &Vocabulary,
    limits: &GuidanceLimits,
) -> Result<String, GuidanceError> {
    let to_error = |error| match error {
        TranslationError::Invalid(reason) => GuidanceError::Invalid { kind, reason },
        TranslationError::TooComplex(limit) => GuidanceError::TooComplex { kind, limit },
    };
    let mut steps = Steps::new();
    let grammar = parser::parse(source, vocabulary, limits, &mut steps).map_err(to_error)?;
    let is_finite = grammar.matches_finite(false);
    if !is_finite[grammar.root_body()] {
        return Err(GuidanceError::DeadEnd { kind, reason: "no text that matches is finite".into() });
    }
    let terminals = Terminals::choose(&grammar, &mut steps).map_err(to_error)?;
    let mut writer = Writer {
        grammar: &grammar,
        is_finite,
        terminals,
        vocabulary,
        lark: String::new(),
        max_bytes: limits.source_bytes,
        pending: Vec::new(),
        named: vec![[false; 2]; grammar.nodes.len()],
    };
    writer.write().map_err(to_error)?;
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
    max_bytes: usize,
    /// Definitions that are named, but not written yet.
    pending: Vec<Definition>,
    /// By node: whether a rule and whether a terminal of it is named.
    named: Vec<[bool; 2]>,
}

impl Writer<'_> {
    fn write(&mut self) -> Result<(), TranslationError> {
        self.push("start: ")?;
        self.write_name(Definition { node: self.grammar.root_body(), is_terminal: false })?;
        while let Some(definition) = self.pending.pop() {
            self.push("\n")?;
            self.write_name(definition)?;
            self.push(": ")?;
            match &self.grammar.nodes[definition.node] {
                Node::Characters(set) => self.write_pattern(&pattern(set))?,
                _ => self.write_node(definition, Binding::Choice)?,
            }
        }
        Ok(())
    }

    /// Writes the name of a definition, which is written later.
    fn write_name(&mut self, definition: Definition) -> Result<(), TranslationError> {
        let Definition { node, is_terminal } = definition;
        self.push(&format!("{}{node}", if is_terminal { "T" } else { "rule" }))?;
        if !std::mem::replace(&mut self.named[node][usize::from(is_terminal)], true) {
            self.pending.push(definition);
        }
        Ok(())
    }

    /// Writes an expression, in brackets if it is bound less tightly than `least`.
    fn write_node(&mut self, within: Definition, least: Binding) -> Result<(), TranslationError> {
        let Definition { node, is_terminal } = within;
        let part = |node| Definition { node, is_terminal };
        let grammar = self.grammar;
        match &grammar.nodes[node] {
            Node::Characters(set) if set.ranges().len() > MAX_COPIED_RANGES => {
                self.write_name(Definition { node, is_terminal: true })
            }
            Node::Characters(set) => self.write_pattern(&pattern(set)),
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
                self.push(&format!("<[{}{}]>", if token.negated { "^" } else { "" }, ids.join(",")))
            }
            Node::Rule(rule) => self.write_name(part(grammar.rules[*rule].body)),
            Node::Sequence(parts) if parts.is_empty() => self.push("\"\""),
            Node::Sequence(parts) => match is_terminal.then(|| self.literal(parts)).flatten() {
                Some(literal) => self.write_pattern(&literal),
                None => self.write_parts(parts, is_terminal, [Binding::Sequence, least]),
            },
            Node::Choice(parts) => {
                let finite: Vec<_> = parts.iter().copied().filter(|&part| self.is_finite[part]).collect();
                self.write_parts(&finite, is_terminal, [Binding::Choice, least])
            }
            Node::Repeat(child, ..) if !self.is_finite[*child] => self.push("\"\""),
            Node::Repeat(child, min, max) => {
                let is_bracketed = least > Binding::Repeat;
                self.push(if is_bracketed { "(" } else { "" })?;
                self.write_node(part(*child), Binding::Atom)?;
                self.push(&match (min, max) {
                    (0, None) => "*".to_owned(),
                    (1, None) => "+".to_owned(),
                    (0, Some(1)) => "?".to_owned(),
                    (min, None) => format!("{{{min},}}"),
                    (min, Some(max)) => format!("{{{min},{max}}}"),
                })?;
                self.push(if is_bracketed { ")" } else { "" })
            }
        }
    }

    /// Writes the parts of a sequence or a choice.
    fn write_parts(
        &mut self,
        parts: &[NodeId],
        is_terminal: bool,
        [own, least]: [Binding; 2],
    ) -> Result<(), TranslationError> {
        let is_bracketed = own < least;
        self.push(if is_bracketed { "(" } else { "" })?;
        for (index, &node) in parts.iter().enumerate() {
            if index > 0 {
                self.push(if own == Binding::Choice { " | " } else { " " })?;
            }
            self.write_node(Definition { node, is_terminal }, Binding::Sequence)?;
        }
        self.push(if is_bracketed { ")" } else { "" })
    }

    /// The pattern of a sequence of characters.
    fn literal(&self, parts: &[NodeId]) -> Option<String> {
        let patterns = parts.iter().map(|&part| match &self.grammar.nodes[part] {
            Node::Characters(set) => Some(pattern(set)),
            _ => None,
        });
        patterns.collect()
    }

    fn write_pattern(&mut self, pattern: &str) -> Result<(), TranslationError> {
        self.push("/")?;
        self.push(pattern)?;
        self.push("/")
    }

    fn push(&mut self, text: &str) -> Result<(), TranslationError> {
        let limit = self.max_bytes;
        if self.lark.len() + text.len() > limit {
            let reason = format!("its translation has more than {limit} bytes");
            return Err(TranslationError::TooComplex(reason));
        }
        self.lark.push_str(text);
        Ok(())
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::TokenText;

    #[test]
    fn large_class_is_not_copied_to_each_reference() {
        let table =
            (0..=255).map(|byte| Some(TokenText { bytes: vec![byte], special: byte == 255 })).collect();
        let vocabulary = Vocabulary::new(table, &[255], Arc::new(|_| Vec::new())).unwrap();
        let members: String = (0..1_000).filter_map(|index| char::from_u32(0x100 + 2 * index)).collect();
        let source = format!("c ::= [{members}]\nroot ::= {}(root | c)", "c ".repeat(10_000));
        let lark = translate("GBNF grammar", &source, &vocabulary, &GuidanceLimits::default()).unwrap();
        assert!(lark.len() < 50_000, "{} bytes", lark.len());
    }
}
