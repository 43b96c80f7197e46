//! `Request`: Python's handle on one request. Each of its three questions also tells the port's `drain` what to name
//! the request for, so that nobody is woken for less than it waits for.

use std::sync::Arc;

use pyo3::prelude::*;

use crate::errors::Error;
use crate::live::{End, Goal, Live};
use crate::params::SamplingParams;
use crate::record::Tuple;
use crate::results::{Chunk, Result as Answer, Timings, Usage};

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

    fn check_admission(&self) -> Result<(), Error> {
        if self.live.was_admitted() { Ok(()) } else { self.check() }
    }

    fn check(&self) -> Result<(), Error> {
        match self.live.end() {
            Some(End::Refused(refusal)) => Err(Error::Refused(refusal)),
            Some(End::Failed(reason)) => Err(Error::Failed(reason)),
            Some(End::Stopped) => Err(Error::Stopped),
            Some(End::Finished(..)) | None => Ok(()),
        }
    }

    fn result(&self) -> Result<Option<Answer>, Error> {
        self.check()?;
        let Some(End::Finished(reason, stop_reason, finish)) = self.live.end() else { return Ok(None) };
        let Chunk { text, token_ids, logprobs } = self.live.output();
        let request = &self.live.request;
        Ok(Some(Answer {
            usage: Usage::of(request.prompt.len(), token_ids.0.len(), finish.cached),
            text,
            token_ids,
            logprobs,
            finish_reason: reason.to_owned(),
            stop_reason,
            prompt_token_ids: Tuple(request.prompt.to_vec()),
            seed: request.sampling.seed,
            timings: Timings::from(&finish),
        }))
    }

    fn cancel(&self) {
        self.live.cancel();
    }
}
