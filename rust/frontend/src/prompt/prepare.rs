//! `Frontend`: prepares and starts the requests of one model.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;
use std::time::Instant;

use penstock_engine::request::{LogitsProcessor, Request, StopCause};
use penstock_engine::{ClientId, Engine, Port, StartError};
use penstock_guidance::{Caller, GuidanceError};
use penstock_text::{TextError, TextOptions, Tokenizer};
use penstock_types::{FieldError, GenerationConfig};

use super::bad_words;
use super::formats::ModelFormats;
use super::grammar_spec::requested_grammar;
use super::grammars::Grammars;
use crate::Error;
use crate::adapters::{AdapterNotFound, Adapters};
use crate::field::{Field, Read};
use crate::output::{Echo, OutputFormats, OutputOptions, RequestState};
use crate::params::{ModelLimits, ResolvedParams, SamplingParams};
use crate::selection::{BeamSearch, BeamStep};
use crate::value::{Kind, Value};

/// The types of a prompt, in words. Messages are rendered to text before.
const PROMPT: &str = "text, a sequence of token ids (integers from 0) or a sequence of messages";

/// The remedy for a schema that is not supported, in each field that has one.
const LENIENT_SCHEMA: &str = r#"to ignore what is not supported, pass {"type": "json_schema", "json_schema": {"schema": ..., "ignore_unsupported": true}}"#;
const LENIENT_TOOLS: &str = r#"to ignore what is not supported, add "ignore_unsupported": true beside the "parameters" of the function"#;

/// Multiple of `max_model_len` up to which the tokens of a prompt are counted: a client that reads the number in the
/// error shortens the prompt by the difference.
const COUNTED_LENGTHS: usize = 2;

/// A prompt as the caller passes it.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

/// The use of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The model continues the prompt.
    Completion,
    /// The prompt is a rendered chat: it contains its special tokens, and the output is parsed.
    Chat,
    /// The prompt is scored, and nothing is generated.
    Scoring,
}

/// One engine, and the properties of its model that requests depend on.
pub struct Frontend {
    pub engine: Engine,
    pub tokenizer: Tokenizer,
    pub formats: ModelFormats,
    pub grammars: Grammars,
    pub generation: GenerationConfig,
    pub adapters: Adapters,
    pub hidden_size: usize,
    /// See [`ModelLimits::max_logprobs`].
    pub max_logprobs: u32,
}

/// A request that is ready to start.
pub struct PreparedRequest {
    /// The parameters with every default filled in.
    pub params: SamplingParams,
    request: Request,
    num_choices: usize,
    output: OutputOptions,
}

impl Prompt {
    /// Reads text, or at most `max_tokens` token ids.
    pub fn read<V: Value>(value: &V, max_tokens: usize) -> Read<Self, V> {
        let field = Field::new("prompt");
        match value.kind() {
            Kind::Text => field.text(value).map(Prompt::Text),
            _ => field.token_ids(value, max_tokens, PROMPT).map(Prompt::Tokens),
        }
    }
}

