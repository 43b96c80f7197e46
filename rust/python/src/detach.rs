//! The one way out of the interpreter: everything that can take longer than a few microseconds runs in [`detach`].

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::prelude::*;

use crate::errors::Error;

/// Runs `work` with the interpreter released. A panic in it becomes an error that says it is a defect.
///
/// Rule: no lock of ours is held while attaching, so a thread that waits for such a lock while attached cannot
/// deadlock with one that holds it detached.
pub fn detach<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> Result<T, Error> {
    py.detach(|| catch(work)).map_err(Error::Defect)
}

/// Runs `work`; a panic comes back as its message.
pub fn catch<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().map(ToString::to_string);
        text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
    })
}
