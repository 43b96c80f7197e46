//! Search for the marker literals of a format in text that arrives in pieces.

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

/// The number of bytes of leading whitespace, and the first character after it.
pub(super) fn first_character(text: &str) -> (usize, Option<char>) {
    let space = whitespace_length(text);
    (space, text[space..].chars().next())
}

/// The result of a search for markers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// The marker at `start`.
    Marker { start: usize, marker: &'static str },
    /// The text from `start` on is the beginning of a marker.
    Part { start: usize },
    /// There is no marker.
    None,
}

/// The first of `markers` in `text`. None of them is the beginning of another one. At the end of the output,
/// `is_end`, a part of a marker is text.
pub(super) fn find(text: &str, markers: &[&'static str], is_end: bool) -> Found {
    for (start, byte) in text.bytes().enumerate() {
        visit(1);
        for marker in markers.iter().copied().filter(|marker| marker.as_bytes()[0] == byte) {
            match begins(&text.as_bytes()[start..], marker) {
                Beginning::Whole => return Found::Marker { start, marker },
                Beginning::Part if !is_end => return Found::Part { start },
                _ => {}
            }
        }
    }
    Found::None
}

/// The part of a marker that a text begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beginning {
    Whole,
    /// The whole text is a part of the marker.
    Part,
    None,
}

fn begins(text: &[u8], marker: &str) -> Beginning {
    let same = text.iter().zip(marker.as_bytes()).take_while(|(left, right)| left == right).count();
    visit(same);
    match same {
        _ if same == marker.len() => Beginning::Whole,
        _ if same == text.len() => Beginning::Part,
        _ => Beginning::None,
    }
}

/// The marker that `text` begins with. `None` if more text is needed to know it, which is never at the end.
pub(super) fn marker_at(text: &str, markers: &[&'static str], is_end: bool) -> Option<Option<&'static str>> {
    let mut may_follow = false;
    for &marker in markers {
        match begins(text.as_bytes(), marker) {
            Beginning::Whole => return Some(Some(marker)),
            Beginning::Part => may_follow = true,
            Beginning::None => {}
        }
    }
    (is_end || !may_follow).then_some(None)
}

/// Text outside markers, without the whitespace beside them.
#[derive(Default)]
pub(super) struct PlainText {
    /// Whitespace held back because a marker may follow.
    space: String,
    /// The current run of whitespace is too long to be held back.
    is_long: bool,
    /// Only whitespace has been read since the last marker.
    after_marker: bool,
}

impl PlainText {
    /// The text after a marker, if `after_marker`, or elsewhere.
    pub(super) fn new(after_marker: bool) -> Self {
        Self { after_marker, ..Self::default() }
    }

    /// Appends text up to the next of `markers` to `plain`. Returns the number of bytes read and the marker, if it is
    /// complete; what remains without one is the beginning of a marker.
    pub(super) fn feed(
        &mut self,
        text: &str,
        markers: &[&'static str],
        is_end: bool,
        plain: &mut String,
    ) -> (usize, Option<&'static str>) {
        match find(text, markers, is_end) {
            Found::Marker { start, marker } => {
                self.append(&text[..start], plain);
                (start + marker.len(), Some(marker))
            }
            Found::Part { start } => {
                self.append(&text[..start], plain);
                (start, None)
            }
            Found::None => {
                self.append(text, plain);
                (text.len(), None)
            }
        }
    }

    /// Appends held-back whitespace, because no marker follows.
    pub(super) fn release(&mut self, plain: &mut String) {
        plain.push_str(&self.space);
        visit(self.space.len());
        self.space.clear();
        (self.is_long, self.after_marker) = (false, false);
    }

    /// Takes the whitespace before a marker.
    pub(super) fn take_space(&mut self) -> String {
        std::mem::take(&mut self.space)
    }

    /// Appends text without markers to `plain`, except for its trailing whitespace, which is held back.
    fn append(&mut self, mut text: &str, plain: &mut String) {
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
