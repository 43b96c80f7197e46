//! Where a JSON value ends, in text that comes in parts.
//!
//! Brackets must match, and outside of strings there must be nothing that JSON never has; the rest is not
//! checked. So a value that a client's parser would refuse still ends where its author meant, and one that
//! breaks off is noticed at the next thing that is not JSON. Line breaks in strings, which models do write,
//! are let through.

use super::markers::is_space;
use super::visit;

/// What reading on led to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// It needs more text.
    More,
    /// It is complete.
    Complete,
    /// It is not what it should be.
    Broken,
}

/// A string, from after its opening quote on.
#[derive(Default)]
pub(super) struct StringReader {
    is_escaped: bool,
}

impl StringReader {
    /// Where in `text` the closing quote is, if it is there.
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

/// A value, from its first byte on.
#[derive(Default)]
pub(super) struct ValueReader {
    /// What closes the brackets that are open, innermost last.
    closing: Vec<u8>,
    string: Option<StringReader>,
    /// Whether the value is a number or a word, which only what follows it ends.
    is_scalar: bool,
}

impl ValueReader {
    /// Reads on; gives how many bytes of `text` belong to the value.
    pub(super) fn feed(&mut self, text: &str) -> (usize, Progress) {
        let mut at = 0;
        while let Some(&byte) = text.as_bytes().get(at) {
            if let Some(string) = &mut self.string {
                let Some(quote) = string.feed(&text[at..]) else { return (text.len(), Progress::More) };
                at += quote + 1;
                self.string = None;
                if self.closing.is_empty() {
                    return (at, Progress::Complete);
                }
                continue;
            }
            visit(1);
            let is_nested = !self.closing.is_empty();
            match byte {
                b'"' | b'{' | b'[' if self.is_scalar && !is_nested => return (at, Progress::Broken),
                b'"' => self.string = Some(StringReader::default()),
                b'{' => self.closing.push(b'}'),
                b'[' => self.closing.push(b']'),
                b'}' | b']' if self.closing.last() == Some(&byte) => {
                    self.closing.pop();
                    if self.closing.is_empty() {
                        return (at + 1, Progress::Complete);
                    }
                }
                b',' | b'}' | b']' | b' ' | b'\t' | b'\r' | b'\n' if !is_nested => {
                    let progress = if self.is_scalar { Progress::Complete } else { Progress::Broken };
                    return (at, progress);
                }
                b',' | b':' if is_nested => {}
                byte if is_space(byte) => {}
                b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b'+' | b'-' | b'.' => self.is_scalar |= !is_nested,
                _ => return (at, Progress::Broken),
            }
            at += 1;
        }
        (text.len(), Progress::More)
    }
}
