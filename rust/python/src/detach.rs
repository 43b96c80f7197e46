//! [`detach`]: runs work without the GIL. Everything that can take longer than a few microseconds runs in it.
//!
//! The thread of a caller can have a stack of 128 KiB. Work that can need more, because it has large frames or recurses
//! as deep as a file is nested, runs in [`detach_deep`]: reading, loading and converting models and tokenizers.

use std::thread::{Builder, Scope, ScopedJoinHandle};

use penstock_frontend::panics::catch;
use penstock_frontend::prompt::Caller;
use penstock_runner::LaunchError;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::Error;
use crate::errors::exiting;

/// Runs `work` detached from the interpreter. A panic becomes [`Error::Defect`].
///
/// Rule: a thread does not attach while it holds a lock of this crate, so a thread that waits for the lock while
/// attached cannot deadlock with a detached thread that holds it.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    py.detach(|| catch(work)).map_err(Error::Defect)
}

/// Bytes of the stack of a thread that [`spawn_deep`] starts. Loading takes half a megabyte in a build for tests, a
/// tokenizer.json with the deepest nesting that its parser allows a quarter.
const STACK_BYTES: usize = 8 << 20;

/// Like [`detach`], for work that can need more stack than the thread of the caller has: it runs on a thread of its own.
/// Meanwhile the caller's thread runs `serve`, which returns at the end of the work, or earlier.
pub fn detach_deep<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> T + Send,
    serve: impl FnOnce() + Send,
) -> Result<T, Error> {
    let run = || {
        std::thread::scope(|scope| {
            let working = spawn_deep(scope, work)?;
            serve();
            Ok(join(working))
        })
    };
    detach(py, run)?
}

/// Starts a thread with a large stack. It has no name of its own: the threads that a driver starts in it would inherit
/// the name, and stay.
pub fn spawn_deep<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, Error> {
    let thread = Builder::new().stack_size(STACK_BYTES);
    let cannot_start = |error| LaunchError::Start(format!("cannot start a thread: {error}")).into();
    thread.spawn_scoped(scope, work).map_err(cannot_start)
}

/// The result of a thread; its panic becomes one of this thread.
pub fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Returns false once the caller has no use for a result.
pub type IsWanted<'a> = &'a mut (dyn FnMut() -> bool + Send);

/// Runs slow work without the GIL. Raises if a signal arrives or the caller is cancelled, which ends the work.
pub fn detach_while_wanted<T: Send>(
    py: Python<'_>,
    check_cancelled: Option<&Py<PyAny>>,
    work: impl FnOnce(IsWanted<'_>) -> T + Send,
) -> Result<T, Error> {
    detach_for(py, check_cancelled, None, |caller| work(&mut || caller.is_wanted()))
}

/// Like [`detach_while_wanted`], for work for a client, which can wait for other threads.
pub fn detach_for<T: Send>(
    py: Python<'_>,
    check_cancelled: Option<&Py<PyAny>>,
    client: Option<u64>,
    work: impl FnOnce(&mut PyCaller<'_>) -> T + Send,
) -> Result<T, Error> {
    let mut caller = PyCaller { check_cancelled, client, raised: None };
    let done = detach(py, || work(&mut caller))?;
    caller.raised.map_or(Ok(done), |raised| Err(Error::Python(raised)))
}

/// The caller of slow work: a function that raises if the work is no longer wanted. It can have the method `begin_wait`
/// of `SlowCall` in `_workers.py`, which is called before the work waits.
pub struct PyCaller<'a> {
    check_cancelled: Option<&'a Py<PyAny>>,
    client: Option<u64>,
    raised: Option<PyErr>,
}

impl PyCaller<'_> {
    /// Calls a function with the interpreter, unless a call has raised; returns whether none has.
    fn call(&mut self, function: impl FnOnce(Python<'_>, Option<&Py<PyAny>>) -> PyResult<()>) -> bool {
        if self.raised.is_none() {
            let called = Python::try_attach(|py| {
                py.check_signals()?;
                function(py, self.check_cancelled)
            });
            self.raised = called.unwrap_or_else(|| Err(exiting())).err();
        }
        self.raised.is_none()
    }
}

impl Caller for PyCaller<'_> {
    fn client(&self) -> Option<u64> {
        self.client
    }

    fn begin_wait(&mut self) -> bool {
        self.call(|py, check| match check {
            Some(check) if check.bind(py).hasattr(intern!(py, "begin_wait"))? => {
                check.call_method0(py, intern!(py, "begin_wait")).map(drop)
            }
            _ => Ok(()),
        })
    }

    fn is_wanted(&mut self) -> bool {
        self.call(|py, check| check.map_or(Ok(()), |check| check.call0(py).map(drop)))
    }
}
