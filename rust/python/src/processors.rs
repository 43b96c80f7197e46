//! `logits_processors`: the user's own functions between the model and the choice of a token.
//!
//! They are the one thing that a thread of the engine attaches to the interpreter for: the device thread, for the
//! length of a call, with no lock held. References to callables may be dropped on any thread; PyO3 gives them back when
//! next somebody is attached.
//!
//! What waits for a step of an engine would wait in a processor for the thread it runs on, and so for ever. So a mark on
//! the thread lasts as long as the call, and whatever waits asks [`check_may_wait`] first.
//!
//! A processor may refer to its own request. So a request's Python object alone owns its callables, where the collector
//! of cycles sees them; the engine knows the places that they are in, and finds those empty afterwards.
//!
//! The interpreter ends threads that come back to it while it goes away, which would end the process badly. So its exit
//! closes a gate first and waits for the call that is inside, though not for ever; later calls fail.

use std::cell::Cell;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_engine::request::LogitsProcessor;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyList, PyTuple};

use crate::errors::Error;
use crate::fields::Field;
use crate::tensor::{Tensor, read_vector};

/// Most processors of a request.
const MAX_PROCESSORS: usize = 16;
const GOING_AWAY: &str = "the interpreter is going away";
const REQUEST_GONE: &str = "the request was dropped";
/// Longest that the interpreter's exit waits for a call, and how often it looks for signals meanwhile.
const MAX_EXIT_WAIT: Duration = Duration::from_secs(5);
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

static GATE: Mutex<Gate> = Mutex::new(Gate { is_closed: false, inside: 0 });
static LEFT: Condvar = Condvar::new();
/// The process that the last call was in. A fork copies the gate, but none of the threads that are inside.
static PROCESS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// Whether a processor is being called on this thread.
    static IS_CALLING: Cell<bool> = const { Cell::new(false) };
}

/// An error on a thread that is inside a processor.
pub fn check_may_wait() -> PyResult<()> {
    if IS_CALLING.get() {
        return Err(PyRuntimeError::new_err("the engine cannot be waited for inside a logits processor"));
    }
    Ok(())
}

/// What calls go through.
struct Gate {
    is_closed: bool,
    inside: usize,
}

impl Gate {
    fn lock() -> MutexGuard<'static, Self> {
        GATE.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// From now on the exit of the interpreter closes the gate.
    fn watch_exit(py: Python<'_>) -> PyResult<()> {
        static WATCHED: PyOnceLock<()> = PyOnceLock::new();
        WATCHED.get_or_try_init(py, || {
            let close =
                |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| Self::close(arguments.py());
            let close = PyCFunction::new_closure(py, None, None, close)?;
            py.import("atexit")?.call_method1("register", (close,)).map(drop)
        })?;
        Ok(())
    }

    fn close(py: Python<'_>) -> PyResult<()> {
        if PROCESS.load(Ordering::Relaxed) != process::id() {
            return Ok(());
        }
        Self::lock().is_closed = true;
        let begin = Instant::now();
        while !py.detach(Self::wait) && begin.elapsed() < MAX_EXIT_WAIT {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Waits a moment; says whether nobody is inside.
    fn wait() -> bool {
        let waited = LEFT.wait_timeout_while(Self::lock(), SIGNAL_INTERVAL, |gate| gate.inside > 0);
        waited.unwrap_or_else(PoisonError::into_inner).0.inside == 0
    }
}

/// A call that the gate has let in.
struct Inside;

impl Inside {
    fn enter() -> Option<Self> {
        let mut gate = Gate::lock();
        if gate.is_closed {
            return None;
        }
        if PROCESS.swap(process::id(), Ordering::Relaxed) != process::id() {
            gate.inside = 0;
        }
        gate.inside += 1;
        IS_CALLING.set(true);
        Some(Self)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        IS_CALLING.set(false);
        Gate::lock().inside -= 1;
        LEFT.notify_all();
    }
}

/// Callables, called one after the other.
#[derive(Clone, Debug, Default)]
pub struct Processors(pub Vec<Arc<Py<PyAny>>>);

impl Processors {
    pub fn read(field: Field, value: &Bound<'_, PyAny>) -> Result<Self, Error> {
        let expected = "a sequence of callables";
        let callable = |field: Field, item: &Bound<'_, PyAny>| {
            if item.is_callable() {
                Ok(Arc::new(item.clone().unbind()))
            } else {
                Err(field.refuse(item, expected))
            }
        };
        Gate::watch_exit(value.py())?;
        field.items(value, MAX_PROCESSORS, "processors", expected, callable).map(Self)
    }

    /// References of their own for one request.
    pub fn owned(&self, py: Python<'_>) -> Owned {
        let place = |callable: &Arc<Py<PyAny>>| Arc::new(Place(Mutex::new(Some(callable.clone_ref(py)))));
        Owned(self.0.iter().map(place).collect())
    }
}

/// The callables of one request, for the one Python object that shows them to the collector. No reference to any of them
/// is elsewhere but while it is called, when the collector finds one more than it can account for and leaves it alone.
#[derive(Default)]
pub struct Owned(Vec<Arc<Place>>);

impl Owned {
    /// As the engine knows them.
    pub fn for_engine(&self) -> Vec<Arc<dyn LogitsProcessor>> {
        self.0
            .iter()
            .map(|place| Arc::new(Processor(Arc::clone(place))) as Arc<dyn LogitsProcessor>)
            .collect()
    }

