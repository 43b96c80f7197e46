//! The bell as a file: an eventfd on Linux, a pipe on other systems.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use super::RawBell;

pub(crate) struct DescriptorBell {
    reader: File,
    /// The other end of a pipe; an eventfd has one end.
    writer: Option<File>,
}

impl DescriptorBell {
    pub(crate) fn new() -> io::Result<Self> {
        let (reader, writer) = open()?;
        Ok(Self { reader: reader.into(), writer: writer.map(File::from) })
    }

    pub(crate) fn fd(&self) -> Option<RawBell> {
        Some(self.reader.as_raw_fd())
    }

    pub(crate) fn ring(&self) {
        // An eventfd takes eight bytes, and so does a pipe. The only possible error is "would block": the counter
        // or the pipe is full, so the file is readable, which is the purpose of a ring.
        let mut writer = self.writer.as_ref().unwrap_or(&self.reader);
        while let Err(error) = writer.write(&1u64.to_ne_bytes()) {
            if error.kind() != io::ErrorKind::Interrupted {
                break;
            }
        }
    }

    pub(crate) fn clear(&self) {
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

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut poll = libc::pollfd { fd: self.reader.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            // SAFETY: `poll` points to one initialised pollfd, as the count says, for the length of the call.
            if unsafe { libc::poll(&mut poll, 1, super::milliseconds(left)) } > 0 {
                return true;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
        }
    }
}

#[cfg(any(target_os = "linux", target_os = "android"))]
fn open() -> io::Result<(OwnedFd, Option<OwnedFd>)> {
    use std::os::fd::FromRawFd;
    // SAFETY: no pointers; the result is checked before use.
    let fd = unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call above just opened it, and nothing else owns it.
    Ok((unsafe { OwnedFd::from_raw_fd(fd) }, None))
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
fn open() -> io::Result<(OwnedFd, Option<OwnedFd>)> {
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
    Ok((reader.into(), Some(writer.into())))
}
