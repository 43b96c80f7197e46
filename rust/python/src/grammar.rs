//! Structured output: the form that a request asks for, compiled for the model's vocabulary, and its walk on the
//! device's side.
//!
//! The table of what each token says is made for the first request that needs it, on that request's thread; so are
//! grammars, once each. Nobody else waits for either.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use penstock_engine::request::{Grammar as EngineGrammar, GrammarState};
use penstock_frontend::output::OutputFormats;
use penstock_frontend::params::{ModelLimits, ResponseKind, SamplingParams, ToolChoice, Tools};
use penstock_guidance::{
    CompiledGrammar, GrammarCompiler, GrammarMatcher, GrammarSpec, GuidanceError, GuidanceLimits, TokenText,
    ToolCallSpec, Vocabulary,
};
use penstock_text::Tokenizer;
use penstock_text::parsers::ToolLiterals;

use crate::classes::PySamplingParams;
use crate::errors::Error;

/// What a tool call looks like is known of the model, or it is not.
const NO_FORMAT: &str = "left out, or asked of an engine with a tool_parser: this model's chat template does not say \
                         how it writes its calls";

/// The form of the text that `params` ask for, if they ask for one, and the field that says so.
pub fn wanted(
    given: &PySamplingParams,
    formats: Option<OutputFormats>,
) -> Result<Option<(&'static str, GrammarSpec)>, Error> {
    let params = &given.params;
    if let Some(format) = &params.response_format {
        let grammar = match &format.kind {
            ResponseKind::Text => return Ok(None),
            ResponseKind::JsonObject => GrammarSpec::JsonObject,
            ResponseKind::JsonSchema(schema) => GrammarSpec::JsonSchema(schema.0.clone()),
        };
        return Ok(Some(("response_format", grammar)));
    }
    if let Some(regex) = &params.regex {
        return Ok(Some(("regex", GrammarSpec::Regex(regex.clone()))));
    }
    if let Some(texts) = &params.choice {
        return Ok(Some(("choice", GrammarSpec::Choice(texts.clone()))));
    }
    if let Some(source) = &params.grammar {
        return Ok(Some(("grammar", dialect(source)(source.clone()))));
    }
    let Some(tools) = params.tools.as_ref().filter(|_| params.tool_choice != Some(ToolChoice::None)) else {
        return Ok(None);
    };
    let format = formats.and_then(|formats| formats.tools.map(|tools| (tools, formats.reasoning)));
    let (format, reasoning) = format.ok_or_else(|| given.refuse("tools", NO_FORMAT))?;
    if !params.tool_choice.as_ref().is_some_and(ToolChoice::requires_call) {
        return Ok(None);
    }
    let thinking = reasoning.and_then(|(reasoning, is_opened)| match reasoning.markers() {
        [opening, closing] => Some((if is_opened { "" } else { *opening }.to_owned(), (*closing).to_owned())),
        _ => None,
    });
    Ok(Some(("tools", tool_calls(params, tools, format.literals(), thinking))))
}

/// GBNF is told by what it writes between a rule's name and its body; Lark has a colon there.
fn dialect(source: &str) -> fn(String) -> GrammarSpec {
    let is_rule = |line: &str| line.split_once("::=").is_some_and(|(name, _)| is_rule_name(name.trim()));
    if source.lines().any(is_rule) { GrammarSpec::Gbnf } else { GrammarSpec::Lark }
}

fn is_rule_name(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|character| character.is_alphanumeric() || "-_".contains(character))
}

/// At least one call; exactly one where only one may be made, or a certain one is asked for.
fn tool_calls(
    params: &SamplingParams,
    tools: &Tools,
    literals: ToolLiterals,
    thinking: Option<(String, String)>,
) -> GrammarSpec {
    let only = match &params.tool_choice {
        Some(ToolChoice::Function { name, .. }) => Some(name),
        _ => None,
    };
    let functions = tools.functions.iter().filter(|function| only.is_none_or(|name| *name == function.name));
    GrammarSpec::ToolCalls(ToolCallSpec {
        opening: literals.opening.to_owned(),
        call_opening: literals.call_opening.to_owned(),
        name_key: key_of(literals.name_key),
        arguments_key: key_of(literals.arguments_key),
        call_closing: literals.call_closing.strip_prefix('}').unwrap_or(literals.call_closing).to_owned(),
        separator: literals.separator.to_owned(),
        closing: literals.closing.to_owned(),
        tools: functions.map(|function| (function.name.clone(), function.parameters.clone())).collect(),
        parallel: params.parallel_tool_calls && only.is_none(),
        reasoning: thinking,
    })
}

