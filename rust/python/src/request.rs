//! `Request`: Python's handle on one request. Each of its three questions also tells the port's `drain` what to name
//! the request for, so that nobody is woken for less than it waits for.

use std::sync::Arc;

use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};

use crate::assembly::End;
use crate::detach::detach;
use crate::errors::Error;
use crate::live::{Goal, Live};
use crate::logs;
use crate::params::SamplingParams;
use crate::processors::{Owned, Processors};
use crate::results::{Chunk, Result as Answer};

/// See `_core.pyi`. Dropping the object is a cancel.
#[pyclass(frozen, module = "penstock._core")]
pub struct Request {
    pub live: Arc<Live>,
    /// But for the processors.
    params: SamplingParams,
    processors: Owned,
}

impl Request {
    /// `params` are resolved; of their processors, `processors` are the request's own.
    pub fn new(live: Arc<Live>, params: SamplingParams, processors: Owned) -> Self {
        let params = SamplingParams { logits_processors: Processors::default(), ..params };
        Self { live, params, processors }
    }

    /// See [`Live::aim`]. Rows are copied when the end arrives, which may take long.
    fn aim(&self, py: Python<'_>, goal: Goal) -> Result<bool, Error> {
        if self.live.has_rows { detach(py, || self.live.aim(goal)) } else { Ok(self.live.aim(goal)) }
    }
}

#[pymethods]
impl Request {
    #[getter]
    fn id(&self) -> u64 {
        self.live.id
    }

    #[getter]
    fn params(&self, py: Python<'_>) -> SamplingParams {
        SamplingParams { logits_processors: self.processors.listed(py), ..self.params.clone() }
    }

    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.live.end().map(|end| match end {
            End::Finished(reason, ..) => reason,
            End::Rejected(_) | End::Failed(_) | End::Stopped(_) => "error",
        })
    }

    fn is_admitted(&self, py: Python<'_>) -> Result<bool, Error> {
        self.aim(py, Goal::Admission)
    }

    fn has_chunk(&self, py: Python<'_>) -> Result<bool, Error> {
        self.aim(py, Goal::Chunk)
    }

    fn has_ended(&self, py: Python<'_>) -> Result<bool, Error> {
        self.aim(py, Goal::End)
    }

    fn take(&self) -> Option<Chunk> {
        self.live.take()
    }

    fn check_admission(&self, py: Python<'_>) -> Result<(), Error> {
        if self.live.was_admitted() { Ok(()) } else { self.check(py) }
    }

    fn check(&self, py: Python<'_>) -> Result<(), Error> {
        match self.live.end() {
            Some(End::Rejected(refusal)) => Err(Error::Rejected(refusal)),
            Some(End::Failed(reason)) => {
                logs::drain(py)?; // more may be said there of what failed
                Err(Error::Failed(reason))
            }
            Some(End::Stopped(cause)) => Err(Error::Stopped(cause)),
            Some(End::Finished(..)) | None => Ok(()),
        }
    }

    fn result(&self, py: Python<'_>) -> Result<Option<Answer>, Error> {
        self.check(py)?;
        Ok(self.live.result())
    }

    fn cancel(&self) {
        self.live.cancel();
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.processors.traverse(&visit)
    }

    fn __clear__(&self) {
        self.processors.clear();
    }
}
