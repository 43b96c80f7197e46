//! `Engine`: opening a model, starting requests, tokenising, statistics.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use penstock_checkpoint::{Checkpoint, CheckpointError, SpecialTokens, TokenizerSource, check_lfs_pointer};
use penstock_engine::{Overload, StopCause};
use penstock_frontend::field::{Field, TOKEN_IDS};
use penstock_frontend::params::SamplingParams;
use penstock_frontend::prompt::{Frontend, Grammars, Mode, ModelFormats, Prompt};
use penstock_runner::{LaunchError, Profile};
use penstock_text::{TextError, TextOptions, Tokenizer};
use penstock_types::config_limits::DEFAULT_MAX_LOGPROBS;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyBytes;

use crate::beams::BeamSearch;
use crate::classes::{
    ModelInfo, PyEngineConfig, PyHealth, PyModelInfo, PyProfileRow, PySamplingParams, PyStats,
};
use crate::detach::detach;
use crate::errors::{Error, Problem};
use crate::health::Health;
use crate::load_progress::{LoadProgress, exiting};
use crate::logs;
use crate::port::Port;
use crate::processors;
use crate::request::Request;
use crate::value::{PyValue, prepare_error, request_error};

/// Most token ids that are decoded at once.
const MAX_DECODED: usize = 1 << 26;

/// The files of a model: a path, or an archive of a converted model in memory.
#[derive(FromPyObject)]
pub enum ModelFiles {
    Memory(PyBackedBytes),
    Path(PathBuf),
}

impl ModelFiles {
    fn open(self) -> Result<Checkpoint, CheckpointError> {
        match self {
            Self::Memory(bytes) => Checkpoint::from_bytes(Bytes::from_owner(bytes)),
            Self::Path(path) => Checkpoint::open(path),
        }
    }
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct Engine {
    frontend: Arc<Frontend>,
    info: Arc<ModelInfo>,
    chat_templates: BTreeMap<String, String>,
    special_tokens: SpecialTokens,
    /// With `EngineConfig.profile`.
    profile: Option<Arc<Profile>>,
}

#[pymethods]
impl Engine {
    #[staticmethod]
    #[pyo3(signature = (model, config, progress = None))]
    fn open(
        py: Python<'_>,
        model: ModelFiles,
        config: &PyEngineConfig,
        progress: Option<Py<PyAny>>,
    ) -> Result<Self, Error> {
        Self::load(py, model, config.with_environment()?, config, progress)
    }

    #[pyo3(signature = (prompt, params, port, *, is_chat = false, is_scoring = false, check_cancelled = None))]
    #[allow(clippy::too_many_arguments, reason = "three of them are keywords")]
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
        let mode = mode(is_chat, is_scoring);
        params.params.check_mode(mode).map_err(|error| params.error(error))?;
        let prompt = self.read_prompt(prompt, mode)?;
        let own = params.processors.clone();
        let processors = own.for_engine();
        let started = detach_while_wanted(py, check_cancelled.as_ref(), |is_wanted| {
            let mut prepared = self.frontend.prepare(&params.params, prompt, mode, is_wanted)?;
            let resolved = std::mem::take(&mut prepared.params);
            Ok((prepared.start(processors, &self.frontend.engine, port.inner())?, resolved))
        })?;
        let (state, resolved) = started.map_err(|error| prepare_error(params, error))?;
        let state = Arc::new(state);
        port.register(&state);
        Ok(Request::new(state, PySamplingParams { params: resolved, processors: own }))
    }

