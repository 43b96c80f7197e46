//! Incremental reader of a call whose arguments, a JSON object, follow a header with its name.

use penstock_types::{Header, IdPlace, ToolFormat};

use super::json_reader::{ScanStatus, ValueReader};
use super::markers::{Found, WHITESPACE, find, whitespace_length};
use super::names::{is_name, room};
use super::visits::visit;

/// Reads a call whose arguments, a JSON object, follow a header.
pub(super) struct HeaderReader {
    header: &'static Header,
    /// The text that ends a header: the start of the arguments, or a marker.
    stops: Vec<&'static str>,
    /// The text of the header.
    text: String,
    pub(super) name: Option<String>,
    pub(super) id: Option<String>,
    value: ValueReader,
    arguments: String,
}

impl HeaderReader {
    /// Takes the arguments read since the last call.
    pub(super) fn take_arguments(&mut self) -> String {
        std::mem::take(&mut self.arguments)
    }

    pub(super) fn new(header: &'static Header, format: &ToolFormat) -> Self {
        let markers = format.section.all().chain(format.call.all());
        Self {
            header,
            stops: std::iter::once("{").chain(markers).collect(),
            text: String::new(),
            name: None,
            id: None,
            value: ValueReader::default(),
            arguments: String::new(),
        }
    }

    /// See `CallText::feed`.
    pub(super) fn feed(&mut self, text: &str, is_end: bool) -> (usize, ScanStatus) {
        if self.name.is_some() {
            return self.read_arguments(text);
        }
        let (end, stop) = match find(text, &self.stops, is_end) {
            Found::Marker { start, marker } => (start, Some(marker)),
            Found::Part { start } => (start, None),
            Found::None => (text.len(), None),
        };
        let used = room(self.text.len(), text).min(end).min(self.word_length(&text[..end]));
        visit(used);
        self.text.push_str(&text[..used]);
        match stop {
            _ if used < end => (used, ScanStatus::Invalid),
            None => (end, ScanStatus::Incomplete),
            Some(marker) => match name_in(&self.text, self.header, marker == "{") {
                Some((name, id)) => {
                    (self.name, self.id) = (Some(name), id);
                    if marker == "{" {
                        let (used, status) = self.read_arguments(&text[end..]);
                        return (end + used, status);
                    }
                    self.arguments.push_str("{}");
                    (end, ScanStatus::Complete)
                }
                None => (end, ScanStatus::Invalid),
            },
        }
    }

    /// The length of the part of `text` that continues the header, if it has to be a word.
    fn word_length(&self, text: &str) -> usize {
        if !self.header.is_word {
            return text.len();
        }
        let start = if self.text.trim_matches(WHITESPACE).is_empty() { whitespace_length(text) } else { 0 };
        let word = text[start..].trim_end_matches(WHITESPACE);
        match word.find(WHITESPACE) {
            Some(length) => start + length,
            None if self.text.ends_with(WHITESPACE) && !word.is_empty() && start == 0 => 0,
            None => text.len(),
        }
    }

    fn read_arguments(&mut self, text: &str) -> (usize, ScanStatus) {
        let (used, status) = self.value.feed(text);
        self.arguments.push_str(&text[..used]);
        (used, status)
    }
}

/// The name and the id in a header. Without arguments after it, the header must have its end.
fn name_in(text: &str, header: &Header, has_arguments: bool) -> Option<(String, Option<String>)> {
    let text = text.trim_matches(WHITESPACE);
    let ended = header.end.iter().find_map(|end| text.strip_suffix(end.trim()));
    let text = ended.or((header.end_is_optional && has_arguments).then_some(text))?.trim_matches(WHITESPACE);
    let text = text.strip_prefix(header.prefix).unwrap_or(text).trim_matches(WHITESPACE);
    let (name, id) = match header.id {
        IdPlace::None => (text, None),
        IdPlace::Before(marker) => {
            text.split_once(marker).map_or((text, None), |(id, name)| (name, Some(id)))
        }
        IdPlace::After(marker) => text.split_once(marker).map_or((text, None), |(name, id)| (name, Some(id))),
        IdPlace::Kimi => {
            let name = text.strip_prefix("functions.").unwrap_or(text);
            let numbered =
                name.rsplit_once(':').filter(|(_, number)| number.bytes().all(|byte| byte.is_ascii_digit()));
            (numbered.map_or(name, |(name, _)| name), Some(text))
        }
    };
    let id = id.map(|id| id.trim_matches(WHITESPACE)).filter(|id| !id.is_empty()).map(str::to_owned);
    let name = name.trim_matches(WHITESPACE);
    is_name(name).then(|| (name.to_owned(), id))
}
