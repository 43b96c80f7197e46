//! Windows.

use std::ffi::{OsString, c_void};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::windows::ffi::OsStringExt;
use std::os::windows::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::ptr;

pub(crate) use libloading::os::windows::Library;
use libloading::os::windows::{LOAD_LIBRARY_SEARCH_DEFAULT_DIRS, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR};
use windows_sys::Win32::Foundation::ERROR_CANT_ACCESS_FILE;
use windows_sys::Win32::Storage::FileSystem::{
    FILE_FLAG_OPEN_REPARSE_POINT, FILE_GENERIC_READ, FILE_WRITE_ATTRIBUTES,
};
use windows_sys::Win32::System::LibraryLoader::{
    GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS, GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT, GetModuleFileNameW,
    GetModuleHandleExW,
};

/// The name of the driver's library.
pub(crate) const DRIVER: &str = "nvcuda.dll";
/// The installer of the toolkit adds its folder to the search path.
pub(crate) const TOOLKIT: Option<&str> = None;
/// The beginning of the names of the libraries of NVRTC's built-in functions.
pub(crate) const BUILTINS: &str = "nvrtc-builtins64_";
/// The error of [`open_own`] for a link.
pub(crate) const NOT_FOLLOWED: i32 = ERROR_CANT_ACCESS_FILE as i32;
/// The longest path.
const MAX_PATH: usize = 32_768;

/// The file name of a library of the toolkit, such as `nvrtc` of CUDA 13.
pub(crate) fn library_name(name: &str, major: u32) -> String {
    match name {
        "nvrtc" => format!("nvrtc64_{major}0_0.dll"),
        name => format!("{name}64_{major}.dll"),
    }
}

/// Loads a library, and those beside it that it needs.
///
/// # Safety
///
/// Loading it, which runs its initialisers, has no requirements.
pub(crate) unsafe fn open_library(path: &Path) -> Result<Library, libloading::Error> {
    let beside = LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS;
    // SAFETY: the caller's.
    unsafe { Library::load_with_flags(path, if path.is_absolute() { beside } else { 0 }) }
}

/// The file of the library that a function is in.
pub(crate) fn file_of(function: *const c_void) -> Option<PathBuf> {
    let mut module = ptr::null_mut();
    let flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    let mut name = vec![0_u16; MAX_PATH];
    // SAFETY: any address may be passed, and the pointers are valid. The module stays loaded: it has this function, or
    // is a library that is never unloaded.
    let length = unsafe {
        if GetModuleHandleExW(flags, function.cast(), &mut module) == 0 {
            return None;
        }
        GetModuleFileNameW(module, name.as_mut_ptr(), MAX_PATH as u32)
    };
    (length > 0).then(|| OsString::from_wide(&name[..length as usize]).into())
}

/// Opens a file for reading and for a new modification time; a link is an error.
pub(crate) fn open_own(path: &Path) -> io::Result<File> {
    let access = FILE_GENERIC_READ | FILE_WRITE_ATTRIBUTES;
    let file =
        OpenOptions::new().access_mode(access).custom_flags(FILE_FLAG_OPEN_REPARSE_POINT).open(path)?;
    if file.metadata()?.is_symlink() {
        return Err(io::Error::from_raw_os_error(NOT_FOLLOWED));
    }
    Ok(file)
}

/// Creates a file, which has the access of its folder. An error if it exists.
pub(crate) fn create_own(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Creates a folder, which has the access of its parent: a folder of the user's profile is the user's alone.
pub fn own_folder(folder: &Path) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    if folder.symlink_metadata()?.is_dir() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::PermissionDenied, "it is not a directory"))
}

/// The reason why users besides the one of this process may change a file or folder. The access of Windows is that of
/// the parent folder, in which the user has put them.
pub fn others_may_change(_: &Metadata) -> Option<&'static str> {
    None
}