    #[pyo3(signature = (prompt, params, *, is_chat = false, check_cancelled = None))]
    fn search_beams(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &PySamplingParams,
        is_chat: bool,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<BeamSearch, Error> {
        let mode = mode(is_chat, false);
        let prompt = self.read_prompt(prompt, mode)?;
        let search = detach_while_wanted(py, check_cancelled.as_ref(), |is_wanted| {
            self.frontend.prepare_beams(&params.params, prompt, mode, is_wanted)
        })?;
        search.map(BeamSearch::new).map_err(|error| prepare_error(params, error))
    }

    #[pyo3(signature = (text, *, add_special_tokens = true))]
    fn encode(
        &self,
        py: Python<'_>,
        text: &Bound<'_, PyAny>,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, Error> {
        let text = Field::new("prompt").text(&PyValue(text.clone())).map_err(request_error)?;
        let encode = |is_wanted: IsWanted<'_>| self.frontend.encode(&text, add_special_tokens, is_wanted);
        Ok(detach_while_wanted(py, None, encode)??)
    }

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true, spaces_between_special_tokens = false))]
    fn decode(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
        spaces_between_special_tokens: bool,
    ) -> Result<String, Error> {
        let token_ids = PyValue(token_ids.clone());
        let token_ids = Field::new("token_ids").token_ids(&token_ids, MAX_DECODED, TOKEN_IDS);
        let token_ids = token_ids.map_err(request_error)?;
        let options =
            TextOptions { skip_special_tokens, spaces_between_special_tokens, ..TextOptions::default() };
        detach(py, || self.frontend.tokenizer.decode(&token_ids, options))
    }

    fn token_bytes<'py>(
        &self,
        py: Python<'py>,
        token_ids: &Bound<'py, PyAny>,
    ) -> Result<Vec<Bound<'py, PyBytes>>, Error> {
        let given = PyValue(token_ids.clone());
        let token_ids = Field::new("token_ids").token_ids(&given, MAX_DECODED, TOKEN_IDS);
        let token_ids = token_ids.map_err(request_error)?;
        let tokenizer = &self.frontend.tokenizer;
        if !tokenizer.has_token_bytes() {
            let limit = "decoded together: this tokenizer joins words with spaces, so a token has no bytes of its own";
            return Err(request_error(Field::new("token_ids").refuse(&given, limit)));
        }
        let bytes = |id| tokenizer.token_bytes(id).map_or(&[][..], |token| token.bytes);
        Ok(token_ids.into_iter().map(|id| PyBytes::new(py, bytes(id))).collect())
    }

    #[getter]
    fn info(&self) -> PyModelInfo {
        PyModelInfo(Arc::clone(&self.info))
    }

    #[getter]
    fn chat_templates(&self) -> &BTreeMap<String, String> {
        &self.chat_templates
    }

    #[getter]
    fn special_tokens(&self) -> Vec<(&'static str, &str)> {
        let SpecialTokens { bos, eos, unk, pad } = &self.special_tokens;
        let named = [("bos_token", bos), ("eos_token", eos), ("unk_token", unk), ("pad_token", pad)];
        named.into_iter().filter_map(|(name, token)| Some((name, token.as_deref()?))).collect()
    }

    fn stats(&self, py: Python<'_>) -> PyResult<PyStats> {
        logs::drain(py)?;
        Ok(PyStats(self.frontend.engine.stats().into()))
    }

    fn health(&self, state: &str) -> Result<PyHealth, Error> {
        match self.frontend.engine.stop_cause() {
            None | Some(StopCause::Closed) => Ok(PyHealth(Health::of(&self.frontend.engine, state).into())),
            Some(cause) => Err(cause.into()),
        }
    }

    fn profile(&self) -> PyResult<Vec<PyProfileRow>> {
        let profile = self.profile.as_ref();
        let profile =
            profile.ok_or_else(|| PyRuntimeError::new_err("profile() requires Engine(profile=True)"))?;
        Ok(profile.rows().into_iter().map(|row| PyProfileRow(row.into())).collect())
    }

    #[getter]
    fn is_running(&self) -> bool {
        self.frontend.engine.is_running()
    }

    #[pyo3(signature = (*, cache_salt = None))]
    fn reset_prefix_cache(&self, py: Python<'_>, cache_salt: Option<Bound<'_, PyAny>>) -> Result<(), Error> {
        let mut params = SamplingParams::default();
        params.set("cache_salt", cache_salt.map(PyValue).as_ref()).map_err(request_error)?;
        if let Some(cause) = self.frontend.engine.stop_cause() {
            return Err(cause.into());
        }
        processors::check_may_wait()?;
        detach(py, || self.frontend.engine.reset_prefix_cache(params.cache_salt.as_deref()))
    }

    #[getter]
    fn is_forked(&self) -> bool {
        !self.frontend.engine.process().is_current()
    }

    fn check_room(&self) -> Result<(), Error> {
        let engine = &self.frontend.engine;
        let Some(overload) = engine.overload() else { return Ok(()) };
        engine.count_rejection();
        Err(Error::Overloaded(match overload {
            Overload::Waiting => format!("max_waiting={} requests wait", engine.limits().max_waiting),
            Overload::Unfinished => {
                format!("max_unfinished={} outputs are unfinished", engine.limits().max_unfinished)
            }
        }))
    }

    fn check_process(&self) -> Result<(), Error> {
        self.frontend.engine.process().check().map_err(Error::from)
    }

    #[staticmethod]
    fn check_may_wait() -> PyResult<()> {
        processors::check_may_wait()
    }

    fn drain(&self, py: Python<'_>) -> Result<(), Error> {
        detach(py, || self.frontend.engine.drain())
    }

    fn stop(&self) {
        self.frontend.close();
    }

    fn ring_at_end(&self, port: &Port) {
        self.frontend.engine.ring_at_end(port.inner());
    }

    fn shutdown(&self, py: Python<'_>) -> Result<(), Error> {
        processors::check_may_wait()?;
        let done = detach(py, || self.frontend.shutdown());
        logs::drain(py)?;
        done
    }
}

