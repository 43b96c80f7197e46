//! Conversion of complete literals to JSON: those of Python, and those with bare keys and delimited strings.

/// The deepest nesting of lists and objects.
const MAX_DEPTH: usize = 128;

/// The notation of strings and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Notation {
    /// The text on either side of a string; quotation marks, if there is none.
    pub quote: &'static str,
}

/// Python's literals, among which those of JSON are accepted.
pub(super) const PYTHON: Notation = Notation { quote: "" };

/// The JSON text of a string.
pub(super) fn quoted(text: &str) -> String {
    let mut json = String::with_capacity(text.len() + 2);
    json.push('"');
    escape(text, &mut json);
    json.push('"');
    json
}

/// Appends text as the inside of a JSON string.
pub(super) fn escape(text: &str, json: &mut String) {
    for character in text.chars() {
        match character {
            '"' => json.push_str("\\\""),
            '\\' => json.push_str("\\\\"),
            '\n' => json.push_str("\\n"),
            '\r' => json.push_str("\\r"),
            '\t' => json.push_str("\\t"),
            '\0'..='\u{1f}' => json.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => json.push(character),
        }
    }
}

/// The JSON text of one literal, or `None` if `text` is none.
pub(super) fn to_json(text: &str, notation: Notation) -> Option<String> {
    let mut reader = Reader { rest: text, notation, json: String::new() };
    reader.value(0)?;
    reader.skip_space();
    reader.rest.is_empty().then_some(reader.json)
}

struct Reader<'a> {
    rest: &'a str,
    notation: Notation,
    json: String,
}

impl<'a> Reader<'a> {
    fn value(&mut self, depth: usize) -> Option<()> {
        self.skip_space();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.rest.chars().next()? {
            '{' => self.items('}', depth, true),
            '[' => self.items(']', depth, false),
            '(' => self.items(')', depth, false),
            _ if self.starts_string() => self.string(),
            _ => self.word(),
        }
    }

    /// A list, a tuple, or an object if the items have keys.
    fn items(&mut self, close: char, depth: usize, has_keys: bool) -> Option<()> {
        self.rest = &self.rest[1..];
        self.json.push(if has_keys { '{' } else { '[' });
        let mut is_first = true;
        loop {
            self.skip_space();
            if let Some(rest) = self.rest.strip_prefix(close) {
                self.rest = rest;
                self.json.push(if has_keys { '}' } else { ']' });
                return Some(());
            }
            if !is_first {
                self.json.push(',');
            }
            is_first = false;
            if has_keys {
                self.key()?;
            }
            self.value(depth + 1)?;
            self.skip_space();
            match self.rest.strip_prefix(',') {
                Some(rest) => self.rest = rest,
                None if self.rest.starts_with(close) => {}
                None => return None,
            }
        }
    }

    fn key(&mut self) -> Option<()> {
        if self.starts_string() {
            self.string()?;
        } else {
            let end = self.rest.find([':', ',', '{', '}', '"'])?;
            let key = self.rest[..end].trim();
            if key.is_empty() {
                return None;
            }
            self.json += &quoted(key);
            self.rest = &self.rest[end..];
        }
        self.skip_space();
        self.rest = self.rest.strip_prefix(':')?;
        self.json.push(':');
        Some(())
    }

    fn starts_string(&self) -> bool {
        match self.notation.quote {
            "" => self.rest.starts_with(['"', '\'']),
            quote => self.rest.starts_with(quote) || self.rest.starts_with('"'),
        }
    }

    fn string(&mut self) -> Option<()> {
        let quote = self.notation.quote;
        if !quote.is_empty() && self.rest.starts_with(quote) {
            let (text, rest) = self.rest[quote.len()..].split_once(quote)?;
            self.json += &quoted(text);
            self.rest = rest;
            return Some(());
        }
        let mut text = String::new();
        let mut characters = self.rest.char_indices();
        let (_, mark) = characters.next()?;
        loop {
            match characters.next()? {
                (at, character) if character == mark => {
                    self.json += &quoted(&text);
                    self.rest = &self.rest[at + 1..];
                    return Some(());
                }
                (at, '\\') => {
                    let (character, used) = escaped(&self.rest[at..]);
                    text.extend(character);
                    for _ in 1..used {
                        characters.next();
                    }
                }
                (_, character) => text.push(character),
            }
        }
    }

    /// A number or a word.
    fn word(&mut self) -> Option<()> {
        let end = self.rest.find(|character: char| ",]})".contains(character) || character.is_whitespace());
        let (word, rest) = self.rest.split_at(end.unwrap_or(self.rest.len()));
        self.json += &match word {
            "true" | "True" => "true".to_owned(),
            "false" | "False" => "false".to_owned(),
            "null" | "None" => "null".to_owned(),
            _ => number(word)?,
        };
        self.rest = rest;
        Some(())
    }

    fn skip_space(&mut self) {
        self.rest = self.rest.trim_start();
    }
}

/// The JSON text of a number of JSON or Python.
fn number(word: &str) -> Option<String> {
    let is_json = |word: &str| serde_json::from_str::<serde_json::Number>(word).is_ok();
    let plain = word.strip_prefix('+').unwrap_or(word).replace('_', "");
    let (sign, digits) = plain.strip_prefix('-').map_or(("", &*plain), |digits| ("-", digits));
    let fraction = match (digits.starts_with('.'), digits.ends_with('.')) {
        (true, false) => format!("{sign}0{digits}"),
        (false, true) => format!("{plain}0"),
        _ => plain.clone(),
    };
    Some(fraction).filter(|text| is_json(text))
}

/// The text of an escape sequence, and the number of its characters.
fn escaped(text: &str) -> (Vec<char>, usize) {
    let mut characters = text.chars().skip(1);
    let hex = |digits: usize, from: &str| {
        let text = from.get(2..2 + digits).filter(|text| text.bytes().all(|byte| byte.is_ascii_hexdigit()));
        text.and_then(|text| u32::from_str_radix(text, 16).ok())
    };
    match characters.next() {
        Some('n') => (vec!['\n'], 2),
        Some('t') => (vec!['\t'], 2),
        Some('r') => (vec!['\r'], 2),
        Some('b') => (vec!['\u{8}'], 2),
        Some('f') => (vec!['\u{c}'], 2),
        Some('0') => (vec!['\0'], 2),
        Some('\n') => (vec![], 2),
        Some(character @ ('\\' | '"' | '\'' | '/')) => (vec![character], 2),
        Some('x') if hex(2, text).is_some() => {
            (hex(2, text).and_then(char::from_u32).into_iter().collect(), 4)
        }
        Some('u') if hex(4, text).is_some() => {
            let code = hex(4, text).unwrap_or_default();
            let low = text.get(6..).filter(|rest| rest.starts_with("\\u")).and_then(|rest| hex(4, rest));
            match (code, low) {
                (0xd800..=0xdbff, Some(low @ 0xdc00..=0xdfff)) => {
                    let code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                    (vec![char::from_u32(code).unwrap_or('\u{fffd}')], 12)
                }
                _ => (vec![char::from_u32(code).unwrap_or('\u{fffd}')], 6),
            }
        }
        Some('U') if hex(8, text).is_some() => {
            (vec![hex(8, text).and_then(char::from_u32).unwrap_or('\u{fffd}')], 10)
        }
        _ => (vec!['\\'], 1),
    }
}
