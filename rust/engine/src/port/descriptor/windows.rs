//! The bell as a pair of connected sockets on the loopback interface: event loops of Windows wait for sockets only.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::windows::io::AsRawSocket;
use std::time::{Duration, Instant};

use windows_sys::Win32::Networking::WinSock::{POLLRDNORM, WSAPOLLFD, WSAPoll};

use super::RawBell;

pub(crate) struct DescriptorBell {
    reader: TcpStream,
    writer: TcpStream,
}

impl DescriptorBell {
    pub(crate) fn new() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let writer = TcpStream::connect(listener.local_addr()?)?;
        let (reader, peer) = listener.accept()?;
        // Any process of the machine can connect to the listener.
        if peer != writer.local_addr()? || writer.peer_addr()? != reader.local_addr()? {
            return Err(io::Error::new(ErrorKind::ConnectionAborted, "another process took the connection"));
        }
        for socket in [&reader, &writer] {
            socket.set_nonblocking(true)?;
            socket.set_nodelay(true)?;
        }
        Ok(Self { reader, writer })
    }

    pub(crate) fn fd(&self) -> Option<RawBell> {
        Some(self.reader.as_raw_socket())
    }

    pub(crate) fn ring(&self) {
        // The only possible error is "would block": the socket is full, so its other end is readable.
        let _ = (&self.writer).write(&[1]);
    }

    pub(crate) fn clear(&self) {
        let mut sink = [0; 512];
        while (&self.reader).read(&mut sink).is_ok_and(|read| read == sink.len()) {}
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) -> bool {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        loop {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut poll =
                WSAPOLLFD { fd: self.reader.as_raw_socket() as usize, events: POLLRDNORM, revents: 0 };
            // SAFETY: `poll` points to one initialised structure, as the count says, for the length of the call.
            if unsafe { WSAPoll(&mut poll, 1, super::milliseconds(left)) } > 0 {
                return true;
            }
            if left.is_some_and(|left| left.is_zero()) {
                return false;
            }
        }
    }
}
