//! The memory for tensors and long lists of logprobs: bounded for all requests of an engine together, and
//! reserved from the start of a request until its consumers have received everything, or for a beam search.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::handle::StartError;

/// The bytes that open requests have reserved.
pub(crate) struct OutputBudget {
    limit: usize,
    reserved: AtomicUsize,
}

/// A part of the budget. Dropping it gives it back.
pub struct Reservation {
    budget: Arc<OutputBudget>,
    bytes: usize,
}

impl OutputBudget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, reserved: AtomicUsize::new(0) })
    }

    /// Reserves what a request needs; `None` if that is nothing.
    pub(crate) fn reserve(self: &Arc<Self>, bytes: usize) -> Result<Option<Arc<Reservation>>, StartError> {
        if bytes == 0 {
            return Ok(None);
        }
        let add = |reserved: usize| reserved.checked_add(bytes).filter(|sum| *sum <= self.limit);
        // Relaxed: the count orders nothing else.
        match self.reserved.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Some(Arc::new(Reservation { budget: Arc::clone(self), bytes }))),
            Err(reserved) => Err(StartError::OutputMemory { bytes, reserved, limit: self.limit }),
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.budget.reserved.fetch_sub(self.bytes, Ordering::Relaxed); // as in `reserve`
    }
}
