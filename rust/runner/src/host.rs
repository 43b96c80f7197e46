//! [`Host`]: what the engines of a process share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_device::{AvailableMemory, MemoryLimit};

use crate::LaunchError;
use crate::backend::DefaultHost;
use crate::budget::display_bytes;

/// The compute threads and the memory that engines share.
///
/// Engines whose threads do not fit the CPUs together take turns, a step each, in the order in which the steps are
/// ready. Engines plan their memory one after the other. The memory of an engine is counted in full when it is opened,
/// also the part that was not used yet.
#[derive(Debug, Default)]
pub struct Host {
    device: Arc<DefaultHost>,
    planning: Mutex<()>,
}

impl Host {
    /// A host whose engines may reserve `memory_limit` bytes together.
    pub fn new(memory_limit: Option<u64>) -> Self {
        Self { device: Arc::new(DefaultHost::new(memory_limit)), planning: Mutex::default() }
    }

    /// Bytes that the engines have reserved.
    pub fn reserved_bytes(&self) -> u64 {
        self.device.reserved_memory()
    }

    /// Bytes that another engine may reserve.
    pub fn available_bytes(&self) -> u64 {
        self.device.available_memory().bytes
    }

    /// The error of an engine that did not fit the `available` memory beside the `reserved` bytes of other engines.
    pub(crate) fn explain(
        &self,
        error: LaunchError,
        available: &AvailableMemory,
        reserved: u64,
    ) -> LaunchError {
        let LaunchError::OutOfMemory(reason) = error else { return error };
        let others = match reserved {
            0 => String::new(),
            bytes => format!("; other engines have reserved {}", display_bytes(bytes)),
        };
        let of_host = self.device.memory_limit();
        let limit = match of_host.filter(|limit| limit.saturating_sub(reserved) == available.bytes) {
            None => available.limit.as_ref().map(limit_text).unwrap_or_default(),
            Some(limit) => format!("; the limit of the host is memory_bytes={limit}"),
        };
        LaunchError::OutOfMemory(format!("{reason}{others}{limit}"))
    }

    pub(crate) fn device(&self) -> &Arc<DefaultHost> {
        &self.device
    }

    /// Held while an engine plans its memory, until the memory is reserved.
    pub(crate) fn plan_memory(&self) -> MutexGuard<'_, ()> {
        self.planning.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of the error of an engine that does not fit because of a limit.
fn limit_text(limit: &MemoryLimit) -> String {
    let MemoryLimit { subject, setting, bytes } = limit;
    let setting = if setting.is_empty() { String::new() } else { format!(" ({setting})") };
    format!("; {subject} is limited to {}{setting}", display_bytes(*bytes))
}
