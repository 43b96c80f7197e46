//! `Request`: Python's handle on one request. Each of its three questions also tells the port's `drain` what to name
//! the request for, so that nobody is woken for less than it waits for.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::assembly::End;
use crate::errors::Error;
use crate::live::{Goal, Live};
use crate::logs;
use crate::params::SamplingParams;
use crate::results::{Chunk, Result as Answer};

/// See `_core.pyi`. Dropping the object is a cancel.
#[pyclass(frozen, module = "penstock._core")]
pub struct Request {
    pub live: Arc<Live>,
    pub params: SamplingParams,
}

#[pymethods]
impl Request {
    #[getter]
    fn id(&self) -> u64 {
        self.live.id
    }

    #[getter]
    fn params(&self) -> SamplingParams {
        self.params.clone()
    }

    #[getter]
    fn finish_reason(&self) -> Option<&'static str> {
        self.live.end().map(|end| match end {
            End::Finished(reason, ..) => reason,
            End::Refused(_) | End::Failed(_) | End::Stopped => "error",
        })
    }

    fn is_admitted(&self) -> bool {
        self.live.aim(Goal::Admission)
    }

    fn has_chunk(&self) -> bool {
        self.live.aim(Goal::Chunk)
    }

    fn has_ended(&self) -> bool {
        self.live.aim(Goal::End)
    }

    fn take(&self) -> Option<Chunk> {
        self.live.take()
    }

    fn check_admission(&self, py: Python<'_>) -> Result<(), Error> {
        if self.live.was_admitted() { Ok(()) } else { self.check(py) }
    }

    fn check(&self, py: Python<'_>) -> Result<(), Error> {
        match self.live.end() {
            Some(End::Refused(refusal)) => Err(Error::Refused(refusal)),
            Some(End::Failed(reason)) => {
                logs::drain(py)?; // more may be said there of what failed
                Err(Error::Failed(reason))
            }
            Some(End::Stopped) => Err(Error::Stopped),
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
}
