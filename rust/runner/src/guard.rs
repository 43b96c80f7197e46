//! Code of others that runs here, grammars and logits processors: what goes wrong there, a panic too, becomes the reason
//! why one request cannot go on.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Calls `run`, which belongs to `who`. After a failure nothing of `who` is to be used any more.
pub(crate) fn guarded<T>(who: &str, run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(result) => result.map_err(|text| format!("the {who} failed: {text}")),
        Err(panic) => Err(format!("a defect in the {who}: {}", panic_text(panic.as_ref()))),
    }
}

/// What was said when it came to a panic.
pub(crate) fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no message)")
}
