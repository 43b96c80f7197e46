//! From ids to text, one id at a time and with as little held back as exactness allows.
//!
//! The same state machine decodes at once and in a stream, so the two cannot differ. What it remembers is
//! bounded by one character, except that a run of byte-fallback tokens is kept until it ends: one wrong byte
//! turns the whole run into replacement characters.
//!
//! With spaces between special tokens, an added token is a part of the text, and so is a run of others
//! between two of them, decoded as if it were alone; one space separates parts that are not empty.

use std::char::REPLACEMENT_CHARACTER;

use crate::TextOptions;
use crate::pieces::{Kind, Piece, Pieces, Rule};

/// The state between two ids.
#[derive(Clone)]
pub(crate) struct Detokenizer {
    rule: Rule,
    skip_special_tokens: bool,
    spaces: Option<Spaces>,
    /// Whether no token has been decoded yet.
    first: bool,
    /// How many characters may still be stripped off the beginning of the text.
    strippable: usize,
    /// Bytes that are not text yet: the beginning of a character, or a run of byte-fallback tokens.
    bytes: Vec<u8>,
}

/// Where the spaces between parts go.
#[derive(Clone, Default)]
struct Spaces {
    /// Whether there is a part already.
    is_begun: bool,
    /// Whether the text that comes next begins a part.
    is_due: bool,
}

impl Detokenizer {
    pub(crate) fn new(rule: Rule, options: TextOptions) -> Self {
        let spaced = options.spaces_between_special_tokens && !options.skip_special_tokens;
        let mut detokenizer = Self {
            rule,
            skip_special_tokens: options.skip_special_tokens,
            spaces: spaced.then(Spaces::default),
            first: true,
            strippable: 0,
            bytes: Vec::new(),
        };
        detokenizer.restart();
        detokenizer
    }

    /// Appends to `text` what `id` makes certain.
    pub(crate) fn push(&mut self, pieces: &Pieces, id: u32, text: &mut String) {
        let Some(piece) = pieces.get(id) else { return };
        if self.skip_special_tokens && piece.special {
            return;
        }
        if piece.added && self.spaces.is_some() {
            self.push_part(piece, text);
            return;
        }
        let piece = if self.first { pieces.beginning(id, piece) } else { piece };
        let from = text.len();
        self.push_piece(piece, text);
        self.put_space(from, text);
        self.first = false;
    }

    /// Appends what is left when no id follows.
    pub(crate) fn finish(&mut self, text: &mut String) {
        let from = text.len();
        if matches!(self.rule, Rule::Bytes) {
            if !self.bytes.is_empty() {
                self.bytes.clear();
                text.push(REPLACEMENT_CHARACTER);
            }
        } else {
            self.end_byte_run(text);
        }
        self.put_space(from, text);
    }

    /// Forgets all ids, so that the next one is decoded as the first of a text, in a part of its own.
    fn restart(&mut self) {
        self.first = true;
        self.strippable = match self.rule {
            Rule::Text { strip: Some((_, most)), .. } => most,
            _ => 0,
        };
        if let Some(spaces) = &mut self.spaces {
            spaces.is_due = spaces.is_begun;
        }
    }

    /// Appends an added token as a part.
    fn push_part(&mut self, piece: Piece<'_>, text: &mut String) {
        self.finish(text);
        self.restart();
        let from = text.len();
        text.push_str(&String::from_utf8_lossy(piece.bytes));
        self.put_space(from, text);
        self.restart();
    }

    /// Puts the space that is due before the text that came at `from`, if any did.
    fn put_space(&mut self, from: usize, text: &mut String) {
        if let Some(spaces) = &mut self.spaces
            && from < text.len()
        {
            if spaces.is_due {
                text.insert(from, ' ');
            }
            *spaces = Spaces { is_begun: true, is_due: false };
        }
    }

    fn push_piece(&mut self, piece: Piece<'_>, text: &mut String) {
        match (self.rule, piece.kind) {
            (Rule::Bytes, _) => self.push_bytes(piece.bytes, text),
            (Rule::Text { .. }, Kind::Byte) => self.bytes.extend_from_slice(piece.bytes),
            (Rule::Text { .. }, Kind::Text) => {
                self.end_byte_run(text);
                self.push_stripped(piece.text(), text);
            }
            (Rule::Spaced, _) => {
                text.push_str(if self.first { "" } else { " " });
                text.push_str(piece.text());
            }
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
