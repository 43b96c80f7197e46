//! Ports, which wake consumers: a [`Port`] belongs to one listener (an event loop or a blocking thread), and all
//! requests started on it share its bell.
//!
//! The order is fixed. The engine pushes, lists the request, then rings; the listener clears the bell, then takes the
//! list and drains the consumers in it:
//!
//! ```text
//! engine     push push push ─ list ─ ring     (once per touched port and iteration)
//! listener                             wait ─ clear ─ take list ─ unlist, pop pop pop ─ wait
//! ```
//!
//! A request is in the list at most once: a flag in its result queue is set when it is listed and cleared before it is
//! drained. So a drain costs nothing for requests without new events. A listener of one request can ignore the list.
//!
//! With the listener's two steps in the other order it can sleep although a queue is full. There is no "already rung"
//! flag to save the ring: it would need a third step in that order, and one write per step is cheap.

mod bell;
mod condvar;
mod descriptor;
mod ringer;

pub use bell::{Bell, Port, RingOnDrop};
pub use descriptor::RawBell;
pub use ringer::{PortIndex, Ringer};
