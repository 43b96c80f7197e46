//! Ports, which wake consumers: a [`Port`] belongs to one listener (an event loop or a blocking thread), and all
//! requests started on it share its bell.
//!
//! The order is fixed. The engine pushes, then rings; the listener clears the bell, then drains its consumers:
//!
//! ```text
//! engine     push push push ─ ring            (once per touched port and iteration)
//! listener                      wait ─ clear ─ pop pop pop ─ wait
//! ```
//!
//! With the listener's two steps in the other order it can sleep although a queue is full. There is no "already rung"
//! flag to save the ring: it would need a third step in that order, and one write per step is cheap.

mod bell;
mod condvar;
mod descriptor;
mod ringer;

pub use bell::{Bell, Port};
pub use ringer::{PortIndex, Ringer};
