//! Where results are heard: a [`Port`] belongs to one listener (an event loop or a blocking thread), and every
//! request started on it shares its bell.
//!
//! The order is law. The engine pushes, then rings; the listener clears the bell, then drains its consumers:
//!
//! ```text
//! engine     push push push ─ ring            (once per touched port and turn, whatever was rung before)
//! listener                      wait ─ clear ─ pop pop pop ─ wait
//! ```
//!
//! Any other order of the listener's two steps can sleep on a full queue. There is no "already rung" flag to save
//! the ring: it would need a third step in that order, and one write per step is cheap.

mod condvar;
mod descriptor;
mod ringer;

use std::fmt;
use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use crate::sync::Arc;
pub use ringer::{PortIndex, Ringer};

/// One listener's end. Clones are the same port; at most one thread or task may clear and wait at a time.
#[derive(Clone)]
pub struct Port {
    bell: Bell,
}

/// The ringing end of a port. Clones ring the same bell.
#[derive(Clone)]
pub struct Bell {
    kind: Arc<Kind>,
}

enum Kind {
    Descriptor(descriptor::Bell),
    Condvar(condvar::Bell),
}

impl Port {
    /// A port an event loop can wait for: its [`fd`](Self::fd) becomes readable when the bell rings. Fails when the
    /// process may open no more files.
    pub fn with_eventfd() -> io::Result<Self> {
        Ok(Self::new(Kind::Descriptor(descriptor::Bell::new()?)))
    }

    /// A port for a blocking thread: no file, [`wait`](Self::wait) sleeps on a condition variable.
    pub fn with_condvar() -> Self {
        Self::new(Kind::Condvar(condvar::Bell::new()))
    }

    fn new(kind: Kind) -> Self {
        Self { bell: Bell { kind: Arc::new(kind) } }
    }

    /// The file to wait for, non-blocking and closed on exec; `None` for a condvar port. Valid while a clone of the
    /// port lives. Nobody but [`clear`](Self::clear) may read it.
    pub fn fd(&self) -> Option<RawFd> {
        match &*self.bell.kind {
            Kind::Descriptor(bell) => bell.fd(),
            Kind::Condvar(_) => None,
        }
    }

    /// Silences the bell, to be done before draining: what is pushed after this rings it again. Never blocks.
    pub fn clear(&self) {
        match &*self.bell.kind {
            Kind::Descriptor(bell) => bell.clear(),
            Kind::Condvar(bell) => bell.clear(),
        }
    }

    /// Sleeps until the bell has rung since the last [`clear`](Self::clear) (true) or `timeout` has passed (false).
    /// Does not clear.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        match &*self.bell.kind {
            Kind::Descriptor(bell) => bell.wait(timeout),
            Kind::Condvar(bell) => bell.wait(timeout),
        }
    }

    /// The ringing end, as handed to the engine with every request.
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }
}

impl Bell {
    /// Wakes the listener, or makes its next wait return at once. Never blocks; several rings before a clear are one.
    pub fn ring(&self) {
        match &*self.kind {
            Kind::Descriptor(bell) => bell.ring(),
            Kind::Condvar(bell) => bell.ring(),
        }
    }

    /// Tells ports apart; stable while a clone lives.
    fn address(&self) -> usize {
        &raw const *self.kind as usize
    }
}

impl fmt::Debug for Port {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Port").field("fd", &self.fd()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Bell").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn both_kinds() -> [Port; 2] {
        [Port::with_eventfd().unwrap(), Port::with_condvar()]
    }

    #[test]
    fn a_ring_is_heard_until_cleared() {
        for port in both_kinds() {
            assert!(!port.wait(Some(Duration::ZERO)));
            port.bell().ring();
            port.bell().ring();
            assert!(port.wait(None));
            assert!(port.wait(Some(Duration::ZERO)), "waiting does not clear");
            port.clear();
            assert!(!port.wait(Some(Duration::ZERO)), "one clear silences any number of rings");
            port.clear();
        }
    }

    #[test]
    fn a_sleeping_listener_is_woken() {
        for port in both_kinds() {
            let bell = port.bell();
            let listener = std::thread::spawn(move || port.wait(None));
            bell.ring();
            assert!(listener.join().unwrap());
        }
    }

    #[test]
    fn a_wait_ends_by_itself() {
        for port in both_kinds() {
            assert!(!port.wait(Some(Duration::from_millis(1))));
        }
    }

    #[test]
    fn the_file_does_not_block_and_is_closed_on_exec() {
        let [port, other] = both_kinds();
        assert_eq!(other.fd(), None);
        let fd = port.fd().unwrap();
        // SAFETY: the calls only read the flags of a file the port keeps open.
        let (status, descriptor) =
            unsafe { (libc::fcntl(fd, libc::F_GETFL), libc::fcntl(fd, libc::F_GETFD)) };
        assert_ne!(status & libc::O_NONBLOCK, 0);
        assert_ne!(descriptor & libc::FD_CLOEXEC, 0);
    }
}
