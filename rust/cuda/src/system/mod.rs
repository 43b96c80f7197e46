//! The parts of the operating system that this crate needs: the loader of libraries, and files that no other user can
//! change.

use std::ffi::c_void;
use std::time::UNIX_EPOCH;

#[cfg(unix)]
mod unix;
#[cfg(windows)]
mod windows;

#[cfg(unix)]
use unix as imp;
#[cfg(windows)]
use windows as imp;

#[cfg(all(test, unix))]
pub(crate) use imp::user;
pub(crate) use imp::{
    BUILTINS, DRIVER, Library, NOT_FOLLOWED, TOOLKIT, create_own, file_of, library_name, open_library,
    open_own,
};
pub use imp::{others_may_change, own_folder};

/// The size and the modification time of the file that a function is in; empty if they cannot be found.
pub(crate) fn describe_file(function: *const c_void) -> String {
    let Some(metadata) = file_of(function).and_then(|path| path.metadata().ok()) else {
        return String::new();
    };
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    format!("{} {:?}", metadata.len(), modified.unwrap_or_default())
}
