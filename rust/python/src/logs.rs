//! Passes log records to Python's `logging`. No thread of the engine waits for the interpreter.
//!
//! ```text
//! log::error! on any thread ── try_send ──> bounded queue ── drain, in calls from Python ──> logger "penstock"
//! ```
//!
//! If the queue is full, records are dropped and counted; the next `drain` logs the count.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};
use log::{Level, LevelFilter, Log, Metadata};
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;

/// Maximum number of queued records.
const CAPACITY: usize = 256;

static QUEUE: LazyLock<Queue> = LazyLock::new(|| {
    let (sender, records) = bounded(CAPACITY);
    Queue { sender, records, dropped: AtomicU64::new(0) }
});

struct Queue {
    sender: Sender<Record>,
    records: Receiver<Record>,
    /// All accesses are relaxed: the count does not order other memory accesses.
    dropped: AtomicU64,
}

struct Record {
    level: Level,
    message: String,
}

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Records of dependencies are excluded, because they may contain prompts.
        metadata.target().starts_with("penstock") && metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let record = Record { level: record.level(), message: record.args().to_string() };
            if self.sender.try_send(record).is_err() {
                self.dropped.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn flush(&self) {}
}

/// Sets the level to that of the Python logger. A record below the level costs one comparison.
pub fn listen(py: Python<'_>) -> PyResult<()> {
    let level: i64 = logger(py)?.call_method0(intern!(py, "getEffectiveLevel"))?.extract()?;
    let allowed = Level::iter().filter(|allowed| number(*allowed) >= level).max();
    let _ = log::set_logger(&*QUEUE); // fails if the logger is already set
    log::set_max_level(allowed.map_or(LevelFilter::Off, |level| level.to_level_filter()));
    Ok(())
}

/// Passes the queued records to the Python logger; cheap if there are none. An `Exception` of a log handler is printed;
/// other exceptions, such as `KeyboardInterrupt`, are returned.
pub fn drain(py: Python<'_>) -> PyResult<()> {
    if QUEUE.records.is_empty() {
        return Ok(());
    }
    deliver(py).or_else(|error| {
        if !error.is_instance_of::<PyException>(py) {
            return Err(error);
        }
        error.write_unraisable(py, None);
        Ok(())
    })
}

fn deliver(py: Python<'_>) -> PyResult<()> {
    let logger = logger(py)?;
    let log = |level, message: &str| logger.call_method1(intern!(py, "log"), (level, "%s", message));
    for Record { level, message } in QUEUE.records.try_iter().take(CAPACITY) {
        log(number(level), &message)?;
    }
    let dropped = QUEUE.dropped.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        log(number(Level::Warn), &format!("{dropped} log records were dropped; the queue holds {CAPACITY}"))?;
    }
    Ok(())
}

fn logger(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import(intern!(py, "logging"))?.call_method1(intern!(py, "getLogger"), (intern!(py, "penstock"),))
}

/// The level as a number of Python's `logging`, which has no level for `Trace`.
fn number(level: Level) -> i64 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}
