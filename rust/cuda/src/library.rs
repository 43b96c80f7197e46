//! Libraries that are loaded when they are asked for.

use std::ffi::{CStr, OsStr, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// The loader's reason for an error, without the path, with which it begins.
pub(crate) fn reason(path: &Path, error: &libloading::Error) -> String {
    let text = match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    };
    let prefix = format!("{}: ", path.display());
    text.strip_prefix(&prefix).unwrap_or(&text).to_owned()
}

/// The size and the modification time of the file that a function is in; empty if they cannot be found.
pub(crate) fn describe_file(function: *const c_void) -> String {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the pointer is valid, and any address may be passed.
    let is_found = unsafe { libc::dladdr(function, info.as_mut_ptr()) } != 0;
    // SAFETY: all fields are pointers, which are null or were written.
    let info = unsafe { info.assume_init() };
    if !is_found || info.dli_fname.is_null() {
        return String::new();
    }
    // SAFETY: the name is a string of the loader, and the library is not unloaded.
    let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(info.dli_fname) }.to_bytes()));
    path.metadata().map_or_else(
        |_| String::new(),
        |file| format!("{} {}.{:09}", file.len(), file.mtime(), file.mtime_nsec()),
    )
}
