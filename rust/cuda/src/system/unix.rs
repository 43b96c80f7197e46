//! Unix.

use std::ffi::{CStr, OsStr, c_void};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

pub(crate) use libloading::os::unix::Library;
use libloading::os::unix::{RTLD_LOCAL, RTLD_NOW};

/// The name that the driver's library has on every system.
pub(crate) const DRIVER: &str = "libcuda.so.1";
/// The folder of a toolkit that is installed for all users.
pub(crate) const TOOLKIT: Option<&str> = Some("/usr/local/cuda/lib64");
/// The beginning of the names of the libraries of NVRTC's built-in functions.
pub(crate) const BUILTINS: &str = "libnvrtc-builtins.so";
/// The error of [`open_own`] for a link.
pub(crate) const NOT_FOLLOWED: i32 = libc::ELOOP;

/// The file name of a library of the toolkit, such as `nvrtc` of CUDA 13.
pub(crate) fn library_name(name: &str, major: u32) -> String {
    format!("lib{name}.so.{major}")
}

/// Loads a library.
///
/// # Safety
///
/// Loading it, which runs its initialisers, has no requirements.
pub(crate) unsafe fn open_library(path: &Path) -> Result<Library, libloading::Error> {
    // SAFETY: the caller's.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }
}

/// The file of the library that a function is in.
pub(crate) fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the pointer is valid, and any address may be passed.
    let is_found = unsafe { libc::dladdr(function, info.as_mut_ptr()) } != 0;
    // SAFETY: all fields are pointers, which are null or were written.
    let info = unsafe { info.assume_init() };
    if !is_found || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: the name is a string of the loader, and lasts as long as the library.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(Path::new(OsStr::from_bytes(name.to_bytes())).to_owned())
}

/// Opens a file for reading; a link is an error, and a pipe is not waited for.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Creates a file with access for the user alone. An error if it exists.
pub(crate) fn create_own(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)
}

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
