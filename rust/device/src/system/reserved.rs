//! Zeroed memory whose pages take no memory until they are first written.

use std::io;

/// Memory of a fixed size, page-aligned.
#[derive(Debug)]
pub(crate) struct Reserved(system::Mapping);

impl Reserved {
    /// `bytes` bytes, at least one. A failure is an error, never an abort.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        system::Mapping::new(bytes.max(1)).map(Self)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
    }
}

#[cfg(unix)]
mod system {
    use std::io;

    use memmap2::MmapMut;

    #[derive(Debug)]
    pub(super) struct Mapping(MmapMut);

    impl Mapping {
        pub(super) fn new(bytes: usize) -> io::Result<Self> {
            MmapMut::map_anon(bytes).map(Self)
        }

        pub(super) fn bytes(&self) -> &[u8] {
            &self.0
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            &mut self.0
        }
    }
}

/// The system commits to all of the memory at once, so that a later write cannot fail.
#[cfg(windows)]
mod system {
    use std::{io, ptr, slice};

    use windows_sys::Win32::System::Memory::{
        MEM_COMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc, VirtualFree,
    };

    #[derive(Debug)]
    pub(super) struct Mapping {
        address: ptr::NonNull<u8>,
        bytes: usize,
    }

    // SAFETY: the memory belongs to the value alone, and is accessed through it only.
    unsafe impl Send for Mapping {}
    // SAFETY: as above; a shared reference gives read access.
    unsafe impl Sync for Mapping {}

    impl Mapping {
        pub(super) fn new(bytes: usize) -> io::Result<Self> {
            // SAFETY: a null address lets the system choose one.
            let address =
                unsafe { VirtualAlloc(ptr::null(), bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
            let address = ptr::NonNull::new(address.cast()).ok_or_else(io::Error::last_os_error)?;
            Ok(Self { address, bytes })
        }

        pub(super) fn bytes(&self) -> &[u8] {
            // SAFETY: the memory is zeroed by the system, has this size, and lives as long as the value.
            unsafe { slice::from_raw_parts(self.address.as_ptr(), self.bytes) }
        }

        pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as above; the reference to the value is unique.
            unsafe { slice::from_raw_parts_mut(self.address.as_ptr(), self.bytes) }
        }
    }

    impl Drop for Mapping {
        fn drop(&mut self) {
            // SAFETY: the address is that of a call of `VirtualAlloc`, and nothing refers to the memory any more.
            unsafe { VirtualFree(self.address.as_ptr().cast(), 0, MEM_RELEASE) };
        }
    }
}
