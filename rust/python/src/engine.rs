//! `Engine`: opening a model, starting requests, tokenising, statistics.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_checkpoint::{Checkpoint, GenerationConfig, SpecialTokens, TokenizerSource};
use penstock_engine::request::{Request as EngineRequest, StopCause};
use penstock_frontend::output::{OutputFormats, OutputOptions, RequestState};
use penstock_frontend::params::{ModelLimits, ResolvedParams, SamplingParams, choice_request};
use penstock_guidance::GuidanceError;
use penstock_runner::Profile;
use penstock_text::{TextOptions, Tokenizer};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::bad_words;
use crate::beams::Beams;
use crate::classes::PySamplingParams;
use crate::config::EngineConfig;
use crate::detach::detach;
use crate::errors::{Error, Problem};
use crate::fields::{Field, TOKEN_IDS};
use crate::formats::ModelFormats;
use crate::grammar::{self, Grammars};
use crate::logs;
use crate::port::Port;
use crate::processors;
use crate::request::Request;
use crate::results::{ModelInfo, ProfileRow, Stats};

/// What a prompt may be; messages are text by the time they are here.
const PROMPT: &str = "text, a sequence of token ids (integers from 0) or a sequence of messages";
/// Most token ids that are decoded at once.
const MAX_DECODED: usize = 1 << 26;
/// The progress callback is called at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct Engine {
    engine: penstock_engine::Engine,
    model: Model,
}

/// What is known of the model besides its weights.
struct Model {
    info: ModelInfo,
    hidden_size: usize,
    tokenizer: Tokenizer,
    formats: ModelFormats,
    grammars: Grammars,
    generation: GenerationConfig,
    chat_templates: BTreeMap<String, String>,
    special_tokens: SpecialTokens,
    /// With `EngineConfig.profile`.
    profile: Option<Arc<Profile>>,
}

#[pymethods]
impl Engine {
    #[staticmethod]
    #[pyo3(signature = (path, config, progress = None))]
    fn open(
        py: Python<'_>,
        path: PathBuf,
        config: &EngineConfig,
        progress: Option<Py<PyAny>>,
    ) -> Result<Self, Error> {
        Self::load(py, path, config.with_environment()?, config, progress)
    }

