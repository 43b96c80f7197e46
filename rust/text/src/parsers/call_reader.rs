//! Incremental reader of a tool call that is a JSON object with a name and arguments.

use penstock_types::ObjectKeys;

use super::json_reader::{ScanStatus, StringReader, ValueReader};
use super::markers::whitespace_length;

/// Reads a call from after the opening brace of its object.
pub(super) struct CallReader {
    keys: ObjectKeys,
    /// An object without arguments is not a call.
    needs_arguments: bool,
    state: CallState,
    /// The key or name being read, as written.
    string: String,
    name: Option<String>,
    id: Option<String>,
    has_arguments: bool,
    /// The call is the value of the key `function` of another object.
    is_nested: bool,
    /// The object inside the other one has ended.
    has_ended: bool,
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
    Text(Member, StringReader),
    Inside(Member, ValueReader),
    /// Before a comma or the end.
    Next,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    Name,
    Id,
    Arguments,
    /// An object that may have the name and the arguments.
    Function,
    Other,
}

impl CallReader {
    pub(super) fn new(keys: ObjectKeys, needs_arguments: bool) -> Self {
        Self {
            keys,
            needs_arguments,
            state: CallState::Member,
            string: String::new(),
            name: None,
            id: None,
            has_arguments: false,
            is_nested: false,
            has_ended: false,
            arguments: String::new(),
            is_quoted: false,
        }
    }

    /// The name, once it is certain that this is a call.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.has_arguments)
    }

    /// The id, if it was read so far.
    pub(super) fn id(&self) -> Option<&str> {
        self.id.as_deref()
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
            CallState::Key(reader) | CallState::Text(_, reader) => {
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
            _ => self.read_delimiter(text),
        }
    }

    fn read_delimiter(&mut self, text: &str) -> (usize, ScanStatus) {
        let space = whitespace_length(text);
        let Some(&byte) = text.as_bytes().get(space) else { return (space, ScanStatus::Incomplete) };
        self.state = match (&self.state, byte) {
            (CallState::Member, b'"') => CallState::Key(StringReader::default()),
            (CallState::Next, b'}') if self.is_nested && !self.has_ended => {
                self.has_ended = true;
                CallState::Next
            }
            (CallState::Value(Member::Function), b'{') => {
                self.is_nested = true;
                CallState::Member
            }
            (CallState::Member | CallState::Next, b'}') if self.is_call() => {
                if !self.has_arguments {
                    self.has_arguments = true;
                    self.arguments.push_str("{}");
                }
                return (space + 1, ScanStatus::Complete);
            }
            (CallState::Next, b',') => CallState::Member,
            (CallState::Colon(member), b':') => CallState::Value(*member),
            (&CallState::Value(member @ (Member::Name | Member::Id)), b'"') => {
                CallState::Text(member, StringReader::default())
            }
            (CallState::Value(Member::Function | Member::Id), _) => {
                self.state = CallState::Value(Member::Other);
                return (space, ScanStatus::Incomplete);
            }
            (CallState::Value(Member::Arguments), byte) if self.keys.name.is_empty() && byte != b'{' => {
                return (space, ScanStatus::Invalid);
            }
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
        let text =
            || serde_json::from_str::<String>(&format!("\"{string}\"")).ok().filter(|text| !text.is_empty());
        match self.state {
            CallState::Key(_) if self.keys.name.is_empty() => {
                if self.name.is_some() {
                    return false;
                }
                self.name = text();
                self.state = CallState::Colon(Member::Arguments);
                self.name.is_some()
            }
            CallState::Key(_) => {
                let key = string.as_str();
                self.state = CallState::Colon(match key {
                    _ if self.keys.name.contains(&key) && self.name.is_none() => Member::Name,
                    _ if self.keys.arguments.contains(&key) && !self.has_arguments => Member::Arguments,
                    _ if self.keys.id.contains(&key) && self.id.is_none() => Member::Id,
                    "function" if self.name.is_none() && !self.is_nested => Member::Function,
                    _ => Member::Other,
                });
                true
            }
            CallState::Text(Member::Id, _) => {
                // The id is passed on with the name, which is not withheld until the arguments end.
                self.id = text().filter(|_| !self.has_arguments);
                self.state = CallState::Next;
                true
            }
            _ => {
                self.name = text();
                self.state = CallState::Next;
                self.name.is_some()
            }
        }
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
