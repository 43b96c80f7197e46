//! [`detach`]: runs work without the GIL. Everything that can take longer than a few microseconds runs in it.

use penstock_frontend::panics::catch;
use pyo3::prelude::*;

use crate::errors::Error;
use crate::load_progress::exiting;

/// Runs `work` detached from the interpreter. A panic becomes [`Error::Defect`].
///
/// Rule: a thread does not attach while it holds a lock of this crate, so a thread that waits for the lock while
/// attached cannot deadlock with a detached thread that holds it.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    py.detach(|| catch(work)).map_err(Error::Defect)
}

/// Returns false once the caller has no use for a result.
pub type IsWanted<'a> = &'a mut (dyn FnMut() -> bool + Send);

/// Runs slow work without the GIL. Raises if a signal arrives or the caller is cancelled, which ends the work.
pub fn detach_while_wanted<T: Send>(
    py: Python<'_>,
    check_cancelled: Option<&Py<PyAny>>,
    work: impl FnOnce(IsWanted<'_>) -> T + Send,
) -> Result<T, Error> {
    let mut raised = None;
    let mut is_wanted = || {
        if raised.is_none() {
            let checked = Python::try_attach(|py| check_interest(py, check_cancelled));
            raised = checked.unwrap_or_else(|| Err(exiting())).err();
        }
        raised.is_none()
    };
    let done = detach(py, || work(&mut is_wanted))?;
    raised.map_or(Ok(done), |raised| Err(Error::Python(raised)))
}

/// Raises if a signal arrived or the caller was cancelled.
fn check_interest(py: Python<'_>, check_cancelled: Option<&Py<PyAny>>) -> PyResult<()> {
    py.check_signals()?;
    check_cancelled.map_or(Ok(()), |check| check.call0(py).map(drop))
}
