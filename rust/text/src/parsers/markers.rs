//! Incremental search for the marker literals of a format.
//!
//! The first byte of a marker occurs in it only once. So no marker can start inside a partial match of another, and the
//! search can continue at the byte that does not match.

use super::visits::visit;

/// Maximum length, in bytes, of whitespace held back because a marker may follow. A longer run is text.
pub const MAX_HELD_WHITESPACE: usize = 64;

/// JSON's whitespace.
pub(super) const WHITESPACE: [char; 4] = [' ', '\t', '\r', '\n'];

pub(super) fn is_whitespace(byte: u8) -> bool {
    WHITESPACE.contains(&char::from(byte))
}

/// The length of the leading whitespace of `text`.
pub(super) fn whitespace_length(text: &str) -> usize {
    let length = text.bytes().position(|byte| !is_whitespace(byte)).unwrap_or(text.len());
    visit(length + 1);
    length
}

/// Searches for the next of several markers anywhere in the text.
pub(super) struct MarkerSearch {
    /// All start with the same byte.
    markers: &'static [&'static str],
    /// Whitespace held back because a marker may follow.
    space: String,
    /// The current run of whitespace is too long to be held back.
    is_long: bool,
    /// Only whitespace has been read since the last marker.
    after_marker: bool,
    /// A marker of which a prefix has been read, and the length of the prefix.
    candidate: &'static str,
    matched: usize,
}

impl MarkerSearch {
    /// Creates a search. `after_marker` is true if the text follows a marker.
    pub(super) fn new(markers: &'static [&'static str], after_marker: bool) -> Self {
        debug_assert!(markers.iter().all(|marker| marker.rfind(&markers[0][..1]) == Some(0)));
        Self {
            markers,
            space: String::new(),
            is_long: false,
            after_marker,
            candidate: markers[0],
            matched: 0,
        }
    }

    /// Appends text outside markers to `plain`. Returns the end of a marker in `text`, and the marker; the search is
    /// then over.
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
                self.append_plain(before, plain);
                self.matched = usize::from(end.is_some());
                at += before.len() + self.matched;
            }
        }
        None
    }

    /// Appends held-back text as plain text.
    pub(super) fn release(&mut self, plain: &mut String) {
        plain.push_str(&self.space);
        plain.push_str(&self.candidate[..self.matched]);
        visit(self.space.len() + self.matched);
        self.space.clear();
        (self.matched, self.is_long, self.after_marker) = (0, false, false);
    }

    /// The whitespace before the marker that was found.
    pub(super) fn space(&self) -> &str {
        &self.space
    }

    fn marker_with(&self, byte: u8) -> Option<&'static str> {
        let read = &self.candidate[..self.matched];
        let matches = |marker: &&&str| marker.starts_with(read) && marker.as_bytes()[read.len()] == byte;
        self.markers.iter().find(matches).copied()
    }

    /// Appends text without markers to `plain`, except for its trailing whitespace, which is held back.
    fn append_plain(&mut self, mut text: &str, plain: &mut String) {
        if self.after_marker {
            text = text.trim_start_matches(WHITESPACE);
        }
        let trimmed = text.trim_end_matches(WHITESPACE);
        if !trimmed.is_empty() {
            self.release(plain);
            plain.push_str(trimmed);
        }
        let space = &text[trimmed.len()..];
        visit(text.len());
        self.is_long |= self.space.len() + space.len() > MAX_HELD_WHITESPACE;
        self.space.push_str(space);
        if self.is_long {
            plain.push_str(&self.space);
            self.space.clear();
        }
    }
}

/// Checks whether a text starts with a marker, after optional whitespace.
pub(super) struct MarkerPrefix {
    marker: &'static str,
    space: String,
    matched: usize,
}

impl MarkerPrefix {
    pub(super) fn new(marker: &'static str) -> Self {
        Self { marker, space: String::new(), matched: 0 }
    }

    /// Returns the number of bytes of `text` held back, and whether the marker is there, once that is known.
    pub(super) fn feed(&mut self, text: &str) -> (usize, Option<bool>) {
        for (at, byte) in text.bytes().enumerate() {
            visit(1);
            if self.matched == 0 && is_whitespace(byte) && self.space.len() < MAX_HELD_WHITESPACE {
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

    /// The text held back.
    pub(super) fn held_back(&self) -> String {
        format!("{}{}", self.space, &self.marker[..self.matched])
    }
}
