//! Compilation of one grammar: checks before the library, the library's translation and compiler, a check of the
//! result.

use std::sync::Arc;

use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::{CGrammar, CSymIdx, SlicedBiasComputer};
use llguidance::{ParserFactory, TokenParser};
use toktrie::InferenceCapabilities;

use crate::matcher::CompiledGrammar;
use crate::scan::{BracketCounts, Syntax, count_brackets};
use crate::{
    GrammarSpec, GuidanceError, GuidanceLimits, Vocabulary, gbnf, lark, library, schema, terminal_chain,
};

/// Maximum number of intersections of terminals in a Lark grammar. The library's work doubles with each.
const MAX_INTERSECTIONS: usize = 12;
/// Maximum number of terminals in a Lark grammar of which each refers to the next. The library refuses about 500, but
/// its work until then grows with the third power of the number.
const MAX_TERMINAL_CHAIN: usize = 400;

/// Compiles grammars for one vocabulary.
pub(crate) struct GrammarBuilder {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    limits: GuidanceLimits,
}

impl GrammarBuilder {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, limits: GuidanceLimits) -> Result<Self, GuidanceError> {
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
            max_items_in_row: limits.row_items,
            max_lexer_states: limits.lexer_states,
            max_grammar_size: limits.grammar_symbols,
            verbose_errors: false,
            ..ParserLimits::default()
        };
        Ok(builder)
    }

    /// Compiles a grammar. The time is not limited; recursion stays within the stack of a worker thread; a bug of the
    /// library panics.
    pub(crate) fn build(&self, spec: &GrammarSpec) -> Result<CompiledGrammar, GuidanceError> {
        let kind = spec.kind();
        let source = GrammarInit::Serialized(self.write_source(spec)?);
        let environment = self.vocabulary.environment().clone();
        let (grammar, lexer) = source
            .to_internal(Some(environment), self.factory.limits().clone())
            .map_err(|error| translation_error(spec, &error))?;
        let parser = self
            .factory
            .create_parser_from_init_default(GrammarInit::Internal(grammar, lexer))
            .map_err(|error| compilation_error(kind, &error))?;
        let Some(symbols) = count_symbols_if_finite(&parser) else {
            return Err(GuidanceError::DeadEnd { kind, reason: "no text that matches is finite".into() });
        };
        CompiledGrammar::new(
            kind,
            Arc::clone(&self.vocabulary),
            parser,
            spec.source_bytes(),
            symbols,
            &self.limits,
        )
    }

    /// Checks the spec and writes it in a notation of the library.
    fn write_source(&self, spec: &GrammarSpec) -> Result<TopLevelGrammar, GuidanceError> {
        let kind = spec.kind();
        check_size(kind, spec.source_bytes(), self.limits.source_bytes)?;
        let source = match spec {
            GrammarSpec::JsonObject => {
                return Ok(TopLevelGrammar::from_json_schema(schema::prepare_schema(
                    kind,
                    r#"{"type":"object"}"#,
                    &self.limits,
                )?));
            }
            GrammarSpec::JsonSchema(source) | GrammarSpec::LenientJsonSchema(source) => {
                self.check_brackets(kind, source, Syntax::Json)?;
                let mut schema = schema::prepare_schema(kind, source, &self.limits)?;
                if matches!(spec, GrammarSpec::LenientJsonSchema(_)) {
                    schema::ignore_unsupported(&mut schema);
                }
                return Ok(TopLevelGrammar::from_json_schema(schema));
            }
            GrammarSpec::Regex(source) => {
                self.check_brackets(kind, source, Syntax::Regex)?;
                lark::regex(source)
            }
            GrammarSpec::Choice(texts) => lark::choice(kind, texts)?,
            GrammarSpec::Lark(source) => {
                let schemas = self.check_brackets(kind, source, Syntax::Lark)?.schemas;
                schema::prepare_embedded(kind, source, &schemas, &self.limits)?
            }
            GrammarSpec::Gbnf(source) => {
                self.check_brackets(kind, source, Syntax::Gbnf)?;
                let lark = gbnf::translate(kind, source, &self.vocabulary)?;
                self.check_brackets(kind, &lark, Syntax::Lark)?;
                lark
            }
            GrammarSpec::ToolCalls(calls) => {
                for tool in &calls.tools {
                    self.check_brackets(kind, &tool.schema, Syntax::Json)?;
                }
                lark::tool_calls(kind, calls, &self.vocabulary, &self.limits)?
            }
        };
        Ok(TopLevelGrammar::from_lark(source))
    }

    fn check_brackets(
        &self,
        kind: &'static str,
        source: &str,
        syntax: Syntax,
    ) -> Result<BracketCounts, GuidanceError> {
        let brackets = count_brackets(source, syntax);
        let too_complex = |limit: String| Err(GuidanceError::TooComplex { kind, limit });
        if brackets.nesting > self.limits.nesting {
            let limit = self.limits.nesting;
            return too_complex(format!("brackets nested {} deep; the limit is {limit}", brackets.nesting));
        }
        if matches!(syntax, Syntax::Lark | Syntax::Gbnf) {
            // A chain of rules recurses through the brackets of each of them.
            if brackets.intersections > MAX_INTERSECTIONS {
                return too_complex(format!(
                    "{} intersections (&); the limit is {MAX_INTERSECTIONS}",
                    brackets.intersections
                ));
            }
            let definition = if syntax == Syntax::Gbnf { "::=" } else { ":" };
            let recursion = brackets.opened + source.matches(definition).count();
            if recursion > self.limits.recursion {
                let limit = self.limits.recursion;
                return too_complex(format!("{recursion} rules and brackets; the limit is {limit}"));
            }
            // GBNF has no terminals; those of its translation are checked.
            let chain = if syntax == Syntax::Lark { terminal_chain::longest(source) } else { 0 };
            if chain > MAX_TERMINAL_CHAIN {
                return too_complex(format!(
                    "{chain} terminals that refer to one another; the limit is {MAX_TERMINAL_CHAIN}"
                ));
            }
        }
        Ok(brackets)
    }
}

