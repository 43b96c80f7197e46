//! The pages of a memory mapping that the system has provided.

use std::io;

/// Bytes of the pages of a mapping of `len` bytes at `address` that are in memory. The mapping may end at any time: the
/// system only looks up its pages. Fails if it does not exist, and on systems other than Linux.
pub fn resident_bytes(address: usize, len: usize) -> io::Result<usize> {
    system::resident_bytes(address, len)
}

#[cfg(target_os = "linux")]
mod system {
    use std::io;

    /// Pages that are looked up at once.
    const PAGES: usize = 1 << 16;

    pub(super) fn resident_bytes(address: usize, len: usize) -> io::Result<usize> {
        // SAFETY: only returns a number.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) } as usize;
        let mut states = vec![0_u8; len.div_ceil(page).min(PAGES)];
        let mut num_resident = 0;
        for start in (0..len).step_by(PAGES * page) {
            let size = (len - start).min(PAGES * page);
            // SAFETY: the kernel reads no memory at the address, and writes one byte for each page.
            let result =
                unsafe { libc::mincore((address + start) as *mut _, size, states.as_mut_ptr().cast()) };
            if result != 0 {
                return Err(io::Error::last_os_error());
            }
            let states = &states[..size.div_ceil(page)];
            num_resident += states.iter().filter(|state| **state & 1 == 1).count();
        }
        Ok((num_resident * page).min(len))
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::io;

    pub(super) fn resident_bytes(_: usize, _: usize) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }
}
