//! Files and folders that no other user can change.

use std::fs::{self, DirBuilder, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::Path;

/// Creates a folder with access for the user alone. An error if it exists and other users may change it.
pub fn own_folder(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        fs::create_dir_all(parent)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let metadata = folder.symlink_metadata()?;
    let reason = if metadata.is_dir() { others_may_change(&metadata) } else { Some("it is not a directory") };
    match reason {
        None => Ok(()),
        Some(reason) => Err(io::Error::new(io::ErrorKind::PermissionDenied, reason)),
    }
}

/// The reason why users besides the one of this process may change a file or folder; `None` if they may not.
pub fn others_may_change(metadata: &Metadata) -> Option<&'static str> {
    if metadata.uid() != user() {
        Some("it belongs to another user")
    } else if metadata.mode() & 0o022 != 0 {
        Some("other users may write to it")
    } else {
        None
    }
}

/// The owner of the files that this process creates.
pub(crate) fn user() -> u32 {
    // SAFETY: the function has no requirements and always succeeds.
    unsafe { libc::geteuid() }
}
