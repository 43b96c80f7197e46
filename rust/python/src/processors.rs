//! `logits_processors`: Python callables that modify the logits before sampling.
//!
//! Only these calls attach a thread of the engine to the interpreter: the device thread, for the duration of the call,
//! without holding a lock. References to callables may be dropped on any thread; PyO3 releases them when a thread
//! attaches next.
//!
//! A processor that waits for a step would block the thread that runs the steps. So a thread-local flag is set during
//! a call, and every function that waits calls [`check_may_wait`] first.
//!
//! A processor may refer to its own parameters or request. So each of those Python objects owns its callables, where
//! the garbage collector sees the cycle. The engine has the slots of the request that contain them; the slots are empty
//! once the object is gone.
//!
//! During its exit the interpreter blocks or ends threads that attach to it, which could crash the process. So an exit
//! handler closes a gate and waits, for a limited time, until no call is in progress; later calls fail.

use std::cell::Cell;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use penstock_engine::request::LogitsProcessor;
use penstock_frontend::field::{Field, Read, ReadError};
use penstock_frontend::params::SamplingParams;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::pyclass::{PyTraverseError, PyVisit};
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyDict, PyList, PyTuple};

use crate::convert::ToPython;
use crate::tensor::{Tensor, read_vector};
use crate::value::PyValue;

const EXITING: &str = "the interpreter is exiting";
const REQUEST_GONE: &str = "the request was dropped";
/// Maximum time that the exit of the interpreter waits for calls, and the interval at which it checks for signals.
const MAX_EXIT_WAIT: Duration = Duration::from_secs(5);
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

static GATE: CallGate = CallGate(AtomicU64::new(0));
/// The thread in which the interpreter exits. The end of a call unparks it.
static EXIT_THREAD: OnceLock<Thread> = OnceLock::new();

thread_local! {
    /// Whether this thread is calling a processor.
    static IS_CALLING: Cell<bool> = const { Cell::new(false) };
}

/// Fails on a thread that is calling a processor.
pub fn check_may_wait() -> PyResult<()> {
    if IS_CALLING.get() {
        return Err(PyRuntimeError::new_err("a logits processor cannot wait for the engine"));
    }
    Ok(())
}

/// Counts the calls in progress and rejects calls after the exit of the interpreter has begun.
///
/// Not a lock: a fork could copy a locked one, whose owner the child does not have.
struct CallGate(AtomicU64);

/// A value of the gate: from the highest bit on 32 bits of the process, a bit that says whether the gate is closed, and
/// the number of calls. A fork copies the gate, but not the threads of the calls: a value of another process counts as
/// an open gate without calls.
#[derive(Clone, Copy)]
struct GateState(u64);

impl GateState {
    const CLOSED: u64 = 1 << 31;

    fn of_process(self, process: u32) -> Self {
        if self.process() == process { self } else { Self(u64::from(process) << 32) }
    }

    fn process(self) -> u32 {
        (self.0 >> 32) as u32
    }

    fn is_closed(self) -> bool {
        self.0 & Self::CLOSED != 0
    }

    fn num_calls(self) -> u64 {
        self.0 & (Self::CLOSED - 1)
    }
}

impl CallGate {
    /// Replaces the value by one for this process, unless `change` returns `None`. Returns whether it was replaced.
    fn change(&self, change: impl Fn(GateState) -> Option<u64>) -> bool {
        let own = |value| GateState(value).of_process(process::id());
        // Acquire and release: the end of a call comes before the exit that has waited for it.
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, |value| change(own(value))).is_ok()
    }

    /// Counts a call; false if the gate is closed.
    fn enter(&self) -> bool {
        self.change(|state| (!state.is_closed()).then_some(state.0 + 1))
    }

    /// Counts the end of a call that `process` began.
    fn leave(&self, process: u32) {
        self.change(|state| (state.process() == process && state.num_calls() > 0).then(|| state.0 - 1));
        if let Some(thread) = EXIT_THREAD.get() {
            thread.unpark();
        }
    }

    /// Registers the exit handler, once.
    fn register_exit(py: Python<'_>) -> PyResult<()> {
        static REGISTERED: PyOnceLock<()> = PyOnceLock::new();
        REGISTERED.get_or_try_init(py, || {
            let close =
                |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| GATE.close(arguments.py());
            let close = PyCFunction::new_closure(py, None, None, close)?;
            py.import("atexit")?.call_method1("register", (close,)).map(drop)
        })?;
        Ok(())
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let _ = EXIT_THREAD.set(thread::current()); // an interpreter exits once
        self.change(|state| Some(state.0 | GateState::CLOSED));
        let begin = Instant::now();
        while !py.detach(|| self.wait()) && begin.elapsed() < MAX_EXIT_WAIT {
            py.check_signals()?;
        }
        Ok(())
    }

    /// Waits up to [`SIGNAL_INTERVAL`] for the end of a call. Returns whether no call is in progress.
    fn wait(&self) -> bool {
        let has_calls = || GateState(self.0.load(Ordering::Acquire)).num_calls() > 0;
        if has_calls() {
            thread::park_timeout(SIGNAL_INTERVAL);
        }
        !has_calls()
    }
}

