//! Reads a grammar's source once, before any recursive parser does, and counts what it may recurse over.

/// Brackets of a source.
#[derive(Default)]
pub(crate) struct Brackets {
    /// The most within each other.
    pub(crate) nesting: usize,
    /// Those that open.
    pub(crate) opened: usize,
    /// Times that Lark's sign for an intersection stands outside of strings and regular expressions.
    pub(crate) intersections: usize,
}

/// The language a source is in, as far as brackets are concerned.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Syntax {
    /// Brackets in strings do not count.
    Json,
    /// Escaped brackets and those in a character class do not count.
    Regex,
    /// Like JSON, with comments, and with regular expressions between slashes whose brackets do count.
    Lark,
}

/// Counts them, in one pass and with no memory of its own.
pub(crate) fn brackets(source: &str, syntax: Syntax) -> Brackets {
    let mut counted = Brackets::default();
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
                // A bracket that comes first is a member of the class.
                bytes.next_if_eq(&b'^');
                bytes.next_if_eq(&b']');
            }
            b'/' if lark && bytes.peek() == Some(&b'/') => skip_to(&mut bytes, b'\n'),
            b'/' if lark => within_regex = true,
            b'#' if lark && !within_regex => skip_to(&mut bytes, b'\n'),
            // The name of a special token may hold any of the marks looked for here.
            b'<' if lark && !within_regex => skip_to(&mut bytes, b'>'),
            b'"' if !within_regex => skip_string(&mut bytes),
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

fn skip_to(bytes: &mut impl Iterator<Item = u8>, end: u8) {
    bytes.find(|&byte| byte == end);
}

fn skip_string(bytes: &mut impl Iterator<Item = u8>) {
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
        let counted = brackets(source, syntax);
        assert_eq!((counted.nesting, counted.opened), (nesting, opened), "{source}");
    }

    #[test]
    fn brackets_in_strings_and_comments_do_not_count() {
        check(r#"{"a": ["(((", "\"[["]}"#, Syntax::Json, 2, 2);
        check("start: (\"((\" | \"[\") # ((((\n// ((((\na: [b]", Syntax::Lark, 1, 2);
    }

    #[test]
    fn brackets_of_a_regex_count_unless_escaped_or_in_a_class() {
        check(r"(a(b)\(\()[(((]{2}", Syntax::Regex, 2, 3);
        check("[](]([^](](x))", Syntax::Regex, 2, 2);
        check(r#"start: /\/((a")/ ("b")"#, Syntax::Lark, 2, 3);
        check("start: /[(/ ((b))", Syntax::Lark, 2, 2);
    }

    #[test]
    fn the_name_of_a_special_token_hides_nothing() {
        check(r#"start: <"> ((<//> (<#> "(""#, Syntax::Lark, 3, 3);
    }

    #[test]
    fn intersections_count_where_lark_sees_them() {
        assert_eq!(brackets("start: A & /b&c/ & \"&\" # &\n", Syntax::Lark).intersections, 2);
    }

    #[test]
    fn what_never_closes_is_counted_and_what_never_opened_is_not() {
        check(&"[".repeat(100_000), Syntax::Json, 100_000, 100_000);
        check("}}}{", Syntax::Json, 1, 1);
    }
}
