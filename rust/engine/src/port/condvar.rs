//! The bell of a blocking thread: a flag, and a condition variable for when somebody sleeps.
//!
//! The engine thread must not wait for a listener, so the lock guards nothing but the listener's way into sleep: it
//! is held between announcing oneself and sleeping, and `ring` touches it only if somebody has announced himself.

#![cfg_attr(
    not(loom),
    expect(clippy::disallowed_types, reason = "a blocking listener has to sleep somewhere")
)]

use std::sync::PoisonError;
use std::time::{Duration, Instant};

use crate::sync::{AtomicBool, Condvar, Mutex, MutexGuard, Ordering, fence};

pub(super) struct Bell {
    rung: AtomicBool,
    /// Somebody is inside `wait`, past his first look at `rung`.
    is_waiting: AtomicBool,
    door: Mutex<()>,
    heard: Condvar,
}

impl Bell {
    pub(super) fn new() -> Self {
        Self {
            rung: AtomicBool::new(false),
            is_waiting: AtomicBool::new(false),
            door: Mutex::new(()),
            heard: Condvar::new(),
        }
    }

    pub(super) fn ring(&self) {
        // Release: whoever takes the ring sees what was pushed before. A swap, because engines may share a port: a
        // plain store would hide the ring it overwrites, a swap passes it on.
        self.rung.swap(true, Ordering::Release);
        // Each side writes its own flag, fences, and reads the other's. The two fences have an order, and the side
        // whose fence is second sees what the other wrote: the listener stays awake or we see him waiting.
        fence(Ordering::SeqCst);
        if self.is_waiting.load(Ordering::Relaxed) {
            // Once the lock is ours the listener is asleep (or gone): it cannot be between its look and its sleep.
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
        fence(Ordering::SeqCst); // between our flag and the look at the other: see `ring`
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
        self.is_waiting.store(false, Ordering::Relaxed); // under the lock; at worst a ring knocks in vain
        rung
    }

    fn enter(&self) -> MutexGuard<'_, ()> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
