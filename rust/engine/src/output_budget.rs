//! The memory for tensors and long lists of logprobs: bounded for all requests of an engine together, and
//! reserved from the start of a request until its consumers have received everything, or for a beam search.

#![expect(clippy::disallowed_types, reason = "locked for the time of counting")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::request::ClientId;
use crate::share::bound_of;
use crate::start_error::StartError;

/// The bytes that open requests have reserved.
pub(crate) struct OutputBudget {
    limit: usize,
    reserved: Mutex<Reserved>,
}

#[derive(Default)]
struct Reserved {
    bytes: usize,
    by_client: HashMap<Option<ClientId>, usize>,
}

/// A part of the budget. Dropping it gives it back.
pub struct Reservation {
    budget: Arc<OutputBudget>,
    client: Option<ClientId>,
    bytes: usize,
}

impl OutputBudget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit, reserved: Mutex::default() })
    }

    /// Reserves what a request of a client needs; `None` if that is nothing. A client with less than its share may go
    /// beyond the limit, up to twice.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        client: Option<ClientId>,
        bytes: usize,
    ) -> Result<Option<Arc<Reservation>>, StartError> {
        if bytes == 0 {
            return Ok(None);
        }
        let mut reserved = self.lock();
        let own = reserved.by_client.get(&client).copied().unwrap_or(0);
        let bound = bound_of(own, bytes, reserved.by_client.len(), self.limit);
        if reserved.bytes.saturating_add(bytes) > bound {
            return Err(StartError::OutputMemory { bytes, reserved: reserved.bytes, limit: self.limit });
        }
        reserved.bytes += bytes;
        reserved.by_client.insert(client, own + bytes);
        Ok(Some(Arc::new(Reservation { budget: Arc::clone(self), client, bytes })))
    }

    fn lock(&self) -> MutexGuard<'_, Reserved> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let mut reserved = self.budget.lock();
        reserved.bytes -= self.bytes;
        let left = reserved.by_client.remove(&self.client).unwrap_or(0) - self.bytes;
        if left > 0 {
            reserved.by_client.insert(self.client, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_with_less_than_its_share_may_go_beyond_the_limit() {
        let budget = OutputBudget::new(100);
        let reserve = |client: u64, bytes| budget.reserve(Some(ClientId(client)), bytes);
        let mut first: Vec<_> = (0..10).map(|_| reserve(1, 10).expect("room")).collect();
        assert!(reserve(1, 1).is_err(), "the client has everything");
        let second = reserve(2, 50).expect("half of the limit");
        assert!(reserve(2, 1).is_err(), "more than its share");
        let third = reserve(3, 33).expect("a third of the limit");
        assert!(reserve(4, 25).is_err(), "twice the limit are reserved");
        first.clear();
        assert!(reserve(1, 35).is_err(), "118 of 100 bytes, more than its share");
        drop((second, third));
        assert!(reserve(1, 100).is_ok());
        assert!(budget.lock().by_client.is_empty());
    }
}
