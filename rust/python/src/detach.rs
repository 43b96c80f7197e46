//! [`detach`]: runs work without the GIL. Everything that can take longer than a few microseconds runs in it.

use penstock_frontend::panics::catch;
use pyo3::prelude::*;

use crate::errors::Error;

/// Runs `work` detached from the interpreter. A panic becomes [`Error::Defect`].
///
/// Rule: a thread does not attach while it holds a lock of this crate, so a thread that waits for the lock while attached
/// cannot deadlock with a detached thread that holds it.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    py.detach(|| catch(work)).map_err(Error::Defect)
}
