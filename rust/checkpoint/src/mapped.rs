//! A file mapped read-only into memory: the one unsafe step of this crate.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::error::CheckpointError;

/// The bytes of a file, paged in by the operating system when first touched.
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps a regular file; devices and pipes, whose length says nothing, are refused.
    pub(crate) fn open(path: &Path) -> Result<Self, CheckpointError> {
        let io = |source| CheckpointError::io(path, source);
        if !path.metadata().map_err(io)?.is_file() {
            return Err(CheckpointError::not_a_model(path, "is no regular file"));
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the map is private and read-only, and nothing in this process writes model files. Should another
        // process change the file meanwhile, values read may change: they are only ever read as plain numbers after
        // the header was checked and copied. Should it cut the file short, touching a lost page ends the process, as
        // with every mapped file.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(MappedFile { path: path.to_owned(), map })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Asks the operating system to read this range soon. Advice: a system that cannot is no error.
    pub(crate) fn prefetch(&self, range: Range<usize>) {
        #[cfg(unix)]
        let _ = self.map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        #[cfg(not(unix))]
        let _ = range;
    }
}
