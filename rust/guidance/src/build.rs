//! From a grammar to what guides are started from: checks, the library's compiler, checks again.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::earley::{CGrammar, CSymIdx, SlicedBiasComputer};
use llguidance::{ParserFactory, TokenParser};
use toktrie::InferenceCapabilities;

use crate::guide::Compiled;
use crate::scan::{Syntax, brackets};
use crate::{Grammar, GuidanceError, Limits, Vocabulary, lark, library, schema};

/// Terminals that a Lark grammar intersects: what the library does with them doubles with each.
const MAX_INTERSECTIONS: usize = 12;

/// Compiles grammars for one vocabulary.
pub(crate) struct Builder {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    limits: Limits,
}

impl Builder {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, limits: Limits) -> Result<Self, GuidanceError> {
        let environment = vocabulary.environment();
        let slices = SlicedBiasComputer::general_slices();
        let factory =
            library::call(|| ParserFactory::new(environment, InferenceCapabilities::default(), &slices))
                .and_then(|factory| factory.map_err(|error| library::reason(&error)))
                .map_err(|reason| GuidanceError::Vocabulary { reason })?;
        let mut builder = Self { vocabulary, factory, limits };
        builder.factory.quiet();
        let limits = &builder.limits;
        *builder.factory.limits_mut() = ParserLimits {
            initial_lexer_fuel: limits.lexer_nodes,
            step_lexer_fuel: limits.mask_nodes,
            step_max_items: limits.mask_items,
            // What one mask may make bounds a row of it too.
            max_items_in_row: limits.mask_items,
            max_lexer_states: limits.lexer_states,
            max_grammar_size: limits.grammar_symbols,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(builder)
    }

    /// Takes as long as it takes, may recurse as deep as [`STACK_BYTES`](crate::compiler::STACK_BYTES) allow, and may
    /// panic in the library.
    pub(crate) fn build(&self, grammar: &Grammar) -> Result<Compiled, GuidanceError> {
        let what = grammar.kind();
        let source = self.translate(grammar)?;
        let parser = self.factory.create_parser(source).map_err(|error| classify(grammar, &error))?;
        let Some(symbols) = finite_symbols(&parser) else {
            return Err(GuidanceError::DeadEnd { what, reason: "no text that follows it ever ends".into() });
        };
        Compiled::new(
            what,
            Arc::clone(&self.vocabulary),
            parser,
            grammar.source_bytes(),
            symbols,
            self.limits.lexer_bytes,
        )
    }

    fn translate(&self, grammar: &Grammar) -> Result<TopLevelGrammar, GuidanceError> {
        let what = grammar.kind();
        check_size(what, grammar.source_bytes(), self.limits.source_bytes)?;
        let source = match grammar {
            Grammar::JsonObject => {
                return Ok(TopLevelGrammar::from_json_schema(schema::prepare(
                    what,
                    r#"{"type":"object"}"#,
                    &self.limits,
                )?));
            }
            Grammar::JsonSchema(source) => {
                self.check_brackets(what, source, Syntax::Json)?;
                return Ok(TopLevelGrammar::from_json_schema(schema::prepare(what, source, &self.limits)?));
            }
            Grammar::Regex(source) => {
                self.check_brackets(what, source, Syntax::Regex)?;
                lark::regex(source)
            }
            Grammar::Choice(texts) => lark::choice(what, texts)?,
            Grammar::Lark(source) => {
                self.check_brackets(what, source, Syntax::Lark)?;
                source.clone()
            }
            Grammar::Gbnf(_) => {
                let reason = "not supported: llguidance does not read GBNF; write the grammar in Lark".into();
                return Err(GuidanceError::Invalid { what, reason });
            }
            Grammar::ToolCalls(calls) => {
                for (_, source) in &calls.tools {
                    self.check_brackets(what, source, Syntax::Json)?;
                }
                lark::tool_calls(what, calls, &self.vocabulary, &self.limits)?
            }
        };
        Ok(TopLevelGrammar::from_lark(source))
    }

