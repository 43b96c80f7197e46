//! Splits an answer into content and tool calls.
//!
//! One machine for all formats: content up to a marker, what must come before an object, the object, what may
//! come after it. Whatever is read between a marker and the beginning of a call is held, and becomes content
//! at the first byte that does not fit.

use super::call::Call;
use super::json::Progress;
use super::markers::{Prefix, SPACE, Search, space_length};
use super::{Delta, ToolFormat, add, visit};

const HERMES_OPENING: &str = "<tool_call>";
const HERMES_CLOSING: &str = "</tool_call>";
const LLAMA_TAG: &str = "<|python_tag|>";
const MISTRAL_OPENING: &str = "[TOOL_CALLS]";

/// The most bytes between `[TOOL_CALLS]` and the arguments; a function's name and a call's id need far less.
const MAX_HEADING: usize = 256;

/// Splits the content of an answer from its calls.
pub(super) struct ToolParser {
    format: ToolFormat,
    state: State,
    /// What was read of a call that has not begun, in case that it never does.
    held: String,
    /// Whether an object must have arguments to be a call.
    needs_arguments: bool,
    /// Whether the calls being read are in brackets.
    is_list: bool,
    num_calls: usize,
    most_calls: usize,
}

enum State {
    /// The answer begins, with a call or never.
    Start(Prefix),
    /// Content, until a marker.
    Content(Search),
    /// Content, whatever comes; nothing but white space has come of it yet if it `is_bordering` on a marker.
    Rest { is_bordering: bool },
    /// Before the object of a call.
    Opened,
    /// Between an opening marker and the arguments.
    Heading(String),
    /// Inside a call, `is_begun` once it was announced.
    Call { call: Call, is_begun: bool },
    /// After a call that others may follow.
    Between,
}

impl ToolParser {
    pub(super) fn new(format: ToolFormat) -> Self {
        let state = match format {
            ToolFormat::Llama3Json => State::Start(Prefix::new(LLAMA_TAG)),
            ToolFormat::Hermes | ToolFormat::Mistral => content(format, false),
        };
        Self {
            format,
            state,
            held: String::new(),
            needs_arguments: false,
            is_list: false,
            num_calls: 0,
            most_calls: usize::MAX,
        }
    }

