//! Compilation of one grammar: checks before the library, the library's translation and compiler, a check of the
//! result.

use std::mem;
use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::api::{GrammarInit, ParserLimits, TopLevelGrammar};
use llguidance::earley::{CGrammar, CSymIdx, SlicedBiasComputer, SymbolProps};
use toktrie::InferenceCapabilities;

use crate::lark_tokens::{self, LarkKind, LarkToken};
use crate::matcher::{CompiledGrammar, MatcherBounds};
use crate::memory::MatcherMemory;
use crate::scan::{BracketCounts, Syntax, count_brackets, count_lark_brackets};
use crate::schema::SchemaWork;
use crate::{
    GrammarSpec, GuidanceError, GuidanceLimits, Vocabulary, gbnf, lark, library, schema, terminal_chain,
};

/// Maximum number of intersections of terminals in a Lark grammar. The library's work doubles with each.
const MAX_INTERSECTIONS: usize = 12;
/// Maximum number of terminals in a Lark grammar of which each refers to the next. The library refuses about 500, but
/// its work until then grows with the third power of the number.
const MAX_TERMINAL_CHAIN: usize = 400;

/// Maximum number of bytes of the values of `%regex`, texts of which any part matches. The library takes 8 us and 600
/// bytes of memory for a byte.
const MAX_SUBSTRING_BYTES: usize = 128 << 10;
/// The library numbers symbols with 16 bits.
const NUM_SYMBOLS: usize = 1 << 16;

/// Compiles grammars for one vocabulary.
pub(crate) struct GrammarBuilder {
    vocabulary: Arc<Vocabulary>,
    factory: ParserFactory,
    limits: GuidanceLimits,
    bounds: MatcherBounds,
}

impl GrammarBuilder {
    pub(crate) fn new(vocabulary: Arc<Vocabulary>, limits: GuidanceLimits) -> Result<Self, GuidanceError> {
        let environment = vocabulary.environment();
        let slices = SlicedBiasComputer::general_slices();
        let factory =
            library::call(|| ParserFactory::new(environment, InferenceCapabilities::default(), &slices))
                .and_then(|factory| factory.map_err(|error| library::reason(&error)))
                .map_err(|reason| GuidanceError::Vocabulary { reason })?;
        let bounds = MatcherBounds {
            memory: MatcherMemory::new(limits.matcher_bytes),
            watchdog: Arc::default(),
            step_time: limits.step_time,
            forced_time: limits.forced_time,
        };
        let mut builder = Self { vocabulary, factory, limits, bounds };
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
        let grammar = parser.parser.grammar();
        let symbols = reachable_symbols(grammar);
        if symbols.iter().any(|&symbol| has_capture(&grammar.sym_data(symbol).props)) {
            return Err(GuidanceError::Invalid {
                kind,
                reason: "captures are not supported: remove the attributes capture and stop_capture".into(),
            });
        }
        if !derives_finite_text(grammar, &symbols) {
            return Err(GuidanceError::DeadEnd { kind, reason: "no text that matches is finite".into() });
        }
        let num_symbols = symbols.len();
        CompiledGrammar::new(
            kind,
            Arc::clone(&self.vocabulary),
            parser,
            spec.source_bytes(),
            num_symbols,
            &self.limits,
            self.bounds.clone(),
        )
    }

