//! Separation of an answer into content and tool calls.
//!
//! One state machine serves all formats: content up to a marker, delimiters before a call, the call, delimiters after
//! it. Text between a marker and the start of a call is held back, and becomes content at the first byte that does not
//! fit.

use std::borrow::Cow;
use std::sync::Arc;

use penstock_types::{CallForm, JsonCall, LiteralCall, ObjectKeys, ToolFormat, Wrap};

use super::call_reader::CallReader;
use super::call_text::CallText;
use super::delta::{Delta, add};
use super::header_reader::HeaderReader;
use super::json_reader::ScanStatus;
use super::literal_reader::LiteralReader;
use super::markers::{MAX_HELD_WHITESPACE, PlainText, first_character, marker_at, whitespace_length};
use super::names::is_name;
use super::tagged_reader::TaggedReader;
use super::typing::ToolSchemas;
use super::visits::visit;

/// Separates the content of an answer from its calls.
pub(super) struct AnswerParser {
    /// The format of the calls, if they are parsed.
    format: Option<&'static ToolFormat>,
    schemas: Arc<ToolSchemas>,
    /// The text around the content, which is dropped.
    wrap: Wrap,
    /// The markers that are searched in content: those around it, and others before calls, after a call, and after the
    /// last call.
    around: Vec<&'static str>,
    before_call: Vec<&'static str>,
    after_call: Vec<&'static str>,
    after_calls: Vec<&'static str>,
    state: State,
    /// Text of the current state that is read again, with more text: the beginning of a marker.
    pending: String,
    /// Text of a possible call that has not started, in case it is content.
    held_back: String,
    /// The answer begins with a call without its opening text, so an object must have arguments to be a call.
    needs_arguments: bool,
    /// The calls being read are items of a list.
    is_list: bool,
    num_calls: usize,
    max_calls: usize,
    /// The answer has no content before or between the calls.
    requires_call: bool,
}

enum State {
    /// Start of the answer. Calls are possible only here. The whitespace read so far is held back.
    Start,
    /// Content up to a marker.
    Content(PlainText, Place),
    /// After the opening of a section.
    Section,
    /// Before a call.
    BeforeCall,
    /// Inside a call. `is_started` is true after its name has been emitted.
    Call { reader: Box<CallText>, is_started: bool },
    /// After a call that another may follow.
    Between,
}

/// The place of content.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    BeforeCall,
    AfterCall,
    /// No call can follow.
    Rest,
}

impl AnswerParser {
    pub(super) fn new(format: Option<&'static ToolFormat>, schemas: Arc<ToolSchemas>, wrap: Wrap) -> Self {
        let around: Vec<_> = wrap.all().collect();
        let (mut before_call, mut after_call, mut after_calls) =
            (around.clone(), around.clone(), around.clone());
        if let Some(ToolFormat { section, call, at_start, .. }) = format {
            let opens = [section.open, call.open].concat();
            let closes = [call.close, section.close].concat();
            before_call.extend(opens.iter().filter(|_| !at_start));
            after_call.extend(opens.iter().chain(&closes).filter(|_| !closes.is_empty() || !at_start));
            after_calls.extend(closes);
        }
        let starts = format.is_some_and(|format| format.at_start);
        let state = if starts { State::Start } else { content(Place::BeforeCall, false) };
        Self {
            format,
            schemas,
            wrap,
            around,
            before_call,
            after_call,
            after_calls,
            state,
            pending: String::new(),
            held_back: String::new(),
            needs_arguments: false,
            is_list: false,
            num_calls: 0,
            max_calls: usize::MAX,
            requires_call: false,
        }
    }

    /// Allows one call. Text after it is content.
    pub(super) fn allow_one(&mut self) {
        self.max_calls = 1;
    }

    /// The answer consists of calls, so a part of one at its end is not content.
    pub(super) fn require_call(&mut self) {
        self.requires_call = true;
    }

    pub(super) fn requires_call(&self) -> bool {
        self.requires_call
    }