    #[pyo3(signature = (prompt, params, port, *, is_chat = false, is_scoring = false, check_cancelled = None))]
    #[allow(clippy::too_many_arguments, reason = "three of them keywords")]
    fn start_request(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &PySamplingParams,
        port: &Port,
        is_chat: bool,
        is_scoring: bool,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<Request, Error> {
        processors::check_may_wait()?;
        check_single(params)?;
        if !is_chat && params.params.tools.is_some() {
            return Err(params.refuse("tools", "left out when the prompt is not a chat"));
        }
        let (text, prompt) = self.read_prompt(py, prompt, is_chat, usize::from(!is_scoring))?;
        let asked = if is_scoring { &params.with_params(params.params.for_scoring()) } else { params };
        let (params, resolved) = self.resolve(asked, prompt.len())?;
        let prompt: Arc<[u32]> = prompt.into();
        let output = self.output_options(py, &params.params, text, &prompt, is_chat)?;
        let request = resolved.request(prompt);
        let mut first = self.with_constraints(py, &params, output.formats, request, check_cancelled)?;
        let processors = params.processors.owned(py);
        first.processors = processors.for_engine();
        let requests =
            (0..resolved.num_choices).map(|index| Arc::new(choice_request(&first, index))).collect();
        let state =
            Arc::new(detach(py, || RequestState::start(&self.engine, requests, output, &port.inner))??);
        port.register(&state);
        Ok(Request::new(state, params, processors))
    }

    #[pyo3(signature = (prompt, params, *, is_chat = false))]
    fn prepare_beams(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &PySamplingParams,
        is_chat: bool,
    ) -> Result<Beams, Error> {
        let (_text, prompt) = self.read_prompt(py, prompt, is_chat, 1)?;
        let (params, _) = self.resolve(params, prompt.len())?;
        let (step_params, step) =
            self.resolve(&params.with_params(params.params.for_beams()), prompt.len())?;
        let prompt: Arc<[u32]> = prompt.into();
        let output = self.output_options(py, &params.params, None, &prompt, false)?;
        let mut first = self.with_constraints(py, &step_params, None, step.request(prompt), None)?;
        // Enough tokens that `num_beams` continuations remain when the others end.
        let num_likeliest = params.params.top_logprobs.unwrap_or(0).max(2 * params.params.num_beams as u32);
        first.outputs.logprobs = Some(num_likeliest.min(self.model_limits().vocabulary_size as u32));
        Ok(Beams::new(self.engine.clone(), output, params, step_params, first))
    }

    #[pyo3(signature = (text, *, add_special_tokens = true))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, Error> {
        let field = Field::request("prompt");
        let text = field.text(text)?;
        detach(py, || self.model.tokenizer.encode(&text, add_special_tokens))?.map_err(|error| {
            let limit = Some("text that the tokenizer can encode".to_owned());
            Error::Request(Problem {
                message: error.to_string(),
                field: "prompt".to_owned(),
                value: None,
                limit,
            })
        })
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true, spaces_between_special_tokens = false))]
    fn decode(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> Result<String, Error> {
        let token_ids = Field::request("token_ids").token_ids(token_ids, MAX_DECODED, TOKEN_IDS)?;
        let options =
            TextOptions { skip_special_tokens, spaces_between_special_tokens, ..TextOptions::default() };
        detach(py, || self.model.tokenizer.decode(&token_ids, options))
    }

    #[getter]
    fn info(&self) -> ModelInfo {
        self.model.info.clone()
    }

    #[getter]
    fn chat_templates(&self) -> &BTreeMap<String, String> {
        &self.model.chat_templates
    }

    #[getter]
    fn special_tokens(&self) -> Vec<(&'static str, &str)> {
        let SpecialTokens { bos, eos, unk, pad } = &self.model.special_tokens;
        let named = [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)];
        named.into_iter().filter_map(|(name, token)| Some((name, token.as_deref()?))).collect()
    }

    #[getter]
    fn eos_token_ids(&self) -> Vec<u32> {
        self.model_limits().end_ids().collect()
    }

    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        logs::drain(py)?;
        Ok(self.engine.stats().into())
    }

    fn profile(&self) -> PyResult<Vec<ProfileRow>> {
        let profile = self.model.profile.as_ref();
        let profile =
            profile.ok_or_else(|| PyRuntimeError::new_err("profile() requires Engine(profile=True)"))?;
        Ok(profile.rows().into_iter().map(ProfileRow::from).collect())
    }

    #[getter]
    fn is_running(&self) -> bool {
        self.engine.is_running()
    }

    fn reset_prefix_cache(&self, py: Python<'_>) -> Result<(), Error> {
        if let Some(cause) = self.engine.stop_cause() {
            return Err(Error::Stopped(cause));
        }
        processors::check_may_wait()?;
        detach(py, || self.engine.reset_prefix_cache())
    }

    #[staticmethod]
    fn check_may_wait() -> PyResult<()> {
        processors::check_may_wait()
    }

    /// The engine's shutdown may wait for a place in a full mailbox, and then waits for a step: another thread does it.
    fn stop(&self) {
        let grammars = self.model.grammars.close();
        if self.engine.is_running() {
            let engine = self.engine.clone();
            let stopping = std::thread::Builder::new().spawn(move || {
                engine.shutdown();
                drop(grammars);
            });
            if stopping.is_err() {
                self.engine.shutdown(); // better late than never
            }
        }
    }

    fn shutdown(&self, py: Python<'_>) -> Result<(), Error> {
        processors::check_may_wait()?;
        let done = detach(py, || self.engine.shutdown());
        logs::drain(py)?;
        done
    }
}

