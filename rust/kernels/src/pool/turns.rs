//! The turns of the threads that share a pool, in the order of their requests.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A lock that is granted in the order of the requests. (`std::sync::Mutex` can be taken again by the thread that has
/// just released it, any number of times.)
#[derive(Debug, Default)]
pub(super) struct Turns {
    tickets: Mutex<Tickets>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct Tickets {
    /// The ticket of the next request.
    next: u64,
    /// The ticket whose turn it is.
    current: u64,
}

/// A thread's turn on a pool, see [`Pool::turn`](super::Pool::turn). It ends when this is dropped.
#[derive(Debug)]
#[must_use = "the turn ends when it is dropped"]
pub struct Turn(Arc<Turns>);

impl Turns {
    pub(super) fn take(self: &Arc<Self>) -> Turn {
        let mut tickets = self.lock();
        let ticket = tickets.next;
        tickets.next += 1;
        while tickets.current != ticket {
            tickets = self.ended.wait(tickets).unwrap_or_else(PoisonError::into_inner);
        }
        Turn(Arc::clone(self))
    }

    /// The number of threads that wait for their turn.
    pub(super) fn waiting(&self) -> usize {
        let tickets = self.lock();
        (tickets.next - tickets.current).saturating_sub(1) as usize
    }

    fn lock(&self) -> MutexGuard<'_, Tickets> {
        self.tickets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut tickets = self.0.lock();
        tickets.current += 1;
        if tickets.current < tickets.next {
            drop(tickets);
            self.0.ended.notify_all();
        }
    }
}
