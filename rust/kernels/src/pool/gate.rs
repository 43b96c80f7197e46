//! One number that threads wait on: first by spinning, then asleep.
//!
//! Waking a sleeping thread costs tens of microseconds and a decode step has some hundred parallel regions, so a
//! waiter spins for about a millisecond; an idle pool must use no CPU, so after that it sleeps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

/// Rounds of `spin_loop` before a waiter sleeps: about a millisecond.
pub(super) const SPINS: u32 = 40_000;

#[derive(Debug)]
pub(super) struct Gate {
    value: AtomicUsize,
    spins: u32,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    changed: Condvar,
}

impl Gate {
    /// A gate at 0 whose waiters look `spins` times before they sleep.
    pub(super) const fn new(spins: u32) -> Self {
        Self {
            value: AtomicUsize::new(0),
            spins,
            sleepers: AtomicUsize::new(0),
            lock: Mutex::new(()),
            changed: Condvar::new(),
        }
    }

    /// Waits until `passes` likes the value, and returns it. Everything written before the change is visible.
    pub(super) fn wait(&self, passes: impl Fn(usize) -> bool) -> usize {
        for _ in 0..self.spins {
            // Acquire pairs with the writer's SeqCst (which is also a release).
            let value = self.value.load(Ordering::Acquire);
            if passes(value) {
                return value;
            }
            std::hint::spin_loop();
        }
        self.sleep(passes)
    }

    #[cold]
    fn sleep(&self, passes: impl Fn(usize) -> bool) -> usize {
        let mut guard = self.lock.lock().unwrap_or_else(|poison| poison.into_inner());
        // SeqCst on both sides, in opposite order: a sleeper announces itself and then reads the value; a writer
        // changes the value and then reads the count. At least one of them sees the other, so no wake is lost: a
        // writer that sees the sleeper takes the lock, which is free only once the sleeper waits (or has left).
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let value = loop {
            let value = self.value.load(Ordering::SeqCst);
            if passes(value) {
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

    /// Adds one and wakes whoever waits.
    pub(super) fn increment(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        self.wake();
    }

    /// Adds one if the value `allows` it. Nobody waits for that, so nobody is woken.
    pub(super) fn try_increment(&self, allows: impl Fn(usize) -> bool) -> bool {
        // Acquire: whoever is let in sees what was written before the value that let him in. Release is not needed: what he
        // writes is published when he subtracts again.
        let increment = |value| allows(value).then_some(value + 1);
        self.value.fetch_update(Ordering::Acquire, Ordering::Relaxed, increment).is_ok()
    }

    /// Subtracts one; waiters are woken if `matters` likes what that leaves.
    pub(super) fn decrement(&self, matters: impl Fn(usize) -> bool) {
        if matters(self.value.fetch_sub(1, Ordering::SeqCst) - 1) {
            self.wake();
        }
    }

    /// Clears bits. Nobody waits for that, so nobody is woken.
    pub(super) fn clear_bits(&self, bits: usize) {
        self.value.fetch_and(!bits, Ordering::SeqCst);
    }

    /// The value now, for the only thread that changes it.
    pub(super) fn value(&self) -> usize {
        self.value.load(Ordering::Relaxed)
    }

    /// Threads asleep at this gate now.
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