impl Engine {
    /// Opens a model. Slow: loads the weights and warms up.
    pub fn load(
        py: Python<'_>,
        model: ModelFiles,
        runner_config: penstock_runner::EngineConfig,
        config: &PyEngineConfig,
        progress: Option<Py<PyAny>>,
    ) -> Result<Self, Error> {
        logs::listen(py)?;
        let mut loading = LoadProgress::new(progress);
        let opened = detach(py, || {
            let checkpoint = model.open()?;
            let mut report = |done, total| loading.report(done, total);
            let mut launch = || penstock_runner::launch(&checkpoint, &runner_config, &mut report);
            let (tokenizer, (engine, info)) = match &config.config.tokenizer {
                Some(path) => (read_tokenizer(Path::new(path))?, launch()?),
                None => {
                    let (source, added) = (checkpoint.tokenizer()?, checkpoint.added_tokens());
                    load_together(|| Tokenizer::with_added_tokens(source, added), launch)?
                }
            };
            let templates = checkpoint.chat_templates();
            let frontend = Frontend {
                formats: ModelFormats::new(
                    config.config.reasoning_parser,
                    config.config.tool_parser,
                    templates.values(),
                ),
                tokenizer,
                grammars: Grammars::default(),
                generation: checkpoint.generation().clone(),
                hidden_size: info.hidden_size,
                max_logprobs: match config.config.max_logprobs.unwrap_or(DEFAULT_MAX_LOGPROBS) {
                    -1 => u32::MAX,
                    most => most as u32,
                },
                engine,
            };
            Ok(Self {
                info: ModelInfo::new(&info, frontend.engine.limits(), &frontend.generation).into(),
                frontend: Arc::new(frontend),
                chat_templates: templates.clone(),
                special_tokens: checkpoint.special_tokens().clone(),
                profile: info.profile,
            })
        })?;
        logs::drain(py)?;
        loading.finish(opened)
    }

