//! Limits on the size of a file's regular expressions and added tokens, which are checked before one is compiled.
//!
//! A short expression can stand for much: `\w{100}` compiles to 1.8 MB, and the backtracking engine compiles each
//! look-around and each alternative beside one to an automaton of its own, with a cache that grows. So the
//! expressions of a file have a limit on their bytes, on their parts and on their compiled size, each in sum. The
//! compiled size is measured on an automaton of the whole expression, in which look-arounds are groups: it has the
//! states of all automata that the engines compile.

use fancy_regex::{Expr, escape};
use regex_automata::nfa::thompson::{Compiler, Config};
use serde::Deserialize;
use serde_json::Value;

/// Maximum length of all expressions in bytes.
const MAX_BYTES: usize = 16 << 10;
/// Maximum number of parts: groups, classes, repetitions, look-arounds, alternations and references.
const MAX_PARTS: usize = 512;
/// Maximum size of the compiled expressions in bytes. Published files have less than a fifth.
const MAX_COMPILED: usize = 2 << 20;

/// Maximum length of all added tokens of a file in bytes. The library's automata take 75 bytes for each.
const MAX_ADDED_BYTES: usize = 4 << 20;

/// Checks the length of all added tokens of a file.
pub(crate) fn check_added_bytes(bytes: usize) -> Result<(), String> {
    if bytes > MAX_ADDED_BYTES {
        return Err(format!("{bytes} bytes in all; the limit is {MAX_ADDED_BYTES}"));
    }
    Ok(())
}

/// The fields of a `tokenizer.json` that can have expressions.
#[derive(Deserialize)]
struct Fields {
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<Added>,
}

/// An added token.
#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
}

/// Checks the expressions of a `tokenizer.json`, and the size of its added tokens, of which the library makes automata.
pub(crate) fn check(file: &[u8]) -> Result<(), serde_json::Error> {
    let Fields { normalizer, pre_tokenizer, decoder, added_tokens } = serde_json::from_slice(file)?;
    check_added_bytes(added_tokens.iter().map(|token| token.content.len()).sum())
        .map_err(|problem| serde::de::Error::custom(format_args!("added_tokens: {problem}")))?;
    let mut sizes = Sizes::default();
    for (field, value) in [("normalizer", normalizer), ("pre_tokenizer", pre_tokenizer), ("decoder", decoder)]
    {
        let added = sizes.add_all(&value);
        added.map_err(|problem| serde::de::Error::custom(format_args!("{field}: {problem}")))?;
    }
    Ok(())
}

/// The sizes of the expressions so far.
#[derive(Default)]
struct Sizes {
    bytes: usize,
    parts: usize,
    compiled: usize,
}

impl Sizes {
    /// Adds the patterns of a step and of the steps in it. The library compiles a text as an expression, too.
    fn add_all(&mut self, step: &Value) -> Result<(), String> {
        match step {
            Value::Array(steps) => steps.iter().try_for_each(|step| self.add_all(step)),
            Value::Object(fields) => {
                let pattern = fields.get("pattern");
                let text = |kind: &str| pattern.and_then(|pattern| pattern.get(kind)).and_then(Value::as_str);
                if let Some(expression) = text("Regex") {
                    self.add(expression)?;
                }
                if let Some(text) = text("String") {
                    self.add(&escape(text))?;
                }
                fields.values().try_for_each(|step| self.add_all(step))
            }
            _ => Ok(()),
        }
    }

    fn add(&mut self, expression: &str) -> Result<(), String> {
        self.bytes += expression.len();
        if self.bytes > MAX_BYTES {
            return Err(format!("expressions of {} bytes; the limit for a file is {MAX_BYTES}", self.bytes));
        }
        let tree = Expr::parse_tree(expression).map_err(|error| error.to_string())?;
        let regular = self.count_parts(tree.expr);
        if self.parts > MAX_PARTS {
            return Err(format!("expressions of {} parts; the limit for a file is {MAX_PARTS}", self.parts));
        }
        let mut all = String::new();
        regular.to_str(&mut all, 0);
        let config = Config::new().nfa_size_limit(Some(MAX_COMPILED.saturating_sub(self.compiled)));
        let automaton =
            Compiler::new().configure(config).build(&all).map_err(|error| match error.size_limit() {
                None => format!("expression {expression:?}: {error}"),
                Some(_) => {
                    format!("expressions of more than {MAX_COMPILED} bytes if compiled, the limit for a file")
                }
            })?;
        self.compiled += automaton.memory_usage();
        Ok(())
    }