/// A call in progress.
struct CallGuard {
    process: u32,
}

impl CallGuard {
    /// `None` if the gate is closed.
    fn enter() -> Option<Self> {
        if !GATE.enter() {
            return None;
        }
        IS_CALLING.set(true);
        Some(Self { process: process::id() })
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        IS_CALLING.set(false);
        GATE.leave(self.process);
    }
}

/// Callables in the order of their calls, owned by one Python object, which reports them to the garbage collector. No
/// other reference exists, except during a call; the collector then finds an additional reference and keeps the object.
#[derive(Debug, Default)]
pub struct Processors(Vec<Arc<CallableSlot>>);

impl Processors {
    /// Reads the value of the parameter.
    pub fn read<'py>(value: &PyValue<'py>) -> Read<Self, PyValue<'py>> {
        let expected = "a sequence of callables";
        let callable = |field: Field, item: &PyValue<'py>| match item.0.is_callable() {
            true => Ok(CallableSlot::new(item.0.clone().unbind())),
            false => Err(field.refuse(item, expected)),
        };
        CallGate::register_exit(value.0.py()).map_err(ReadError::Raised)?;
        let field = Field::new("logits_processors");
        field.items(value, SamplingParams::MAX_LOGITS_PROCESSORS, "processors", expected, callable).map(Self)
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The processors that the engine calls. They have no references of their own.
    pub fn for_engine(&self) -> Vec<Arc<dyn LogitsProcessor>> {
        self.0.iter().map(|slot| Arc::new(Processor(Arc::clone(slot))) as Arc<dyn LogitsProcessor>).collect()
    }

    /// The callables that are left.
    fn callables(&self, py: Python<'_>) -> Vec<Py<PyAny>> {
        self.0.iter().filter_map(|slot| slot.get(py)).collect()
    }

    pub fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.0.iter().try_for_each(|slot| visit.call(&*slot.lock()))
    }

    /// Empties all slots. The callables are dropped without a lock, because that may run user code.
    pub fn clear(&self) {
        self.0.iter().for_each(|slot| drop(slot.take()));
    }
}

impl Clone for Processors {
    /// New references, because each Python object reports its own.
    fn clone(&self) -> Self {
        if self.0.is_empty() {
            return Self::default();
        }
        Python::attach(|py| Self(self.callables(py).into_iter().map(CallableSlot::new).collect()))
    }
}

impl Drop for Processors {
    /// The engine may still have the slots.
    fn drop(&mut self) {
        self.clear();
    }
}

/// The slot of one callable. Only attached threads lock it, and only to copy or take the reference.
#[derive(Debug)]
struct CallableSlot(Mutex<Option<Py<PyAny>>>);

impl CallableSlot {
    fn new(callable: Py<PyAny>) -> Arc<Self> {
        Arc::new(Self(Mutex::new(Some(callable))))
    }

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
struct Processor(Arc<CallableSlot>);

impl LogitsProcessor for Processor {
    fn process(&self, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> Result<(), String> {
        let Some(_guard) = CallGuard::enter() else { return Err(EXITING.to_owned()) };
        let called = Python::try_attach(|py| {
            let callable = self.0.get(py).ok_or_else(|| REQUEST_GONE.to_owned())?;
            call(callable.bind(py), prompt, generated, logits).map_err(|error| {
                let trace = error.traceback(py).and_then(|trace| trace.format().ok()).unwrap_or_default();
                // The target is set because the library's name differs from the crate's, which the filter expects.
                log::warn!(target: "penstock_python", "a logits processor raised:\n{trace}{error}");
                match location_of(py, &error) {
                    Some(location) => format!("{error} ({location})"),
                    None => error.to_string(),
                }
            })
        });
        called.unwrap_or_else(|| Err(EXITING.to_owned()))
    }
}

fn call(callable: &Bound<'_, PyAny>, prompt: &[u32], generated: &[u32], logits: &mut [f32]) -> PyResult<()> {
    let py = callable.py();
    let tokens = PyList::new(py, [prompt, generated].concat())?;
    // A copy, because the processor may keep the tensor after the call.
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

/// File and line of the frame that raised the error, if it was a Python frame.
fn location_of(py: Python<'_>, error: &PyErr) -> Option<String> {
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
    /// Compares with Python's `==`: two references to one bound method are equal.
    fn eq(&self, other: &Self) -> bool {
        let are_equal = |py: Python<'_>| {
            let (these, others) = (self.callables(py), other.callables(py));
            let mut pairs = these.iter().zip(&others);
            these.len() == others.len()
                && pairs.all(|(one, other)| one.bind(py).eq(other.bind(py)).unwrap_or(false))
        };
        self.0.len() == other.0.len() && Python::attach(are_equal)
    }
}

impl ToPython for Processors {
    fn to_python<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        Ok(PyTuple::new(py, self.callables(py))?.into_any())
    }
}
