//! Formats and patterns of strings that the library reads more loosely than their specification.

use serde_json::{Map, Value, json};

/// A day of the proleptic Gregorian calendar in the years 1 to 9999 (RFC 3339, section 5.6 and appendix C).
const DATE: &str = concat!(
    "(?:(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-",
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])",
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
);
/// A time with an offset, without leap seconds: their days are not known in advance.
const TIME: &str = concat!(
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?",
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
);
/// The whitespace of ECMA-262, section 22.2.2.9: U+FEFF is in it and U+0085 is not.
const WHITESPACE: &str =
    concat!(r"\t-\r\x20\u{A0}\u{1680}\u{2000}-\u{200A}", r"\u{2028}\u{2029}\u{202F}\u{205F}\u{3000}\u{FEFF}");

/// Replaces formats by patterns that no other text matches.
pub(super) fn tighten_format(keywords: &mut Map<String, Value>) {
    let pattern = match keywords.get("format").and_then(Value::as_str) {
        Some("date") => format!("^{DATE}$"),
        Some("time") => format!("^{TIME}$"),
        Some("date-time") => format!("^{DATE}[tT]{TIME}$"),
        _ => return,
    };
    keywords.remove("format");
    if !keywords.contains_key("pattern") {
        keywords.insert("pattern".into(), pattern.into());
        return;
    }
    match keywords.entry("allOf").or_insert_with(|| json!([])) {
        Value::Array(schemas) => schemas.push(json!({"pattern": pattern})),
        malformed => *malformed = json!({}), // the library rejects it
    }
}

/// Writes the whitespace classes of patterns as ECMA-262 defines them.
pub(super) fn write_whitespace(keywords: &mut Map<String, Value>) {
    if let Some(Value::String(pattern)) = keywords.get_mut("pattern") {
        *pattern = with_whitespace(pattern);
    }
    if let Some(Value::Object(patterns)) = keywords.get_mut("patternProperties") {
        let entries = std::mem::take(patterns).into_iter();
        patterns.extend(entries.map(|(pattern, schema)| (with_whitespace(&pattern), schema)));
    }
}

/// Classes may be nested in the library's dialect.
fn with_whitespace(pattern: &str) -> String {
    let mut written = String::with_capacity(pattern.len());
    let mut characters = pattern.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next() {
                Some('s') => written.extend(["[", WHITESPACE, "]"]),
                Some('S') => written.extend(["[^", WHITESPACE, "]"]),
                escaped => written.extend(['\\'].into_iter().chain(escaped)),
            },
            _ => written.push(character),
        }
    }
    written
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use regex_automata::meta::Regex;

    use super::*;

    fn tightened(format: &str) -> Regex {
        let mut schema = json!({"format": format});
        tighten_format(schema.as_object_mut().unwrap());
        Regex::new(schema["pattern"].as_str().unwrap()).unwrap()
    }

    /// Days of the month by counting, without the rules of the pattern.
    fn is_day(year: u32, month: u32, day: u32) -> bool {
        let leap = year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        let lengths = [31, 28 + u32::from(leap), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
        year > 0
            && day > 0
            && month.checked_sub(1).and_then(|month| lengths.get(month as usize)) >= Some(&day)
    }

    #[test]
    fn dates_are_days_of_the_calendar() {
        let pattern = tightened("date");
        let years = (0..=9).chain(90..=110).chain(390..=410).chain(1896..=2004).chain(9_996..=9_999);
        for year in years {
            for (month, day) in (0..=13).flat_map(|month| (0..=32).map(move |day| (month, day))) {
                let date = format!("{year:04}-{month:02}-{day:02}");
                assert_eq!(pattern.is_match(&date), is_day(year, month, day), "{date}");
            }
        }
    }

    #[test]
    fn times_have_no_leap_seconds() {
        let (time, both) = (tightened("time"), tightened("date-time"));
        for (text, is_valid) in [
            ("23:59:59Z", true),
            ("00:00:00.125+23:59", true),
            ("23:59:60Z", false),
            ("12:00:60+00:00", false),
            ("24:00:00Z", false),
            ("12:00:00", false),
            ("12:00:00+24:00", false),
        ] {
            assert_eq!(time.is_match(text), is_valid, "{text}");
            assert_eq!(both.is_match(&format!("2024-02-29T{text}")), is_valid, "{text}");
            assert!(!both.is_match(&format!("2023-02-29T{text}")), "{text}");
        }
    }

    #[test]
    fn whitespace_is_that_of_ecma_262() {
        let is_space = |character: char| {
            matches!(character, '\t'..='\r' | ' ' | '\u{a0}' | '\u{1680}' | '\u{2000}'..='\u{200a}' | '\u{2028}')
                || matches!(character, '\u{2029}' | '\u{202f}' | '\u{205f}' | '\u{3000}' | '\u{feff}')
        };
        for (pattern, matches_space) in
            [(r"^\s$", true), (r"^\S$", false), (r"^[\s]$", true), (r"^[^\S]$", true)]
        {
            let regex = Regex::new(&with_whitespace(pattern)).unwrap();
            for character in ('\0'..='\u{ffff}').filter(|&character| character != '\n') {
                let text = character.to_string();
                assert_eq!(
                    regex.is_match(&text),
                    is_space(character) == matches_space,
                    "{pattern} {character:?}"
                );
            }
        }
        assert_eq!(with_whitespace(r"a\\s\d\"), r"a\\s\d\");
    }
}
