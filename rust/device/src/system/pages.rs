//! The pages of a memory mapping that the system has provided.

use std::io;

/// Bytes of the pages of a mapping of `len` bytes at `address` that are in memory. The mapping may end at any time: the
/// system only looks up its pages. Fails if it does not exist.
pub(crate) fn resident_bytes(address: usize, len: usize) -> io::Result<usize> {
    system::resident_bytes(address, len)
}

#[cfg(unix)]
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

#[cfg(windows)]
mod system {
    use std::io;

    use windows_sys::Win32::System::ProcessStatus::{
        K32QueryWorkingSetEx, PSAPI_WORKING_SET_EX_BLOCK, PSAPI_WORKING_SET_EX_INFORMATION,
    };
    use windows_sys::Win32::System::Threading::GetCurrentProcess;

    /// The page size of x86-64 and ARM64.
    const PAGE: usize = 4096;
    /// Pages that are looked up at once.
    const PAGES: usize = 1 << 16;
    /// The flag of a page that is in memory.
    const VALID: usize = 1;

    pub(super) fn resident_bytes(address: usize, len: usize) -> io::Result<usize> {
        let pages = |start: usize, size: usize| (start..start + size).step_by(PAGE);
        let mut num_resident = 0;
        for start in (address..address + len).step_by(PAGES * PAGE) {
            let state = |page| PSAPI_WORKING_SET_EX_INFORMATION {
                VirtualAddress: page as *mut _,
                VirtualAttributes: PSAPI_WORKING_SET_EX_BLOCK { Flags: 0 },
            };
            let size = (address + len - start).min(PAGES * PAGE);
            let mut states: Vec<_> = pages(start, size).map(state).collect();
            // SAFETY: the system reads and writes the states, within the given size. It reads no memory at the pages.
            let done = unsafe {
                let size = size_of_val(&states[..]) as u32;
                K32QueryWorkingSetEx(GetCurrentProcess(), states.as_mut_ptr().cast(), size)
            };
            if done == 0 {
                return Err(io::Error::last_os_error());
            }
            // SAFETY: all variants of the union are bits of one number.
            let flags = states.iter().map(|state| unsafe { state.VirtualAttributes.Flags });
            num_resident += flags.filter(|flags| flags & VALID == VALID).count();
        }
        Ok((num_resident * PAGE).min(len))
    }
}
