//! Incremental reader of a call whose arguments have tags of their own.
//!
//! ```text
//! name ── name_end ── (key.open ── key ── key.close ── value.open ── value ── value.close)* ── call.close
//! ```
//!
//! A value can contain the closing text of values. That text ends a value only if another argument, another call, a
//! closing text or the end of the output follows, with at most whitespace between. The closing text of the call ends it
//! like this, too, because models leave out that of the last value.

use std::sync::Arc;

use penstock_types::{TaggedCall, ToolFormat};

use super::arguments::ArgumentWriter;
use super::json_reader::ScanStatus;
use super::markers::{Found, MAX_HELD_WHITESPACE, WHITESPACE, find, marker_at, whitespace_length};
use super::names::{is_name, room};
use super::typing::{ToolSchemas, convert_untyped};
use super::visits::visit;

/// Reads a call from after its opening text.
pub(super) struct TaggedReader {
    call: &'static TaggedCall,
    schemas: Arc<ToolSchemas>,
    /// The closing text of the call.
    closings: &'static [&'static str],
    /// The text that ends a name, and the text that no name contains.
    name_stops: Vec<&'static str>,
    /// The text that may end a value.
    value_stops: Vec<&'static str>,
    /// The text that may follow a call without its closing text.
    after_call: Vec<&'static str>,
    /// The text that may follow the name and an argument.
    after_value: Vec<&'static str>,
    state: State,
    /// The name, the key, or a value that is converted when it is complete.
    text: String,
    name: Option<String>,
    key: String,
    arguments: ArgumentWriter,
}

