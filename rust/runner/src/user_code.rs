//! Calls into grammars and logits processors: their errors and panics fail one request and nothing else.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `run`, which belongs to the part called `name`. After a failure that part must not be used any more.
pub(crate) fn catch_user_code<T>(name: &str, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|text| format!("the {name} failed: {text}")),
        Err(panic) => Err(format!("the {name} panicked: {}", panic_text(panic.as_ref()))),
    }
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no message)")
}
