//! A counter that threads wait on: they spin first, then yield, then sleep.
//!
//! Waking a sleeping thread takes tens of microseconds and a decode step has some hundred parallel regions, so a waiter
//! does not sleep for about a millisecond; an idle pool must not use the CPU, so it sleeps after that. A longer wait
//! than that for the other workers of a region is usually a wait for a thread that has no CPU, such as the event loop's
//! or a worker that was preempted. So a waiter yields its CPU after some ten microseconds.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

/// Iterations of `spin_loop` before a waiter yields: some ten microseconds.
const SPINS: u32 = 2_000;
/// The number of times that a waiter yields before it sleeps: about a millisecond if no other thread needs the CPU.
const YIELDS: u32 = 2_000;

#[derive(Debug)]
pub(crate) struct WaitableCounter {
    value: AtomicUsize,
    /// Whether a waiter spins and yields before it sleeps.
    spins: bool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl WaitableCounter {
    /// A counter at 0. Threads that wait for it sleep at once unless `spins`.
    pub(super) const fn new(spins: bool) -> Self {
        Self {
            value: AtomicUsize::new(0),
            spins,
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Another counter at 0, with the same kind of wait.
    pub(super) const fn another(&self) -> Self {
        Self::new(self.spins)
    }

    /// Waits until `condition` holds for the value, and returns the value. Writes before the change are visible.
    pub(crate) fn wait(&self, condition: impl Fn(usize) -> bool) -> usize {
        let attempts = if self.spins { SPINS + YIELDS } else { 0 };
        for attempt in 0..attempts {
            // Acquire pairs with the writer's SeqCst (which is also a release).
            let value = self.value.load(Ordering::Acquire);
            if condition(value) {
                return value;
            }
            if attempt < SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        self.sleep(condition)
    }

    #[cold]
    fn sleep(&self, condition: impl Fn(usize) -> bool) -> usize {
        let mut guard = self.lock.lock().unwrap_or_else(|poison| poison.into_inner());
        // SeqCst on both sides, in opposite order: a sleeper increments `sleepers` and then reads the value; a writer
        // changes the value and then reads `sleepers`. At least one of them sees the other, so no wake-up is lost: a
        // writer that sees the sleeper takes the lock, which is free only while the sleeper waits or after it has left.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let value = loop {
            let value = self.value.load(Ordering::SeqCst);
            if condition(value) {
                break value;
            }
            guard = self.changed.wait(guard).unwrap_or_else(|poison| poison.into_inner());
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        value
    }

    pub(super) fn set(&self, value: usize) {
        self.value.store(value, Ordering::SeqCst);
        self.wake();
    }

    /// Adds one and wakes the waiters.
    pub(crate) fn increment(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Adds one if `allowed` holds for the value. Does not wake the waiters: none waits for this change.
    pub(super) fn try_increment(&self, allowed: impl Fn(usize) -> bool) -> bool {
        // Acquire: the caller sees the writes before the value that allowed the increment. Release is not needed: the
        // decrement publishes the caller's own writes.
        let increment = |value| allowed(value).then_some(value + 1);
        self.value.fetch_update(Ordering::Acquire, Ordering::Relaxed, increment).is_ok()
    }

    /// Subtracts one; wakes the waiters if `wakes` holds for the new value.
    pub(super) fn decrement(&self, wakes: impl Fn(usize) -> bool) {
        if wakes(self.value.fetch_sub(1, Ordering::SeqCst) - 1) {
            self.wake();
        }
    }

    /// Clears bits. Does not wake the waiters: none waits for this change.
    pub(super) fn clear_bits(&self, bits: usize) {
        self.value.fetch_and(!bits, Ordering::SeqCst);
    }

    /// The value, for the only thread that changes it.
    pub(super) fn value(&self) -> usize {
        self.value.load(Ordering::Relaxed)
    }

    /// The number of sleeping threads.
    pub(super) fn sleepers(&self) -> usize {
        self.sleepers.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        if self.sleepers() > 0 {
            drop(self.lock.lock().unwrap_or_else(|poison| poison.into_inner()));
            self.changed.notify_all();
        }
    }
}
