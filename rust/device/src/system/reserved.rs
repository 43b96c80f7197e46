//! Reserved memory: page-aligned and zero. A page takes no memory until it is first written.

#[cfg(unix)]
pub(crate) use unix::{Reserved, reserve};
#[cfg(windows)]
pub(crate) use windows::{Reserved, reserve};

#[cfg(unix)]
mod unix {
    use std::io;

    pub(crate) use memmap2::MmapMut as Reserved;

    /// Reserves this number of bytes, which is not 0. A failure is an error, never an abort.
    pub(crate) fn reserve(bytes: usize) -> io::Result<Reserved> {
        Reserved::map_anon(bytes)
    }
}

#[cfg(windows)]
mod windows {
    use std::ops::{Deref, DerefMut};
    use std::{io, ptr, slice};

    use windows_sys::Win32::System::Memory::{
        MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc, VirtualFree,
    };

    #[derive(Debug)]
    pub(crate) struct Reserved {
        address: ptr::NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: the memory belongs to the value alone, and is accessed through it only.
    unsafe impl Send for Reserved {}
    // SAFETY: as above; a shared reference gives read access.
    unsafe impl Sync for Reserved {}

    /// Reserves this number of bytes, which is not 0. The system commits to all of them at once, so that a later write
    /// cannot fail.
    pub(crate) fn reserve(bytes: usize) -> io::Result<Reserved> {
        // SAFETY: a null address lets the system choose one.
        let address = unsafe { VirtualAlloc(ptr::null(), bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
        let address = ptr::NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(Reserved { address, bytes })
    }

    impl Deref for Reserved {
        type Target = [u8];

        fn deref(&self) -> &[u8] {
            // SAFETY: the system has set the memory to zero; it has this size, and lives as long as the value.
            unsafe { slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
        }
    }

    impl DerefMut for Reserved {
        fn deref_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above; the reference to the value is unique.
            unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
        }
    }

    impl Drop for Reserved {
        fn drop(&mut self) {
            // SAFETY: the address is that of a call of `VirtualAlloc`, and nothing refers to the memory any more.
            unsafe { VirtualFree(self.address.as_ptr().cast(), 0, MEM_RELEASE) };
        }
    }
}
