//! Read-only memory-mapped files: the only unsafe code of this crate.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::CheckpointError;
use crate::lfs::check_lfs_pointer;

/// The bytes of a file, which the operating system reads on first access.
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file. Devices and pipes are rejected, because they have no length.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::io(path, source);
        if !path.metadata().map_err(io)?.is_file() {
            return Err(CheckpointError::not_a_model(path, "is not a regular file"));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is private and read-only, and this process does not write model files. If another process
        // modifies the file, the values read may change; after the header has been checked and copied, they are only
        // read as plain numbers. If another process truncates the file, access to a lost page ends the process, as with
        // every mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        check_lfs_pointer(path, &map)?;
        Ok(MappedFile { path: path.to_owned(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks the operating system to read this range soon. Failure is ignored, because this is only advice.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        #[cfg(unix)]
        let _ = self.map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        #[cfg(not(unix))]
        let _ = range;
    }
}