    /// Replaces the executor, for tests.
    #[cfg(feature = "testing")]
    pub fn with_executor(
        mut self,
        executor: impl FnOnce(penstock_engine::Completions) -> Box<dyn penstock_engine::Executor> + Send + 'static,
    ) -> Result<Self, Error> {
        let started = penstock_engine::Engine::start(self.frontend.engine.limits().clone(), executor);
        let frontend = Arc::get_mut(&mut self.frontend).expect("nothing is started yet");
        frontend.engine = started.map_err(|error| Error::Defect(error.to_string()))?;
        Ok(self)
    }

    fn read_prompt(&self, prompt: &Bound<'_, PyAny>, mode: Mode) -> Result<Prompt, Error> {
        let max_tokens = self.frontend.max_prompt_tokens(mode);
        Prompt::read(&PyValue(prompt.clone()), max_tokens).map_err(request_error)
    }
}

/// Builds the tokenizer on a separate thread while the model is loaded: for a large vocabulary that takes longer than
/// opening a mapped model.
fn load_together<T>(
    tokenizer: impl FnOnce() -> Result<Tokenizer, TextError> + Send,
    launch: impl FnOnce() -> Result<T, LaunchError>,
) -> Result<(Tokenizer, T), Error> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("penstock tokenizer".to_owned());
        let tokenizer = thread.spawn_scoped(scope, tokenizer);
        let tokenizer = tokenizer.map_err(|error| LaunchError::Start(error.to_string()))?;
        let launched = launch();
        let tokenizer = tokenizer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let launched = launched?;
        Ok((tokenizer?, launched))
    })
}

fn mode(is_chat: bool, is_scoring: bool) -> Mode {
    match (is_chat, is_scoring) {
        (_, true) => Mode::Scoring,
        (true, false) => Mode::Chat,
        (false, false) => Mode::Completion,
    }
}

/// Returns false once the caller has no use for a result.
type IsWanted<'a> = &'a mut (dyn FnMut() -> bool + Send);

/// Runs slow work without the GIL. Raises if a signal arrives or the caller is cancelled, which ends the work.
fn detach_while_wanted<T: Send>(
    py: Python<'_>,
    check_cancelled: Option<&Py<PyAny>>,
    work: impl FnOnce(IsWanted<'_>) -> T + Send,
) -> Result<T, Error> {
    let mut raised = None;
    let mut is_wanted = || {
        if raised.is_none() {
            let checked = Python::try_attach(|py| check_interest(py, check_cancelled));
            raised = checked.unwrap_or_else(|| Err(exiting())).err();
        }
        raised.is_none()
    };
    let done = detach(py, || work(&mut is_wanted))?;
    raised.map_or(Ok(done), |raised| Err(Error::Python(raised)))
}

/// Raises if a signal arrived or the caller was cancelled.
fn check_interest(py: Python<'_>, check_cancelled: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    check_cancelled.map_or(Ok(()), |check| check.call0(py).map(drop))
}

impl Drop for Engine {
    /// The thread that drops an engine is attached to the interpreter, so it must not wait for the engine's threads.
    fn drop(&mut self) {
        self.stop();
        if self.is_forked() {
            std::mem::forget(Arc::clone(&self.frontend)); // it has threads, which are in the parent
        }
    }
}

/// The tokenizer of a `tokenizer.json`, of a directory that contains one, or of a GGUF file.
fn read_tokenizer(path: &Path) -> Result<Tokenizer, Error> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if file.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(Tokenizer::new(Checkpoint::open(&file)?.tokenizer()?)?);
    }
    let bytes = std::fs::read(&file).map_err(|error| {
        let limit = "a tokenizer.json, a directory that contains one, or a GGUF file".to_owned();
        let message = format!("tokenizer={path:?} cannot be read ({error}); it must be {limit}");
        Error::Config(Problem { message, field: "tokenizer".to_owned(), value: None, limit: Some(limit) })
    })?;
    check_lfs_pointer(&file, &bytes)?;
    Ok(Tokenizer::new(&TokenizerSource::Json(bytes))?)
}
