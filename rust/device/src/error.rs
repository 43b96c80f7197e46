//! [`DeviceError`]: an error of an operation or an allocation.

use crate::bfc::Exhausted;

/// An operation or an allocation failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The reserved memory is full.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// The device has no such memory.
    #[error("{what} needs {bytes} bytes and the device refused them: {reason}")]
    OutOfMemory {
        /// The purpose of the memory.
        what: &'static str,
        /// The number of bytes that were requested.
        bytes: u64,
        /// The device's message.
        reason: String,
    },
    /// The device or its threads could not be set up.
    #[error("the device could not be started: {0}")]
    Start(String),
    /// The inputs of a step contradict each other or exceed what was allocated.
    #[error("invalid step: {0}; this is a bug")]
    InvalidStep(String),
    /// The device cannot be used any more, nor anything that was on it. The caller makes no further calls but drops.
    #[error("{0}")]
    Lost(String),
}
