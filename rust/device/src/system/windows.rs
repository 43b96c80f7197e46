//! The available memory on Windows.

use windows_sys::Win32::System::SystemInformation::{GlobalMemoryStatusEx, MEMORYSTATUSEX};

/// Bytes available to this process: the lower of the physical memory that can be used at once, and what the system
/// still commits to in memory and page files.
pub(crate) fn available_memory() -> u64 {
    let mut status =
        MEMORYSTATUSEX { dwLength: size_of::<MEMORYSTATUSEX>() as u32, ..MEMORYSTATUSEX::default() };
    // SAFETY: the system writes one structure of the size in it. The call fails for a wrong size only.
    unsafe { GlobalMemoryStatusEx(&mut status) };
    status.ullAvailPhys.min(status.ullAvailPageFile)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory() > 1 << 20);
    }
}
