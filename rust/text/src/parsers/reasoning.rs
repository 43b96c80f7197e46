//! The reasoning before an answer.
//!
//! It is recognised only at the start of an output, so that an answer may mention its markers. Without a closing marker,
//! everything is reasoning, except for calls:
//!
//! - The opening of a call that is a control token ends the reasoning.
//! - One that is text may be a quotation. It is held back with what follows. If the output ends with calls and nothing
//!   else, they are calls; at the first other text, all of it is reasoning.

use std::borrow::Cow;
use std::sync::Arc;

use penstock_types::{ReasoningFormat, ToolFormat, Wrap};

use super::answer::AnswerParser;
use super::delta::{Delta, add};
use super::markers::{Found, MAX_HELD_WHITESPACE, PlainText, find, marker_at, whitespace_length};
use super::typing::ToolSchemas;
use super::visits::visit;

/// Separates the reasoning from the answer.
pub(super) struct ReasoningParser {
    format: &'static ReasoningFormat,
    tools: Option<&'static ToolFormat>,
    schemas: Arc<ToolSchemas>,
    starts_inside: bool,
    /// Later calls are content.
    allows_one: bool,
    /// The markers that open a block, and that may be at the start of the output.
    opening: Vec<&'static str>,
    /// The markers inside a block.
    inside: Vec<&'static str>,
    state: State,
    /// Text of the current state that is read again, with more text: the beginning of a marker.
    pending: String,
}

enum State {
    /// The opening marker may follow, after this whitespace. A model may repeat the one at the end of its prompt.
    Before(String),
    /// The label may follow.
    Label,
    Inside(PlainText),
    /// Calls inside the reasoning.
    Calls(Box<Calls>),
    /// Whitespace and another block may follow the closing marker.
    AfterClosing,
    Answer,
}

/// Text inside the reasoning that begins with the opening of a call.
struct Calls {
    parser: AnswerParser,
    /// The text, and the whitespace before it.
    text: String,
    deltas: Vec<Delta>,
}

impl ReasoningParser {
    /// A parser of reasoning before an answer with calls in the format `tools`.
    pub(super) fn new(
        format: &'static ReasoningFormat,
        tools: Option<&'static ToolFormat>,
        schemas: Arc<ToolSchemas>,
        starts_inside: bool,
    ) -> Self {
        let bare: &[_] = if format.has_bare_close && !starts_inside { format.block.close } else { &[] };
        let calls = tools.filter(|tools| !tools.at_start);
        let calls = calls.map(|tools| [tools.section.open, tools.call.open].concat()).unwrap_or_default();
        Self {
            format,
            tools,
            schemas,
            starts_inside,
            allows_one: false,
            opening: [format.block.open, bare].concat(),
            inside: [format.block.close, &calls].concat(),
            state: State::Before(String::new()),
            pending: String::new(),
        }
    }

    /// Allows one call inside the reasoning.
    pub(super) fn allow_one(&mut self) {
        self.allows_one = true;
    }

