//! Pointers of Git Large File Storage: small text files that a clone without git-lfs has in place of large files.

use std::path::Path;

use crate::error::CheckpointError;

const FIRST_LINE: &[u8] = b"version https://git-lfs.github.com/spec/v";

/// Rejects a file whose content is a git-lfs pointer.
pub fn check_lfs_pointer(path: &Path, content: &[u8]) -> Result<(), CheckpointError> {
    if !content.starts_with(FIRST_LINE) {
        return Ok(());
    }
    let reason =
        "is a git-lfs pointer, not the file itself; install git-lfs and run `git lfs pull` in its repository";
    Err(CheckpointError::not_a_model(path, reason))
}