    /// Checks the spec and writes it in a notation of the library.
    fn write_source(&self, spec: &GrammarSpec) -> Result<TopLevelGrammar, GuidanceError> {
        let kind = spec.kind();
        let (bytes, limit) = (spec.source_bytes(), self.limits.source_bytes);
        check(kind, bytes <= limit, || format!("{bytes} bytes; the limit is {limit}"))?;
        let source = match spec {
            GrammarSpec::JsonObject => {
                return Ok(TopLevelGrammar::from_json_schema(schema::prepare_schema(
                    kind,
                    r#"{"type":"object"}"#,
                    &self.limits,
                    &mut SchemaWork::default(),
                )?));
            }
            GrammarSpec::JsonSchema(source) | GrammarSpec::LenientJsonSchema(source) => {
                self.check_brackets(kind, source, Syntax::Json)?;
                let mut schema =
                    schema::prepare_schema(kind, source, &self.limits, &mut SchemaWork::default())?;
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
                let tokens = self.check_lark(kind, source)?;
                schema::prepare_embedded(kind, source, &tokens, &self.limits)?
            }
            GrammarSpec::Gbnf(source) => {
                let lark = gbnf::translate(kind, source, &self.vocabulary, &self.limits)?;
                self.check_lark(kind, &lark)?;
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

    fn check_brackets(&self, kind: &'static str, source: &str, syntax: Syntax) -> Result<(), GuidanceError> {
        self.check_nesting(kind, &count_brackets(source, syntax))
    }

    fn check_nesting(&self, kind: &'static str, brackets: &BracketCounts) -> Result<(), GuidanceError> {
        let (nesting, limit) = (brackets.nesting, self.limits.nesting);
        check(kind, nesting <= limit, || format!("brackets nested {nesting} deep; the limit is {limit}"))
    }

    /// Divides a Lark grammar into its tokens and checks them.
    fn check_lark(&self, kind: &'static str, source: &str) -> Result<Vec<LarkToken>, GuidanceError> {
        let tokens = lark_tokens::divide(source).map_err(|reason| GuidanceError::Invalid { kind, reason })?;
        let brackets = count_lark_brackets(source, &tokens);
        self.check_nesting(kind, &brackets)?;
        let count = |kind| tokens.iter().filter(|token| token.kind == kind).count();
        let intersections = count(LarkKind::And);
        check(kind, intersections <= MAX_INTERSECTIONS, || {
            format!("{intersections} intersections (&); the limit is {MAX_INTERSECTIONS}")
        })?;
        // A chain of rules recurses through the brackets of each of them.
        let (recursion, limit) = (brackets.opened + count(LarkKind::Colon), self.limits.recursion);
        check(kind, recursion <= limit, || format!("{recursion} rules and brackets; the limit is {limit}"))?;
        let substrings: usize = tokens
            .windows(2)
            .filter(|pair| {
                pair[0].kind == LarkKind::JsonKeyword && &source[pair[0].range.clone()] == "%regex"
            })
            .map(|pair| pair[1].range.len())
            .sum();
        check(kind, substrings <= MAX_SUBSTRING_BYTES, || {
            format!("{substrings} bytes after %regex; the limit is {MAX_SUBSTRING_BYTES}")
        })?;
        let chain = terminal_chain::longest(source, &tokens);
        check(kind, chain <= MAX_TERMINAL_CHAIN, || {
            format!("{chain} terminals that refer to one another; the limit is {MAX_TERMINAL_CHAIN}")
        })?;
        Ok(tokens)
    }
}

fn check(
    kind: &'static str,
    is_within_limit: bool,
    limit: impl FnOnce() -> String,
) -> Result<(), GuidanceError> {
    if is_within_limit { Ok(()) } else { Err(GuidanceError::TooComplex { kind, limit: limit() }) }
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

/// The symbols that the start symbol derives, with itself.
fn reachable_symbols(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut is_reached = vec![false; NUM_SYMBOLS];
    let mut symbols = vec![grammar.start()];
    is_reached[grammar.start().as_index()] = true;
    let mut next = 0;
    while let Some(&symbol) = symbols.get(next) {
        next += 1;
        for &rule in grammar.rules_of(symbol) {
            let parts = grammar.rule_rhs(rule).0.iter();
            symbols.extend(parts.filter(|part| !mem::replace(&mut is_reached[part.as_index()], true)));
        }
    }
    symbols
}

/// Whether the library keeps the texts of a symbol. It keeps them with their name for each completion, without a limit,
/// and no answer has them.
fn has_capture(properties: &SymbolProps) -> bool {
    properties.capture_name.is_some() || properties.stop_capture_name.is_some()
}

/// Whether the start symbol derives a finite text. Symbols that derive one are found from the terminals upwards, until
/// nothing changes.
fn derives_finite_text(grammar: &CGrammar, symbols: &[CSymIdx]) -> bool {
    let mut rules: Vec<(usize, Vec<usize>)> = Vec::new();
    let mut is_finite = vec![false; NUM_SYMBOLS];
    for &symbol in symbols {
        let data = grammar.sym_data(symbol);
        is_finite[symbol.as_index()] = data.is_terminal || data.is_nullable || !data.cond_nullable.is_empty();
        for &rule in grammar.rules_of(symbol) {
            let parts = grammar.rule_rhs(rule).0;
            rules.push((symbol.as_index(), parts.iter().map(CSymIdx::as_index).collect()));
        }
    }
    // Per rule: the number of symbols not yet known to be finite. Per symbol: the rules that contain it.
    let mut missing: Vec<usize> = rules.iter().map(|(_, parts)| parts.len()).collect();
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); NUM_SYMBOLS];
    for (rule, (_, parts)) in rules.iter().enumerate() {
        parts.iter().for_each(|&part| users[part].push(rule));
    }
    let mut found: Vec<usize> = (0..NUM_SYMBOLS).filter(|&symbol| is_finite[symbol]).collect();
    while let Some(symbol) = found.pop() {
        for &rule in &users[symbol] {
            missing[rule] -= 1;
            let left = rules[rule].0;
            if missing[rule] == 0 && !mem::replace(&mut is_finite[left], true) {
                found.push(left);
            }
        }
    }
    is_finite[grammar.start().as_index()]
}
