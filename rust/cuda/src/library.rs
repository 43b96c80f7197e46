//! Libraries that are loaded when they are asked for: the search for those of the CUDA toolkit, and their functions.

use std::ffi::c_int;
use std::fmt::{self, Display, Formatter};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};

use crate::Version;
use crate::system::{Library, TOOLKIT, library_name, open_library};

/// The major versions of the toolkit's libraries, in the order of the search.
const MAJORS: [u32; 2] = [13, 12];

/// The result of a function of these libraries; 0 is success.
pub(crate) type Status = c_int;

/// The places where a library of the CUDA toolkit may be.
#[derive(Clone, Debug, Default)]
pub struct Search {
    /// The only place, if it is set.
    pub library: Option<PathBuf>,
    /// Folders, before those of the system.
    pub folders: Vec<PathBuf>,
    /// The newest version of CUDA that the driver supports. It loads no code of a newer major version.
    pub driver: Option<Version>,
}

impl Search {
    /// Opens the first library that can be used, by a name without its version, such as `nvrtc`. The error has each
    /// library with the reason.
    pub(crate) fn find<T>(
        &self,
        name: &str,
        open: impl Fn(&Path, ManuallyDrop<Library>) -> Result<T, String>,
    ) -> Result<T, NotFound> {
        let mut tried = Vec::new();
        for path in self.candidates(name) {
            match load(&path).and_then(|library| open(&path, library)) {
                Ok(library) => return Ok(library),
                Err(reason) => tried.push((path, reason)),
            }
        }
        Err(NotFound(tried))
    }

    fn candidates(&self, name: &str) -> Vec<PathBuf> {
        if let Some(library) = &self.library {
            return vec![library.clone()];
        }
        let newest = self.driver.map_or(u32::MAX, |version| version.major);
        let majors = MAJORS.into_iter().filter(|major| *major <= newest);
        let names: Vec<_> = majors.map(|major| library_name(name, major)).collect();
        let folders = self.folders.iter().map(PathBuf::as_path).chain(TOOLKIT.map(Path::new));
        let files = folders.flat_map(|folder| names.iter().map(|name| folder.join(name)));
        files.filter(|file| file.exists()).chain(names.iter().map(PathBuf::from)).collect()
    }

    /// An error if a library's version is older than those of the search, or newer than the driver's.
    pub(crate) fn check(&self, version: Version) -> Result<(), String> {
        match self.driver {
            Some(driver) if version.major > driver.major => {
                Err(format!("its version {version} is newer than CUDA {driver}, which the driver supports"))
            }
            _ if version.major < MAJORS[MAJORS.len() - 1] => {
                Err(format!("its version is {version}, and 12.0 or newer is required"))
            }
            _ => Ok(()),
        }
    }
}

/// The libraries that cannot be used, each with the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NotFound(pub Vec<(PathBuf, String)>);

impl Display for NotFound {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (index, (path, reason)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { "; " };
            write!(f, "{separator}{} ({reason})", path.display())?;
        }
        Ok(())
    }
}

/// A library, which stays loaded: those of the toolkit that were used keep threads and state of their own.
fn load(path: &Path) -> Result<ManuallyDrop<Library>, String> {
    // SAFETY: loading the toolkit's libraries has no requirements. A variable that names one must name a copy of it.
    let library = unsafe { open_library(path) };
    library.map(ManuallyDrop::new).map_err(|error| reason(path, &error))
}

/// Declares a table of a library's functions, which are looked up when it is loaded. Those without a result return a
/// [`Status`].
macro_rules! library_functions {
    (
        $(#[$doc:meta])* $table:ident {
            $($field:ident = $name:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*
        }
    ) => {
        $(#[$doc])*
        struct $table {
            $($field: $crate::library::library_functions!(@type fn($($argument),*) $(-> $result)?),)*
        }

        impl $table {
            /// The error is the name of a function that is missing.
            ///
            /// # Safety
            ///
            /// The library's functions of these names have these types, and it is loaded as long as the table is used.
            unsafe fn load(library: &$crate::system::Library) -> Result<Self, String> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the caller's.
                        let found = unsafe {
                            library.get::<$crate::library::library_functions!(
                                @type fn($($argument),*) $(-> $result)?
                            )>(concat!($name, "\0").as_bytes())
                        };
                        *found.map_err(|_| concat!("it has no function ", $name).to_owned())?
                    },)*
                })
            }
        }
    };
    (@type fn($($argument:ty),*)) => { unsafe extern "C" fn($($argument),*) -> $crate::library::Status };
    (@type fn($($argument:ty),*) -> $result:ty) => { unsafe extern "C" fn($($argument),*) -> $result };
}
pub(crate) use library_functions;

/// The loader's reason for an error, without the path, with which it begins.
pub(crate) fn reason(path: &Path, error: &libloading::Error) -> String {
    let text = match error {
        libloading::Error::DlOpen { source } => source.to_string(),
        other => other.to_string(),
    };
    let prefix = format!("{}: ", path.display());
    text.strip_prefix(&prefix).unwrap_or(&text).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(driver: Option<Version>) -> Vec<PathBuf> {
        let candidates = Search { driver, ..Search::default() }.candidates("x");
        candidates.into_iter().filter(|path| path.is_relative()).collect()
    }

    #[test]
    fn libraries_newer_than_the_driver_are_not_searched() {
        let [new, old] = [13, 12].map(|major| PathBuf::from(library_name("x", major)));
        assert_eq!(names(None), [new.clone(), old.clone()]);
        assert_eq!(names(Some(Version::new(14, 0))), [new.clone(), old.clone()]);
        assert_eq!(names(Some(Version::new(13, 0))), [new, old.clone()]);
        assert_eq!(names(Some(Version::new(12, 9))), [old]);
    }

    #[test]
    fn versions_are_from_12_to_that_of_the_driver() {
        let check = |driver, version| Search { driver, ..Search::default() }.check(Version::new(version, 4));
        let driver = Some(Version::new(12, 2));
        assert_eq!([check(driver, 12), check(None, 13)], [Ok(()), Ok(())]);
        let newer = "its version 13.4 is newer than CUDA 12.2, which the driver supports";
        assert_eq!(check(driver, 13), Err(newer.to_owned()));
        assert_eq!(check(None, 11), Err("its version is 11.4, and 12.0 or newer is required".to_owned()));
    }

    #[test]
    fn folders_are_searched_in_order_before_the_system() {
        let root = std::env::temp_dir().join(format!("penstock-search-{}", std::process::id()));
        let folders = ["a", "b", "c"].map(|name| root.join(name));
        let files = [folders[0].join(library_name("x", 12)), folders[2].join(library_name("x", 13))];
        for file in &files {
            std::fs::create_dir_all(file.parent().expect("a folder")).expect("a folder");
            std::fs::write(file, "").expect("a file");
        }
        let search = Search { folders: folders.to_vec(), ..Search::default() };
        let candidates = search.candidates("x");
        let only = Search { library: Some(files[1].clone()), ..search }.candidates("x");
        std::fs::remove_dir_all(root).expect("a folder");
        assert_eq!(candidates[..2], files);
        assert_eq!(only, files[1..]);
    }
}