fn check_size(kind: &'static str, bytes: usize, limit: usize) -> Result<(), GuidanceError> {
    if bytes <= limit {
        return Ok(());
    }
    Err(GuidanceError::TooComplex { kind, limit: format!("{bytes} bytes; the limit is {limit}") })
}

/// The error of a source that the library cannot translate: too large or invalid.
fn translation_error(spec: &GrammarSpec, error: &dyn std::fmt::Display) -> GuidanceError {
    let (kind, reason) = (spec.kind(), library::reason(error));
    let line = library::one_line(&reason, matches!(spec, GrammarSpec::Lark(_)));
    if library::is_limit(&reason) {
        GuidanceError::TooComplex { kind, limit: line }
    } else if matches!(spec, GrammarSpec::JsonSchema(_) | GrammarSpec::ToolCalls(_))
        && library::is_unsupported(&reason)
    {
        GuidanceError::Unsupported { kind, reason: library::without_context(&line).to_owned() }
    } else {
        GuidanceError::Invalid { kind, reason: line }
    }
}

/// The error of a translated grammar that the library cannot compile. A translated grammar is valid, so the library's
/// only errors here are limits; it also returns its own panics as errors.
fn compilation_error(kind: &'static str, error: &dyn std::fmt::Display) -> GuidanceError {
    let reason = library::reason(error);
    let line = library::one_line(&reason, false);
    if library::is_panic(&reason) {
        GuidanceError::Library { kind, reason: line }
    } else {
        GuidanceError::TooComplex { kind, limit: line }
    }
}

/// The number of symbols reachable from the start symbol, or `None` if the start symbol derives no finite text. Symbols
/// that derive a finite text are found from the terminals upwards, until nothing changes.
fn count_symbols_if_finite(parser: &TokenParser) -> Option<usize> {
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
    // Per rule: the number of symbols not yet known to be finite. Per symbol: the rules that contain it.
    let mut missing: Vec<usize> = rules.iter().map(|(_, parts)| parts.len()).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); seen.len()];
    for (rule, (_, parts)) in rules.iter().enumerate() {
        parts.iter().for_each(|&part| users[part].push(rule));
    }
    let mut found: Vec<usize> = (0..finite.len()).filter(|&symbol| finite[symbol]).collect();
    while let Some(symbol) = found.pop() {
        for &rule in &users[symbol] {
            missing[rule] -= 1;
            let left = rules[rule].0;
            if missing[rule] == 0 && !std::mem::replace(&mut finite[left], true) {
                found.push(left);
            }
        }
    }
    finite[start].then(|| seen.iter().filter(|&&seen| seen).count())
}
