//! Passes log records to Python's `logging`. No thread of the engine waits for the interpreter.
//!
//! ```text
//! log::error! on any thread ── try_send ──> bounded queue ── drain, in calls from Python ──> logger "penstock"
//! ```
//!
//! If the queue is full, records are dropped and counted; the next `drain` logs the count.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

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
    /// The source file and the line.
    place: (&'static str, u32),
    /// The name of the thread.
    thread: String,
    /// Seconds since 1970.
    created: f64,
}

impl Record {
    fn new(level: Level, message: String, place: (&'static str, u32)) -> Self {
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let thread = std::thread::current().name().unwrap_or_default().to_owned();
        Self { level, message, place, thread, created }
    }
}

impl Log for Queue {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // Records of dependencies are excluded, because they may contain prompts.
        metadata.target().starts_with("penstock") && metadata.level() <= log::max_level()
    }

    fn log(&self, record: &log::Record<'_>) {
        if self.enabled(record.metadata()) {
            let place = (record.file_static().unwrap_or_default(), record.line().unwrap_or_default());
            let record = Record::new(record.level(), record.args().to_string(), place);
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
    for record in QUEUE.records.try_iter().take(CAPACITY) {
        handle(&logger, record)?;
    }
    let dropped = QUEUE.dropped.swap(0, Ordering::Relaxed);
    if dropped > 0 {
        let message = format!("{dropped} log records were dropped; the queue holds {CAPACITY}");
        handle(&logger, Record::new(Level::Warn, message, (file!(), line!())))?;
    }
    Ok(())
}

/// Passes a record on, with the time, the place and the thread of its creation.
fn handle(logger: &Bound<'_, PyAny>, record: Record) -> PyResult<()> {
    let (py, Record { level, message, place: (file, line), thread, created }) = (logger.py(), record);
    let level = number(level);
    if !logger.call_method1(intern!(py, "isEnabledFor"), (level,))?.is_truthy()? {
        return Ok(());
    }
    let arguments = (logger.getattr(intern!(py, "name"))?, level, file, line, "%s", (message,), py.None());
    let record = logger.call_method1(intern!(py, "makeRecord"), arguments)?;
    let delivered: f64 = record.getattr(intern!(py, "created"))?.extract()?;
    let relative: f64 = record.getattr(intern!(py, "relativeCreated"))?.extract()?;
    record.setattr(intern!(py, "created"), created)?;
    record.setattr(intern!(py, "msecs"), (created.fract() * 1e3).floor())?;
    record.setattr(intern!(py, "relativeCreated"), relative - (delivered - created) * 1e3)?;
    record.setattr(intern!(py, "threadName"), thread)?;
    record.setattr(intern!(py, "thread"), py.None())?;
    logger.call_method1(intern!(py, "handle"), (record,)).map(drop)
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