impl Engine {
    /// Opens a model; long.
    pub fn load(
        py: Python<'_>,
        path: PathBuf,
        runner_config: penstock_runner::EngineConfig,
        config: &EngineConfig,
        progress: Option<Py<PyAny>>,
    ) -> Result<Self, Error> {
        logs::listen(py)?;
        let mut watcher = LoadProgress { progress, called: None, raised: None };
        let opened = detach(py, || {
            let checkpoint = Checkpoint::open(&path)?;
            let tokenizer = match &config.tokenizer {
                Some(path) => read_tokenizer(Path::new(path))?,
                None => Tokenizer::with_added_tokens(checkpoint.tokenizer()?, checkpoint.added_tokens())?,
            };
            let mut report = |done, total| watcher.report(done, total);
            let (engine, info) = penstock_runner::launch(&checkpoint, &runner_config, &mut report)?;
            let model = Model {
                hidden_size: info.hidden_size,
                info: ModelInfo::of(&info, engine.limits()),
                formats: ModelFormats::new(config, checkpoint.chat_templates().values()),
                tokenizer,
                grammars: Grammars::default(),
                generation: checkpoint.generation().clone(),
                chat_templates: checkpoint.chat_templates().clone(),
                special_tokens: checkpoint.special_tokens().clone(),
                profile: info.profile,
            };
            Ok(Self { engine, model })
        })?;
        match watcher.raised {
            Some(raised) => Err(Error::Python(raised)),
            None => opened,
        }
    }

    /// Replaces the executor, for tests.
    #[cfg(feature = "testing")]
    pub fn with_executor(
        mut self,
        executor: impl FnOnce(penstock_engine::Completions) -> Box<dyn penstock_engine::Executor> + Send + 'static,
    ) -> Result<Self, Error> {
        let started = penstock_engine::Engine::start(self.engine.limits().clone(), executor);
        self.engine = started.map_err(|error| Error::Defect(error.to_string()))?;
        Ok(self)
    }

    /// The text of a prompt, if it is one, and its tokens; ids leave room for `room` more.
    fn read_prompt(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        is_chat: bool,
        room: usize,
    ) -> Result<(Option<String>, Vec<u32>), Error> {
        let field = Field::request("prompt");
        if prompt.is_instance_of::<PyString>() {
            // Chat templates write special tokens themselves.
            return Ok((Some(field.text(prompt)?), self.encode(py, prompt, !is_chat)?));
        }
        Ok((None, field.token_ids(prompt, self.engine.limits().max_model_len - room, PROMPT)?))
    }

    fn output_options(
        &self,
        py: Python<'_>,
        params: &SamplingParams,
        text: Option<String>,
        prompt: &[u32],
        is_chat: bool,
    ) -> Result<OutputOptions, Error> {
        let tokenizer = self.model.tokenizer.clone();
        let options = TextOptions {
            skip_special_tokens: params.skip_special_tokens,
            spaces_between_special_tokens: params.spaces_between_special_tokens,
            include_stop_str_in_output: params.include_stop_str_in_output,
        };
        let formats = if is_chat { self.model.formats.of(params, text.as_deref()) } else { None };
        let echo = match text {
            _ if !params.echo => None,
            Some(text) => Some(text),
            None => Some(detach(py, || tokenizer.decode(prompt, options))?),
        };
        let (stops, sequences) = (params.stop.clone(), params.stop_token_sequences.clone());
        Ok(OutputOptions { tokenizer, options, stops, sequences, echo, formats })
    }

