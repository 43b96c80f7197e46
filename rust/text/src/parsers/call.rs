//! One tool call: an object with a name and arguments, read as it comes.

use super::json::{Progress, StringReader, ValueReader};
use super::markers::space_length;

/// A call, from after the opening brace of its object on, or from its arguments on if the name came before.
pub(super) struct Call {
    /// Whether an object without arguments is no call.
    needs_arguments: bool,
    state: State,
    /// The key or the name that is being read, as written.
    string: String,
    name: Option<String>,
    has_arguments: bool,
    /// The arguments that were not taken yet.
    arguments: String,
    /// Whether they are a string that has not ended.
    is_quoted: bool,
}

enum State {
    /// Before a key, or the end.
    Member,
    Key(StringReader),
    Colon(Member),
    /// Before a value.
    Value(Member),
    Name(StringReader),
    Inside(Member, ValueReader),
    /// Before a comma, or the end.
    Next,
    /// Inside arguments that no object is around.
    Bare(ValueReader),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Member {
    Name,
    Arguments,
    Other,
}

impl Call {
    pub(super) fn new(needs_arguments: bool) -> Self {
        Self {
            needs_arguments,
            state: State::Member,
            string: String::new(),
            name: None,
            has_arguments: false,
            arguments: String::new(),
            is_quoted: false,
        }
    }

    /// A call of which only the arguments are missing.
    pub(super) fn named(name: String) -> Self {
        let state = State::Bare(ValueReader::default());
        Self { state, name: Some(name), has_arguments: true, ..Self::new(true) }
    }

    /// The name, once the call is certain to be one.
    pub(super) fn name(&self) -> Option<&str> {
        self.name.as_deref().filter(|_| self.has_arguments)
    }

    /// The arguments since the last time.
    pub(super) fn take_arguments(&mut self) -> String {
        if self.is_quoted { String::new() } else { std::mem::take(&mut self.arguments) }
    }

    /// The arguments since the last time, when no more will come.
    pub(super) fn take_rest(&mut self) -> String {
        self.is_quoted = false;
        self.take_arguments()
    }

    /// Reads on; gives how many bytes of `text` belong to the call.
    pub(super) fn feed(&mut self, text: &str) -> (usize, Progress) {
        let mut at = 0;
        while at < text.len() {
            let (used, progress) = self.step(&text[at..]);
            at += used;
            if progress != Progress::More {
                return (at, progress);
            }
        }
        (at, Progress::More)
    }

    /// Reads one thing: white space and a mark, or as much of a string or value as there is.
    fn step(&mut self, text: &str) -> (usize, Progress) {
        match &mut self.state {
            State::Key(reader) | State::Name(reader) => {
                let quote = reader.feed(text);
                self.string.push_str(&text[..quote.unwrap_or(text.len())]);
                match quote {
                    Some(quote) if self.end_string() => (quote + 1, Progress::More),
                    Some(quote) => (quote, Progress::Broken),
                    None => (text.len(), Progress::More),
                }
            }
            State::Inside(member, reader) => {
                let (used, progress) = reader.feed(text);
                if *member == Member::Arguments && used > 0 {
                    self.has_arguments = true;
                    self.arguments.push_str(&text[..used]);
                }
                if progress != Progress::Complete {
                    return (used, progress);
                }
                self.end_arguments();
                self.state = State::Next;
                (used, Progress::More)
            }
            State::Bare(reader) => {
                let (used, progress) = reader.feed(text);
                self.arguments.push_str(&text[..used]);
                (used, progress)
            }
            _ => self.step_over_mark(text),
        }
    }

    fn step_over_mark(&mut self, text: &str) -> (usize, Progress) {
        let space = space_length(text);
        let Some(&byte) = text.as_bytes().get(space) else { return (space, Progress::More) };
        self.state = match (&self.state, byte) {
            (State::Member, b'"') => State::Key(StringReader::default()),
            (State::Member | State::Next, b'}') if self.may_end() => {
                if !self.has_arguments {
                    self.has_arguments = true;
                    self.arguments.push_str("{}");
                }
                return (space + 1, Progress::Complete);
            }
            (State::Next, b',') => State::Member,
            (State::Colon(member), b':') => State::Value(*member),
            (State::Value(Member::Name), b'"') => State::Name(StringReader::default()),
            (&State::Value(member @ (Member::Arguments | Member::Other)), _) => {
                self.is_quoted |= member == Member::Arguments && byte == b'"';
                self.state = State::Inside(member, ValueReader::default());
                return (space, Progress::More);
            }
            _ => return (space, Progress::Broken),
        };
        (space + 1, Progress::More)
    }

    /// Says whether the string is what it should be.
    fn end_string(&mut self) -> bool {
        let string = std::mem::take(&mut self.string);
        if matches!(self.state, State::Key(_)) {
            self.state = State::Colon(match string.as_str() {
                "name" if self.name.is_none() => Member::Name,
                "arguments" | "parameters" if !self.has_arguments => Member::Arguments,
                _ => Member::Other,
            });
            return true;
        }
        self.name =
            serde_json::from_str(&format!("\"{string}\"")).ok().filter(|name: &String| !name.is_empty());
        self.state = State::Next;
        self.name.is_some()
    }

    /// Takes arguments out of the string they may be in.
    fn end_arguments(&mut self) {
        if std::mem::take(&mut self.is_quoted)
            && let Ok(held) = serde_json::from_str::<String>(&self.arguments)
            && held.trim_ascii_start().starts_with('{')
        {
            self.arguments = held;
        }
    }

    /// Whether an object that ends here is a call.
    fn may_end(&self) -> bool {
        self.name.is_some() && (self.has_arguments || !self.needs_arguments)
    }
}
