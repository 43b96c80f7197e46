//! Incremental reader of a call with literals as arguments: `name(key=value, …)` or `name{key:value,…}`.

use penstock_types::LiteralCall;

use super::arguments::ArgumentWriter;
use super::json_reader::ScanStatus;
use super::literal::{self, Notation};
use super::markers::{first_character, marker_at};
use super::names::{MAX_HEADER, is_name};
use super::visits::visit;

/// Reads a call from before its name.
pub(super) struct LiteralReader {
    call: &'static LiteralCall,
    state: State,
    /// The name, a key or a value.
    text: String,
    /// The key of the value.
    key: String,
    name: Option<String>,
    /// An argument or the end of the call was read.
    is_call: bool,
    arguments: ArgumentWriter,
}

enum State {
    Name,
    /// Before a key or the end.
    Member,
    Key,
    Value(ValueScan),
}

/// The state inside a value.
#[derive(Default)]
struct ValueScan {
    /// Closing brackets of the open ones, innermost last.
    closing: Vec<char>,
    /// The quotation mark that ends the string.
    mark: Option<char>,
    is_escaped: bool,
    /// Inside a delimited string.
    is_delimited: bool,
}

impl LiteralReader {
    pub(super) fn new(call: &'static LiteralCall) -> Self {
        Self {
            call,
            state: State::Name,
            text: String::new(),
            key: String::new(),
            name: None,
            is_call: false,
            arguments: ArgumentWriter::default(),
        }
    }

    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.is_call)
    }

    pub(super) fn take_arguments(&mut self) -> String {
        self.arguments.take()
    }

    /// See `CallText::feed`.
    pub(super) fn feed(&mut self, text: &str, is_end: bool) -> (usize, ScanStatus) {
        let mut at = 0;
        while let Some(character) = text[at..].chars().next() {
            visit(character.len_utf8());
            let (used, status) = match &mut self.state {
                State::Name => self.read_name(character),
                State::Member => self.read_member(&text[at..]),
                State::Key => self.read_key(character),
                State::Value(_) => match self.read_value(&text[at..], character, is_end) {
                    Some(read) => read,
                    None => return (at, ScanStatus::Incomplete),
                },
            };
            at += used;
            if status != ScanStatus::Incomplete {
                return (at, status);
            }
        }
        (at, ScanStatus::Incomplete)
    }

    fn read_name(&mut self, character: char) -> (usize, ScanStatus) {
        let used = character.len_utf8();
        if character == self.call.open {
            let text = std::mem::take(&mut self.text);
            let name = text.strip_prefix(self.call.prefix).map(str::trim);
            self.state = State::Member;
            return match name.filter(|name| is_name(name)) {
                Some(name) => {
                    self.name = Some(name.to_owned());
                    (used, ScanStatus::Incomplete)
                }
                None => (0, ScanStatus::Invalid),
            };
        }
        let is_allowed = self.text.len() + used <= MAX_HEADER && is_name(character.encode_utf8(&mut [0; 4]));
        if !is_allowed {
            return (0, ScanStatus::Invalid);
        }
        self.text.push(character);
        (used, ScanStatus::Incomplete)
    }

    fn read_member(&mut self, text: &str) -> (usize, ScanStatus) {
        match first_character(text) {
            (space, None) => (space, ScanStatus::Incomplete),
            (space, Some(character)) if character == self.call.close => (space + 1, self.finish()),
            (space, Some(_)) => {
                self.state = State::Key;
                (space, ScanStatus::Incomplete)
            }
        }
    }

    fn read_key(&mut self, character: char) -> (usize, ScanStatus) {
        let used = character.len_utf8();
        if character == self.call.assign {
            let key = self.text.trim_end();
            let quote = match self.call.quote {
                "" => "\"",
                quote => quote,
            };
            let bare = key.strip_prefix(quote).and_then(|key| key.strip_suffix(quote)).unwrap_or(key);
            if bare.is_empty() || bare.contains(char::is_whitespace) {
                return (0, ScanStatus::Invalid);
            }
            (self.key, self.is_call) = (bare.to_owned(), true);
            self.text.clear();
            self.state = State::Value(ValueScan::default());
            return (used, ScanStatus::Incomplete);
        }
        if self.text.len() + used > MAX_HEADER || "{}[](),".contains(character) {
            return (0, ScanStatus::Invalid);
        }
        self.text.push(character);
        (used, ScanStatus::Incomplete)
    }

    /// Reads a character or a delimiter of a value, or what follows the value. `None` if more text is needed.
    fn read_value(&mut self, text: &str, character: char, is_end: bool) -> Option<(usize, ScanStatus)> {
        let State::Value(scan) = &mut self.state else { unreachable!("the state is a value; this is a bug") };
        let mut used = character.len_utf8();
        let is_delimiter = match self.call.quote {
            "" => false,
            _ if scan.mark.is_some() => false,
            quote => marker_at(text, &[quote], is_end)?.is_some(),
        };
        match character {
            _ if is_delimiter => {
                scan.is_delimited = !scan.is_delimited;
                used = self.call.quote.len();
            }
            _ if scan.is_delimited => {}
            _ if scan.is_escaped => scan.is_escaped = false,
            '\\' if scan.mark.is_some() => scan.is_escaped = true,
            _ if scan.mark == Some(character) => scan.mark = None,
            _ if scan.mark.is_some() => {}
            '"' => scan.mark = Some('"'),
            '\'' if self.call.quote.is_empty() => scan.mark = Some('\''),
            '{' => scan.closing.push('}'),
            '[' => scan.closing.push(']'),
            '(' => scan.closing.push(')'),
            _ if scan.closing.last() == Some(&character) => {
                scan.closing.pop();
            }
            ',' if scan.closing.is_empty() => {
                let is_valid = self.end_value();
                self.state = State::Member;
                return Some(if is_valid { (1, ScanStatus::Incomplete) } else { (0, ScanStatus::Invalid) });
            }
            _ if scan.closing.is_empty() && character == self.call.close => {
                let is_valid = self.end_value();
                return Some(if is_valid { (1, self.finish()) } else { (0, ScanStatus::Invalid) });
            }
            '}' | ']' | ')' => return Some((0, ScanStatus::Invalid)),
            _ => {}
        }
        self.text.push_str(&text[..used]);
        Some((used, ScanStatus::Incomplete))
    }

    /// Writes the value in `self.text`. Text that is no literal is a string. Returns whether there is text.
    fn end_value(&mut self) -> bool {
        let text = std::mem::take(&mut self.text);
        let text = text.trim();
        if !text.is_empty() && self.arguments.begin(&self.key) {
            let json = literal::to_json(text, Notation { quote: self.call.quote });
            self.arguments.json(&json.unwrap_or_else(|| literal::quoted(text)));
        }
        !text.is_empty()
    }

    fn finish(&mut self) -> ScanStatus {
        self.is_call = true;
        self.arguments.finish();
        ScanStatus::Complete
    }
}
