//! The one way out of the interpreter: everything that can take longer than a few microseconds runs in [`detach`].

use penstock_frontend::panics::catch;
use pyo3::prelude::*;

use crate::errors::Error;

/// Runs `work` with the interpreter released. A panic in it becomes an error that says it is a defect.
///
/// Rule: no lock of ours is held while attaching, so a thread that waits for such a lock while attached cannot
/// deadlock with one that holds it detached.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    py.detach(|| catch(work)).map_err(Error::Defect)
}