impl Frontend {
    /// The properties of the model that parameters depend on.
    pub fn limits(&self) -> ModelLimits<'_> {
        let limits = self.engine.limits();
        ModelLimits {
            generation: &self.generation,
            max_model_len: limits.max_model_len,
            vocabulary_size: limits.vocabulary_size,
            hidden_size: self.hidden_size,
            max_logprobs: self.max_logprobs,
            max_output_bytes: self.engine.limits().max_output_bytes,
        }
    }

    /// The most token ids of a prompt. Generation needs room for a token.
    pub fn max_prompt_tokens(&self, mode: Mode) -> usize {
        self.engine.limits().max_model_len - usize::from(mode != Mode::Scoring)
    }

    /// Prepares a request: tokenises the prompt, resolves the parameters, compiles the grammar. This can take seconds;
    /// it ends early with an error when the caller no longer wants it.
    pub fn prepare(
        &self,
        params: &SamplingParams,
        prompt: Prompt,
        mode: Mode,
        caller: &mut dyn Caller,
    ) -> Result<PreparedRequest, Error> {
        self.engine.process().check().map_err(StartError::Stopped)?;
        self.check_adapter(params)?;
        let (text, prompt) = self.tokenise(prompt, mode, &mut || caller.is_wanted())?;
        let (params, resolved) = match mode {
            Mode::Scoring => self.resolve(&params.for_scoring(), prompt.len())?,
            Mode::Completion | Mode::Chat => self.resolve(params, prompt.len())?,
        };
        let output = self.output_options(&params, text, &prompt, mode);
        let request = Request { client: client(caller), ..resolved.request(prompt.into()) };
        let request = self.constrain(&params, output.formats.as_ref(), request, caller)?;
        Ok(PreparedRequest { params, request, num_choices: resolved.num_choices, output })
    }

    /// Prepares a beam search; nothing is started yet.
    pub fn prepare_beams(
        &self,
        params: &SamplingParams,
        prompt: Prompt,
        mode: Mode,
        caller: &mut dyn Caller,
    ) -> Result<BeamSearch, Error> {
        self.engine.process().check().map_err(StartError::Stopped)?;
        self.check_adapter(params)?;
        let (_text, prompt) = self.tokenise(prompt, mode, &mut || caller.is_wanted())?;
        let prompt: Arc<[u32]> = prompt.into();
        let (params, resolved) = self.resolve(params, prompt.len())?;
        let (step_params, step) = self.resolve(&params.for_beams(), prompt.len())?;
        let output = self.output_options(&params, None, &prompt, Mode::Completion);
        let request = Request { client: client(caller), ..step.request(Arc::clone(&prompt)) };
        let mut request = self.constrain(&step_params, None, request, caller)?;
        // Enough tokens that `num_beams` continuations remain when the others end.
        let num_likeliest = params.top_logprobs.unwrap_or(0).max(2 * params.num_beams as u32);
        request.outputs.logprobs = Some(num_likeliest.min(self.limits().vocabulary_size as u32));
        let hold = match &params.adapter {
            None => self.engine.hold(None),
            Some(name) => {
                self.adapters.start(name, |id| Ok::<_, AdapterNotFound>(self.engine.hold(Some(id))))?
            }
        };
        request.adapter = hold.adapter();
        let step = BeamStep { params: step_params, request, hold: Some(hold) };
        let whole = Request { client: step.request.client, ..resolved.request(prompt) };
        BeamSearch::new(self.engine.clone(), params, whole, step, output)
    }

    /// Checks that there is an adapter with the name in the parameters, before the prompt is read.
    fn check_adapter(&self, params: &SamplingParams) -> Result<(), AdapterNotFound> {
        params.adapter.as_ref().map_or(Ok(()), |name| self.adapters.get(name).map(drop))
    }

    /// The text of a prompt, if it is given as text, and its token ids.
    fn tokenise(
        &self,
        prompt: Prompt,
        mode: Mode,
        is_wanted: &mut dyn FnMut() -> bool,
    ) -> Result<(Option<String>, Vec<u32>), Error> {
        match prompt {
            Prompt::Text(text) => {
                let max_model_len = self.engine.limits().max_model_len;
                let (bytes, limit) =
                    (text.len(), max_model_len.saturating_mul(self.tokenizer.max_token_bytes()));
                if bytes > limit {
                    return Err(Error::TextTooLong { bytes, limit, max_model_len });
                }
                let counted = max_model_len.saturating_mul(COUNTED_LENGTHS);
                // Chat templates write special tokens themselves.
                let ids = self.tokenizer.encode_while(&text, mode != Mode::Chat, counted, is_wanted);
                let ids = ids.map_err(|error| match error {
                    TextError::TooManyTokens { max_tokens: counted } => {
                        let limit = self.max_prompt_tokens(mode);
                        Error::TooManyTokens { counted, limit, max_model_len }
                    }
                    error => Error::Prompt(error),
                })?;
                Ok((Some(text), ids))
            }
            Prompt::Tokens(ids) => Ok((None, ids)),
        }
    }

    /// The parameters with every default filled in, and their values for the engine.
    fn resolve(
        &self,
        params: &SamplingParams,
        num_prompt: usize,
    ) -> Result<(SamplingParams, ResolvedParams), FieldError> {
        let resolved = params.resolve(&self.limits(), num_prompt, random_seed())?;
        Ok((params.filled(&resolved), resolved))
    }

    fn output_options(
        &self,
        params: &SamplingParams,
        text: Option<String>,
        prompt: &[u32],
        mode: Mode,
    ) -> OutputOptions {
        let options = text_options(params);
        let is_chat = mode == Mode::Chat;
        OutputOptions {
            formats: if is_chat { self.formats.of_chat(params, text.as_deref()) } else { None },
            echo: params.echo.then(|| text.map_or_else(|| Echo::Tokens(prompt.to_vec()), Echo::Text)),
            tokenizer: self.tokenizer.clone(),
            options,
            stops: params.stop.clone(),
            adapter: params.adapter.clone(),
            sequences: params.stop_token_sequences.clone(),
        }
    }

    /// Adds the constraints that depend on the vocabulary: bad words and the grammar.
    fn constrain(
        &self,
        params: &SamplingParams,
        formats: Option<&OutputFormats>,
        mut request: Request,
        caller: &mut dyn Caller,
    ) -> Result<Request, Error> {
        if !params.bad_words.is_empty() {
            let refuse = |limit: String| params.refuse("bad_words", limit);
            let sequences = bad_words::tokenisations(&params.bad_words, &self.tokenizer)
                .map_err(|error| refuse(format!("strings that the tokenizer can encode ({error})")))?;
            let limit = || format!("at most {} tokens in all", bad_words::MAX_IDS);
            request.sampling.bad_token_sequences.extend(sequences.ok_or_else(|| refuse(limit()))?);
        }
        if request.sampling.bad_token_sequences.iter().map(Vec::len).sum::<usize>() > bad_words::MAX_IDS {
            let limit = format!("at most {} ids in all, with those of bad_words", bad_words::MAX_IDS);
            return Err(params.refuse("bad_token_sequences", limit).into());
        }
        if let Some((field, grammar)) = requested_grammar(params, formats)? {
            let stop_ids = &request.stop_token_ids;
            let compiled = self.grammars.compile(&grammar, &self.tokenizer, &self.limits(), stop_ids, caller);
            let compiled = compiled.ok_or(StartError::Stopped(StopCause::Closed))?;
            request.grammar = Some(compiled.map_err(|error| match error {
                GuidanceError::Overloaded { .. } => Error::Overloaded(error.to_string()),
                GuidanceError::Unsupported { reason, .. } => {
                    let remedy = if field == "tools" { LENIENT_TOOLS } else { LENIENT_SCHEMA };
                    Error::UnsupportedSchema { field, reason, remedy }
                }
                _ => params.refuse(field, format!("a grammar for this model's vocabulary ({error})")).into(),
            })?);
        }
        Ok(request)
    }

    /// Tells the engine and the grammar compiler to stop, and does not wait for their threads. Without effect in the
    /// child of a fork.
    pub fn close(&self) {
        if self.engine.process().is_current() {
            self.engine.close();
            self.grammars.close();
        }
    }

    /// Closes the engine, and waits until its threads have ended.
    pub fn shutdown(&self) {
        self.close();
        self.engine.shutdown();
    }
}

