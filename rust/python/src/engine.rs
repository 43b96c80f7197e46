//! `Engine`: opening a model, starting requests, tokenising, statistics.

use std::collections::BTreeMap;
use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher, Hasher};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_checkpoint::{Checkpoint, Generation, SpecialTokens, TokenizerSource};
use penstock_engine::request::{Reports, Request as EngineRequest, Sampling};
use penstock_runner::Options;
use penstock_text::{TextOptions, TextStream, Tokenizer};
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::config::EngineConfig;
use crate::detach::detach;
use crate::errors::{Error, Problem};
use crate::fields::{Field, TOKEN_IDS};
use crate::live::Live;
use crate::logs;
use crate::params::SamplingParams;
use crate::port::Port;
use crate::request::Request;
use crate::results::{ModelInfo, Stats};

/// What a prompt may be; messages are text by the time they are here.
const PROMPT: &str = "text, a sequence of token ids (integers from 0) or a sequence of messages";
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
    tokenizer: Tokenizer,
    generation: Generation,
    chat_templates: BTreeMap<String, String>,
    special_tokens: SpecialTokens,
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
        Self::load(py, path, config.options()?, config.tokenizer.clone(), progress)
    }

    #[pyo3(signature = (prompt, params, port, *, add_special_tokens = true))]
    fn start_request(
        &self,
        py: Python<'_>,
        prompt: &Bound<'_, PyAny>,
        params: &SamplingParams,
        port: &Port,
        add_special_tokens: bool,
    ) -> Result<Request, Error> {
        let prompt = if prompt.is_instance_of::<PyString>() {
            self.encode(py, prompt, add_special_tokens)?
        } else {
            Field::request("prompt").token_ids(prompt, PROMPT)?
        };
        let limits = self.engine.limits();
        let params = params.resolve(&self.model.generation, prompt.len(), limits.max_model_len, draw_seed());
        let request = Arc::new(self.engine_request(prompt, &params));
        let stops = params.stop.0.clone();
        let options =
            TextOptions { skip_special_tokens: params.skip_special_tokens, ..TextOptions::default() };
        let stream = TextStream::new(&self.model.tokenizer, options, &stops)?;
        let consumer = self.engine.start_request(Arc::clone(&request), &port.inner).map_err(Error::Start)?;
        let live = Arc::new(Live::new(request, consumer, stream, stops, limits.queue_capacity));
        port.register(&live);
        Ok(Request { live, params })
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

    #[pyo3(signature = (token_ids, *, skip_special_tokens = true))]
    fn decode(
        &self,
        py: Python<'_>,
        token_ids: &Bound<'_, PyAny>,
        skip_special_tokens: bool,
    ) -> Result<String, Error> {
        let token_ids = Field::request("token_ids").token_ids(token_ids, TOKEN_IDS)?;
        let options = TextOptions { skip_special_tokens, ..TextOptions::default() };
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

    fn stats(&self, py: Python<'_>) -> PyResult<Stats> {
        logs::drain(py)?;
        Ok(self.engine.stats().into())
    }

    #[getter]
    fn is_running(&self) -> bool {
        self.engine.is_running()
    }

    fn flush_prefix_cache(&self, py: Python<'_>) -> Result<(), Error> {
        if !self.engine.is_running() {
            return Err(Error::Stopped);
        }
        detach(py, || self.engine.flush_prefix_cache())
    }

    /// The engine's shutdown may wait for a place in a full mailbox, and then waits for a step: another thread does it.
    fn stop(&self) {
        if self.engine.is_running() {
            let engine = self.engine.clone();
            let stopping = std::thread::Builder::new().spawn(move || engine.shutdown());
            if stopping.is_err() {
                self.engine.shutdown(); // better late than never
            }
        }
    }

    fn shutdown(&self, py: Python<'_>) -> Result<(), Error> {
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
        options: Options,
        tokenizer_path: Option<String>,
        progress: Option<Py<PyAny>>,
    ) -> Result<Self, Error> {
        logs::listen(py)?;
        let mut watcher = Watcher { progress, called: None, raised: None };
        let opened = detach(py, || {
            let checkpoint = Checkpoint::open(&path)?;
            let tokenizer = match tokenizer_path {
                Some(path) => read_tokenizer(Path::new(&path))?,
                None => Tokenizer::with_added_tokens(checkpoint.tokenizer()?, checkpoint.added_tokens())?,
            };
            let mut report = |done, total| watcher.report(done, total);
            let (engine, info) =
                penstock_runner::launch(&checkpoint, &options, &mut report).map_err(Error::Launch)?;
            let model = Model {
                info: ModelInfo::of(&info, engine.limits()),
                tokenizer,
                generation: checkpoint.generation().clone(),
                chat_templates: checkpoint.chat_templates().clone(),
                special_tokens: checkpoint.special_tokens().clone(),
            };
            Ok(Self { engine, model })
        })?;
        match watcher.raised {
            Some(raised) => Err(Error::Python(raised)),
            None => opened,
        }
    }

    fn engine_request(&self, prompt: Vec<u32>, params: &SamplingParams) -> EngineRequest {
        let mut stop_token_ids = params.stop_token_ids.0.clone();
        if !params.ignore_eos {
            // An id beyond the vocabulary, which some published files name, is never generated.
            let vocabulary_size = self.engine.limits().vocabulary_size;
            let known = |id: &&u32| (**id as usize) < vocabulary_size;
            stop_token_ids.extend(self.model.generation.eos_token_ids.iter().filter(known));
        }
        stop_token_ids.sort_unstable();
        stop_token_ids.dedup();
        let sampling = Sampling {
            temperature: params.temperature.expect("resolved; this is a bug") as f32,
            top_k: params.top_k.expect("resolved; this is a bug"),
            top_p: params.top_p.expect("resolved; this is a bug") as f32,
            min_p: params.min_p.expect("resolved; this is a bug") as f32,
            seed: params.seed.expect("resolved; this is a bug"),
            ..Sampling::default()
        };
        let max_tokens = params.max_tokens.expect("resolved; this is a bug");
        EngineRequest {
            min_tokens: params.min_tokens,
            stop_token_ids,
            reports: Reports { logprobs: params.logprobs.then_some(0), ..Reports::default() },
            priority: params.priority,
            prefix_cache: params.use_prefix_cache,
            cache_salt: params.cache_salt.as_deref().map(Arc::from),
            ..EngineRequest::new(prompt, max_tokens, sampling)
        }
    }
}

impl Drop for Engine {
    /// Whoever drops an open engine holds the interpreter, and must not wait for its threads.
    fn drop(&mut self) {
        self.stop();
    }
}

/// Reports progress to Python now and then, and looks for Ctrl-C on the way.
struct Watcher {
    progress: Option<Py<PyAny>>,
    called: Option<Instant>,
    raised: Option<PyErr>,
}

impl Watcher {
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
