//! The bell of an event loop: a file that is readable from a ring until the next clear.
//!
//! An eventfd on Linux, a pipe on other systems, and under loom a counter that behaves like an eventfd, so that the
//! order of clearing and draining can be model-checked. Ringing never blocks.

#[cfg(feature = "loom")]
pub(super) use model::DescriptorBell;
#[cfg(not(feature = "loom"))]
pub(super) use system::DescriptorBell;

#[cfg(not(feature = "loom"))]
mod system {
    use std::fs::File;
    use std::io::{self, Read, Write};
    use std::os::fd::{AsRawFd, OwnedFd, RawFd};
    use std::time::{Duration, Instant};

    pub(in crate::port) struct DescriptorBell {
        reader: File,
        /// The same eventfd again, or the other end of the pipe.
        writer: File,
    }

    impl DescriptorBell {
        pub(in crate::port) fn new() -> io::Result<Self> {
            let (reader, writer) = open()?;
            Ok(Self { reader: reader.into(), writer: writer.into() })
        }

        pub(in crate::port) fn fd(&self) -> Option<RawFd> {
            Some(self.reader.as_raw_fd())
        }

        pub(in crate::port) fn ring(&self) {
            // An eventfd takes eight bytes, and so does a pipe. The only possible error is "would block": the counter
            // or the pipe is full, so the file is readable, which is the purpose of a ring.
            while let Err(error) = (&self.writer).write(&1u64.to_ne_bytes()) {
                if error.kind() != io::ErrorKind::Interrupted {
                    break;
                }
            }
        }

        pub(in crate::port) fn clear(&self) {
            let mut sink = [0; 512];
            loop {
                match (&self.reader).read(&mut sink) {
                    Ok(read) if read < sink.len() => break, // an eventfd always, a pipe when empty
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(_) => break, // it was not rung
                }
            }
        }

        pub(in crate::port) fn wait(&self, timeout: Option<Duration>) -> bool {
            let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
            loop {
                let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                // Rounded up, so that a wait never returns early to spin through its last millisecond.
                let milliseconds = left.map_or(-1, |left| {
                    i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
                });
                let mut poll = libc::pollfd { fd: self.reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
                // SAFETY: `poll` points to one initialised pollfd, as the count says, for the length of the call.
                if unsafe { libc::poll(&mut poll, 1, milliseconds) } > 0 {
                    return true;
                }
                if left.is_some_and(|left| left.is_zero()) {
                    return false;
                }
            }
        }
    }

    #[cfg(any(target_os = "linux", target_os = "android"))]
    fn open() -> io::Result<(OwnedFd, OwnedFd)> {
        use std::os::fd::FromRawFd;
        // SAFETY: no pointers; the result is checked before use.
        let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call above just opened it, and nothing else owns it.
        let reader = unsafe { OwnedFd::from_raw_fd(fd) };
        let writer = reader.try_clone()?;
        Ok((reader, writer))
    }

    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    fn open() -> io::Result<(OwnedFd, OwnedFd)> {
        let (reader, writer) = io::pipe()?; // closed on exec already
        for fd in [reader.as_raw_fd(), writer.as_raw_fd()] {
            // SAFETY: both calls only touch the status flags of a file owned by this function.
            let done = unsafe {
                let flags = libc::fcntl(fd, libc::F_GETFL);
                flags >= 0 && libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) >= 0
            };
            if !done {
                return Err(io::Error::last_os_error());
            }
        }
        Ok((reader.into(), writer.into()))
    }
}

#[cfg(feature = "loom")]
mod model {
    use std::io;
    use std::os::fd::RawFd;
    use std::time::Duration;

    use crate::sync::{AtomicUsize, Ordering};

    /// An eventfd: a write adds, a read takes everything, and a wait sleeps while it is zero. The kernel orders memory
    /// as a lock does, hence acquire and release.
    pub(in crate::port) struct DescriptorBell {
        counter: AtomicUsize,
    }

    impl DescriptorBell {
        pub(in crate::port) fn new() -> io::Result<Self> {
            Ok(Self { counter: AtomicUsize::new(0) })
        }

        pub(in crate::port) fn fd(&self) -> Option<RawFd> {
            None
        }

        pub(in crate::port) fn ring(&self) {
            self.counter.fetch_add(1, Ordering::AcqRel);
        }

        pub(in crate::port) fn clear(&self) {
            self.counter.swap(0, Ordering::AcqRel);
        }

        pub(in crate::port) fn wait(&self, timeout: Option<Duration>) -> bool {
            while self.counter.load(Ordering::Acquire) == 0 {
                if timeout.is_some() {
                    return false;
                }
                loom::thread::yield_now();
            }
            true
        }
    }
}
