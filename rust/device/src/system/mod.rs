//! The memory of the system: the part that is available, the pages that are in memory, and reserved address space.
//!
//! Each has a branch for Linux, macOS and Windows. Elsewhere the crate does not compile: a wrong amount of memory would
//! give a KV cache of a wrong size.

#[cfg_attr(target_os = "linux", path = "linux.rs")]
#[cfg_attr(target_os = "macos", path = "macos.rs")]
#[cfg_attr(windows, path = "windows.rs")]
mod memory;
mod pages;
mod reserved;

pub(crate) use memory::available_memory;
pub(crate) use pages::resident_bytes;
pub(crate) use reserved::Reserved;

/// The bytes of a line of /proc or /sys such as `VmSize:   2048 kB`.
pub(crate) fn parse_kilobytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
