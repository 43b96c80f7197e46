//! Names of functions and keys outside JSON.

/// Maximum length, in bytes, of the text between the opening of a call and its arguments, and of a key.
pub(super) const MAX_HEADER: usize = 256;

/// The number of bytes of `text` that fit into a header with `length` bytes.
pub(super) fn room(length: usize, text: &str) -> usize {
    let mut room = text.len().min(MAX_HEADER - length);
    while !text.is_char_boundary(room) {
        room -= 1;
    }
    room
}

/// Whether a text outside JSON can be the name of a function. It is any text without whitespace and brackets.
pub(super) fn is_name(text: &str) -> bool {
    let is_foreign = |character: char| character.is_whitespace() || "{}[]()<>\"',;=|".contains(character);
    !text.is_empty() && !text.contains(is_foreign)
}
