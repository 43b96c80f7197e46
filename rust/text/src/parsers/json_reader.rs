//! Incremental search for the end of a JSON value.
//!
//! Only matching brackets and the characters outside strings are checked. So a slightly invalid value still ends at the
//! right place, and a truncated value is detected at the next character that is not JSON. Line breaks in strings are
//! accepted, because models write them.

use super::markers::is_whitespace;
use super::visits::visit;

/// The state of a value after reading more text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScanStatus {
    Incomplete,
    Complete,
    Invalid,
}

/// Reads a string from after its opening quote.
#[derive(Default)]
pub(super) struct StringReader {
    is_escaped: bool,
}

impl StringReader {
    /// Returns the position of the closing quote in `text`, if any.
    pub(super) fn feed(&mut self, text: &str) -> Option<usize> {
        for (at, byte) in text.bytes().enumerate() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' => self.is_escaped = true,
                b'"' => {
                    visit(at + 1);
                    return Some(at);
                }
                _ => {}
            }
        }
        visit(text.len());
        None
    }
}

/// Reads a value from its first byte.
#[derive(Default)]
pub(super) struct ValueReader {
    /// Closing brackets of the open ones, innermost last.
    closing: Vec<u8>,
    string: Option<StringReader>,
    /// The value is a number or literal, which ends only at the next delimiter.
    is_scalar: bool,
}

impl ValueReader {
    /// Reads more text. Returns the number of bytes that belong to the value.
    pub(super) fn feed(&mut self, text: &str) -> (usize, ScanStatus) {
        let mut at = 0;
        while let Some(&byte) = text.as_bytes().get(at) {
            if let Some(string) = &mut self.string {
                let Some(quote) = string.feed(&text[at..]) else {
                    return (text.len(), ScanStatus::Incomplete);
                };
                at += quote + 1;
                self.string = None;
                if self.closing.is_empty() {
                    return (at, ScanStatus::Complete);
                }
                continue;
            }
            visit(1);
            let is_nested = !self.closing.is_empty();
            match byte {
                b'"' | b'{' | b'[' if self.is_scalar && !is_nested => return (at, ScanStatus::Invalid),
                b'"' => self.string = Some(StringReader::default()),
                b'{' => self.closing.push(b'}'),
                b'[' => self.closing.push(b']'),
                b'}' | b']' if self.closing.last() == Some(&byte) => {
                    self.closing.pop();
                    if self.closing.is_empty() {
                        return (at + 1, ScanStatus::Complete);
                    }
                }
                b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n' if !is_nested => {
                    let status = if self.is_scalar { ScanStatus::Complete } else { ScanStatus::Invalid };
                    return (at, status);
                }
                b',' | b':' if is_nested => {}
                byte if is_whitespace(byte) => {}
                b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.' => self.is_scalar |= !is_nested,
                _ => return (at, ScanStatus::Invalid),
            }
            at += 1;
        }
        (text.len(), ScanStatus::Incomplete)
    }
}
