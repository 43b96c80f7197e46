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

/// The bytes of a line of /proc or /sys such as `VmSize:   2048 kB`.
pub(crate) fn parse_kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
