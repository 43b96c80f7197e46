//! The bell of an event loop: a file or socket that is readable from a ring until the next clear.
//!
//! An eventfd on Linux, a pipe on other Unix systems, and a pair of sockets on Windows, where event loops wait for
//! nothing else. Under loom it is a counter that behaves like an eventfd, so that the order of clearing and draining
//! can be model-checked. Ringing never blocks.

#[cfg(not(feature = "loom"))]
use std::time::Duration;

#[cfg(feature = "loom")]
mod model;
#[cfg(all(unix, not(feature = "loom")))]
mod unix;
#[cfg(all(windows, not(feature = "loom")))]
mod windows;

#[cfg(feature = "loom")]
pub(super) use model::DescriptorBell;
#[cfg(all(unix, not(feature = "loom")))]
pub(super) use unix::DescriptorBell;
#[cfg(all(windows, not(feature = "loom")))]
pub(super) use windows::DescriptorBell;

/// A file descriptor, for which an event loop waits.
#[cfg(unix)]
pub type RawBell = std::os::fd::RawFd;
/// A socket, for which an event loop waits.
#[cfg(windows)]
pub type RawBell = std::os::windows::io::RawSocket;

/// The timeout of a poll: -1 for none. Rounded up, so that a wait never returns early to spin through its last
/// millisecond.
#[cfg(not(feature = "loom"))]
fn milliseconds(left: Option<Duration>) -> i32 {
    left.map_or(-1, |left| i32::try_from(left.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX))
}