    /// Appends the reasoning. Returns the text of the answer: text held back before, and the rest of `text`.
    pub(super) fn push<'a>(&mut self, text: &'a str, deltas: &mut Vec<Delta>) -> Cow<'a, str> {
        if matches!(self.state, State::Answer) {
            return Cow::Borrowed(text);
        }
        Cow::Owned(self.read(text, false, deltas))
    }

    /// Appends held-back reasoning and calls inside it. Returns held-back text that belongs to the answer.
    pub(super) fn finish(&mut self, deltas: &mut Vec<Delta>) -> String {
        let mut answer = self.read("", true, deltas);
        match std::mem::replace(&mut self.state, State::Answer) {
            State::Before(space) if !self.starts_inside => answer += &space,
            State::Inside(mut plain) => {
                let mut reasoning = String::new();
                plain.release(&mut reasoning);
                add(deltas, Delta::Reasoning(reasoning));
            }
            State::Calls(mut calls) => {
                calls.parser.finish(&mut calls.deltas);
                let has_calls = calls.deltas.iter().any(|delta| matches!(delta, Delta::ToolCall { .. }));
                if has_calls && !calls.has_other_text() {
                    calls.deltas.into_iter().for_each(|delta| add(deltas, delta));
                } else {
                    add(deltas, Delta::Reasoning(calls.text));
                }
            }
            State::Before(_) | State::Label | State::AfterClosing | State::Answer => {}
        }
        answer
    }

    /// Reads text, with the pending one before it. Returns the text that belongs to the answer.
    fn read(&mut self, text: &str, is_end: bool, deltas: &mut Vec<Delta>) -> String {
        let pending = std::mem::take(&mut self.pending);
        let text = if pending.is_empty() { Cow::Borrowed(text) } else { Cow::Owned(pending + text) };
        let (mut text, mut at, mut answer) = (text, 0, String::new());
        while at < text.len() && !matches!(self.state, State::Answer) {
            let (used, needs_more) = self.step(&text[at..], is_end, &mut answer, deltas);
            at += used;
            if needs_more && !is_end {
                visit(text.len() - at);
                self.pending = text[at..].to_owned();
                return answer;
            }
            if !self.pending.is_empty() {
                visit(text.len() - at);
                text = Cow::Owned(std::mem::take(&mut self.pending) + &text[at..]);
                at = 0;
            }
        }
        answer + &text[at..]
    }

    /// Reads the next part. Returns the number of bytes read, and whether the next step needs more text. Text before the
    /// rest that belongs to the answer is appended to `answer`.
    fn step(
        &mut self,
        text: &str,
        is_end: bool,
        answer: &mut String,
        deltas: &mut Vec<Delta>,
    ) -> (usize, bool) {
        match &mut self.state {
            State::Before(space) => {
                let length = whitespace_length(text);
                let used = length.min(MAX_HELD_WHITESPACE - space.len());
                space.push_str(&text[..used]);
                if used == text.len() {
                    return (used, false);
                }
                match marker_at(&text[used..], &self.opening, is_end) {
                    None => return (used, true),
                    Some(Some(marker)) => {
                        let is_open = self.format.block.open.contains(&marker);
                        self.state = if is_open { State::Label } else { State::AfterClosing };
                        return (used + marker.len(), false);
                    }
                    Some(None) if self.starts_inside => self.state = State::Label,
                    Some(None) => {
                        *answer += space;
                        self.state = State::Answer;
                    }
                }
                (used, false)
            }
            State::Label => {
                let space = whitespace_length(text);
                let label = self.format.label;
                let found =
                    if label.is_empty() { Some(None) } else { marker_at(&text[space..], &[label], is_end) };
                let Some(found) = found.filter(|_| space < text.len()) else {
                    return (space, space < text.len());
                };
                self.state = State::Inside(PlainText::new(true));
                (space + found.map_or(0, str::len), false)
            }
            State::Inside(plain) => {
                let mut reasoning = String::new();
                let (used, marker) = plain.feed(text, &self.inside, is_end, &mut reasoning);
                let space = if marker.is_some() { plain.take_space() } else { String::new() };
                add(deltas, Delta::Reasoning(reasoning));
                let Some(marker) = marker else { return (used, used < text.len()) };
                if self.format.block.close.contains(&marker) {
                    self.state = State::AfterClosing;
                } else if self.tools.is_some_and(|tools| tools.ends_reasoning) {
                    *answer += marker;
                    self.state = State::Answer;
                } else {
                    let mut parser = AnswerParser::new(self.tools, Arc::clone(&self.schemas), Wrap::NONE);
                    if self.allows_one {
                        parser.allow_one();
                    }
                    let mut calls = Vec::new();
                    parser.push(marker, &mut calls);
                    self.state =
                        State::Calls(Box::new(Calls { parser, text: space + marker, deltas: calls }));
                }
                (used, false)
            }
            State::Calls(calls) => {
                // The first other text decides, so one character is read at a time.
                let mut used = 0;
                for character in text.chars() {
                    let end = used + character.len_utf8();
                    calls.parser.push(&text[used..end], &mut calls.deltas);
                    calls.text.push_str(&text[used..end]);
                    used = end;
                    if calls.has_other_text() {
                        let held = std::mem::take(&mut calls.text);
                        let rest = self.read_quotation(&held, deltas);
                        if rest <= used {
                            return (used - rest, false);
                        }
                        // The rest began in an earlier piece of the text.
                        self.pending = held[held.len() - rest..].to_owned();
                        return (used, false);
                    }
                }
                (used, false)
            }
            State::AfterClosing => {
                let space = whitespace_length(text);
                if space == text.len() {
                    return (space, false);
                }
                let repeated: &[_] = if self.format.repeats { self.format.block.open } else { &[] };
                match marker_at(&text[space..], repeated, is_end) {
                    None => return (space, true),
                    Some(Some(marker)) => {
                        self.state = State::Label;
                        return (space + marker.len(), false);
                    }
                    Some(None) => self.state = State::Answer,
                }
                (space, false)
            }
            State::Answer => (0, false),
        }
    }

    /// Reads text that has no calls as reasoning. Returns the length of its rest, which follows the closing marker or is
    /// the beginning of a marker.
    fn read_quotation(&mut self, text: &str, deltas: &mut Vec<Delta>) -> usize {
        let mut plain = PlainText::default();
        let mut reasoning = String::new();
        let (mut used, marker) = match find(text, self.format.block.close, false) {
            Found::Marker { start, marker } => (start + marker.len(), Some(marker)),
            Found::Part { .. } | Found::None => (text.len(), None),
        };
        if marker.is_none() {
            let longest = self.inside.iter().map(|marker| marker.len()).max().unwrap_or(0);
            let begins = |at: &usize| {
                self.inside.iter().any(|marker| marker.as_bytes().starts_with(&text.as_bytes()[*at..]))
            };
            used = (text.len().saturating_sub(longest)..text.len()).find(begins).unwrap_or(used);
        }
        plain.feed(&text[..used], self.format.block.close, true, &mut reasoning);
        add(deltas, Delta::Reasoning(reasoning));
        self.state = if marker.is_some() { State::AfterClosing } else { State::Inside(plain) };
        text.len() - used
    }
}

impl Calls {
    /// Whether there is text beside the calls.
    fn has_other_text(&self) -> bool {
        self.deltas.iter().any(|delta| matches!(delta, Delta::Content(_)))
    }
}
