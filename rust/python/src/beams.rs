//! `Beams`: the common part of the requests of a beam search, which differ in their prompts only. `StopSearch`: the state
//! of the search for stop strings after the tokens of a beam.

use std::sync::Arc;

use penstock_engine::Engine;
use penstock_engine::request::Request as EngineRequest;
use penstock_frontend::output::{OutputOptions, RequestState};
use penstock_text::{StopMatch, TextOptions, TextStream, Tokenizer};
use pyo3::prelude::*;

use crate::classes::PySamplingParams;
use crate::errors::Error;
use crate::fields::{Field, TOKEN_IDS};
use crate::port::Port;
use crate::processors::Owned;
use crate::request::Request;

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct Beams {
    engine: Engine,
    tokenizer: Tokenizer,
    options: TextOptions,
    /// The parameters of the search, with all defaults filled in.
    params: PySamplingParams,
    /// The parameters of each step, and the request of the first step.
    step_params: PySamplingParams,
    first: EngineRequest,
}

impl Beams {
    /// A search whose first request is `first`, which has the parameters `step_params`.
    pub fn new(
        engine: Engine,
        output: OutputOptions,
        params: PySamplingParams,
        step_params: PySamplingParams,
        first: EngineRequest,
    ) -> Self {
        let OutputOptions { tokenizer, options, .. } = output;
        Self { engine, tokenizer, options, params, step_params, first }
    }
}

#[pymethods]
impl Beams {
    #[getter]
    fn params(&self) -> PySamplingParams {
        self.params.clone()
    }

    fn start(&self, token_ids: &Bound<'_, PyAny>, port: &Port) -> Result<Request, Error> {
        let most = self.engine.limits().max_model_len;
        let token_ids = Field::request("token_ids").token_ids(token_ids, most, TOKEN_IDS)?;
        let mut request = self.first.clone();
        request.min_tokens = usize::from(token_ids.len() < self.params.params.min_tokens);
        request.prompt = self.first.prompt.iter().copied().chain(token_ids).collect();
        let output = OutputOptions {
            tokenizer: self.tokenizer.clone(),
            options: self.options,
            stops: Vec::new(),
            sequences: Vec::new(),
            echo: None,
            formats: None,
        };
        let requests = vec![Arc::new(request)];
        let state = Arc::new(RequestState::start(&self.engine, requests, output, &port.inner)?);
        port.register(&state);
        Ok(Request::new(state, self.step_params.clone(), Owned::default()))
    }

    fn stop_search(&self) -> Result<StopSearch, Error> {
        let stops: Arc<[String]> = self.params.params.stop.clone().into();
        Ok(StopSearch { stream: TextStream::new(&self.tokenizer, self.options, &stops)?, stops })
    }
}

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct StopSearch {
    stream: TextStream,
    stops: Arc<[String]>,
}

#[pymethods]
impl StopSearch {
    fn push(&self, token_id: u32) -> (Self, Option<&str>) {
        let mut stream = self.stream.clone();
        let found = stream.push(token_id);
        drop(stream.take());
        let stop = found.map(|StopMatch { stop }| &*self.stops[stop]);
        (Self { stream, stops: Arc::clone(&self.stops) }, stop)
    }
}
