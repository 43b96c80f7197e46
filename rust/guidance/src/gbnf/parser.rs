//! The parser of GBNF.

use std::collections::HashMap;

use super::TranslationError;
use super::grammar::{CharacterSet, Grammar, Node, NodeId, Rule, TokenReference};
use super::steps::Steps;
use crate::{GuidanceLimits, Vocabulary};

/// Maximum number of repetitions that can be written in a grammar.
const MAX_REPETITIONS: u32 = 1_000_000;

/// Parses a source.
///
/// # Errors
/// [`TranslationError::Invalid`] with the line, the rule and the reason. [`TranslationError::TooComplex`] if the
/// grammar is nested too deeply for recursion.
pub(super) fn parse(
    source: &str,
    vocabulary: &Vocabulary,
    limits: &GuidanceLimits,
    steps: &mut Steps,
) -> Result<Grammar, TranslationError> {
    let mut parser = Parser {
        source,
        position: 0,
        vocabulary,
        limits,
        steps,
        grammar: Grammar::default(),
        names: HashMap::new(),
        rule: String::new(),
        counted: (0, 1),
        depth: 0,
        num_levels: 0,
    };
    parser.parse()?;
    Ok(parser.grammar)
}

struct Parser<'a> {
    source: &'a str,
    /// Offset of the next character, in bytes.
    position: usize,
    vocabulary: &'a Vocabulary,
    limits: &'a GuidanceLimits,
    steps: &'a mut Steps,
    grammar: Grammar,
    /// Indices of rules, also of those that are not defined yet.
    names: HashMap<&'a str, usize>,
    /// Name of the rule that is parsed.
    rule: String,
    /// An offset and its line, from 1.
    counted: (usize, usize),
    /// Number of open brackets.
    depth: usize,
    /// Number of rules, brackets, and repetitions of repetitions, which the translation puts in brackets.
    num_levels: usize,
}

/// The body of a rule that has no definition yet.
const UNDEFINED: NodeId = NodeId::MAX;

impl<'a> Parser<'a> {
    fn parse(&mut self) -> Result<(), TranslationError> {
        self.skip_space(true);
        while self.peek().is_some() {
            self.parse_rule()?;
            self.skip_space(true);
        }
        if let Some(rule) = self.grammar.rules.iter().find(|rule| rule.body == UNDEFINED) {
            let reason = format!("line {}: the rule {:?} is not defined", rule.line, rule.name);
            return Err(TranslationError::Invalid(reason));
        }
        let root = self.names.get("root").copied();
        self.grammar.root =
            root.ok_or_else(|| TranslationError::Invalid("the rule \"root\" is not defined".into()))?;
        Ok(())
    }

    fn parse_rule(&mut self) -> Result<(), TranslationError> {
        let line = self.line();
        self.add_level()?;
        let name = self.parse_name().ok_or_else(|| {
            TranslationError::Invalid(format!("line {line}: the name of a rule is missing"))
        })?;
        name.clone_into(&mut self.rule);
        self.skip_space(false);
        if !self.take("::=") {
            return Err(self.error("\"::=\" is missing after the name"));
        }
        let rule = self.rule_index(name);
        if self.grammar.rules[rule].body != UNDEFINED {
            let earlier = self.grammar.rules[rule].line;
            return Err(self.error(&format!("it is already defined in line {earlier}")));
        }
        self.skip_space(true);
        let first = self.grammar.nodes.len();
        let body = self.parse_choice(false)?;
        let nodes = first..self.grammar.nodes.len();
        self.grammar.rules[rule] = Rule { name: name.to_owned(), line, body, nodes };
        match self.peek() {
            None | Some('\r' | '\n') => Ok(()),
            Some(character) => Err(self.error(&format!("unexpected {character:?}"))),
        }
    }

    fn parse_choice(&mut self, is_nested: bool) -> Result<NodeId, TranslationError> {
        let mut alternatives = vec![self.parse_sequence(is_nested)?];
        while self.take("|") {
            self.skip_space(true);
            alternatives.push(self.parse_sequence(is_nested)?);
        }
        Ok(self.add_group(alternatives, Node::Choice))
    }

