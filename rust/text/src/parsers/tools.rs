//! Separation of an answer into content and tool calls.
//!
//! One state machine serves all formats: content up to a marker, delimiters before an object, the object, delimiters
//! after it. Text between a marker and the start of a call is held back, and becomes content at the first byte that
//! does not fit.

use super::call_reader::CallReader;
use super::delta::{Delta, add};
use super::format::ToolFormat;
use super::json_reader::ScanStatus;
use super::markers::{MarkerPrefix, MarkerSearch, WHITESPACE, whitespace_length};
use super::visits::visit;

const HERMES_OPENING: &str = "<tool_call>";
const HERMES_CLOSING: &str = "</tool_call>";
const LLAMA_TAG: &str = "<|python_tag|>";
const MISTRAL_OPENING: &str = "[TOOL_CALLS]";

/// Maximum length, in bytes, of the text between `[TOOL_CALLS]` and the arguments: a function's name and a call's id.
const MAX_HEADER: usize = 256;

/// Separates the content of an answer from its calls.
pub(super) struct ToolParser {
    format: ToolFormat,
    state: ToolState,
    /// Text of a possible call that has not started, in case it is content.
    held_back: String,
    /// An object must have arguments to be a call.
    needs_arguments: bool,
    /// The calls being read are a JSON list.
    is_list: bool,
    num_calls: usize,
    max_calls: usize,
    /// The answer has no content before or between the calls.
    requires_call: bool,
}

enum ToolState {
    /// Start of the answer. Calls are possible only here.
    Start(MarkerPrefix),
    /// Content up to a marker.
    Content(MarkerSearch),
    /// Content up to the end. `after_marker` is true while only whitespace has been read since a marker.
    Rest { after_marker: bool },
    /// Before the object of a call.
    BeforeObject,
    /// Between an opening marker and the arguments.
    Header(String),
    /// Inside a call. `is_started` is true after its name has been emitted.
    Call { reader: CallReader, is_started: bool },
    /// After a call that another may follow.
    Between,
}

impl ToolParser {
    pub(super) fn new(format: ToolFormat) -> Self {
        let state = match format {
            ToolFormat::Llama3Json => ToolState::Start(MarkerPrefix::new(LLAMA_TAG)),
            ToolFormat::Hermes | ToolFormat::Mistral => content(format, false),
        };
        Self {
            format,
            state,
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
        let mut rest = text;
        while !rest.is_empty() {
            let used = self.step(rest, deltas);
            rest = &rest[used..];
        }
    }

    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) {
        match &mut self.state {
            ToolState::Call { reader, is_started: true } => {
                let (index, text) = (self.num_calls - 1, reader.take_rest());
                add(deltas, Delta::Arguments { index, text });
            }
            // A call that was cut before its name.
            _ if self.requires_call => {}
            ToolState::Start(prefix) => add(deltas, Delta::Content(prefix.held_back())),
            ToolState::Content(search) => {
                let mut content = String::new();
                search.release(&mut content);
                add(deltas, Delta::Content(content));
            }
            ToolState::Between => {}
            // A later call that was cut before its arguments: content would be half of it.
            _ if self.num_calls > 0 => {}
            _ => add(deltas, Delta::Content(std::mem::take(&mut self.held_back))),
        }
    }

    /// Runs one step of the state machine. Returns the number of bytes read; zero only if the state has changed.
    fn step(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        match &mut self.state {
            ToolState::Start(prefix) => {
                let (used, is_tagged) = prefix.feed(text);
                if let Some(is_tagged) = is_tagged {
                    self.held_back = prefix.held_back();
                    self.needs_arguments = !is_tagged;
                    self.state = ToolState::BeforeObject;
                    let is_object = self.held_back.trim_ascii().is_empty() && text[used..].starts_with('{');
                    if !is_tagged && !is_object {
                        self.emit_held_back(deltas);
                    }
                }
                used
            }
            ToolState::Content(search) => {
                let mut plain = String::new();
                let found = search.feed(text, &mut plain);
                add(deltas, Delta::Content(plain));
                let Some((used, marker)) = found else { return text.len() };
                if marker == HERMES_CLOSING {
                    self.end_calls(true);
                } else {
                    self.held_back = format!("{}{marker}", search.space());
                    self.state = ToolState::BeforeObject;
                }
                used
            }
            ToolState::Rest { after_marker } => {
                visit(text.len());
                let shown = if *after_marker { text.trim_start_matches(WHITESPACE) } else { text };
                *after_marker &= shown.is_empty();
                add(deltas, Delta::Content(shown.to_owned()));
                text.len()
            }
            ToolState::BeforeObject | ToolState::Between => self.read_delimiter(text, deltas),
            ToolState::Header(_) => self.read_header(text, deltas),
            ToolState::Call { .. } => self.read_call(text, deltas),
        }
    }

