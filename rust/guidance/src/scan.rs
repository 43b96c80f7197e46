//! One linear pass over a grammar's source that measures its brackets, before any recursive parser reads it.

/// Bracket counts of a source.
#[derive(Default)]
pub(crate) struct BracketCounts {
    /// Maximum nesting depth.
    pub(crate) nesting: usize,
    /// Number of opening brackets.
    pub(crate) opened: usize,
    /// Number of Lark's intersection operators (`&`) outside strings and regular expressions.
    pub(crate) intersections: usize,
    /// The offsets after Lark's keyword `%json` outside strings and regular expressions.
    pub(crate) schemas: Vec<usize>,
}

/// The syntax of a source, as far as brackets are concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syntax {
    /// Brackets in strings are ignored.
    Json,
    /// Escaped brackets and brackets in character classes are ignored.
    Regex,
    /// Like JSON, plus comments, plus regular expressions between slashes, whose brackets are counted.
    Lark,
}

/// Keyword of a JSON schema in a Lark grammar.
const SCHEMA: &str = "%json";

/// Counts the brackets of a source in one pass.
pub(crate) fn count_brackets(source: &str, syntax: Syntax) -> BracketCounts {
    let mut counted = BracketCounts::default();
    let mut open: usize = 0;
    let mut bytes = source.bytes().peekable();
    let lark = syntax == Syntax::Lark;
    let mut within_regex = syntax == Syntax::Regex;
    let mut within_class = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'/' if lark && within_regex => (within_regex, within_class) = (false, false),
            b']' if within_regex => within_class = false,
            _ if within_class => {}
            b'[' if within_regex => {
                within_class = true;
                // A leading closing bracket is a member of the class.
                bytes.next_if_eq(&b'^');
                bytes.next_if_eq(&b']');
            }
            b'/' if lark && bytes.peek() == Some(&b'/') => skip_to(&mut bytes, b'\n'),
            b'/' if lark => within_regex = true,
            b'#' if lark && !within_regex => skip_to(&mut bytes, b'\n'),
            // The name of a special token may contain any of these characters.
            b'<' if lark && !within_regex => skip_to(&mut bytes, b'>'),
            b'"' if !within_regex => skip_string(&mut bytes),
            b'%' if lark && !within_regex => {
                let offset = source.len() - bytes.len() - 1;
                let is_schema = source[offset..].starts_with(SCHEMA);
                counted.schemas.extend(is_schema.then_some(offset + SCHEMA.len()));
            }
            b'&' if !within_regex => counted.intersections += 1,
            b'(' | b'[' | b'{' => {
                open += 1;
                counted.opened += 1;
                counted.nesting = counted.nesting.max(open);
            }
            b')' | b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    counted
}

pub(crate) fn skip_to(bytes: &mut impl Iterator<Item = u8>, end: u8) {
    bytes.find(|&byte| byte == end);
}

pub(crate) fn skip_string(bytes: &mut impl Iterator<Item = u8>) {
    while let Some(byte) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            b'"' => return,
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(source: &str, syntax: Syntax, nesting: usize, opened: usize) {
        let counted = count_brackets(source, syntax);
        assert_eq!((counted.nesting, counted.opened), (nesting, opened), "{source}");
    }

    #[test]
    fn brackets_in_strings_and_comments_are_ignored() {
        check(r#"{"a": ["(((", "\"[["]}"#, Syntax::Json, 2, 2);
        check("start: (\"((\" | \"[\") # ((((\n// ((((\na: [b]", Syntax::Lark, 1, 2);
    }

    #[test]
    fn regex_brackets_count_unless_escaped_or_in_a_class() {
        check(r"(a(b)\(\()[(((]{2}", Syntax::Regex, 2, 3);
        check("[](]([^](](x))", Syntax::Regex, 2, 2);
        check(r#"start: /\/((a")/ ("b")"#, Syntax::Lark, 2, 3);
        check("start: /[(/ ((b))", Syntax::Lark, 2, 2);
    }

    #[test]
    fn special_token_name_does_not_hide_later_brackets() {
        check(r#"start: <"> ((<//> (<#> "(""#, Syntax::Lark, 3, 3);
    }

    #[test]
    fn intersections_in_strings_regexes_and_comments_are_ignored() {
        assert_eq!(count_brackets("start: A & /b&c/ & \"&\" # &\n", Syntax::Lark).intersections, 2);
    }

    #[test]
    fn schemas_in_strings_regexes_and_comments_are_ignored() {
        let source = "start: %json {\"a\": \"%json\"} \"%json\" /%json/ <%json> # %json\na: %json true";
        let schemas = count_brackets(source, Syntax::Lark).schemas;
        assert_eq!(schemas.iter().map(|&at| &source[at..at + 3]).collect::<Vec<_>>(), [" {\"", " tr"]);
    }

    #[test]
    fn unclosed_brackets_count_and_unopened_ones_do_not() {
        check(&"[".repeat(100_000), Syntax::Json, 100_000, 100_000);
        check("}}}{", Syntax::Json, 1, 1);
    }
}
