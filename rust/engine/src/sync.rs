//! The primitives whose interleavings are model-checked: the standard library's, or loom's with the feature `loom`.
//!
//! Only `result_queue`, `port`, `ending` and the mailbox's flags use them; everything else in the crate is owned by one
//! thread.

#[cfg(feature = "loom")]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{
        Arc, Condvar, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence},
    },
};
#[cfg(not(feature = "loom"))]
#[expect(clippy::disallowed_types, reason = "the listener of a condvar bell sleeps on it")]
pub(crate) use std::sync::{
    Arc, Condvar, Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence},
};

/// `std::cell::UnsafeCell` behind loom's closure interface, so that both are used the same way.
#[cfg(not(feature = "loom"))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(feature = "loom"))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
        read(self.0.get())
    }

    pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
        write(self.0.get())
    }
}
