//! The available memory on macOS.

use std::mem;

use super::AvailableMemory;

/// Bytes available to this process: pages that hold nothing, that were not used for some time, or that programs have
/// marked as removable.
pub(crate) fn available_memory() -> AvailableMemory {
    // SAFETY: the structure consists of numbers, for which zero is valid.
    let mut statistics: libc::vm_statistics64 = unsafe { mem::zeroed() };
    let mut count = libc::HOST_VM_INFO64_COUNT;
    // SAFETY: the system writes at most `count` words, the size of the structure. The call fails for an invalid argument
    // only.
    #[expect(deprecated, reason = "the crate that replaces it has nothing else that is used here")]
    unsafe {
        let host = libc::mach_host_self();
        libc::host_statistics64(host, libc::HOST_VM_INFO64, (&raw mut statistics).cast(), &mut count)
    };
    let pages = [statistics.free_count, statistics.inactive_count, statistics.purgeable_count];
    // SAFETY: only returns a number.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as u64;
    (pages.into_iter().map(u64::from).sum::<u64>() * page).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_memory_is_available() {
        assert!(available_memory().bytes > 1 << 20);
    }
}
