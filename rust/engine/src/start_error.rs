//! [`StartError`]: the reason why a request was not sent to the engine.

use crate::limits::InvalidRequest;
use crate::request::StopCause;

/// The reason why a request was not sent to the engine. A request that is sent may still be rejected, by
/// [`Event::Rejected`](crate::request::Event::Rejected).
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StartError {
    /// The engine can never run it.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// The mailbox is full.
    #[error("the engine is overloaded: its mailbox is full; try again later")]
    Overloaded,
    /// Too much memory is reserved for tensors and logprobs.
    #[error(
        "{bytes} bytes of tensors and logprobs do not fit: open requests have reserved {reserved} of \
         max_output_bytes={limit}; try again later"
    )]
    OutputMemory {
        /// The `output_bytes` of the request.
        bytes: usize,
        /// The bytes that open requests have reserved.
        reserved: usize,
        /// The engine's `max_output_bytes`.
        limit: usize,
    },
    /// The engine has stopped.
    #[error("{0}")]
    Stopped(StopCause),
}
