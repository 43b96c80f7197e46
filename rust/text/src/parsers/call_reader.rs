//! Incremental reader of one tool call: a JSON object with a name and arguments.

use super::json_reader::{ScanStatus, StringReader, ValueReader};
use super::markers::whitespace_length;

/// Reads a call from after the opening brace of its object, or from its arguments if the name is known.
pub(super) struct CallReader {
    /// An object without arguments is not a call.
    needs_arguments: bool,
    state: CallState,
    /// The key or name being read, as written.
    string: String,
    name: Option<String>,
    has_arguments: bool,
    /// Arguments that have not been taken.
    arguments: String,
    /// The arguments are a string whose end has not been read.
    is_quoted: bool,
}

enum CallState {
    /// Before a key or the end.
    Member,
    Key(StringReader),
    Colon(Member),
    /// Before a value.
    Value(Member),
    Name(StringReader),
    Inside(Member, ValueReader),
    /// Before a comma or the end.
    Next,
    /// Inside arguments without an enclosing object.
    BareArguments(ValueReader),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    Other,
}

impl CallReader {
    pub(super) fn new(needs_arguments: bool) -> Self {
        Self {
            needs_arguments,
            state: CallState::Member,
            string: String::new(),
            name: None,
            has_arguments: false,
            arguments: String::new(),
            is_quoted: false,
        }
    }

    /// A reader of a call whose name is known.
    pub(super) fn named(name: String) -> Self {
        let state = CallState::BareArguments(ValueReader::default());
        Self { state, name: Some(name), has_arguments: true, ..Self::new(true) }
    }

    /// The name, once it is certain that this is a call.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.has_arguments)
    }

    /// Takes the arguments read since the last call.
    pub(super) fn take_arguments(&mut self) -> String {
        if self.is_quoted { String::new() } else { std::mem::take(&mut self.arguments) }
    }

    /// Takes the remaining arguments after the end.
    pub(super) fn take_rest(&mut self) -> String {
        self.is_quoted = false;
        self.take_arguments()
    }

    /// Reads more text. Returns the number of bytes that belong to the call.
    pub(super) fn feed(&mut self, text: &str) -> (usize, ScanStatus) {
        let mut at = 0;
        while at < text.len() {
            let (used, status) = self.step(&text[at..]);
            at += used;
            if status != ScanStatus::Incomplete {
                return (at, status);
            }
        }
        (at, ScanStatus::Incomplete)
    }

    /// Reads whitespace and a delimiter, or the available part of a string or value.
    fn step(&mut self, text: &str) -> (usize, ScanStatus) {
        match &mut self.state {
            CallState::Key(reader) | CallState::Name(reader) => {
                let quote = reader.feed(text);
                self.string.push_str(&text[..quote.unwrap_or(text.len())]);
                match quote {
                    Some(quote) if self.end_string() => (quote + 1, ScanStatus::Incomplete),
                    Some(quote) => (quote, ScanStatus::Invalid),
                    None => (text.len(), ScanStatus::Incomplete),
                }
            }
            CallState::Inside(member, reader) => {
                let (used, status) = reader.feed(text);
                if *member == Member::Arguments && used > 0 {
                    self.has_arguments = true;
                    self.arguments.push_str(&text[..used]);
                }
                if status != ScanStatus::Complete {
                    return (used, status);
                }
                self.end_arguments();
                self.state = CallState::Next;
                (used, ScanStatus::Incomplete)
            }
            CallState::BareArguments(reader) => {
                let (used, status) = reader.feed(text);
                self.arguments.push_str(&text[..used]);
                (used, status)
            }
            _ => self.read_delimiter(text),
        }
    }

    fn read_delimiter(&mut self, text: &str) -> (usize, ScanStatus) {
        let space = whitespace_length(text);
        let Some(&byte) = text.as_bytes().get(space) else { return (space, ScanStatus::Incomplete) };
        self.state = match (&self.state, byte) {
            (CallState::Member, b'"') => CallState::Key(StringReader::default()),
            (CallState::Member | CallState::Next, b'}') if self.is_call() => {
                if !self.has_arguments {
                    self.has_arguments = true;
                    self.arguments.push_str("{}");
                }
                return (space + 1, ScanStatus::Complete);
            }
            (CallState::Next, b',') => CallState::Member,
            (CallState::Colon(member), b':') => CallState::Value(*member),
            (CallState::Value(Member::Name), b'"') => CallState::Name(StringReader::default()),
            (&CallState::Value(member @ (Member::Arguments | Member::Other)), _) => {
                self.is_quoted |= member == Member::Arguments && byte == b'"';
                self.state = CallState::Inside(member, ValueReader::default());
                return (space, ScanStatus::Incomplete);
            }
            _ => return (space, ScanStatus::Invalid),
        };
        (space + 1, ScanStatus::Incomplete)
    }

    /// Interprets the string just read. Returns whether it is valid.
    fn end_string(&mut self) -> bool {
        let string = std::mem::take(&mut self.string);
        if matches!(self.state, CallState::Key(_)) {
            self.state = CallState::Colon(match string.as_str() {
                "name" if self.name.is_none() => Member::Name,
                "arguments" | "parameters" if !self.has_arguments => Member::Arguments,
                _ => Member::Other,
            });
            return true;
        }
        self.name =
            serde_json::from_str(&format!("\"{string}\"")).ok().filter(|name: &String| !name.is_empty());
        self.state = CallState::Next;
        self.name.is_some()
    }

    /// Unquotes arguments that are a string containing an object.
    fn end_arguments(&mut self) {
        if std::mem::take(&mut self.is_quoted)
            && let Ok(held) = serde_json::from_str::<String>(&self.arguments)
            && held.trim_ascii_start().starts_with('{')
        {
            self.arguments = held;
        }
    }

    /// Whether an object that ends here is a call.
    fn is_call(&self) -> bool {
        self.name.is_some() && (self.has_arguments || !self.needs_arguments)
    }
}
