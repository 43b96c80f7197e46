//! Beam search, `best_of` and scores of texts: the classes and functions around those of the front end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_frontend::output::RequestOutput;
use penstock_frontend::selection;
use pyo3::prelude::*;

use crate::classes::{PyRequestOutput, PySamplingParams, PyScore};
use crate::detach::detach;
use crate::errors::Error;
use crate::port::Port;
use crate::request::Request;
use crate::response_type::ResponseType;

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct BeamSearch(Mutex<selection::BeamSearch>);

impl BeamSearch {
    pub fn new(search: selection::BeamSearch) -> Self {
        Self(Mutex::new(search))
    }

    fn lock(&self) -> MutexGuard<'_, selection::BeamSearch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl BeamSearch {
    #[getter]
    fn is_running(&self) -> bool {
        self.lock().is_running()
    }

    fn start_step(&self, py: Python<'_>, port: &Port) -> Result<Vec<Request>, Error> {
        let (params, states) = detach(py, || {
            let search = self.lock();
            (search.step_params().clone(), search.start_step(port.inner()))
        })?;
        let params = PySamplingParams { params, ..PySamplingParams::default() };
        let request = |state| {
            let state = Arc::new(state);
            port.register(&state);
            Request::new(state, params.clone())
        };
        Ok(states?.into_iter().map(request).collect())
    }

    fn advance(&self, py: Python<'_>, results: Vec<PyRequestOutput>) -> Result<(), Error> {
        let outputs: Vec<_> = results.into_iter().map(|result| result.0).collect();
        detach(py, || self.lock().advance(&outputs))
    }

    fn close(&self, py: Python<'_>) -> Result<(), Error> {
        detach(py, || self.lock().close())
    }

    fn result(&self, py: Python<'_>) -> Result<PyRequestOutput, Error> {
        let result = detach(py, || self.lock().result())?;
        check_complete(&result)?;
        Ok(PyRequestOutput(result.into(), ResponseType::default()))
    }
}

/// See `_core.pyi`.
#[pyfunction]
pub fn candidate_params(params: &PySamplingParams) -> PySamplingParams {
    params.with_params(params.params.for_candidates())
}

/// See `_core.pyi`.
#[pyfunction]
pub fn best_of(result: &PyRequestOutput, params: &PySamplingParams) -> Result<PyRequestOutput, Error> {
    check_complete(&result.0)?;
    Ok(PyRequestOutput(selection::best_of(&result.0, &params.params), result.1.clone()))
}

/// An error if the engine was closed first: only that cancels a request whose caller waits for its result.
fn check_complete(output: &RequestOutput) -> Result<(), Error> {
    match output.choices.iter().any(|choice| choice.finish_reason == "cancelled") {
        true => Err(Error::Stopped("the engine was closed before the request finished".to_owned())),
        false => Ok(()),
    }
}

/// See `_core.pyi`.
#[pyfunction]
pub fn score(result: &PyRequestOutput) -> Result<PyScore, Error> {
    match selection::score(&result.0) {
        Ok(score) => Ok(PyScore(score.into())),
        Err(error @ selection::ScoreError::Closed) => Err(Error::Stopped(error.to_string())),
        Err(error @ selection::ScoreError::Incomplete { .. }) => Err(Error::Failed(error.to_string())),
    }
}
