//! [`Port`] and its [`Bell`], of either kind, with the list of requests that have new events.

#![cfg_attr(
    not(feature = "loom"),
    expect(clippy::disallowed_types, reason = "locked for the time of copying ids")
)]

use std::fmt;
use std::io;
use std::sync::PoisonError;
use std::time::Duration;

use super::condvar::CondvarBell;
use super::descriptor::{DescriptorBell, RawBell};
use crate::request::RequestId;
use crate::sync::{Arc, Mutex, MutexGuard};

/// The listener's end. Clones are the same port; at most one thread or task may clear and wait at a time.
#[derive(Clone)]
pub struct Port {
    bell: Bell,
}

/// The ringing end of a port. Clones ring the same bell.
#[derive(Clone)]
pub struct Bell {
    inner: Arc<Inner>,
}

/// Rings a bell when it is dropped.
pub struct RingOnDrop(pub Bell);

impl Drop for RingOnDrop {
    fn drop(&mut self) {
        self.0.ring();
    }
}

struct Inner {
    kind: BellKind,
    /// The requests with events that were pushed since they were last taken off the list, each once.
    listed: Mutex<Vec<RequestId>>,
}

enum BellKind {
    Descriptor(DescriptorBell),
    Condvar(CondvarBell),
}

impl Port {
    /// A port for an event loop: its [`fd`](Self::fd) becomes readable when the bell rings. Fails if the process may
    /// open no more files.
    pub fn with_descriptor() -> io::Result<Self> {
        Ok(Self::new(BellKind::Descriptor(DescriptorBell::new()?)))
    }

    /// A port for a blocking thread, without a file: [`wait`](Self::wait) sleeps on a condition variable.
    pub fn with_condvar() -> Self {
        Self::new(BellKind::Condvar(CondvarBell::new()))
    }

    fn new(kind: BellKind) -> Self {
        Self { bell: Bell { inner: Arc::new(Inner { kind, listed: Mutex::new(Vec::new()) }) } }
    }

    /// The file to wait for, non-blocking and closed on exec; `None` for a condvar port. Valid while a clone of the
    /// port lives. Only [`clear`](Self::clear) may read it.
    pub fn fd(&self) -> Option<RawBell> {
        match &self.bell.inner.kind {
            BellKind::Descriptor(bell) => bell.fd(),
            BellKind::Condvar(_) => None,
        }
    }

    /// Clears the bell. To be called before draining: events pushed afterwards ring it again. Never blocks.
    pub fn clear(&self) {
        match &self.bell.inner.kind {
            BellKind::Descriptor(bell) => bell.clear(),
            BellKind::Condvar(bell) => bell.clear(),
        }
    }

    /// [Clears](Self::clear) the bell, and moves the ids of the requests with new events to the end of `ids`. Each is
    /// to be [unlisted](crate::Consumer::unlist) and then drained; until then it is not listed again.
    pub fn take_listed(&self, ids: &mut Vec<RequestId>) {
        self.clear();
        ids.append(&mut self.bell.lock());
    }

    /// Sleeps until the bell has rung since the last [`clear`](Self::clear) (true) or `timeout` has passed (false).
    /// Does not clear.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        match &self.bell.inner.kind {
            BellKind::Descriptor(bell) => bell.wait(timeout),
            BellKind::Condvar(bell) => bell.wait(timeout),
        }
    }

    /// The ringing end, which the engine gets with every request.
    pub fn bell(&self) -> Bell {
        self.bell.clone()
    }
}

impl Bell {
    /// Wakes the listener, or makes its next wait return at once. Never blocks; several rings before a clear count as
    /// one.
    pub fn ring(&self) {
        match &self.inner.kind {
            BellKind::Descriptor(bell) => bell.ring(),
            BellKind::Condvar(bell) => bell.ring(),
        }
    }

    /// Moves `ids` to the port's list, before ringing.
    pub fn list(&self, ids: &mut Vec<RequestId>) {
        if !ids.is_empty() {
            self.lock().append(ids);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RequestId>> {
        self.inner.listed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Identifies the port while a clone of the bell lives.
    pub(super) fn address(&self) -> usize {
        &raw const *self.inner as usize
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
        [Port::with_descriptor().unwrap(), Port::with_condvar()]
    }

    #[test]
    fn a_ring_lasts_until_cleared() {
        for port in both_kinds() {
            assert!(!port.wait(Some(Duration::ZERO)));
            port.bell().ring();
            port.bell().ring();
            assert!(port.wait(None));
            assert!(port.wait(Some(Duration::ZERO)), "waiting does not clear");
            port.clear();
            assert!(!port.wait(Some(Duration::ZERO)), "one clear clears any number of rings");
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
    fn a_wait_times_out() {
        for port in both_kinds() {
            assert!(!port.wait(Some(Duration::from_millis(1))));
        }
    }

    #[test]
    #[cfg(unix)]
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