fn client(caller: &dyn Caller) -> Option<ClientId> {
    caller.client().map(ClientId)
}

impl SamplingParams {
    /// Checks that a single request with these parameters can be started in `mode`.
    pub fn check_mode(&self, mode: Mode) -> Result<(), FieldError> {
        let generate_only =
            "left out, or passed to generate(): its outputs are selected after all have finished";
        if self.num_beams > 1 {
            return Err(self.refuse("num_beams", generate_only));
        }
        if self.best_of.is_some() {
            return Err(self.refuse("best_of", generate_only));
        }
        if mode != Mode::Chat && self.tools.is_some() {
            return Err(self.refuse("tools", "left out when the prompt is not a chat"));
        }
        Ok(())
    }
}

impl PreparedRequest {
    /// Sets the time by which the request must end, or the engine rejects it.
    pub fn set_deadline(&mut self, deadline: Option<Instant>) {
        self.request.deadline = deadline;
    }

    /// Starts the request with these logits processors. `port` is notified of their events.
    pub fn start(
        self,
        processors: Vec<Arc<dyn LogitsProcessor>>,
        frontend: &Frontend,
        port: &Port,
    ) -> Result<RequestState, Error> {
        let Self { request, num_choices, output, .. } = self;
        let name = output.adapter.clone();
        let start = |adapter| {
            let request = Request { adapter, processors, ..request };
            RequestState::start(&frontend.engine, Arc::new(request), num_choices, output, port)
        };
        match name {
            None => start(None),
            Some(name) => frontend.adapters.start(&name, |id| start(Some(id))),
        }
    }
}

fn text_options(params: &SamplingParams) -> TextOptions {
    TextOptions {
        skip_special_tokens: params.skip_special_tokens,
        spaces_between_special_tokens: params.spaces_between_special_tokens,
        include_stop_str_in_output: params.include_stop_str_in_output,
    }
}

/// A random seed. The standard library keys every hasher at random; 53 bits survive JSON.
fn random_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}
