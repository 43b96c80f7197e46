//! `Engine`: opening a model, starting requests, statistics.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_checkpoint::{TextFiles, TokenizerSource, check_lfs_pointer};
use penstock_engine::{ClientId, Overload, StopCause};
use penstock_frontend::adapters::Adapters;
use penstock_frontend::params::SamplingParams;
use penstock_frontend::prompt::{Frontend, Grammars, Mode, ModelFormats, Prompt};
use penstock_runner::{AdapterLoader, LaunchError, Profile};
use penstock_text::{TextError, Tokenizer as TextTokenizer};
use penstock_types::KvEvents as KvEventOptions;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::adapters::{AdapterInfo, AdapterSource, check_name};
use crate::beams::BeamSearch;
use crate::classes::{
    ModelInfo, PyAdapterInfo, PyEngineConfig, PyHealth, PyModelInfo, PyProfileRow, PySamplingParams, PyStats,
};
use crate::detach::{detach, detach_for, detach_while_wanted, join, spawn_deep};
use crate::errors::{Error, Problem};
use crate::health::Health;
use crate::host::Host;
use crate::kv_events::KvEvents;
use crate::load_progress::LoadProgress;
use crate::logs;
use crate::model_files::ModelFiles;
use crate::port::Port;
use crate::processors;
use crate::request::Request;
use crate::tokenizer::Tokenizer;
use crate::value::{PyValue, request_error};

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct Engine {
    frontend: Arc<Frontend>,
    info: Arc<ModelInfo>,
    tokenizer: Tokenizer,
    /// With `EngineConfig.profile`.
    profile: Option<Arc<Profile>>,
    /// With `EngineConfig.max_adapters`.
    adapters: Option<AdapterLoader>,
    kv_events: KvEventOptions,
}

#[pymethods]
impl Engine {
    #[staticmethod]
    #[pyo3(signature = (model, config, host, progress = None, cuda_folders = Vec::new(), chat_template = None))]
    fn open(
        py: Python<'_>,
        model: ModelFiles,
        config: &PyEngineConfig,
        host: &Host,
        progress: Option<Py<PyAny>>,
        cuda_folders: Vec<PathBuf>,
        chat_template: Option<String>,
    ) -> Result<Self, Error> {
        Self::load(py, model, config.with_environment(cuda_folders)?, config, host, progress, chat_template)
    }

