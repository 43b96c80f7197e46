//! The bell of a blocking thread: a flag, and a condition variable for a sleeping listener.
//!
//! The engine thread must not wait for a listener, so the lock only guards the listener's way into sleep: the listener
//! holds it from setting `is_waiting` until it sleeps, and `ring` takes it only if `is_waiting` is set.

#![cfg_attr(
    not(feature = "loom"),
    expect(clippy::disallowed_types, reason = "a blocking listener sleeps on it")
)]

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, fence};

pub(super) struct CondvarBell {
    rung: AtomicBool,
    /// A listener is inside `wait`, past its first look at `rung`.
    is_waiting: AtomicBool,
    door: Mutex<()>,
    heard: Condvar,
}

impl CondvarBell {
    pub(super) fn new() -> Self {
        Self {
            rung: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
            door: Mutex::new(()),
            heard: Condvar::new(),
        }
    }

    pub(super) fn ring(&self) {
        // Release: a listener that takes the ring sees the events pushed before. A swap, because engines may share a
        // port: a plain store would hide the ring it overwrites, a swap passes it on.
        self.rung.swap(true, Ordering::Release);
        // Each side writes its own flag, fences, and reads the other's. The side whose fence is second sees what the
        // other wrote: the listener stays awake, or it is seen waiting here.
        fence(Ordering::SeqCst);
        if self.is_waiting.load(Ordering::Relaxed) {
            // With the lock held here, the listener sleeps (or has left): it cannot be between its look and its sleep.
            drop(self.enter());
            self.heard.notify_one();
        }
    }

    pub(super) fn clear(&self) {
        // Acquire pairs with `ring`: the drain that follows sees what was pushed before every ring taken here. A swap,
        // because a plain store could overwrite a ring without acquiring it.
        self.rung.swap(false, Ordering::Acquire);
    }

    pub(super) fn wait(&self, timeout: Option<Duration>) -> bool {
        // Acquire for symmetry with `clear`, which always follows before anything is read.
        if self.rung.load(Ordering::Acquire) {
            return true;
        }
        // A timeout beyond the clock's range is no timeout.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut door = self.enter();
        self.is_waiting.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst); // between writing one flag and reading the other: see `ring`
        let rung = loop {
            if self.rung.load(Ordering::Acquire) {
                break true;
            }
            door = match deadline {
                None => self.heard.wait(door).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break false;
                    }
                    self.heard.wait_timeout(door, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        self.is_waiting.store(false, Ordering::Relaxed); // under the lock; at worst a ring takes the lock needlessly
        rung
    }

    fn enter(&self) -> MutexGuard<'_, ()> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