    /// `request` with what words and forms of `params` mean for this model's vocabulary; a form may take seconds, in
    /// which signals and what `check_cancelled` raises end it.
    fn with_constraints(
        &self,
        py: Python<'_>,
        given: &PySamplingParams,
        formats: Option<OutputFormats>,
        mut request: EngineRequest,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<EngineRequest, Error> {
        let params = &given.params;
        let tokenizer = &self.model.tokenizer;
        if !params.bad_words.is_empty() {
            let limit = |error| format!("strings that the tokenizer can encode ({error})");
            let spellings = detach(py, || bad_words::spellings(&params.bad_words, tokenizer))?;
            let spellings = spellings.map_err(|error| given.refuse("bad_words", limit(error)))?;
            let limit = || format!("at most {} tokens in all", bad_words::MAX_IDS);
            request.sampling.bad_words = spellings.ok_or_else(|| given.refuse("bad_words", limit()))?;
        }
        if let Some((field, form)) = grammar::wanted(given, formats)? {
            let (target, stop_ids) = (self.model_limits(), &request.stop_token_ids);
            let mut raised = None;
            let is_wanted = || {
                raised = Python::attach(|py| check_interest(py, check_cancelled.as_ref())).err();
                raised.is_none()
            };
            let compile = || self.model.grammars.compile(&form, tokenizer, &target, stop_ids, is_wanted);
            let compiled = detach(py, compile)?.ok_or(Error::Stopped(StopCause::Closed))?;
            if let Some(raised) = raised {
                return Err(Error::Python(raised));
            }
            request.grammar = Some(compiled.map_err(|error| match error {
                GuidanceError::Overloaded { .. } => Error::Overloaded(error.to_string()),
                _ => given.refuse(field, format!("a form that texts of this model can be given ({error})")),
            })?);
        }
        Ok(request)
    }

    /// The parameters with every default filled in, and their values for the engine.
    fn resolve(
        &self,
        params: &PySamplingParams,
        num_prompt: usize,
    ) -> Result<(PySamplingParams, ResolvedParams), Error> {
        let resolved = params.params.resolve(&self.model_limits(), num_prompt, draw_seed());
        let resolved = resolved.map_err(|error| params.error(error))?;
        Ok((params.with_params(params.params.filled(&resolved)), resolved))
    }

    fn model_limits(&self) -> ModelLimits<'_> {
        let limits = self.engine.limits();
        ModelLimits {
            generation: &self.model.generation,
            max_model_len: limits.max_model_len,
            vocabulary_size: limits.vocabulary_size,
            hidden_size: self.model.hidden_size,
        }
    }
}

/// Whether somebody still waits; raises where nobody does.
fn check_interest(py: Python<'_>, check_cancelled: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    check_cancelled.map_or(Ok(()), |check| check.call0(py).map(drop))
}

/// A request that is one of several, of which only some are wanted in the end, is not one to be read as it comes.
fn check_single(params: &PySamplingParams) -> Result<(), Error> {
    let field = if params.params.num_beams > 1 {
        "num_beams"
    } else if params.params.best_of.is_some() {
        "best_of"
    } else {
        return Ok(());
    };
    Err(params.refuse(field, "left out, or asked of generate: what is best is known only when all is there"))
}

impl Drop for Engine {
    /// Whoever drops an open engine holds the interpreter, and must not wait for its threads.
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reports the progress of loading to Python at intervals, and checks for signals.
struct LoadProgress {
    progress: Option<Py<PyAny>>,
    called: Option<Instant>,
    raised: Option<PyErr>,
}

impl LoadProgress {
    fn report(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        let now = Instant::now();
        let is_early = self.called.is_some_and(|called| now - called < PROGRESS_INTERVAL);
        if is_early && done < total {
            return ControlFlow::Continue(());
        }
        self.called = Some(now);
        let called = Python::attach(|py| {
            py.check_signals()?;
            self.progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (done, total)).map(drop))
        });
        match called {
            Ok(()) => ControlFlow::Continue(()),
            Err(raised) => {
                self.raised = Some(raised);
                ControlFlow::Break(())
            }
        }
    }
}

/// The tokenizer of a `tokenizer.json`, of a directory that holds one, or of a GGUF file.
fn read_tokenizer(path: &Path) -> Result<Tokenizer, Error> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if file.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(Tokenizer::new(Checkpoint::open(&file)?.tokenizer()?)?);
    }
    let bytes = std::fs::read(&file).map_err(|error| {
        let limit = "a tokenizer.json, a directory that holds one, or a GGUF file".to_owned();
        let message = format!("tokenizer={path:?} cannot be read ({error}); it must be {limit}");
        Error::Config(Problem { message, field: "tokenizer".to_owned(), value: None, limit: Some(limit) })
    })?;
    Ok(Tokenizer::new(&TokenizerSource::Json(bytes))?)
}

/// A seed nobody chose. The standard library keys its hashers at random and never twice alike; 53 bits survive JSON.
fn draw_seed() -> u64 {
    RandomState::new().build_hasher().finish() >> 11
}
