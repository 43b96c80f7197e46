//! Incremental readers of one call in any notation.

use super::call_reader::CallReader;
use super::header_reader::HeaderReader;
use super::json_reader::ScanStatus;
use super::literal_reader::LiteralReader;
use super::tagged_reader::TaggedReader;

/// A call that is being read.
pub(super) enum CallText {
    Object(CallReader),
    Header(HeaderReader),
    Tagged(TaggedReader),
    Literal(LiteralReader),
}

impl CallText {
    /// The name, once it is certain that this is a call.
    pub(super) fn name(&self) -> Option<&str> {
        match self {
            Self::Object(reader) => reader.name(),
            Self::Header(reader) => reader.name.as_deref(),
            Self::Tagged(reader) => reader.name(),
            Self::Literal(reader) => reader.name(),
        }
    }

    /// The id that the model wrote, if any.
    pub(super) fn id(&self) -> Option<&str> {
        match self {
            Self::Object(reader) => reader.id(),
            Self::Header(reader) => reader.id.as_deref(),
            Self::Tagged(_) | Self::Literal(_) => None,
        }
    }

    /// Takes the arguments read since the last call; at the end of the call, `is_end`, also those held back.
    pub(super) fn take_arguments(&mut self, is_end: bool) -> String {
        match self {
            Self::Object(reader) if is_end => reader.take_rest(),
            Self::Object(reader) => reader.take_arguments(),
            Self::Header(reader) => reader.take_arguments(),
            Self::Tagged(reader) => reader.take_arguments(),
            Self::Literal(reader) => reader.take_arguments(),
        }
    }

    /// Reads more text. Returns the number of bytes that belong to the call; the rest of an incomplete call must be
    /// passed again with more text.
    pub(super) fn feed(&mut self, text: &str, is_end: bool) -> (usize, ScanStatus) {
        match self {
            Self::Object(reader) => reader.feed(text),
            Self::Header(reader) => reader.feed(text, is_end),
            Self::Tagged(reader) => reader.feed(text, is_end),
            Self::Literal(reader) => reader.feed(text, is_end),
        }
    }
}