    /// From now on what follows on a call is content.
    pub(super) fn allow_one(&mut self) {
        self.most_calls = 1;
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
            State::Start(prefix) => add(deltas, Delta::Content(prefix.held())),
            State::Content(search) => {
                let mut content = String::new();
                search.release(&mut content);
                add(deltas, Delta::Content(content));
            }
            State::Call { call, is_begun: true } => {
                let (index, text) = (self.num_calls - 1, call.take_rest());
                add(deltas, Delta::Arguments { index, text });
            }
            State::Between => {}
            _ => add(deltas, Delta::Content(std::mem::take(&mut self.held))),
        }
    }

    /// Reads one thing, and says how many bytes of `text` it took; none only where another state goes on with
    /// them.
    fn step(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        match &mut self.state {
            State::Start(prefix) => {
                let (used, is_tagged) = prefix.feed(text);
                if let Some(is_tagged) = is_tagged {
                    self.held = prefix.held();
                    self.needs_arguments = !is_tagged;
                    self.state = State::Opened;
                    let is_object = self.held.trim_ascii().is_empty() && text[used..].starts_with('{');
                    if !is_tagged && !is_object {
                        self.fall_back(deltas);
                    }
                }
                used
            }
            State::Content(search) => {
                let mut plain = String::new();
                let found = search.feed(text, &mut plain);
                add(deltas, Delta::Content(plain));
                let Some((used, marker)) = found else { return text.len() };
                if marker == HERMES_CLOSING {
                    self.leave(true);
                } else {
                    self.held = format!("{}{marker}", search.space());
                    self.state = State::Opened;
                }
                used
            }
            State::Rest { is_bordering } => {
                visit(text.len());
                let shown = if *is_bordering { text.trim_start_matches(SPACE) } else { text };
                *is_bordering &= shown.is_empty();
                add(deltas, Delta::Content(shown.to_owned()));
                text.len()
            }
            State::Opened | State::Between => self.step_over_mark(text, deltas),
            State::Heading(_) => self.read_heading(text, deltas),
            State::Call { .. } => self.read_call(text, deltas),
        }
    }

    fn step_over_mark(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let space = space_length(text);
        self.hold(&text[..space]);
        let Some(&byte) = text.as_bytes().get(space) else { return space };
        let may_have_heading = self.format == ToolFormat::Mistral && !self.is_list;
        match (&self.state, byte) {
            (State::Opened, b'{') => {
                self.state = State::Call { call: Call::new(self.needs_arguments), is_begun: false };
            }
            (State::Opened, b'[') if may_have_heading => self.is_list = true,
            (State::Opened, _) if may_have_heading => {
                self.state = State::Heading(String::new());
                return space;
            }
            (State::Between, b',') if self.is_list && !self.is_full() => self.state = State::Opened,
            (State::Between, b';') if !self.is_list && !self.is_full() => self.state = State::Opened,
            (State::Between, b']') if self.is_list => {
                self.leave(true);
                return space + 1;
            }
            (State::Between, _) => {
                self.leave(true);
                return space;
            }
            _ => {
                self.fall_back(deltas);
                return space;
            }
        }
        self.hold(&text[space..=space]);
        space + 1
    }

    fn read_heading(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let State::Heading(heading) = &mut self.state else {
            unreachable!("not in a heading; this is a bug")
        };
        let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-.:/[]".contains(&byte);
        let room = MAX_HEADING - heading.len();
        let used = text.bytes().take(room).take_while(|&byte| is_allowed(byte)).count();
        visit(used);
        heading.push_str(&text[..used]);
        let name = match text.as_bytes().get(used) {
            None => {
                self.hold(text);
                return used;
            }
            Some(b'{') => name_in(heading).map(str::to_owned),
            Some(_) => None,
        };
        self.hold(&text[..used]);
        match name {
            Some(name) => self.state = State::Call { call: Call::named(name), is_begun: false },
            None => self.fall_back(deltas),
        }
        used
    }

    fn read_call(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let State::Call { call, is_begun } = &mut self.state else {
            unreachable!("not in a call; this is a bug")
        };
        let (used, progress) = call.feed(text);
        if let Some(name) = call.name() {
            if !*is_begun {
                add(deltas, Delta::ToolCall { index: self.num_calls, name: name.to_owned() });
                self.num_calls += 1;
                *is_begun = true;
                self.held.clear();
            }
            let text = if progress == Progress::More { call.take_arguments() } else { call.take_rest() };
            visit(text.len());
            add(deltas, Delta::Arguments { index: self.num_calls - 1, text });
        }
        let is_begun = *is_begun;
        if !is_begun {
            self.hold(&text[..used]);
        }
        match progress {
            Progress::More => {}
            Progress::Broken if !is_begun => self.fall_back(deltas),
            _ if self.format == ToolFormat::Hermes => {
                // The closing tag is due; without it the next call is as welcome.
                let markers: &[_] =
                    if self.is_full() { &[HERMES_CLOSING] } else { &[HERMES_OPENING, HERMES_CLOSING] };
                self.state = State::Content(Search::new(markers, progress == Progress::Complete));
            }
            Progress::Complete if self.is_list || self.format == ToolFormat::Llama3Json => {
                self.state = State::Between;
            }
            _ => self.leave(progress == Progress::Complete),
        }
        used
    }

    fn hold(&mut self, text: &str) {
        visit(text.len());
        self.held.push_str(text);
    }

    /// Goes on with content after calls.
    fn leave(&mut self, is_bordering: bool) {
        self.held.clear();
        self.is_list = false;
        self.state =
            if self.is_full() { State::Rest { is_bordering } } else { content(self.format, is_bordering) };
    }

    /// Whether there are as many calls as there may be.
    fn is_full(&self) -> bool {
        self.num_calls >= self.most_calls
    }

    /// What was held is no call.
    fn fall_back(&mut self, deltas: &mut Vec<Delta>) {
        visit(self.held.len());
        add(deltas, Delta::Content(std::mem::take(&mut self.held)));
        self.leave(false);
    }
}

/// Content, after a marker if it `is_bordering` on one.
fn content(format: ToolFormat, is_bordering: bool) -> State {
    match format {
        ToolFormat::Hermes => State::Content(Search::new(&[HERMES_OPENING], is_bordering)),
        ToolFormat::Llama3Json => State::Rest { is_bordering },
        ToolFormat::Mistral => State::Content(Search::new(&[MISTRAL_OPENING], is_bordering)),
    }
}

/// The name in what stands before the arguments of `[TOOL_CALLS]name[CALL_ID]id[ARGS]{…}`, where id and marks
/// may be missing.
fn name_in(heading: &str) -> Option<&str> {
    let name = heading.strip_suffix("[ARGS]").unwrap_or(heading);
    let name = name.split_once("[CALL_ID]").map_or(name, |(name, _)| name);
    (!name.is_empty() && !name.contains(['[', ']'])).then_some(name)
}