    /// Counts the parts of an expression. Returns it with groups in place of look-arounds, and characters in place of
    /// assertions and references, so that it is regular and each repetition counts.
    fn count_parts(&mut self, expression: Expr) -> Expr {
        if !matches!(expression, Expr::Empty | Expr::Concat(_) | Expr::Literal { casei: false, .. }) {
            self.parts += 1;
        }
        let mut each =
            |children: Vec<Expr>| children.into_iter().map(|child| self.count_parts(child)).collect();
        match expression {
            Expr::Any { .. } | Expr::Literal { .. } | Expr::Delegate { .. } => expression,
            Expr::Concat(children) => Expr::Concat(each(children)),
            Expr::Alt(children) => Expr::Alt(each(children)),
            Expr::Group(child) => Expr::Group(Box::new(self.count_parts(*child))),
            Expr::LookAround(child, _) | Expr::AtomicGroup(child) => self.count_parts(*child),
            Expr::Repeat { child, lo, hi, greedy } => {
                Expr::Repeat { child: Box::new(self.count_parts(*child)), lo, hi, greedy }
            }
            Expr::Conditional { condition, true_branch, false_branch } => {
                Expr::Concat(each(vec![*condition, *true_branch, *false_branch]))
            }
            _ => Expr::Literal { val: "a".to_owned(), casei: false },
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::tokenizer_config::CONFIGS;

    /// The longest expressions of published files: of Kimi-K2, which is that of o200k without Han, of Jais-2, and of
    /// DeepSeek-V3.
    const KIMI: &str = concat!(
        r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?",
        r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    );
    const JAIS: &str = concat!(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+",
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)",
        r"|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}"
    );
    const DEEPSEEK: [&str; 3] = [
        r"\p{N}{1,3}",
        "[\u{4e00}-\u{9fa5}\u{3040}-\u{309f}\u{30a0}-\u{30ff}]+",
        concat!(
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
    ];

    fn sizes(expressions: &[&str]) -> Result<Sizes, String> {
        let mut sizes = Sizes::default();
        let steps = expressions.iter().map(|expression| json!({"pattern": {"Regex": expression}})).collect();
        sizes.add_all(&json!({"pretokenizers": Value::Array(steps)})).map(|()| sizes)
    }

    #[test]
    fn published_expressions_are_far_below_the_limits() {
        let configs = CONFIGS.iter().map(|config| vec![config.expression]);
        for expressions in configs.chain([vec![KIMI], vec![JAIS], DEEPSEEK.to_vec()]) {
            let Sizes { bytes, parts, compiled } = sizes(&expressions).unwrap();
            assert!(
                5 * bytes < MAX_BYTES && 5 * parts < MAX_PARTS && 5 * compiled < MAX_COMPILED,
                "{bytes} bytes, {parts} parts, {compiled} bytes compiled: {expressions:?}"
            );
        }
    }

    #[test]
    fn expressions_at_a_limit_are_accepted() {
        let class = |bytes: usize| format!("[{}]", "a".repeat(bytes - 2));
        assert_eq!(sizes(&[&class(MAX_BYTES - 10), &class(10)]).unwrap().bytes, MAX_BYTES);
        let error = sizes(&[&class(MAX_BYTES - 10), &class(11)]).err();
        assert_eq!(error.as_deref(), Some("expressions of 16385 bytes; the limit for a file is 16384"));
        // A look-ahead, a repetition and a class.
        let parts = |count: usize| "(?=[ab]*)".repeat(count / 3) + &".".repeat(count % 3);
        assert_eq!(sizes(&[&parts(MAX_PARTS - 5), &parts(5)]).unwrap().parts, MAX_PARTS);
        let error = sizes(&[&parts(MAX_PARTS - 5), &parts(6)]).err();
        assert_eq!(error.as_deref(), Some("expressions of 513 parts; the limit for a file is 512"));
    }

    #[test]
    fn all_engines_automata_count_as_compiled() {
        let compiled = |expression: &str| sizes(&[expression]).unwrap().compiled;
        let plain = compiled(r"\w{20}");
        for expression in [
            r"(?=\w{20})a",
            r"(?!\w{20})a",
            r"(?<=\w{1,20})a",
            r"(?<!a\w{1,20})a",
            r"(?>\w{20})",
            r"\w{20}+",
            r"(?:\b\w){20}",
            r"(a)?(?(1)\w{20}|b)",
            r"\w{20}|\s+(?!\S)|\s+",
        ] {
            assert!(compiled(expression) >= plain, "{expression}");
        }
        // The backtracking engine takes a step for each repetition of an assertion.
        assert!(sizes(&[r"(?:(?:\b{1000}){1000}){1000}"]).is_err());
    }
}
