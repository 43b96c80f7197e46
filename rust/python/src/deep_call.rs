//! Calls of Python code that recurses as deep as its input is nested, such as the compiler of templates.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pyo3::prelude::*;

use crate::detach::detach_deep;
use crate::errors::Error;
use crate::errors::exiting;

/// The interval at which the thread of the caller checks for signals.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(50);

/// Bytes of the stack of a thread that calls deep functions itself: the default of glibc is twice as much.
const LARGE_STACK_BYTES: usize = 4 << 20;

/// See `_core.pyi`.
#[pyfunction]
pub fn has_large_stack() -> bool {
    thread_local!(static HAS_LARGE_STACK: bool = stack_bytes() >= LARGE_STACK_BYTES);
    HAS_LARGE_STACK.with(|has| *has)
}

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

/// The size of the stack of the calling thread; 0 if the system does not say it.
#[cfg(target_os = "linux")]
fn stack_bytes() -> usize {
    use std::mem::MaybeUninit;

    let mut attributes = MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut num_bytes = 0;
    // SAFETY: a call that returns 0 has initialised the attributes of this thread, which are read and destroyed then.
    unsafe {
        if libc::pthread_getattr_np(libc::pthread_self(), attributes.as_mut_ptr()) == 0 {
            libc::pthread_attr_getstacksize(attributes.as_ptr(), &raw mut num_bytes);
            libc::pthread_attr_destroy(attributes.as_mut_ptr());
        }
    }
    num_bytes
}

#[cfg(target_os = "macos")]
fn stack_bytes() -> usize {
    // SAFETY: the thread is the calling one.
    unsafe { libc::pthread_get_stacksize_np(libc::pthread_self()) }
}

#[cfg(windows)]
fn stack_bytes() -> usize {
    let [mut low, mut high] = [0; 2];
    // SAFETY: the system writes two numbers.
    unsafe { windows_sys::Win32::System::Threading::GetCurrentThreadStackLimits(&mut low, &mut high) };
    high - low
}