    #[pyo3(signature = (
        prompt, params, port, *, is_chat = false, is_scoring = false, client = None, time_left = None,
        check_cancelled = None
    ))]
    #[allow(clippy::too_many_arguments, reason = "five of them are keywords")]
    fn start_request(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &PySamplingParams,
        port: &Port,
        is_chat: bool,
        is_scoring: bool,
        client: Option<u64>,
        time_left: Option<f64>,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<Request, Error> {
        processors::check_may_wait()?;
        let deadline = deadline(time_left);
        let mode = mode(is_chat, is_scoring);
        params.params.check_mode(mode).map_err(|error| params.error(error))?;
        let prompt = self.read_prompt(prompt, mode)?;
        let own = params.processors.clone();
        let processors = own.for_engine();
        let started = detach_for(py, check_cancelled.as_ref(), client, |caller| {
            let mut prepared = self.frontend.prepare(&params.params, prompt, mode, caller)?;
            prepared.set_deadline(deadline);
            let resolved = std::mem::take(&mut prepared.params);
            Ok((prepared.start(processors, &self.frontend, port.inner())?, resolved))
        })?;
        let (state, resolved) = started.map_err(|error| prepare_error(params, error))?;
        let state = Arc::new(state);
        port.register(&state);
        let response_type = params.response_type.clone();
        Ok(Request::new(state, PySamplingParams { params: resolved, processors: own, response_type }))
    }

    #[pyo3(signature = (prompt, params, *, is_chat = false, client = None, time_left = None, check_cancelled = None))]
    #[allow(clippy::too_many_arguments, reason = "four of them are keywords")]
    fn search_beams(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &PySamplingParams,
        is_chat: bool,
        client: Option<u64>,
        time_left: Option<f64>,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<BeamSearch, Error> {
        let mode = mode(is_chat, false);
        let deadline = deadline(time_left);
        let prompt = self.read_prompt(prompt, mode)?;
        let search = detach_for(py, check_cancelled.as_ref(), client, |caller| {
            let mut search = self.frontend.prepare_beams(&params.params, prompt, mode, caller)?;
            search.set_deadline(deadline);
            Ok(search)
        })?;
        search.map(BeamSearch::new).map_err(|error| prepare_error(params, error))
    }

    fn check_adapter_name(&self, name: &str) -> Result<(), Error> {
        check_name(name)?;
        self.adapters.as_ref().map(drop).ok_or_else(no_adapters)
    }

    #[pyo3(signature = (name, path, *, replace = false, progress = None, check_cancelled = None))]
    fn load_adapter(
        &self,
        py: Python<'_>,
        name: &str,
        path: PathBuf,
        replace: bool,
        progress: Option<Py<PyAny>>,
        check_cancelled: Option<Py<PyAny>>,
    ) -> Result<PyAdapterInfo, Error> {
        let source = AdapterSource { name, path: &path, replace };
        check_name(name)?;
        processors::check_may_wait()?;
        let loader = self.adapters.as_ref().ok_or_else(no_adapters)?;
        self.check_process()?;
        let mut loading = LoadProgress::new(progress);
        let loaded = detach_while_wanted(py, check_cancelled.as_ref(), |is_wanted| {
            source.load(&self.frontend, loader, is_wanted, &mut |done, total| loading.report(done, total))
        })?;
        Ok(PyAdapterInfo(loading.finish(loaded)?.into()))
    }

    #[pyo3(signature = (name, port, *, force = false))]
    fn unload_adapter(&self, py: Python<'_>, name: &str, port: &Port, force: bool) -> Result<(), Error> {
        processors::check_may_wait()?;
        self.check_process()?;
        let reason = force.then(|| format!("adapter {name:?} was unloaded"));
        detach(py, || {
            let removed = self.frontend.adapters.remove(name).map_err(Error::AdapterNotFound)?;
            let last = removed.len() - 1;
            for (index, adapter) in removed.iter().enumerate() {
                let port = (index == last).then_some(port.inner());
                self.frontend.engine.unload_adapter(adapter.id, reason.clone(), port);
            }
            Ok(())
        })?
    }

    fn adapters(&self) -> Vec<PyAdapterInfo> {
        let adapters = self.frontend.adapters.all();
        adapters.iter().map(|adapter| PyAdapterInfo(AdapterInfo::from(&**adapter).into())).collect()
    }

    #[getter]
    fn tokenizer(&self) -> Tokenizer {
        self.tokenizer.clone()
    }

    #[getter]
    fn info(&self) -> PyModelInfo {
        PyModelInfo(Arc::clone(&self.info))
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

    fn kv_events(&self, py: Python<'_>, port: &Port) -> Result<KvEvents, Error> {
        processors::check_may_wait()?;
        if let Some(cause) = self.frontend.engine.stop_cause() {
            return Err(cause.into());
        }
        let events = detach(py, || self.frontend.engine.kv_events(port.inner()))?;
        let events = events.map_err(|error| Error::Config(error.into()))?;
        Ok(KvEvents::new(events, self.kv_events.clone()))
    }

    #[getter]
    fn is_forked(&self) -> bool {
        !self.frontend.engine.process().is_current()
    }

    #[pyo3(signature = (client = None))]
    fn check_room(&self, client: Option<u64>) -> Result<(), Error> {
        let engine = &self.frontend.engine;
        let Some(overload) = engine.overload(client.map(ClientId)) else { return Ok(()) };
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
        runner_config: penstock_runner::LaunchConfig,
        config: &PyEngineConfig,
        host: &Host,
        progress: Option<Py<PyAny>>,
        chat_template: Option<String>,
    ) -> Result<Self, Error> {
        let host = host.inner()?;
        logs::listen(py)?;
        let opened = LoadProgress::new(progress).run(py, |report| {
            let checkpoint = model.open()?;
            let text = checkpoint.text();
            let mut launch = || penstock_runner::launch(&checkpoint, &runner_config, host, report);
            let (tokenizer, (engine, info)) = match &config.config.tokenizer {
                Some(path) => (read_tokenizer(Path::new(path))?, launch()?),
                None => {
                    let (source, added) = (text.tokenizer()?, text.added_tokens());
                    load_together(|| TextTokenizer::with_added_tokens(source, added), launch)?
                }
            };
            let templates = match chat_template {
                Some(source) => BTreeMap::from([("default".to_owned(), source)]),
                None => text.chat_templates().clone(),
            };
            let frontend = Frontend {
                formats: ModelFormats::new(
                    config.config.reasoning_parser,
                    config.config.tool_parser,
                    templates.values(),
                ),
                tokenizer,
                grammars: Grammars::default(),
                generation: text.generation().clone(),
                hidden_size: info.hidden_size,
                max_logprobs: match config.config.max_logprobs() {
                    -1 => u32::MAX,
                    most => most as u32,
                },
                adapters: Adapters::default(),
                engine,
            };
            Ok(Self {
                info: ModelInfo::new(&info, frontend.engine.limits(), &frontend.generation, text.embedding())
                    .into(),
                tokenizer: Tokenizer::new(frontend.tokenizer.clone(), text, templates),
                frontend: Arc::new(frontend),
                profile: info.profile,
                adapters: info.adapters,
                kv_events: config.config.kv_events.clone().unwrap_or_default(),
            })
        });
        logs::drain(py)?;
        opened
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

/// The error for adapters of an engine that takes none.
fn no_adapters() -> Error {
    let limit = "at least 1 to load adapters".to_owned();
    let message = format!("max_adapters=0 is not allowed: it must be {limit}");
    Error::Config(Problem { message, field: "max_adapters".to_owned(), value: None, limit: Some(limit) })
}

/// Builds the tokenizer on a separate thread while the model is loaded: for a large vocabulary that takes longer than
/// opening a mapped model.
fn load_together<T>(
    tokenizer: impl FnOnce() -> Result<TextTokenizer, TextError> + Send,
    launch: impl FnOnce() -> Result<T, LaunchError>,
) -> Result<(TextTokenizer, T), Error> {
    std::thread::scope(|scope| {
        let tokenizer = spawn_deep(scope, tokenizer)?;
        let launched = launch();
        let tokenizer = join(tokenizer);
        let launched = launched?;
        Ok((tokenizer?, launched))
    })
}

/// The time in `time_left` seconds, if that is a time.
fn deadline(time_left: Option<f64>) -> Option<Instant> {
    let left = Duration::try_from_secs_f64(time_left?.max(0.0)).ok()?;
    Instant::now().checked_add(left)
}

fn mode(is_chat: bool, is_scoring: bool) -> Mode {
    match (is_chat, is_scoring) {
        (_, true) => Mode::Scoring,
        (true, false) => Mode::Chat,
        (false, false) => Mode::Completion,
    }
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
fn read_tokenizer(path: &Path) -> Result<TextTokenizer, Error> {
    let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
    if file.extension().is_some_and(|extension| extension == "gguf") {
        return Ok(TextTokenizer::new(TextFiles::open(&file)?.tokenizer()?)?);
    }
    let bytes = std::fs::read(&file).map_err(|error| {
        let limit = "a tokenizer.json, a directory that contains one, or a GGUF file".to_owned();
        let message = format!("tokenizer={path:?} cannot be read ({error}); it must be {limit}");
        Error::Config(Problem { message, field: "tokenizer".to_owned(), value: None, limit: Some(limit) })
    })?;
    check_lfs_pointer(&file, &bytes)?;
    Ok(TextTokenizer::new(&TokenizerSource::Json(bytes))?)
}

/// The error for a request that cannot be prepared or started; `params` are its parameters.
fn prepare_error(params: &PySamplingParams, error: penstock_frontend::Error) -> Error {
    match error {
        penstock_frontend::Error::Field(error) => params.error(error),
        penstock_frontend::Error::UnsupportedSchema { field, .. } => {
            params.schema_error(field, error.to_string())
        }
        error => error.into(),
    }
}
