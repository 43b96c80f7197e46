//! The end of the engine thread, for callers that wait for it on a [`Port`](crate::Port).

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::port::Bell;
use crate::sync::{AtomicBool, Ordering, fence};

/// Rings the bells of its listeners once the engine thread has ended.
pub(crate) struct Ending {
    is_over: AtomicBool,
    add_listener: Sender<Bell>,
    listeners: Receiver<Bell>,
}

impl Default for Ending {
    fn default() -> Self {
        let (add_listener, listeners) = unbounded();
        Self { is_over: AtomicBool::new(false), add_listener, listeners }
    }
}

impl Ending {
    /// Rings `bell` at the end, or at once if the thread has ended.
    pub(crate) fn notify(&self, bell: Bell) {
        if self.is_over.load(Ordering::Acquire) {
            return bell.ring(); // and nothing is left in the channel
        }
        let _ = self.add_listener.send(bell); // never disconnected: `self` has both ends
        // Here: add a listener, fence, look at the flag. In `complete`: set the flag, fence, take the listeners. The
        // side whose fence is second sees what the other did, so that the bell is rung at least once.
        fence(Ordering::SeqCst);
        if self.is_over.load(Ordering::Acquire) {
            self.ring_listeners();
        }
    }

    /// To be called once, by the engine thread, after it has dropped everything.
    pub(crate) fn complete(&self) {
        self.is_over.store(true, Ordering::Release);
        fence(Ordering::SeqCst); // see `notify`
        self.ring_listeners();
    }

    fn ring_listeners(&self) {
        self.listeners.try_iter().for_each(|bell| bell.ring());
    }
}