    /// As parameters know them.
    pub fn listed(&self, py: Python<'_>) -> Processors {
        Processors(self.0.iter().filter_map(|place| place.get(py)).map(Arc::new).collect())
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().try_for_each(|place| visit.call(&*place.lock()))
    }

    /// Empties all places; what was there is dropped with no lock held, for that may run code of the user's.
    pub fn clear(&self) {
        self.0.iter().for_each(|place| drop(place.take()));
    }
}

impl Drop for Owned {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Where a callable is. Locked by who is attached alone, and for no longer than it takes to copy a reference.
#[derive(Debug)]
struct Place(Mutex<Option<Py<PyAny>>>);

impl Place {
    fn get(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.lock().as_ref().map(|callable| callable.clone_ref(py))
    }

    fn take(&self) -> Option<Py<PyAny>> {
        self.lock().take()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Py<PyAny>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug)]
struct Processor(Arc<Place>);

impl LogitsProcessor for Processor {
    fn process(&self, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> Result<(), String> {
        let Some(_inside) = Inside::enter() else { return Err(GOING_AWAY.to_owned()) };
        let called = Python::try_attach(|py| {
            let callable = self.0.get(py).ok_or_else(|| REQUEST_GONE.to_owned())?;
            call(callable.bind(py), prompt, generated, logits).map_err(|error| {
                let trace = error.traceback(py).and_then(|trace| trace.format().ok()).unwrap_or_default();
                // The library has another name than the crate, and its records would not be let through.
                log::warn!(target: "penstock_python", "a logits processor raised:\n{trace}{error}");
                match place_of(py, &error) {
                    Some(place) => format!("{error} ({place})"),
                    None => error.to_string(),
                }
            })
        });
        called.unwrap_or_else(|| Err(GOING_AWAY.to_owned()))
    }
}

fn call(callable: &Bound<'_, PyAny>, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> PyResult<()> {
    let py = callable.py();
    let tokens = PyList::new(py, [prompt, generated].concat())?;
    // Whoever keeps the tensor after the call has memory of its own.
    let tensor = Bound::new(py, Tensor::writable(vec![logits.len()], logits.to_vec()))?;
    let returned = callable.call1((tokens, &tensor))?;
    if returned.is_none() || returned.is(&tensor) {
        tensor.get().copy_to(logits);
    } else {
        read_vector(&returned, logits)?;
    }
    match logits.iter().position(|logit| logit.is_nan() || *logit == f32::INFINITY) {
        Some(id) => Err(PyValueError::new_err(format!("the logit of token {id} is {}", logits[id]))),
        None => Ok(()),
    }
}

/// File and line of the frame that raised, where one of Python did.
fn place_of(py: Python<'_>, error: &PyErr) -> Option<String> {
    let mut trace = error.traceback(py)?.into_any();
    while let Some(next) = trace.getattr("tb_next").ok().filter(|next| !next.is_none()) {
        trace = next;
    }
    let code = trace.getattr("tb_frame").and_then(|frame| frame.getattr("f_code")).ok()?;
    let file: String = code.getattr("co_filename").and_then(|file| file.extract()).ok()?;
    let line: usize = trace.getattr("tb_lineno").and_then(|line| line.extract()).ok()?;
    Some(format!("{file}, line {line}"))
}

impl PartialEq for Processors {
    /// As Python compares them: two bound methods of one object are equal.
    fn eq(&self, other: &Self) -> bool {
        let are_equal = |py: Python<'_>| {
            self.0.iter().zip(&other.0).all(|(one, other)| one.bind(py).eq(other.bind(py)).unwrap_or(false))
        };
        self.0.len() == other.0.len() && Python::attach(are_equal)
    }
}

impl<'py> IntoPyObject<'py> for &Processors {
    type Target = PyTuple;
    type Output = Bound<'py, PyTuple>;
    type Error = PyErr;

    fn into_pyobject(self, py: Python<'py>) -> Result<Self::Output, Self::Error> {
        PyTuple::new(py, self.0.iter().map(|processor| processor.bind(py)))
    }
}