    fn parse_sequence(&mut self, is_nested: bool) -> Result<NodeId, TranslationError> {
        let mut items: Vec<NodeId> = Vec::new();
        while let Some(character) = self.peek() {
            let repetitions = match character {
                '*' => Some((0, None)),
                '+' => Some((1, None)),
                '?' => Some((0, Some(1))),
                '{' => Some(self.parse_repetitions(is_nested)?),
                _ => None,
            };
            if let Some((min, max)) = repetitions {
                self.position += 1;
                let item = items.pop().ok_or_else(|| self.error("there is nothing to repeat"))?;
                if matches!(self.grammar.nodes[item], Node::Repeat(..)) {
                    self.add_level()?;
                }
                let repeat =
                    if max == Some(0) { Node::Sequence(Vec::new()) } else { Node::Repeat(item, min, max) };
                items.push(self.add(repeat));
            } else {
                let item = match character {
                    '"' => self.parse_literal()?,
                    '[' => self.parse_class()?,
                    '.' => {
                        self.position += 1;
                        self.add(Node::Characters(CharacterSet::all()))
                    }
                    '<' | '!' => self.parse_token()?,
                    '(' => self.parse_group()?,
                    _ => {
                        let Some(name) = self.parse_name() else { break };
                        let rule = self.rule_index(name);
                        self.add(Node::Rule(rule))
                    }
                };
                items.push(item);
            }
            self.skip_space(is_nested);
        }
        Ok(self.add_group(items, Node::Sequence))
    }

    fn parse_group(&mut self) -> Result<NodeId, TranslationError> {
        self.position += 1;
        self.add_level()?;
        self.depth += 1;
        let limit = self.limits.nesting;
        if self.depth > limit {
            return Err(TranslationError::TooComplex(format!("brackets nested more than {limit} deep")));
        }
        self.skip_space(true);
        let group = self.parse_choice(true)?;
        self.depth -= 1;
        if self.take(")") { Ok(group) } else { Err(self.error("\")\" is missing")) }
    }

    /// Counts a level of recursion: a chain of rules recurses through the brackets of each of them.
    fn add_level(&mut self) -> Result<(), TranslationError> {
        self.num_levels += 1;
        let limit = self.limits.recursion;
        if self.num_levels > limit {
            return Err(TranslationError::TooComplex(format!("more than {limit} rules and brackets")));
        }
        Ok(())
    }

    /// Parses `{m}`, `{m,}` and `{m,n}` up to the closing bracket.
    fn parse_repetitions(&mut self, is_nested: bool) -> Result<(u32, Option<u32>), TranslationError> {
        self.position += 1;
        self.skip_space(is_nested);
        let min = self.parse_number(MAX_REPETITIONS, "the number of repetitions")?;
        self.skip_space(is_nested);
        let mut max = Some(min);
        if self.take(",") {
            self.skip_space(is_nested);
            max = match self.peek() {
                Some('}') => None,
                _ => Some(self.parse_number(MAX_REPETITIONS, "the number of repetitions")?),
            };
            self.skip_space(is_nested);
        }
        if self.peek() != Some('}') {
            return Err(self.error("\"}\" is missing"));
        }
        if max.is_some_and(|max| max < min) {
            return Err(self.error("the maximum number of repetitions is below the minimum"));
        }
        Ok((min, max))
    }

    fn parse_number(&mut self, limit: u32, noun: &str) -> Result<u32, TranslationError> {
        let rest = &self.source[self.position..];
        let digits = &rest[..rest.bytes().take_while(u8::is_ascii_digit).count()];
        self.position += digits.len();
        if digits.is_empty() {
            return Err(self.error(&format!("{noun} is missing")));
        }
        let number = digits.parse().ok().filter(|&number| number <= limit);
        number.ok_or_else(|| self.error(&format!("{noun} is {digits:.20}; the limit is {limit}")))
    }

    fn parse_literal(&mut self) -> Result<NodeId, TranslationError> {
        self.position += 1;
        let mut items = Vec::new();
        while !self.take("\"") {
            let character = self.parse_character("the string")?;
            if char::from_u32(character).is_none() {
                return Err(self.error(&format!("\\u{character:04x} is not a character")));
            }
            let set = CharacterSet::new(vec![(character, character)], self.steps)?;
            items.push(self.add(Node::Characters(set)));
        }
        Ok(self.add_group(items, Node::Sequence))
    }

