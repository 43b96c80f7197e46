//! `call_deep`: calls Python code that recurses as deep as its input is nested, such as the compiler of templates.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::detach::detach_deep;
use crate::errors::Error;
use crate::load_progress::exiting;

/// The interval at which the thread of the caller checks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// See `_core.pyi`.
#[pyfunction]
pub fn call_deep(py: Python<'_>, function: Py<PyAny>, interrupt: Py<PyAny>) -> Result<Py<PyAny>, Error> {
    let (running, ended) = channel::<()>();
    let call = || {
        let _running = running;
        Python::try_attach(|py| function.call0(py)).unwrap_or_else(|| Err(exiting()))
    };
    let mut raised = None;
    let raise = &mut raised;
    let serve = move || {
        while ended.recv_timeout(SIGNAL_INTERVAL) == Err(RecvTimeoutError::Timeout) {
            let checked = Python::try_attach(|py| {
                py.check_signals().inspect_err(|_| drop(interrupt.call0(py))) // the signal's exception is raised
            });
            if let Err(error) = checked.unwrap_or_else(|| Err(exiting())) {
                *raise = Some(error);
                return;
            }
        }
    };
    let returned = detach_deep(py, call, serve)?;
    raised.map_or(returned.map_err(Error::Python), |raised| Err(Error::Python(raised)))
}
