//! The memory of the system: the part that is available, the pages that are in memory, and reserved address space.
//!
//! Each has a branch for Linux, macOS and Windows, and none for other systems: a wrong amount of memory gives a KV cache
//! of a wrong size.

#[cfg(target_os = "linux")]
mod cgroups;
#[cfg(target_os = "linux")]
mod linux;
#[cfg(target_os = "macos")]
mod macos;
mod pages;
mod reserved;
#[cfg(windows)]
mod windows;

#[cfg(target_os = "linux")]
pub(crate) use linux::available_memory;
#[cfg(target_os = "macos")]
pub(crate) use macos::available_memory;
pub(crate) use pages::resident_bytes;
pub(crate) use reserved::{Reserved, reserve};
#[cfg(windows)]
pub(crate) use windows::available_memory;

/// Memory that is available, and the limit that causes it to be so little.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AvailableMemory {
    /// Bytes.
    pub bytes: u64,
    /// `None` if that is what exists, or if the limit is not known.
    pub limit: Option<MemoryLimit>,
}

/// A limit that users or administrators set, lower than the memory that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryLimit {
    /// The holder of the limit, as the subject of a sentence.
    pub subject: &'static str,
    /// The setting, such as `ulimit -v` or a path. Empty if that has no name.
    pub setting: String,
    /// Bytes, in use or available.
    pub bytes: u64,
}

impl From<u64> for AvailableMemory {
    fn from(bytes: u64) -> Self {
        Self { bytes, limit: None }
    }
}

#[cfg(not(target_os = "macos"))]
impl MemoryLimit {
    /// The memory that is available if this number of bytes is in use.
    pub(crate) fn available(self, used: u64) -> AvailableMemory {
        AvailableMemory { bytes: self.bytes.saturating_sub(used), limit: Some(self) }
    }
}

impl AvailableMemory {
    /// The lower of two numbers of bytes with its limit.
    pub(crate) fn at_most(self, other: impl Into<Self>) -> Self {
        let other = other.into();
        if other.bytes < self.bytes { other } else { self }
    }

    /// The memory that is left after a use of `bytes`.
    pub(crate) fn without(self, bytes: u64) -> Self {
        Self { bytes: self.bytes.saturating_sub(bytes), ..self }
    }
}

/// The bytes of a line of /proc or /sys such as `VmSize:   2048 kB`.
pub(crate) fn parse_kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
