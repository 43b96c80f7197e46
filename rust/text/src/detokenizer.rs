//! The incremental detokenizer: decodes ids one at a time.
//!
//! One state machine serves streaming and one-shot decoding, so their results are equal. It holds back at most one
//! incomplete character or one run of byte-fallback tokens; one invalid byte turns the whole run into replacement
//! characters.
//!
//! With spaces between special tokens, each added token is a segment of the text, and so is each run of other tokens,
//! decoded independently. Non-empty segments are separated by one space.

use std::char::REPLACEMENT_CHARACTER;

use crate::options::TextOptions;
use crate::token_table::{DecodeRule, DecodedToken, TokenKind, TokenTable};

#[derive(Clone)]
pub(crate) struct Detokenizer {
    rule: DecodeRule,
    skip_special_tokens: bool,
    spacing: Option<SegmentSpacing>,
    /// Whether no token has been decoded yet.
    first: bool,
    /// Number of characters that may still be stripped from the start of the text.
    strippable: usize,
    /// Bytes of an incomplete character or of a byte-fallback run.
    bytes: Vec<u8>,
}

/// State of the spaces between segments.
#[derive(Clone, Default)]
struct SegmentSpacing {
    /// A non-empty segment has been written.
    has_segment: bool,
    /// The next text starts a new segment.
    needs_space: bool,
}

impl Detokenizer {
    pub(crate) fn new(rule: DecodeRule, options: TextOptions) -> Self {
        let spaced = options.spaces_between_special_tokens && !options.skip_special_tokens;
        let mut detokenizer = Self {
            rule,
            skip_special_tokens: options.skip_special_tokens,
            spacing: spaced.then(SegmentSpacing::default),
            first: true,
            strippable: 0,
            bytes: Vec::new(),
        };
        detokenizer.start_segment();
        detokenizer
    }

    /// Decodes one id and appends the text that no later id can change.
    pub(crate) fn push(&mut self, table: &TokenTable, id: u32, text: &mut String) {
        let Some(token) = table.get(id) else { return };
        if self.skip_special_tokens && token.special {
            return;
        }
        if token.added && self.spacing.is_some() {
            self.push_segment(token, text);
            return;
        }
        let token = if self.first { table.initial(id, token) } else { token };
        let from = text.len();
        self.push_token(token, text);
        self.insert_space(from, text);
        self.first = false;
    }

    /// Appends the remaining text after the last id.
    pub(crate) fn finish(&mut self, text: &mut String) {
        let from = text.len();
        if matches!(self.rule, DecodeRule::Bytes) {
            if !self.bytes.is_empty() {
                self.bytes.clear();
                text.push(REPLACEMENT_CHARACTER);
            }
        } else {
            self.end_byte_run(text);
        }
        self.insert_space(from, text);
    }

    /// Starts a new segment: the next id is decoded like the first of a text.
    fn start_segment(&mut self) {
        self.first = true;
        self.strippable = match self.rule {
            DecodeRule::Text { strip: Some((_, max)), .. } => max,
            _ => 0,
        };
        if let Some(spacing) = &mut self.spacing {
            spacing.needs_space = spacing.has_segment;
        }
    }

    /// Appends an added token as a segment.
    fn push_segment(&mut self, token: DecodedToken<'_>, text: &mut String) {
        self.finish(text);
        self.start_segment();
        let from = text.len();
        text.push_str(&String::from_utf8_lossy(token.bytes));
        self.insert_space(from, text);
        self.start_segment();
    }

    /// Inserts the space between segments at `from`, if it is needed and text was appended there.
    fn insert_space(&mut self, from: usize, text: &mut String) {
        if let Some(spacing) = &mut self.spacing
            && from < text.len()
        {
            if spacing.needs_space {
                text.insert(from, ' ');
            }
            *spacing = SegmentSpacing { has_segment: true, needs_space: false };
        }
    }

    fn push_token(&mut self, token: DecodedToken<'_>, text: &mut String) {
        match (self.rule, token.kind) {
            (DecodeRule::Bytes, _) => self.push_bytes(token.bytes, text),
            (DecodeRule::Text { .. }, TokenKind::Byte) => self.bytes.extend_from_slice(token.bytes),
            (DecodeRule::Text { .. }, TokenKind::Text) => {
                self.end_byte_run(text);
                self.push_stripped(token.text(), text);
            }
            (DecodeRule::Words, _) => {
                text.push_str(if self.first { "" } else { " " });
                text.push_str(token.text());
            }
        }
    }

    /// Appends complete characters, keeps the bytes of an incomplete one, and replaces invalid bytes like
    /// `String::from_utf8_lossy`.
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
                    text.push_str(
                        std::str::from_utf8(valid).expect("the bytes were validated; this is a bug"),
                    );
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
        if let DecodeRule::Text { strip: Some((strip, _)), .. } = self.rule {
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
