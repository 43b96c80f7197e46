//! What the engine logs, on its way to Python's `logging`: no thread of the engine waits for the interpreter.
//!
//! ```text
//! log::error! on any thread ── try_send ──> bounded queue ── drain, where Python calls anyway ──> logger "penstock"
//! ```
//!
//! A record that finds the queue full is counted instead; the count is reported with what is drained next.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};
use log::{Level, LevelFilter, Log, Metadata};
use pyo3::exceptions::PyException;
use pyo3::intern;
use pyo3::prelude::*;

/// Most records that wait to be drained.
const CAPACITY: usize = 256;

static QUEUE: LazyLock<Queue> = LazyLock::new(|| {
    let (sender, records) = bounded(CAPACITY);
    Queue { sender, records, dropped: AtomicU64::new(0) }
});

struct Queue {
    sender: Sender<Record>,
    records: Receiver<Record>,
    /// Relaxed everywhere: a count that orders nothing.
    dropped: AtomicU64,
}

struct Record {
    level: Level,
    message: String,
}

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Others' records may quote what passes through them: prompts, for a start.
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

/// Lets through from now on what the logger lets through; below that, a record costs one comparison.
pub fn listen(py: Python<'_>) -> PyResult<()> {
    let level: i64 = logger(py)?.call_method0(intern!(py, "getEffectiveLevel"))?.extract()?;
    let allowed = Level::iter().filter(|allowed| number(*allowed) >= level).max();
    let _ = log::set_logger(&*QUEUE); // an error says that this was done before
    log::set_max_level(allowed.map_or(LevelFilter::Off, |level| level.to_level_filter()));
    Ok(())
}

/// Hands over what was logged. Next to nothing when that is nothing. What a handler raises is printed, and raised here
/// only if it is no `Exception`: Ctrl-C meets the handlers' code as well as any other.
pub fn drain(py: Python<'_>) -> PyResult<()> {
    if QUEUE.records.is_empty() {
        return Ok(());
    }
    hand_over(py).or_else(|error| {
        if !error.is_instance_of::<PyException>(py) {
            return Err(error);
        }
        error.write_unraisable(py, None);
        Ok(())
    })
}

fn hand_over(py: Python<'_>) -> PyResult<()> {
    let logger = logger(py)?;
    let log = |level, message: &str| logger.call_method1(intern!(py, "log"), (level, "%s", message));
    for Record { level, message } in QUEUE.records.try_iter().take(CAPACITY) {
        log(number(level), &message)?;
    }
    let dropped = QUEUE.dropped.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        log(number(Level::Warn), &format!("{dropped} records were dropped: more than {CAPACITY} waited"))?;
    }
    Ok(())
}

fn logger(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    py.import(intern!(py, "logging"))?.call_method1(intern!(py, "getLogger"), (intern!(py, "penstock"),))
}

/// The level as Python counts; below its own lowest there is room for one.
fn number(level: Level) -> i64 {
    match level {
        Level::Error => 40,
        Level::Warn => 30,
        Level::Info => 20,
        Level::Debug => 10,
        Level::Trace => 5,
    }
}
