//! From ids to text, one id at a time and with as little held back as exactness allows.
//!
//! The same state machine decodes at once and in a stream, so the two cannot differ. What it remembers is
//! bounded by one character, except that a run of byte-fallback tokens is kept until it ends: one wrong byte
//! turns the whole run into replacement characters.

use std::char::REPLACEMENT_CHARACTER;

use crate::pieces::{Kind, Pieces, Rule};

/// The state between two ids.
pub(crate) struct Detokenizer {
    rule: Rule,
    skip_special_tokens: bool,
    /// Whether no token has been decoded yet.
    first: bool,
    /// How many characters may still be stripped off the beginning of the text.
    strippable: usize,
    /// Bytes that are not text yet: the beginning of a character, or a run of byte-fallback tokens.
    bytes: Vec<u8>,
}

impl Detokenizer {
    pub(crate) fn new(rule: Rule, skip_special_tokens: bool) -> Self {
        let strippable = match rule {
            Rule::Text { strip, .. } => strip.map_or(0, |(_, most)| most),
            _ => 0,
        };
        Self { rule, skip_special_tokens, first: true, strippable, bytes: Vec::new() }
    }

    /// Appends to `text` what `id` makes certain.
    pub(crate) fn push(&mut self, pieces: &Pieces, id: u32, text: &mut String) {
        let Some(piece) = pieces.get(id) else { return };
        if self.skip_special_tokens && piece.special {
            return;
        }
        match (self.rule, piece.kind) {
            (Rule::Bytes, _) => self.push_bytes(piece.bytes, text),
            (Rule::Text { .. }, Kind::Byte) => self.bytes.extend_from_slice(piece.bytes),
            (Rule::Text { .. }, Kind::Text) => {
                self.end_byte_run(text);
                self.push_stripped(piece.text(), text);
            }
            (Rule::Metaspace { replacement, drop_first }, _) => {
                let space = if self.first && drop_first { "" } else { " " };
                for (index, part) in piece.text().split(replacement).enumerate() {
                    text.push_str(if index == 0 { "" } else { space });
                    text.push_str(part);
                }
            }
            (Rule::Spaced, _) => {
                text.push_str(if self.first { "" } else { " " });
                text.push_str(piece.text());
            }
        }
        self.first = false;
    }

    /// Appends what is left when no id follows.
    pub(crate) fn finish(&mut self, text: &mut String) {
        if matches!(self.rule, Rule::Bytes) {
            if !self.bytes.is_empty() {
                self.bytes.clear();
                text.push(REPLACEMENT_CHARACTER);
            }
        } else {
            self.end_byte_run(text);
        }
    }

    /// Appends the characters that `bytes` completes, keeps the beginning of the next one, and replaces what
    /// can never become a character, as `String::from_utf8_lossy` does.
    fn push_bytes(&mut self, bytes: &[u8], text: &mut String) {
        self.bytes.extend_from_slice(bytes);
        let mut rest = self.bytes.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).expect("validated just now; this is a bug"));
                    rest = after;
                    let Some(invalid) = error.error_len() else { break };
                    text.push(REPLACEMENT_CHARACTER);
                    rest = &rest[invalid..];
                }
            }
        }
        let decoded = self.bytes.len() - rest.len();
        self.bytes.drain(..decoded);
    }

    fn end_byte_run(&mut self, text: &mut String) {
        if self.bytes.is_empty() {
            return;
        }
        let run = std::mem::take(&mut self.bytes);
        match std::str::from_utf8(&run) {
            Ok(valid) => self.push_stripped(valid, text),
            Err(_) => run.iter().for_each(|_| self.push_stripped("\u{FFFD}", text)),
        }
        self.bytes = run;
        self.bytes.clear();
    }

    fn push_stripped(&mut self, mut part: &str, text: &mut String) {
        if let Rule::Text { strip: Some((strip, _)), .. } = self.rule {
            while self.strippable > 0 && !part.is_empty() {
                match part.strip_prefix(strip) {
                    Some(after) => {
                        part = after;
                        self.strippable -= 1;
                    }
                    None => self.strippable = 0,
                }
            }
        }
        text.push_str(part);
    }
}