    fn check_brackets(&self, what: &'static str, source: &str, syntax: Syntax) -> Result<(), GuidanceError> {
        let brackets = brackets(source, syntax);
        let too_complex = |limit: String| Err(GuidanceError::TooComplex { what, limit });
        if brackets.nesting > self.limits.nesting {
            let limit = self.limits.nesting;
            return too_complex(format!(
                "{} brackets within each other; the limit is {limit}",
                brackets.nesting
            ));
        }
        if syntax == Syntax::Lark {
            // One rule calls the next, at most through all brackets of both.
            if brackets.intersections > MAX_INTERSECTIONS {
                return too_complex(format!(
                    "{} times &; the limit is {MAX_INTERSECTIONS}",
                    brackets.intersections
                ));
            }
            let recursion = brackets.opened + source.bytes().filter(|&byte| byte == b':').count();
            if recursion > self.limits.recursion {
                let limit = self.limits.recursion;
                return too_complex(format!(
                    "rules and brackets add up to {recursion}; the limit is {limit}"
                ));
            }
        }
        Ok(())
    }
}

fn check_size(what: &'static str, bytes: usize, limit: usize) -> Result<(), GuidanceError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(GuidanceError::TooComplex { what, limit: format!("{bytes} bytes; the limit is {limit}") })
}

/// Tells, by what the library says, a grammar that is too large from one that is wrong.
fn classify(grammar: &Grammar, error: &dyn std::fmt::Display) -> GuidanceError {
    const LIMITS: [&str; 7] = [
        "initial lexer configuration (grammar) too big",
        "grammar size (number of symbols) too big",
        "schema too large",
        "Schema intersection stack level exceeded",
        "fuel exhausted",
        "DNF too large, fuel exhausted",
        "lexer precomputation failed",
    ];
    let (what, reason) = (grammar.kind(), library::reason(error));
    let is_too_large = LIMITS.iter().any(|limit| cause(&reason).starts_with(limit));
    let line = library::in_a_line(&reason, matches!(grammar, Grammar::Lark(_)));
    if reason.starts_with("panic: ") {
        GuidanceError::Library { what, reason: line }
    } else if is_too_large {
        GuidanceError::TooComplex { what, limit: line }
    } else {
        GuidanceError::Invalid { what, reason: line }
    }
}

/// A reason without the place that the library puts before it, `at 3(14): ` or `3(14): `. Names that the source chose
/// come after the cause, never at its beginning.
fn cause(reason: &str) -> &str {
    let is_place = |place: &str| place.bytes().all(|byte| byte.is_ascii_digit() || byte == b'(');
    let cause = match reason.split_once("): ") {
        Some((place, cause)) if is_place(place.trim_start_matches("at ")) => cause,
        _ => reason,
    };
    cause.strip_prefix("failed to compile JSON schema: ").unwrap_or(cause)
}

/// The number of symbols that the start symbol leads to; None if no text that follows the grammar ever ends. Which
/// symbols derive one that does is found by going from terminals upwards until nothing changes.
fn finite_symbols(parser: &TokenParser) -> Option<usize> {
    let grammar: &CGrammar = parser.parser.grammar();
    let start = grammar.start().as_index();
    let mut rules: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut seen = vec![false; usize::from(u16::MAX) + 1];
    let mut finite = vec![false; seen.len()];
    let mut pending = vec![grammar.start()];
    seen[start] = true;
    while let Some(symbol) = pending.pop() {
        let data = grammar.sym_data(symbol);
        finite[symbol.as_index()] = data.is_terminal || data.is_nullable || !data.cond_nullable.is_empty();
        for &rule in grammar.rules_of(symbol) {
            let parts = grammar.rule_rhs(rule).0;
            pending.extend(parts.iter().filter(|part| !std::mem::replace(&mut seen[part.as_index()], true)));
            rules.push((symbol.as_index(), parts.iter().map(CSymIdx::as_index).collect()));
        }
    }
    // The symbols of each rule that are not known to be finite yet, and the rules that wait for each symbol.
    let mut missing: Vec<usize> = rules.iter().map(|(_, parts)| parts.len()).collect();
    let mut waiting: Vec<Vec<usize>> = vec![Vec::new(); seen.len()];
    for (rule, (_, parts)) in rules.iter().enumerate() {
        parts.iter().for_each(|&part| waiting[part].push(rule));
    }
    let mut found: Vec<usize> = (0..finite.len()).filter(|&symbol| finite[symbol]).collect();
    while let Some(symbol) = found.pop() {
        for &rule in &waiting[symbol] {
            missing[rule] -= 1;
            let left = rules[rule].0;
            if missing[rule] == 0 && !std::mem::replace(&mut finite[left], true) {
                found.push(left);
            }
        }
    }
    finite[start].then(|| seen.iter().filter(|&&seen| seen).count())
}
