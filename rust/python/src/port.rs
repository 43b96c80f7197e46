//! `Port`: one listener (an event loop, or a blocking caller) and the requests it receives for.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_engine::Process;
use penstock_frontend::output::{Listener, RequestState};
use pyo3::prelude::*;

use crate::detach::detach;
use crate::errors::Error;
use crate::logs;
use crate::processors::check_may_wait;

/// The interval at which a blocking wait checks for signals such as Ctrl-C.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// See `_core.pyi`.
#[pyclass(frozen, module = "penstock._core")]
pub struct Port {
    listener: Listener,
    process: Process,
}

#[pymethods]
impl Port {
    #[new]
    #[pyo3(signature = (*, blocking = false))]
    fn new(blocking: bool) -> PyResult<Self> {
        check_may_wait()?;
        let port = if blocking {
            penstock_engine::Port::with_condvar()
        } else {
            penstock_engine::Port::with_descriptor()?
        };
        Ok(Self { listener: Listener::new(port), process: Process::current() })
    }

    fn fileno(&self) -> i64 {
        self.inner().fd().map_or(-1, |fd| fd as i64)
    }

    fn drain(&self, py: Python<'_>) -> Result<Vec<u64>, Error> {
        self.process.check()?;
        logs::drain(py)?;
        detach(py, || self.listener.drain())
    }

    fn ring(&self) {
        self.inner().bell().ring();
    }

    #[pyo3(signature = (timeout = None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> Result<bool, Error> {
        check_may_wait()?;
        self.process.check()?;
        // A timeout beyond the range of the clock is no timeout.
        let timeout = timeout.and_then(|timeout| Duration::try_from_secs_f64(timeout).ok());
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let interval = || {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            left.map_or(SIGNAL_INTERVAL, |left| left.min(SIGNAL_INTERVAL))
        };
        let is_rung = loop {
            if detach(py, || self.inner().wait(Some(interval())))? {
                break true;
            }
            py.check_signals()?;
            if interval().is_zero() {
                break false;
            }
        };
        logs::drain(py)?;
        if is_rung {
            self.inner().clear();
        }
        Ok(is_rung)
    }
}

impl Port {
    /// The engine's port, for starting requests.
    pub fn inner(&self) -> &penstock_engine::Port {
        self.listener.port()
    }

    /// Receives for `request`, which was started on the port, from now on.
    pub fn register(&self, request: &Arc<RequestState>) {
        self.listener.add(request);
    }
}
