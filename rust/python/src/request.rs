//! `Request`: the Python handle of one request. If `is_admitted`, `is_readable`, `has_chunk` or `has_ended` returns false,
//! the port's `drain` returns the request's id once it would return true, so a task is woken only for the state it waits
//! for. The same holds if `next` returns `None`.

use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use penstock_engine::Process;
use penstock_frontend::output::{ChoiceEnd, Milestone, RequestState};
use pyo3::exceptions::PyStopAsyncIteration;
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::types::PyTuple;

use crate::classes::{PyChunk, PyRequestOutput, PySamplingParams, PyTimings, PyUsage};
use crate::detach::detach;
use crate::errors::Error;
use crate::logs;

/// See `_core.pyi`. Dropping the object cancels the request.
#[pyclass(frozen, module = "penstock._core")]
pub struct Request {
    state: Arc<RequestState>,
    process: Process,
    params: PySamplingParams,
}

impl Request {
    /// `params` have all defaults filled in. The engine calls their processors.
    pub fn new(state: Arc<RequestState>, params: PySamplingParams) -> Self {
        Self { state, process: Process::current(), params }
    }

    /// The state, unless another process has it: a thread there may have locked the copy at the fork.
    fn state(&self) -> Result<&RequestState, Error> {
        self.process.check()?;
        Ok(&self.state)
    }

    /// The state with all events that have arrived. Detached if tensors are copied at the end, which can take long.
    fn polled_state(&self, py: Python<'_>) -> Result<&RequestState, Error> {
        let state = self.state()?;
        if state.has_tensors {
            detach(py, || state.poll())?;
        } else {
            state.poll();
        }
        Ok(state)
    }

    /// See [`RequestState::wait_for`]. Detached if tensors are copied at the end, which can take long.
    fn wait_for(&self, py: Python<'_>, milestone: Milestone) -> Result<bool, Error> {
        let state = self.state()?;
        if state.has_tensors {
            detach(py, || state.wait_for(milestone))
        } else {
            Ok(state.wait_for(milestone))
        }
    }
}

#[pymethods]
impl Request {
    #[getter]
    fn id(&self) -> u64 {
        self.state.id
    }

    #[getter]
    fn params(&self) -> PySamplingParams {
        self.params.clone()
    }

    #[getter]
    fn prompt_token_ids<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.state.prompt.iter())
    }

    #[getter]
    fn usage(&self, py: Python<'_>) -> Result<PyUsage, Error> {
        Ok(PyUsage(self.polled_state(py)?.usage().into()))
    }

    #[getter]
    fn timings(&self, py: Python<'_>) -> Result<PyTimings, Error> {
        Ok(PyTimings(self.polled_state(py)?.timings(Instant::now()).into()))
    }

    #[getter]
    fn finish_reason(&self, py: Python<'_>) -> Result<Option<&'static str>, Error> {
        let state = self.polled_state(py)?;
        Ok(state.end().map(|end| match end {
            ChoiceEnd::Finished(ending, _) => ending.finish_reason,
            ChoiceEnd::Rejected(_) | ChoiceEnd::Failed(_) | ChoiceEnd::Stopped(_) => "error",
        }))
    }

    #[getter]
    fn is_forked(&self) -> bool {
        !self.process.is_current()
    }

    fn is_admitted(&self, py: Python<'_>) -> Result<bool, Error> {
        self.wait_for(py, Milestone::Admission)
    }

    fn has_chunk(&self, py: Python<'_>) -> Result<bool, Error> {
        self.wait_for(py, Milestone::Chunk)
    }

    fn has_ended(&self, py: Python<'_>) -> Result<bool, Error> {
        self.wait_for(py, Milestone::End)
    }

    fn poll(&self, py: Python<'_>) -> Result<Option<PyChunk>, Error> {
        self.polled_state(py)?;
        self.take(py)
    }

    fn take(&self, py: Python<'_>) -> Result<Option<PyChunk>, Error> {
        let state = self.state()?;
        let chunk = if state.has_tensors { detach(py, || state.take())? } else { state.take() };
        Ok(chunk.map(|chunk| PyChunk(chunk.into())))
    }

    fn is_readable(&self) -> Result<bool, Error> {
        Ok(self.state()?.is_readable())
    }

    fn next(&self, py: Python<'_>) -> PyResult<Option<PyChunk>> {
        let state = self.state()?;
        let next = if state.has_tensors { detach(py, || state.poll_next())? } else { state.poll_next() };
        match next {
            Poll::Ready(Some(chunk)) => Ok(Some(PyChunk(chunk.into()))),
            Poll::Ready(None) => {
                self.check(py)?;
                Err(PyStopAsyncIteration::new_err(()))
            }
            Poll::Pending => Ok(None),
        }
    }

    fn check_admission(&self, py: Python<'_>) -> Result<(), Error> {
        if self.state()?.was_admitted() { Ok(()) } else { self.check(py) }
    }

    fn check(&self, py: Python<'_>) -> Result<(), Error> {
        match self.state()?.end() {
            Some(ChoiceEnd::Rejected(rejection)) => {
                Err(Error::Rejected(rejection, self.state.adapter.clone()))
            }
            Some(ChoiceEnd::Failed(reason)) => {
                logs::drain(py)?; // a record may have details of the failure
                Err(Error::Failed(reason))
            }
            Some(ChoiceEnd::Stopped(cause)) => Err(cause.into()),
            Some(ChoiceEnd::Finished(..)) | None => Ok(()),
        }
    }

    fn result(&self, py: Python<'_>) -> Result<Option<PyRequestOutput>, Error> {
        self.check(py)?;
        Ok(self
            .state()?
            .result()
            .map(|result| PyRequestOutput(result.into(), self.params.response_type.clone())))
    }

    fn cancel(&self) {
        if let Ok(state) = self.state() {
            state.cancel();
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.params.processors.traverse(&visit)
    }

    fn __clear__(&self) {
        self.params.processors.clear();
    }
}