    pub(super) fn push(&mut self, text: &str, deltas: &mut Vec<Delta>) {
        self.read(text, false, deltas);
    }

    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) {
        if self.requires_call && !matches!(self.state, State::Call { is_started: true, .. }) {
            // A call that was cut before its name.
            return;
        }
        self.read("", true, deltas);
        if matches!(self.state, State::Call { .. }) {
            self.read_call("", true, deltas);
        }
        match &mut self.state {
            State::Call { reader, is_started: true } => {
                let (index, text) = (self.num_calls - 1, reader.take_arguments(true));
                add(deltas, Delta::Arguments { index, text });
            }
            _ if self.requires_call => {}
            State::Content(plain, _) => {
                let mut content = String::new();
                plain.release(&mut content);
                add(deltas, Delta::Content(content));
            }
            State::Between => {}
            // A later call that was cut before its arguments: content would be half of it.
            _ if self.num_calls > 0 => {}
            _ => add(deltas, Delta::Content(std::mem::take(&mut self.held_back))),
        }
    }

    /// Reads text, with the pending one before it. At the end, nothing stays pending.
    fn read(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) {
        let pending = std::mem::take(&mut self.pending);
        let text = if pending.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(pending + text) };
        let mut rest = &*text;
        while !rest.is_empty() {
            let (used, needs_more) = self.step(rest, is_end, deltas);
            rest = &rest[used..];
            if needs_more && !is_end {
                visit(rest.len());
                self.pending = rest.to_owned();
                return;
            }
        }
    }

    /// Runs one step of the state machine. Returns the number of bytes read, and whether the next step needs more text.
    /// A step that reads nothing changes the state or needs more text.
    fn step(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> (usize, bool) {
        match &mut self.state {
            State::Start => self.read_start(text, is_end, deltas),
            State::Content(plain, place) => {
                let place = *place;
                let markers = match place {
                    Place::BeforeCall => &self.before_call,
                    Place::AfterCall if self.num_calls >= self.max_calls => &self.after_calls,
                    Place::AfterCall => &self.after_call,
                    Place::Rest => &self.around,
                };
                let mut shown = String::new();
                let (used, marker) = plain.feed(text, markers, is_end, &mut shown);
                let space = if marker.is_some() { plain.take_space() } else { String::new() };
                add(deltas, Delta::Content(shown));
                match marker {
                    Some(marker) => self.read_marker(marker, space, place),
                    None => return (used, used < text.len()),
                }
                (used, false)
            }
            State::Section => self.read_section(text, is_end, deltas),
            State::BeforeCall | State::Between => self.read_delimiter(text, is_end, deltas),
            State::Call { .. } => self.read_call(text, is_end, deltas),
        }
    }

    fn format(&self) -> &'static ToolFormat {
        self.format.expect("only a format has calls; this is a bug")
    }

    /// Reads the start of an answer, which is a call or content.
    fn read_start(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> (usize, bool) {
        let length = whitespace_length(text);
        let space = length.min(MAX_HELD_WHITESPACE - self.held_back.len());
        self.hold(&text[..space]);
        let rest = &text[space..];
        if rest.is_empty() {
            return (space, false);
        }
        let mut format = self.format();
        loop {
            match marker_at(rest, &[format.section.open, format.call.open].concat(), is_end) {
                None => return (space, true),
                Some(Some(marker)) => {
                    self.adopt(format);
                    self.hold(marker);
                    self.open(marker);
                    return (space + marker.len(), false);
                }
                Some(None) if space == length && starts_call(format, rest) => {
                    self.adopt(format);
                    self.needs_arguments = true;
                    self.state = State::BeforeCall;
                    return (space, false);
                }
                Some(None) => match format.alternative {
                    Some(alternative) => format = alternative,
                    None => {
                        self.emit_held_back(deltas);
                        return (space, false);
                    }
                },
            }
        }
    }

    /// Continues with this format, which may be the alternative one.
    fn adopt(&mut self, format: &'static ToolFormat) {
        if self.format != Some(format) {
            let parser = Self::new(Some(format), Arc::clone(&self.schemas), self.wrap);
            let held_back = std::mem::take(&mut self.held_back);
            let (max_calls, requires_call) = (self.max_calls, self.requires_call);
            *self = Self { held_back, max_calls, requires_call, ..parser };
        }
    }

    /// Reads a marker in content.
    fn read_marker(&mut self, marker: &'static str, space: String, place: Place) {
        let Some(format) = self.format.filter(|_| !self.wrap.all().any(|text| text == marker)) else {
            return self.state = content(place, true);
        };
        if format.section.open.contains(&marker) || format.call.open.contains(&marker) {
            self.held_back = space + marker;
            self.open(marker);
        } else if format.section.close.contains(&marker) || format.section.close.is_empty() {
            self.end_calls(true);
        } else {
            self.state = content(Place::AfterCall, true);
        }
    }

    /// Continues after the opening text of a section or a call.
    fn open(&mut self, marker: &'static str) {
        let format = self.format();
        let is_section = format.section.open.contains(&marker) && !format.call.open.is_empty();
        self.state = if is_section { State::Section } else { self.opened() };
    }

    /// The state after the opening text of a call.
    fn opened(&self) -> State {
        let format = self.format();
        match &format.form {
            CallForm::Tagged(call) => {
                let reader = TaggedReader::new(call, format, Arc::clone(&self.schemas));
                State::Call { reader: Box::new(CallText::Tagged(reader)), is_started: false }
            }
            CallForm::Json(_) | CallForm::Literal(_) => State::BeforeCall,
        }
    }

    fn read_section(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> (usize, bool) {
        let space = whitespace_length(text);
        self.hold(&text[..space]);
        if space == text.len() {
            return (space, false);
        }
        match marker_at(&text[space..], self.format().call.open, is_end) {
            None => (space, true),
            Some(None) => {
                self.emit_held_back(deltas);
                (space, false)
            }
            Some(Some(marker)) => {
                self.hold(marker);
                self.open(marker);
                (space + marker.len(), false)
            }
        }
    }

    fn read_delimiter(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> (usize, bool) {
        let (space, Some(character)) = first_character(text) else {
            self.hold(text);
            return (text.len(), false);
        };
        let form = Form::of(self.format());
        let is_before = matches!(self.state, State::BeforeCall);
        if !is_before {
            match self.ends_at(&text[space..], is_end) {
                None => {
                    self.hold(&text[..space]);
                    return (space, true);
                }
                Some(false) => {}
                Some(true) => {
                    self.end_call(true);
                    return (space, false);
                }
            }
        }
        self.hold(&text[..space]);
        match character {
            '[' if is_before && form.is_list && !self.is_list => self.is_list = true,
            ',' if !is_before && self.is_list && !self.is_full() => self.state = State::BeforeCall,
            ']' if !is_before && self.is_list => {
                self.is_list = false;
                self.end_call(true);
                return (space + 1, false);
            }
            _ if !is_before && !self.is_list && !self.is_full() && form.separates(character) => {
                self.state = State::BeforeCall;
                if form.separator == Some("") {
                    return (space, false);
                }
            }
            _ if is_before => match self.begin_call(&form, character) {
                Some((reader, length)) => {
                    self.hold(&text[space..space + length]);
                    self.state = State::Call { reader: Box::new(reader), is_started: false };
                    return (space + length, false);
                }
                None => {
                    self.emit_held_back(deltas);
                    return (space, false);
                }
            },
            _ => {
                self.end_call(true);
                return (space, false);
            }
        }
        self.hold(&text[space..=space]);
        (space + 1, false)
    }

    /// Whether calls that follow each other without a list end here: a marker follows. `None` if more text is needed.
    fn ends_at(&self, text: &str, is_end: bool) -> Option<bool> {
        if self.is_list { Some(false) } else { Some(marker_at(text, &self.after_call, is_end)?.is_some()) }
    }

    /// The reader of a call that begins with `character`, and the number of bytes before its text.
    fn begin_call(&self, form: &Form, character: char) -> Option<(CallText, usize)> {
        match (&self.format().form, form.keys) {
            (CallForm::Json(_), Some(keys)) if character == '{' => {
                Some((CallText::Object(CallReader::new(keys, self.needs_arguments)), 1))
            }
            (CallForm::Json(JsonCall { header: Some(header), .. }), _) if !self.is_list => {
                Some((CallText::Header(HeaderReader::new(header, self.format())), 0))
            }
            (CallForm::Literal(call), _) if self.is_list || !call.is_list => {
                Some((CallText::Literal(LiteralReader::new(call)), 0))
            }
            _ => None,
        }
    }

    fn read_call(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> (usize, bool) {
        let State::Call { reader, is_started } = &mut self.state else {
            unreachable!("the state is a call; this is a bug")
        };
        let (used, status) = reader.feed(text, is_end);
        if let Some(name) = reader.name() {
            if !*is_started {
                let (name, id) = (name.to_owned(), reader.id().map(str::to_owned));
                add(deltas, Delta::ToolCall { index: self.num_calls, name, id });
                self.num_calls += 1;
                *is_started = true;
                self.held_back.clear();
            }
            let text = reader.take_arguments(status != ScanStatus::Incomplete);
            visit(text.len());
            add(deltas, Delta::Arguments { index: self.num_calls - 1, text });
        }
        let is_started = *is_started;
        if !is_started {
            self.hold(&text[..used]);
        }
        let form = Form::of(self.format());
        match status {
            ScanStatus::Incomplete => return (used, used < text.len()),
            ScanStatus::Invalid if !is_started => self.emit_held_back(deltas),
            ScanStatus::Complete if self.is_list || form.separator.is_some() => self.state = State::Between,
            _ => {
                self.is_list = false;
                self.end_call(status == ScanStatus::Complete);
            }
        }
        (used, false)
    }

    fn hold(&mut self, text: &str) {
        visit(text.len());
        self.held_back.push_str(text);
    }

    /// Continues after a call or a list of calls. The closing text should follow; a next call without it is accepted.
    fn end_call(&mut self, after_marker: bool) {
        let format = self.format();
        if format.call.close.is_empty() && format.section.close.is_empty() {
            return self.end_calls(after_marker);
        }
        self.held_back.clear();
        self.is_list = false;
        self.state = content(Place::AfterCall, after_marker);
    }

    /// Continues with content after calls.
    fn end_calls(&mut self, after_marker: bool) {
        self.held_back.clear();
        self.is_list = false;
        let place = if self.is_full() { Place::Rest } else { Place::BeforeCall };
        self.state = content(place, after_marker);
    }

    /// Whether the maximum number of calls has been reached.
    fn is_full(&self) -> bool {
        self.num_calls >= self.max_calls
    }

    /// Emits held-back text as content, because it is not a call.
    fn emit_held_back(&mut self, deltas: &mut Vec<Delta>) {
        visit(self.held_back.len());
        add(deltas, Delta::Content(std::mem::take(&mut self.held_back)));
        self.end_calls(false);
    }
}

/// The properties of a call's form that decide what follows a delimiter.
struct Form {
    keys: Option<ObjectKeys>,
    is_list: bool,
    separator: Option<&'static str>,
}

impl Form {
    fn of(format: &ToolFormat) -> Self {
        match format.form {
            CallForm::Json(JsonCall { object, is_list, separator, .. }) => {
                Self { keys: object, is_list, separator }
            }
            CallForm::Tagged(_) => Self { keys: None, is_list: false, separator: None },
            CallForm::Literal(LiteralCall { is_list, separator, .. }) => {
                Self { keys: None, is_list, separator }
            }
        }
    }

    /// Whether a call follows after this character, or with it if there is no separator.
    fn separates(&self, character: char) -> bool {
        match self.separator {
            None => false,
            Some("") if self.keys.is_some() => character == '{',
            Some("") => is_name(character.encode_utf8(&mut [0; 4])),
            Some(separator) => separator.starts_with(character),
        }
    }
}

/// Whether an answer that begins with this text is a call without its opening text.
fn starts_call(format: &ToolFormat, text: &str) -> bool {
    let form = Form::of(format);
    let is_object = form.keys.is_some()
        && !(form.is_list && format.call.open.is_empty() && format.section.open.is_empty());
    (form.is_list && text.starts_with('[')) || (is_object && text.starts_with('{'))
}

/// The state of reading content. `after_marker` is true directly after a marker.
fn content(place: Place, after_marker: bool) -> State {
    State::Content(PlainText::new(after_marker), place)
}
