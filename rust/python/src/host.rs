//! `Host`: the compute threads and the memory that engines share.

use std::ops::RangeInclusive;

use penstock_engine::Process;
use penstock_frontend::field::Field;
use penstock_runner::LaunchError;
use penstock_types::FieldError;
use pyo3::prelude::*;

use crate::errors::Error;
use crate::value::{PyValue, config_error};

const BYTES: RangeInclusive<i128> = 1..=i64::MAX as i128;

/// The compute threads and the memory that engines share; see the guide, "Several models in one process".
///
/// Engines that are given no host share that of the process. `memory_bytes` is the maximum size of the memory of all
/// engines of the host together; by default, the available memory.
#[pyclass(frozen, module = "penstock")]
pub struct Host {
    inner: penstock_runner::Host,
    memory_bytes: Option<u64>,
    process: Process,
}

#[pymethods]
impl Host {
    #[new]
    #[pyo3(signature = (*, memory_bytes = None))]
    fn new(memory_bytes: Option<Bound<'_, PyAny>>) -> Result<Self, Error> {
        let read = |value| Field::new("memory_bytes").integer(&PyValue(value), BYTES);
        let memory_bytes =
            memory_bytes.map(read).transpose().map_err(config_error)?.map(|bytes| bytes as u64);
        Ok(Self::with_limit(memory_bytes))
    }

    /// Maximum size of the memory of all engines together, in bytes; `None`: the available memory.
    #[getter]
    fn memory_bytes(&self) -> Option<u64> {
        self.memory_bytes
    }

    /// Memory of the open engines, in bytes: weights, workspace and KV cache, used or not.
    #[getter]
    fn reserved_bytes(&self) -> Result<u64, Error> {
        Ok(self.inner()?.reserved_bytes())
    }

    /// Memory that another engine may take, in bytes: what the system and its control groups have left, without what
    /// open engines have reserved, and at most what `memory_bytes` leaves. Changes with the system's other processes.
    #[getter]
    fn available_bytes(&self) -> Result<u64, Error> {
        Ok(self.inner()?.available_bytes())
    }

    fn __repr__(&self) -> String {
        match self.memory_bytes {
            Some(bytes) => format!("Host(memory_bytes={bytes})"),
            None => "Host()".to_owned(),
        }
    }
}

impl Default for Host {
    fn default() -> Self {
        Self::with_limit(None)
    }
}

impl Host {
    fn with_limit(memory_bytes: Option<u64>) -> Self {
        Self { inner: penstock_runner::Host::new(memory_bytes), memory_bytes, process: Process::current() }
    }

    /// The host. An error in the child of a fork, where its threads do not exist and its locks may be held.
    pub fn inner(&self) -> Result<&penstock_runner::Host, Error> {
        if self.process.is_current() {
            return Ok(&self.inner);
        }
        let limit = "created in this process, not before a fork";
        Err(LaunchError::Config(FieldError::new("host", self.__repr__(), limit)).into())
    }
}