/// What stands in quotes.
fn key_of(literal: &str) -> String {
    literal.split('"').nth(1).unwrap_or_default().to_owned()
}

/// What compiles, once somebody has asked for it.
type Workshop = OnceLock<Result<(GrammarCompiler, Arc<Vocabulary>), GuidanceError>>;

/// The grammars of one engine, until it is closed.
pub struct Grammars(Mutex<Option<Arc<Workshop>>>);

impl Default for Grammars {
    fn default() -> Self {
        Self(Mutex::new(Some(Arc::default())))
    }
}

impl Grammars {
    /// Compiles no more. To drop what is returned ends the threads and frees what was kept, which may take a moment.
    pub fn close(&self) -> Option<Arc<Workshop>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Workshop>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Compiles; long, unless `is_wanted` ends it. None where the engine is closed. `stop_ids` are those of the request.
    pub fn compile(
        &self,
        grammar: &GrammarSpec,
        tokenizer: &Tokenizer,
        target: &ModelLimits<'_>,
        stop_ids: &[u32],
        is_wanted: impl FnMut() -> bool,
    ) -> Option<Result<Arc<dyn EngineGrammar>, GuidanceError>> {
        let workshop = self.lock().clone()?;
        let make = || {
            let vocabulary = Arc::new(vocabulary(tokenizer, target)?);
            Ok((GrammarCompiler::new(Arc::clone(&vocabulary), GuidanceLimits::default())?, vocabulary))
        };
        let made = workshop.get_or_init(make).as_ref().map_err(Clone::clone);
        Some(made.and_then(|(compiler, vocabulary)| {
            let (compiled, vocabulary) =
                (compiler.compile_while(grammar, is_wanted)?, Arc::clone(vocabulary));
            Ok(Arc::new(Form { compiled, vocabulary, stop_ids: stop_ids.into() }) as Arc<dyn EngineGrammar>)
        }))
    }
}

fn vocabulary(tokenizer: &Tokenizer, target: &ModelLimits<'_>) -> Result<Vocabulary, GuidanceError> {
    if !tokenizer.has_token_bytes() {
        let reason = "its tokens are words, and what they say depends on their neighbours".to_owned();
        return Err(GuidanceError::Vocabulary { reason });
    }
    let text = |id| {
        let token = tokenizer.token_bytes(id)?;
        Some(TokenText { bytes: token.bytes.to_vec(), special: token.special })
    };
    let tokens = (0..target.vocabulary_size as u32).map(text).collect();
    let tokenizer = tokenizer.clone();
    // Where a text cannot be encoded, it is split without the tokenizer's help.
    let encode = move |text: &str| tokenizer.encode(text, false).unwrap_or_default();
    Vocabulary::new(tokens, &target.end_ids().collect::<Vec<_>>(), Arc::new(encode))
}

/// The form of one request's answers.
struct Form {
    compiled: Arc<CompiledGrammar>,
    vocabulary: Arc<Vocabulary>,
    /// What may come where the text may end.
    stop_ids: Arc<[u32]>,
}

impl fmt::Debug for Form {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Form").field("stop_ids", &self.stop_ids).finish_non_exhaustive()
    }
}

impl EngineGrammar for Form {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        let matcher = self.compiled.start().map_err(|error| error.to_string())?;
        let (vocabulary, stop_ids) = (Arc::clone(&self.vocabulary), Arc::clone(&self.stop_ids));
        Ok(Box::new(Walk { matcher, vocabulary, stop_ids }))
    }
}

/// One answer on its way.
struct Walk {
    matcher: GrammarMatcher,
    vocabulary: Arc<Vocabulary>,
    stop_ids: Arc<[u32]>,
}

impl GrammarState for Walk {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.matcher.mask(allowed).map_err(|error| error.to_string())?;
        let (word, bit) = (|id: u32| id as usize / 32, |id: u32| 1_u32 << (id % 32));
        if self.vocabulary.end_ids().iter().any(|id| allowed[word(*id)] & bit(*id) != 0) {
            self.stop_ids.iter().for_each(|id| allowed[word(*id)] |= bit(*id));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.matcher.accept(token).map_err(|error| error.to_string())
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) {
        self.matcher.forced_tokens(tokens);
    }

    fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
        let matcher = self.matcher.fork().map_err(|error| error.to_string())?;
        let (vocabulary, stop_ids) = (Arc::clone(&self.vocabulary), Arc::clone(&self.stop_ids));
        Ok(Box::new(Self { matcher, vocabulary, stop_ids }))
    }
}