    fn parse_class(&mut self) -> Result<NodeId, TranslationError> {
        self.position += 1;
        let is_negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let first = self.parse_character("the character class")?;
            let mut last = first;
            let rest = &self.source[self.position..];
            if rest.starts_with('-') && !rest.starts_with("-]") {
                self.position += 1;
                last = self.parse_character("the character class")?;
            }
            if last < first {
                return Err(self.error("a range of characters ends before it begins"));
            }
            ranges.push((first, last));
        }
        if ranges.is_empty() {
            return Err(self.error("a character class is empty"));
        }
        // Twice the complement: without surrogates.
        let mut set = CharacterSet::new(ranges, self.steps)?.complement(self.steps)?;
        if !is_negated {
            set = set.complement(self.steps)?;
        }
        if set.is_empty() {
            return Err(self.error("a character class matches no character"));
        }
        Ok(self.add(Node::Characters(set)))
    }

    /// A character of a string or class, as a code point; an escape can be that of a surrogate.
    fn parse_character(&mut self, within: &str) -> Result<u32, TranslationError> {
        let character = self.next(within)?;
        if character != '\\' {
            return Ok(character.into());
        }
        let escaped = self.next(within)?;
        let digits = match escaped {
            'n' => return Ok('\n'.into()),
            't' => return Ok('\t'.into()),
            'r' => return Ok('\r'.into()),
            '\\' | '"' | '[' | ']' | '-' => return Ok(escaped.into()),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            other => return Err(self.error(&format!("unknown escape \\{}", other.escape_default()))),
        };
        let text = self.source.get(self.position..self.position + digits).unwrap_or_default();
        let is_hexadecimal = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let code_point = u32::from_str_radix(text, 16).ok().filter(|_| is_hexadecimal);
        let Some(code_point) = code_point.filter(|&code_point| code_point <= u32::from(char::MAX)) else {
            let reason =
                format!("\\{escaped} needs {digits} hexadecimal digits of a code point up to 10FFFF");
            return Err(self.error(&reason));
        };
        self.position += digits;
        Ok(code_point)
    }

    /// Parses `<[id]>`, `<text>`, and either after `!`.
    fn parse_token(&mut self) -> Result<NodeId, TranslationError> {
        let negated = self.take("!");
        let start = self.position;
        let id = if self.take("<[") {
            let limit = u32::try_from(self.vocabulary.num_tokens()).unwrap_or(u32::MAX).saturating_sub(1);
            let id = self.parse_number(limit, "the token id")?;
            if !self.take("]>") {
                return Err(self.error("\"]>\" is missing after the token id"));
            }
            id
        } else {
            let rest = &self.source[start..];
            let Some(end) = rest.find('>').filter(|_| rest.starts_with('<')) else {
                return Err(self.error("a token is written as <text> or <[id]>"));
            };
            let text = &rest[..=end];
            self.position += text.len();
            self.vocabulary
                .single_token(text)
                .ok_or_else(|| self.error(&format!("{text:.200} is not one token of the model")))?
        };
        if !negated && self.vocabulary.end_ids().contains(&id) {
            let reference = &self.source[start..self.position];
            return Err(self.error(&format!("{reference:.200} ends the output, so no rule can match it")));
        }
        let matches_text = negated || !self.vocabulary.special_ids().contains(&id);
        Ok(self.add(Node::Token(TokenReference { id, negated, matches_text })))
    }

    fn parse_name(&mut self) -> Option<&'a str> {
        let rest = &self.source[self.position..];
        let is_name = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_".contains(byte);
        let name = &rest[..rest.bytes().take_while(is_name).count()];
        self.position += name.len();
        (!name.is_empty()).then_some(name)
    }

    /// The index of the rule of this name, which may be defined later.
    fn rule_index(&mut self, name: &'a str) -> usize {
        let line = self.line();
        let rules = &mut self.grammar.rules;
        *self.names.entry(name).or_insert_with(|| {
            rules.push(Rule { name: name.to_owned(), line, body: UNDEFINED, nodes: 0..0 });
            rules.len() - 1
        })
    }

    fn add(&mut self, node: Node) -> NodeId {
        self.grammar.nodes.push(node);
        self.grammar.nodes.len() - 1
    }

    /// A node of these nodes, or the only one of them.
    fn add_group(&mut self, nodes: Vec<NodeId>, group: fn(Vec<NodeId>) -> Node) -> NodeId {
        match nodes[..] {
            [node] => node,
            _ => self.add(group(nodes)),
        }
    }

    fn peek(&self) -> Option<char> {
        self.source[self.position..].chars().next()
    }

    fn next(&mut self, within: &str) -> Result<char, TranslationError> {
        let character = self.peek().ok_or_else(|| self.error(&format!("{within} is not closed")))?;
        self.position += character.len_utf8();
        Ok(character)
    }

    fn take(&mut self, text: &str) -> bool {
        let found = self.source[self.position..].starts_with(text);
        if found {
            self.position += text.len();
        }
        found
    }

    /// Skips blanks and comments; a comment ends before the end of its line.
    fn skip_space(&mut self, with_newlines: bool) {
        while let Some(character) = self.peek() {
            match character {
                ' ' | '\t' => self.position += 1,
                '\r' | '\n' if with_newlines => self.position += 1,
                '#' => {
                    let rest = &self.source[self.position..];
                    self.position += rest.find(['\r', '\n']).unwrap_or(rest.len());
                }
                _ => break,
            }
        }
    }

    /// The line of the position, which is at or after that of the last call.
    fn line(&mut self) -> usize {
        let (offset, line) = self.counted;
        let passed = &self.source.as_bytes()[offset..self.position];
        self.counted = (self.position, line + passed.iter().filter(|&&byte| byte == b'\n').count());
        self.counted.1
    }

    fn error(&mut self, reason: &str) -> TranslationError {
        TranslationError::Invalid(format!("line {}, rule {:?}: {reason}", self.line(), self.rule))
    }
}