enum State {
    Name,
    /// Before an argument or the end.
    Tag,
    Key,
    /// Between a key and the value's opening text.
    Open(ValueKind),
    Value(Value),
    /// After a text that may end the value, and the whitespace after it.
    Ended(Value, &'static str, String),
}

#[derive(Clone, Copy)]
struct Value {
    kind: ValueKind,
    /// Nothing of it was read.
    is_new: bool,
    /// A line feed before its closing text is held back.
    has_line: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ValueKind {
    /// A string, which is written while it is read.
    Text,
    /// A value of the type that the schema says.
    Typed,
    /// JSON, by the attribute of its tag.
    Json,
    /// A value of a key that was there before.
    Dropped,
}

impl TaggedReader {
    pub(super) fn new(
        call: &'static TaggedCall,
        format: &'static ToolFormat,
        schemas: Arc<ToolSchemas>,
    ) -> Self {
        let after_call: Vec<_> = format.section.all().chain(format.call.open.iter().copied()).collect();
        let after_value: Vec<_> = [call.key.open, format.call.close]
            .concat()
            .into_iter()
            .chain(after_call.iter().copied())
            .collect();
        let name_stops = match call.name_end {
            [] => after_value.clone(),
            end => end.iter().copied().chain(after_value.iter().copied()).collect(),
        };
        Self {
            call,
            schemas,
            closings: format.call.close,
            name_stops,
            value_stops: [call.value.close, format.call.close].concat(),
            after_call,
            after_value,
            state: State::Name,
            text: String::new(),
            name: None,
            key: String::new(),
            arguments: ArgumentWriter::default(),
        }
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    pub(super) fn take_arguments(&mut self) -> String {
        self.arguments.take()
    }

    /// See `CallText::feed`.
    pub(super) fn feed(&mut self, text: &str, is_end: bool) -> (usize, ScanStatus) {
        let mut at = 0;
        loop {
            let is_before = matches!(self.state, State::Ended(..));
            if at == text.len() && !(is_end && is_before) {
                return (at, ScanStatus::Incomplete);
            }
            match self.step(&text[at..], is_end) {
                (used, None) => return (at + used, ScanStatus::Incomplete),
                (used, Some(ScanStatus::Incomplete)) => at += used,
                (used, Some(status)) => return (at + used, status),
            }
        }
    }

    /// Reads the next part. Returns the number of bytes read, and `None` if the next step needs more text.
    fn step(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        match &mut self.state {
            State::Name => self.read_name(text, is_end),
            State::Tag => self.read_tag(text, is_end),
            State::Key => self.read_key(text, is_end),
            State::Open(kind) => {
                let kind = *kind;
                let space = whitespace_length(text);
                match marker_at(&text[space..], self.call.value.open, is_end) {
                    None => (space, None),
                    Some(None) => (space, Some(ScanStatus::Invalid)),
                    Some(Some(marker)) => {
                        self.begin_value(kind);
                        (space + marker.len(), Some(ScanStatus::Incomplete))
                    }
                }
            }
            State::Value(_) => self.read_value(text, is_end),
            State::Ended(..) => self.read_after_value(text, is_end),
        }
    }

    /// Reads up to one of `stops` into `self.text`. Returns the number of bytes read, and the stop that follows them.
    fn read_header(&mut self, text: &str, stops: &[&'static str], is_end: bool) -> (usize, HeaderEnd) {
        let (end, stop) = match find(text, stops, is_end) {
            Found::Marker { start, marker } => (start, HeaderEnd::Stop(marker)),
            Found::Part { start } => (start, HeaderEnd::None),
            Found::None => (text.len(), HeaderEnd::None),
        };
        let used = room(self.text.len(), text).min(end);
        visit(used);
        self.text.push_str(&text[..used]);
        (used, if used < end { HeaderEnd::TooLong } else { stop })
    }

    fn read_name(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        let stops = std::mem::take(&mut self.name_stops);
        let (used, end) = self.read_header(text, &stops, is_end);
        self.name_stops = stops;
        let ends = self.call.name_end;
        let used = match end {
            HeaderEnd::TooLong => return (used, Some(ScanStatus::Invalid)),
            HeaderEnd::None => return (used, None),
            HeaderEnd::Stop(marker) if ends.contains(&marker) => used + marker.len(),
            HeaderEnd::Stop(_) if ends.is_empty() => used,
            HeaderEnd::Stop(_) => return (used, Some(ScanStatus::Invalid)),
        };
        let name = unquoted(&self.text).to_owned();
        self.text.clear();
        self.state = State::Tag;
        if !is_name(&name) {
            return (used, Some(ScanStatus::Invalid));
        }
        self.name = Some(name);
        (used, Some(ScanStatus::Incomplete))
    }

    fn read_tag(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        let space = whitespace_length(text);
        if space == text.len() {
            return (space, None);
        }
        match marker_at(&text[space..], &self.after_value, false) {
            // A part of a marker at the end of the output belongs to the call.
            None if is_end => (text.len(), None),
            None => (space, None),
            Some(None) => (space, Some(ScanStatus::Invalid)),
            Some(Some(marker)) if self.call.key.open.contains(&marker) => {
                self.state = State::Key;
                (space + marker.len(), Some(ScanStatus::Incomplete))
            }
            Some(Some(marker)) => {
                self.arguments.finish();
                let is_closing = self.closings.contains(&marker);
                (space + if is_closing { marker.len() } else { 0 }, Some(ScanStatus::Complete))
            }
        }
    }

    fn read_key(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        let (used, end) = self.read_header(text, self.call.key.close, is_end);
        let marker = match end {
            HeaderEnd::TooLong => return (used, Some(ScanStatus::Invalid)),
            HeaderEnd::None => return (used, None),
            HeaderEnd::Stop(marker) => marker,
        };
        let tag = std::mem::take(&mut self.text);
        self.key = unquoted(&tag).to_owned();
        let function = self.name.as_deref().unwrap_or_default();
        let kind = match (self.call.attribute, self.schemas.argument(function, &self.key)) {
            _ if self.arguments.has(&self.key) => ValueKind::Dropped,
            ("", None) => ValueKind::Text,
            ("", Some(schema)) if schema.is_text() => ValueKind::Text,
            ("", Some(_)) => ValueKind::Typed,
            (attribute, _) => {
                let value =
                    tag.split_once(attribute).map(|(_, value)| value.split('"').next().unwrap_or_default());
                if matches!(value, Some("true" | "string") | None) {
                    ValueKind::Text
                } else {
                    ValueKind::Json
                }
            }
        };
        if self.call.value.open.is_empty() {
            self.begin_value(kind);
        } else {
            self.state = State::Open(kind);
        }
        (used + marker.len(), Some(ScanStatus::Incomplete))
    }

    fn begin_value(&mut self, kind: ValueKind) {
        if kind == ValueKind::Text {
            self.arguments.begin(&self.key);
            self.arguments.quote();
        }
        self.state = State::Value(Value { kind, is_new: true, has_line: false });
    }

    fn read_value(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        let State::Value(value) = self.state else { unreachable!("the state is a value; this is a bug") };
        let (end, stop) = match find(text, &self.value_stops, is_end) {
            Found::Marker { start, marker } => (start, Some(marker)),
            Found::Part { start } => (start, None),
            Found::None => (text.len(), None),
        };
        let value = self.extend_value(value, &text[..end]);
        match stop {
            Some(marker) => {
                self.state = State::Ended(value, marker, String::new());
                (end + marker.len(), Some(ScanStatus::Incomplete))
            }
            None => {
                self.state = State::Value(value);
                (end, None)
            }
        }
    }

    /// Adds text to the value, except for line feeds on its sides.
    fn extend_value(&mut self, mut value: Value, text: &str) -> Value {
        if text.is_empty() {
            return value;
        }
        let trims = self.call.trims_line;
        let text = if trims && value.is_new { text.strip_prefix('\n').unwrap_or(text) } else { text };
        value.is_new = false;
        let body = if trims { text.strip_suffix('\n').unwrap_or(text) } else { text };
        if value.has_line && !text.is_empty() {
            self.add_to_value(value.kind, "\n");
            value.has_line = false;
        }
        self.add_to_value(value.kind, body);
        value.has_line |= body.len() < text.len();
        value
    }

    fn add_to_value(&mut self, kind: ValueKind, text: &str) {
        match kind {
            ValueKind::Text => self.arguments.text(text),
            ValueKind::Typed | ValueKind::Json => {
                visit(text.len());
                self.text.push_str(text);
            }
            ValueKind::Dropped => {}
        }
    }

    /// Decides whether the text before ends the value.
    fn read_after_value(&mut self, text: &str, is_end: bool) -> (usize, Option<ScanStatus>) {
        let State::Ended(value, closing, space) = &mut self.state else {
            unreachable!("the state is after a value; this is a bug")
        };
        let (value, closing) = (*value, *closing);
        let length = whitespace_length(text);
        let used = length.min(MAX_HELD_WHITESPACE + 1 - space.len());
        space.push_str(&text[..used]);
        let ends_call = self.closings.contains(&closing);
        let followers = if ends_call { &self.after_call } else { &self.after_value };
        let rest = &text[used..];
        let is_followed = match rest.is_empty() {
            _ if space.len() > MAX_HELD_WHITESPACE => false,
            true if is_end => true,
            true => return (used, None),
            false => match marker_at(rest, followers, is_end) {
                Some(follower) => follower.is_some(),
                None => return (used, None),
            },
        };
        if !is_followed {
            let more = format!("{closing}{space}");
            let value = self.extend_value(Value { is_new: false, ..value }, &more);
            self.state = State::Value(value);
            return (used, Some(ScanStatus::Incomplete));
        }
        self.end_value(value.kind);
        self.state = State::Tag;
        if ends_call {
            self.arguments.finish();
            return (used, Some(ScanStatus::Complete));
        }
        (used, Some(ScanStatus::Incomplete))
    }

    fn end_value(&mut self, kind: ValueKind) {
        let text = std::mem::take(&mut self.text);
        let function = self.name.as_deref().unwrap_or_default();
        let json = match (kind, self.schemas.argument(function, &self.key)) {
            (ValueKind::Text, _) => return self.arguments.quote(),
            (ValueKind::Dropped, _) => return,
            (ValueKind::Typed, Some(schema)) => schema.convert(&text),
            _ => convert_untyped(&text),
        };
        self.arguments.begin(&self.key);
        self.arguments.json(&json);
    }
}

/// The end of a name or a key in a text.
enum HeaderEnd {
    /// It is not there yet.
    None,
    /// There is too much text before it.
    TooLong,
    Stop(&'static str),
}

/// The text up to a quotation mark, without one before it.
fn unquoted(text: &str) -> &str {
    let text = text.trim_matches(WHITESPACE);
    let text = text.strip_prefix('"').unwrap_or(text);
    text.split('"').next().unwrap_or_default().trim_matches(WHITESPACE)
}
