//! Finds the literals that models put around things, in text that comes in parts.
//!
//! The first byte of a marker occurs in it only once. So where a marker breaks off, no other can have begun
//! inside it, and looking on at the byte that does not fit misses nothing.

use super::visit;

/// The most bytes of white space held back because a marker may follow. A longer run is text.
pub const MAX_HELD_SPACE: usize = 64;

/// White space as JSON has it.
pub(super) const SPACE: [char; 4] = [' ', '\t', '\r', '\n'];

/// Whether a byte is white space.
pub(super) fn is_space(byte: u8) -> bool {
    SPACE.contains(&char::from(byte))
}

/// The length of the white space that `text` begins with.
pub(super) fn space_length(text: &str) -> usize {
    let length = text.bytes().position(|byte| !is_space(byte)).unwrap_or(text.len());
    visit(length + 1);
    length
}

/// Looks for the next of some markers, wherever it is.
pub(super) struct Search {
    /// They begin with the same byte.
    markers: &'static [&'static str],
    /// White space that a marker may follow.
    space: String,
    /// Whether the white space that is being read is too long to border on a marker.
    is_long: bool,
    /// Whether nothing but white space has come since the last marker.
    is_bordering: bool,
    /// A marker that may have begun, and how many of its bytes were read.
    candidate: &'static str,
    matched: usize,
}

impl Search {
    /// A search in a text that begins here, or follows a marker if it `is_bordering` on one.
    pub(super) fn new(markers: &'static [&'static str], is_bordering: bool) -> Self {
        debug_assert!(markers.iter().all(|marker| marker.rfind(&markers[0][..1]) == Some(0)));
        Self {
            markers,
            space: String::new(),
            is_long: false,
            is_bordering,
            candidate: markers[0],
            matched: 0,
        }
    }

    /// Appends to `plain` what belongs to no marker. Says where in `text` a marker ends, and which one; the
    /// search is then at an end.
    pub(super) fn feed(&mut self, text: &str, plain: &mut String) -> Option<(usize, &'static str)> {
        let mut at = 0;
        while at < text.len() {
            let rest = &text[at..];
            if self.matched > 0 {
                visit(1);
                let Some(marker) = self.marker_with(rest.as_bytes()[0]) else {
                    self.release(plain);
                    continue;
                };
                (self.candidate, self.matched, at) = (marker, self.matched + 1, at + 1);
                if self.matched == marker.len() {
                    return Some((at, marker));
                }
            } else {
                let first = char::from(self.candidate.as_bytes()[0]);
                let end = rest.find(first);
                let before = &rest[..end.unwrap_or(rest.len())];
                visit(before.len() + 1);
                self.pass(before, plain);
                self.matched = usize::from(end.is_some());
                at += before.len() + self.matched;
            }
        }
        None
    }

    /// Appends what was held back, which is plain text.
    pub(super) fn release(&mut self, plain: &mut String) {
        plain.push_str(&self.space);
        plain.push_str(&self.candidate[..self.matched]);
        visit(self.space.len() + self.matched);
        self.space.clear();
        (self.matched, self.is_long, self.is_bordering) = (0, false, false);
    }

    /// The white space before the marker found.
    pub(super) fn space(&self) -> &str {
        &self.space
    }

    fn marker_with(&self, byte: u8) -> Option<&'static str> {
        let read = &self.candidate[..self.matched];
        let fits = |marker: &&&str| marker.starts_with(read) && marker.as_bytes()[read.len()] == byte;
        self.markers.iter().find(fits).copied()
    }

    /// Passes on text without any beginning of a marker, but for the white space that it ends with.
    fn pass(&mut self, mut text: &str, plain: &mut String) {
        if self.is_bordering {
            text = text.trim_start_matches(SPACE);
        }
        let trimmed = text.trim_end_matches(SPACE);
        if !trimmed.is_empty() {
            self.release(plain);
            plain.push_str(trimmed);
        }
        let space = &text[trimmed.len()..];
        visit(text.len());
        self.is_long |= self.space.len() + space.len() > MAX_HELD_SPACE;
        self.space.push_str(space);
        if self.is_long {
            plain.push_str(&self.space);
            self.space.clear();
        }
    }
}

/// Looks for one marker where a text begins, after white space at most.
pub(super) struct Prefix {
    marker: &'static str,
    space: String,
    matched: usize,
}

impl Prefix {
    pub(super) fn new(marker: &'static str) -> Self {
        Self { marker, space: String::new(), matched: 0 }
    }

    /// How many bytes of `text` were held back, and whether the marker is there, once that is known.
    pub(super) fn feed(&mut self, text: &str) -> (usize, Option<bool>) {
        for (at, byte) in text.bytes().enumerate() {
            visit(1);
            if self.matched == 0 && is_space(byte) && self.space.len() < MAX_HELD_SPACE {
                self.space.push(char::from(byte));
            } else if self.marker.as_bytes()[self.matched] != byte {
                return (at, Some(false));
            } else {
                self.matched += 1;
                if self.matched == self.marker.len() {
                    return (at + 1, Some(true));
                }
            }
        }
        (text.len(), None)
    }

    /// What was held back.
    pub(super) fn held(&self) -> String {
        format!("{}{}", self.space, &self.marker[..self.matched])
    }
}