    fn read_delimiter(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let space = whitespace_length(text);
        self.hold(&text[..space]);
        let Some(&byte) = text.as_bytes().get(space) else { return space };
        let may_have_header = self.format == ToolFormat::Mistral && !self.is_list;
        match (&self.state, byte) {
            (ToolState::BeforeObject, b'{') => {
                self.state =
                    ToolState::Call { reader: CallReader::new(self.needs_arguments), is_started: false };
            }
            (ToolState::BeforeObject, b'[') if may_have_header => self.is_list = true,
            (ToolState::BeforeObject, _) if may_have_header => {
                self.state = ToolState::Header(String::new());
                return space;
            }
            (ToolState::Between, b',') if self.is_list && !self.is_full() => {
                self.state = ToolState::BeforeObject
            }
            (ToolState::Between, b';') if !self.is_list && !self.is_full() => {
                self.state = ToolState::BeforeObject
            }
            (ToolState::Between, b']') if self.is_list => {
                self.end_calls(true);
                return space + 1;
            }
            (ToolState::Between, _) => {
                self.end_calls(true);
                return space;
            }
            _ => {
                self.emit_held_back(deltas);
                return space;
            }
        }
        self.hold(&text[space..=space]);
        space + 1
    }

    fn read_header(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let ToolState::Header(header) = &mut self.state else {
            unreachable!("the state is a header; this is a bug")
        };
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/[]".contains(&byte);
        let room = MAX_HEADER - header.len();
        let used = text.bytes().take(room).take_while(|&byte| is_allowed(byte)).count();
        visit(used);
        header.push_str(&text[..used]);
        let name = match text.as_bytes().get(used) {
            None => {
                self.hold(text);
                return used;
            }
            Some(b'{') => name_in(header).map(str::to_owned),
            Some(_) => None,
        };
        self.hold(&text[..used]);
        match name {
            Some(name) => self.state = ToolState::Call { reader: CallReader::named(name), is_started: false },
            None => self.emit_held_back(deltas),
        }
        used
    }

    fn read_call(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let ToolState::Call { reader, is_started } = &mut self.state else {
            unreachable!("the state is a call; this is a bug")
        };
        let (used, status) = reader.feed(text);
        if let Some(name) = reader.name() {
            if !*is_started {
                add(deltas, Delta::ToolCall { index: self.num_calls, name: name.to_owned() });
                self.num_calls += 1;
                *is_started = true;
                self.held_back.clear();
            }
            let text =
                if status == ScanStatus::Incomplete { reader.take_arguments() } else { reader.take_rest() };
            visit(text.len());
            add(deltas, Delta::Arguments { index: self.num_calls - 1, text });
        }
        let is_started = *is_started;
        if !is_started {
            self.hold(&text[..used]);
        }
        match status {
            ScanStatus::Incomplete => {}
            ScanStatus::Invalid if !is_started => self.emit_held_back(deltas),
            _ if self.format == ToolFormat::Hermes => {
                // The closing tag should follow; a next call without it is accepted.
                let markers: &[_] =
                    if self.is_full() { &[HERMES_CLOSING] } else { &[HERMES_OPENING, HERMES_CLOSING] };
                self.state = ToolState::Content(MarkerSearch::new(markers, status == ScanStatus::Complete));
            }
            ScanStatus::Complete if self.is_list || self.format == ToolFormat::Llama3Json => {
                self.state = ToolState::Between;
            }
            _ => self.end_calls(status == ScanStatus::Complete),
        }
        used
    }

    fn hold(&mut self, text: &str) {
        visit(text.len());
        self.held_back.push_str(text);
    }

    /// Continues with content after calls.
    fn end_calls(&mut self, after_marker: bool) {
        self.held_back.clear();
        self.is_list = false;
        self.state = if self.is_full() {
            ToolState::Rest { after_marker }
        } else {
            content(self.format, after_marker)
        };
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

/// The state of reading content. `after_marker` is true directly after a marker.
fn content(format: ToolFormat, after_marker: bool) -> ToolState {
    match format {
        ToolFormat::Hermes => ToolState::Content(MarkerSearch::new(&[HERMES_OPENING], after_marker)),
        ToolFormat::Llama3Json => ToolState::Rest { after_marker },
        ToolFormat::Mistral => ToolState::Content(MarkerSearch::new(&[MISTRAL_OPENING], after_marker)),
    }
}

/// The name in the header of `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, in which the id and the markers are optional.
fn name_in(header: &str) -> Option<&str> {
    let name = header.strip_suffix("[ARGS]").unwrap_or(header);
    let name = name.split_once("[CALL_ID]").map_or(name, |(name, _)| name);
    (!name.is_empty() && !name.contains(['[', ']'])).then_some(name)
}
