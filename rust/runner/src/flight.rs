//! [`Flight`]: a step between its launch and its end.

use std::time::Instant;

use penstock_device::Backend;

use crate::logits_rows::LogitsRows;

/// A step that was launched and is not finished.
pub(crate) struct Flight<B: Backend> {
    pub rows: LogitsRows,
    /// The tokens of its batches, in order. After the sampling there is at least one ticket, if only of an empty batch:
    /// the step is not ready before the device has done it.
    pub tickets: Vec<B::Ticket>,
    pub is_sampled: bool,
    /// The time of its launch.
    pub launched: Instant,
}

impl<B: Backend> Flight<B> {
    pub(crate) fn with_room(tokens: usize) -> Self {
        Self {
            rows: LogitsRows::with_room(tokens),
            tickets: Vec::new(),
            is_sampled: false,
            launched: Instant::now(),
        }
    }

    /// Whether all of the step was submitted. If not, it waits for [`Runner::resume`](crate::runner::Runner::resume),
    /// and no other step may be launched.
    pub(crate) fn is_sampled(&self) -> bool {
        self.is_sampled
    }

    /// Makes it ready for another step. Its remaining tickets are dropped.
    pub(crate) fn clear(&mut self) {
        self.rows.clear();
        self.tickets.clear();
        self.is_sampled = false;
    }
}
