//! The progress of loading and converting a model.

use std::ops::ControlFlow;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use penstock_runner::ProgressCallback;
use pyo3::prelude::*;

use crate::detach::detach_deep;
use crate::errors::{Error, exiting};

/// The progress callback is called at most this often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

/// Reports the progress of loading to Python at intervals, and checks for signals.
pub struct LoadProgress {
    progress: Option<Py<PyAny>>,
    called: Option<Instant>,
    /// Whether the last call reported `done == total`.
    ended: bool,
    raised: Option<PyErr>,
}

impl LoadProgress {
    pub fn new(progress: Option<Py<PyAny>>) -> Self {
        Self { progress, called: None, ended: false, raised: None }
    }

    /// Runs `work` in [`detach_deep`]. The callback and the check for signals run on the thread of the caller: signals
    /// and `anyio.from_thread.check_cancelled` belong to it.
    pub fn run<T: Send>(
        mut self,
        py: Python<'_>,
        work: impl FnOnce(ProgressCallback<'_>) -> Result<T, Error> + Send,
    ) -> Result<T, Error> {
        let (reports, reported) = channel();
        let (answers, answered) = channel();
        let work = move || {
            // Neither channel is closed before the work ends.
            work(&mut |done, total| match reports.send((done, total)).map(|()| answered.recv()) {
                Ok(Ok(answer)) => answer,
                _ => ControlFlow::Break(()),
            })
        };
        let serve = || {
            for (done, total) in reported {
                if answers.send(self.report(done, total)).is_err() {
                    return;
                }
            }
        };
        let result = detach_deep(py, work, serve)?;
        self.finish(result)
    }

    /// The result of the loading, or the exception that ended it.
    pub fn finish<T>(self, result: Result<T, Error>) -> Result<T, Error> {
        match self.raised {
            Some(raised) => Err(Error::Python(raised)),
            None => result,
        }
    }

    pub fn report(&mut self, done: u64, total: u64) -> ControlFlow<()> {
        let now = Instant::now();
        let is_early = self.called.is_some_and(|called| now - called < PROGRESS_INTERVAL);
        if is_early && (done < total || self.ended) {
            return ControlFlow::Continue(());
        }
        self.ended = done >= total;
        self.called = Some(now);
        let called = Python::try_attach(|py| {
            py.check_signals()?;
            self.progress.as_ref().map_or(Ok(()), |progress| progress.call1(py, (done, total)).map(drop))
        });
        match called.unwrap_or_else(|| Err(exiting())) {
            Ok(()) => ControlFlow::Continue(()),
            Err(raised) => {
                self.raised = Some(raised);
                ControlFlow::Break(())
            }
        }
    }
}
