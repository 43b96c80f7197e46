//! The bell in loom's models, where a counter stands for the descriptor.

use std::io;
use std::time::Duration;

use super::RawBell;
use crate::sync::{AtomicUsize, Ordering};

/// An eventfd: a write adds, a read takes everything, and a wait sleeps while it is zero. The kernel orders memory
/// as a lock does, hence acquire and release.
pub(crate) struct DescriptorBell {
    counter: AtomicUsize,
}

impl DescriptorBell {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { counter: AtomicUsize::new(0) })
    }

    pub(crate) fn fd(&self) -> Option<RawBell> {
        None
    }

    pub(crate) fn ring(&self) {
        self.counter.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn clear(&self) {
        self.counter.swap(0, Ordering::AcqRel);
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        while self.counter.load(Ordering::Acquire) == 0 {
            if timeout.is_some() {
                return false;
            }
            loom::thread::yield_now();
        }
        true
    }
}
