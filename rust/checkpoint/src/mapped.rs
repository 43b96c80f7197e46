//! The bytes of model files, memory-mapped or in memory: the only unsafe code of this crate.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use memmap2::Mmap;

use crate::error::CheckpointError;
use crate::lfs::check_lfs_pointer;

/// The bytes of a file. The operating system reads those of a mapped file on first access.
pub(crate) struct MappedFile {
    path: PathBuf,
    bytes: Bytes,
    /// The mapping of `bytes`, which is a part of it; `None` if they are in memory.
    map: Option<Arc<Mmap>>,
}

/// A mapping that is shared with [`Bytes`].
struct Owner(Arc<Mmap>);

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl MappedFile {
    /// Maps a regular file. Devices and pipes are rejected, because they have no length.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::io(path, source);
        if !path.metadata().map_err(io)?.is_file() {
            return Err(CheckpointError::not_a_model(path, "is not a regular file"));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is read-only, and this process does not write model files. If another process
        // modifies the file, the values read may change; after the header has been checked and copied, they are only
        // read as plain numbers. If another process truncates the file, access to a lost page ends the process, as with
        // every mapped file.
        let map = Arc::new(unsafe { Mmap::map(&file) }.map_err(io)?);
        check_lfs_pointer(path, &map)?;
        let bytes = Bytes::from_owner(Owner(Arc::clone(&map)));
        Ok(MappedFile { path: path.to_owned(), bytes, map: Some(map) })
    }

    /// A file that is in memory; errors show `name` as its path.
    pub(crate) fn in_memory(name: &Path, bytes: Bytes) -> Self {
        MappedFile { path: name.to_owned(), bytes, map: None }
    }

    /// A part of this file as a file of its own; errors show `name` in its path.
    pub(crate) fn part(&self, name: &str, range: Range<usize>) -> Self {
        MappedFile { path: self.path.join(name), bytes: self.bytes.slice(range), map: self.map.clone() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// A range that keeps the file mapped.
    pub(crate) fn share(&self, range: Range<usize>) -> Bytes {
        self.bytes.slice(range)
    }

    pub(crate) fn is_mapped(&self) -> bool {
        self.map.is_some()
    }

    /// The mapping and a range of `bytes` as a range of it.
    fn in_map(&self, range: Range<usize>) -> Option<(&Mmap, Range<usize>)> {
        let map = self.map.as_deref()?;
        let start = self.bytes.as_ptr().addr() - map.as_ptr().addr();
        Some((map, start + range.start..start + range.end))
    }

    /// Asks the operating system to read this range soon. Failure is ignored, because this is only advice.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        if let Some((map, range)) = self.in_map(range) {
            system::prefetch(map, range);
        }
    }

    /// Maps the pages of this range now, in one call. Failure is ignored: they are then mapped on first access.
    pub(crate) fn populate(&self, range: Range<usize>) {
        if let Some((map, range)) = self.in_map(range) {
            system::populate(map, range);
        }
    }

    /// Removes the pages of this range from the memory of the process. The next access reads them again.
    pub(crate) fn release(&self, range: Range<usize>) {
        if let Some((map, range)) = self.in_map(range) {
            system::release(map, range);
        }
    }
}

#[cfg(unix)]
mod system {
    use std::ops::Range;

    use memmap2::{Advice, Mmap, UncheckedAdvice};

    pub(super) fn prefetch(map: &Mmap, range: Range<usize>) {
        let _ = map.advise_range(Advice::WillNeed, range.start, range.len());
    }

    #[cfg(target_os = "linux")]
    pub(super) fn populate(map: &Mmap, range: Range<usize>) {
        let _ = map.advise_range(Advice::PopulateRead, range.start, range.len());
    }

    /// Other systems map pages on first access only.
    #[cfg(not(target_os = "linux"))]
    pub(super) fn populate(_: &Mmap, _: Range<usize>) {}

    pub(super) fn release(map: &Mmap, range: Range<usize>) {
        // SAFETY: the mapping is read-only and of a file, so a dropped page is read again from the file.
        let _ = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) };
    }
}

#[cfg(windows)]
mod system {
    use std::ops::Range;

    use memmap2::Mmap;
    use windows_sys::Win32::System::Memory::{
        PrefetchVirtualMemory, VirtualUnlock, WIN32_MEMORY_RANGE_ENTRY,
    };
    use windows_sys::Win32::System::Threading::GetCurrentProcess;

    pub(super) fn prefetch(map: &Mmap, range: Range<usize>) {
        let bytes = &map[range];
        let entry = WIN32_MEMORY_RANGE_ENTRY {
            VirtualAddress: bytes.as_ptr().cast_mut().cast(),
            NumberOfBytes: bytes.len(),
        };
        // SAFETY: the system reads one entry, and only reads the pages of the range.
        unsafe { PrefetchVirtualMemory(GetCurrentProcess(), 1, &entry, 0) };
    }

    /// Windows maps pages on first access only.
    pub(super) fn populate(_: &Mmap, _: Range<usize>) {}

    /// Unlocking pages that are not locked is an error, and removes them from the working set.
    pub(super) fn release(map: &Mmap, range: Range<usize>) {
        let bytes = &map[range];
        // SAFETY: a page of a file that is removed is read again.
        unsafe { VirtualUnlock(bytes.as_ptr().cast(), bytes.len()) };
    }
}
