//! [`Nvrtc`]: NVIDIA's compiler of kernels, a library that is found when the program runs.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::ptr;

use crate::Version;
use crate::library::{NotFound, Search, Status, library_functions};
use crate::system::{BUILTINS, Library, describe_file, open_library};

/// Characters of a compiler's log that an error has.
const MAX_LOG: usize = 16 << 10;

/// An error of the compiler, or of finding it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NvrtcError {
    /// No library can be used.
    #[error(
        "NVRTC is not available: {0}; install the package nvidia-cuda-nvrtc, or nvidia-cuda-nvrtc-cu12 for drivers of \
        CUDA 12"
    )]
    NotFound(NotFound),
    /// The source has errors. The log names their files and lines.
    #[error("{name} cannot be compiled for {architecture}:\n{log}")]
    Compile {
        /// The name of the source.
        name: String,
        /// The architecture.
        architecture: String,
        /// The compiler's log.
        log: String,
    },
    /// A call failed.
    #[error("{function} failed: {reason}")]
    Call {
        /// The function.
        function: &'static str,
        /// The library's description of the error.
        reason: String,
    },
    /// A text has a null character.
    #[error("{0} has a null character")]
    NullCharacter(String),
}

/// A kernel's source and the files that it includes, by their names.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The name of the source in errors.
    pub name: &'a str,
    /// The source.
    pub source: &'a str,
    /// Names and texts of the headers.
    pub headers: &'a [(String, String)],
}

type Handle = *mut c_void;
library_functions! {
    /// The functions of the library.
    Functions {
        version = "nvrtcVersion": fn(*mut c_int, *mut c_int);
        error_string = "nvrtcGetErrorString": fn(Status) -> *const c_char;
        create = "nvrtcCreateProgram":
            fn(*mut Handle, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char);
        destroy = "nvrtcDestroyProgram": fn(*mut Handle);
        compile = "nvrtcCompileProgram": fn(Handle, c_int, *const *const c_char);
        log_size = "nvrtcGetProgramLogSize": fn(Handle, *mut usize);
        log = "nvrtcGetProgramLog": fn(Handle, *mut c_char);
        image_size = "nvrtcGetCUBINSize": fn(Handle, *mut usize);
        image = "nvrtcGetCUBIN": fn(Handle, *mut c_char);
    }
}

/// The library, loaded. Several threads may compile.
pub struct Nvrtc {
    functions: Functions,
    version: Version,
    path: PathBuf,
    file: String,
    _library: ManuallyDrop<Library>,
}

impl Nvrtc {
    /// The first library that can be used.
    pub fn find(search: &Search) -> Result<Self, NvrtcError> {
        let open = |path: &Path, library| Self::open(path, library, search);
        search.find("nvrtc", open).map_err(NvrtcError::NotFound)
    }

    fn open(path: &Path, library: ManuallyDrop<Library>, search: &Search) -> Result<Self, String> {
        // SAFETY: NVRTC's functions have these types in every version.
        let functions = unsafe { Functions::load(&library) }?;
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the pointers are valid.
        let status = unsafe { (functions.version)(&raw mut major, &raw mut minor) };
        functions.check("nvrtcVersion", status).map_err(|error| error.to_string())?;
        let version =
            Version::new(u32::try_from(major).unwrap_or_default(), u32::try_from(minor).unwrap_or_default());
        search.check(version)?;
        load_builtins(path);
        let file = describe_file(functions.version as *const c_void);
        Ok(Self { functions, version, path: path.to_owned(), file, _library: library })
    }

    /// The version of the compiler.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The path of the library, or its name if the system found it.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The size and the modification time of the library. A patch release, which may correct the code of kernels, does
    /// not change the version.
    pub(crate) fn file(&self) -> &str {
        &self.file
    }

    /// Compiles a program to an image for one architecture, such as `sm_90a`.
    pub fn compile(
        &self,
        program: Program<'_>,
        architecture: &str,
        options: &[&str],
    ) -> Result<Vec<u8>, NvrtcError> {
        let arch = format!("-arch={architecture}");
        let options = strings([arch.as_str()].into_iter().chain(options.iter().copied()), "an option")?;
        let options = pointers(&options);
        let unit = Unit::new(&self.functions, program)?;
        // SAFETY: the program is alive; the options are an array of this length of strings.
        let status =
            unsafe { (self.functions.compile)(unit.handle, options.len() as c_int, options.as_ptr()) };
        if let Err(error) = self.functions.check("nvrtcCompileProgram", status) {
            let log = unit.log()?;
            return Err(match log.trim_end() {
                "" => error,
                log => NvrtcError::Compile {
                    name: program.name.to_owned(),
                    architecture: architecture.to_owned(),
                    log: log.to_owned(),
                },
            });
        }
        unit.image()
    }
}

/// A program of the library, destroyed when it is dropped.
struct Unit<'a> {
    functions: &'a Functions,
    handle: Handle,
}

impl<'a> Unit<'a> {
    fn new(functions: &'a Functions, program: Program<'_>) -> Result<Self, NvrtcError> {
        let texts = strings([program.source, program.name], program.name)?;
        let names = strings(program.headers.iter().map(|(name, _)| name.as_str()), "a header's name")?;
        let headers = strings(program.headers.iter().map(|(_, text)| text.as_str()), "a header")?;
        let (names, headers) = (pointers(&names), pointers(&headers));
        let mut handle = ptr::null_mut();
        // SAFETY: the arrays have this length, of strings; the library copies them.
        let status = unsafe {
            (functions.create)(
                &raw mut handle,
                texts[0].as_ptr(),
                texts[1].as_ptr(),
                headers.len() as c_int,
                headers.as_ptr(),
                names.as_ptr(),
            )
        };
        functions.check("nvrtcCreateProgram", status)?;
        Ok(Self { functions, handle })
    }

    /// The beginning of the compiler's log.
    fn log(&self) -> Result<String, NvrtcError> {
        let functions = self.functions;
        let log = self.bytes("nvrtcGetProgramLog", functions.log_size, functions.log)?;
        let end = log.iter().position(|byte| *byte == 0).unwrap_or(log.len());
        Ok(String::from_utf8_lossy(&log[..end.min(MAX_LOG)]).into_owned())
    }

    fn image(&self) -> Result<Vec<u8>, NvrtcError> {
        self.bytes("nvrtcGetCUBIN", self.functions.image_size, self.functions.image)
    }

    fn bytes(
        &self,
        function: &'static str,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ) -> Result<Vec<u8>, NvrtcError> {
        let mut length = 0;
        // SAFETY: the program is alive and the pointer is valid.
        self.functions.check(function, unsafe { size(self.handle, &raw mut length) })?;
        let mut bytes = vec![0u8; length];
        // SAFETY: the buffer has the size that the library asked for.
        self.functions.check(function, unsafe { get(self.handle, bytes.as_mut_ptr().cast()) })?;
        Ok(bytes)
    }
}

impl Drop for Unit<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and not used afterwards.
        unsafe { (self.functions.destroy)(&raw mut self.handle) };
    }
}

impl Functions {
    fn check(&self, function: &'static str, status: Status) -> Result<(), NvrtcError> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the function takes any number.
        let text = unsafe { (self.error_string)(status) };
        let reason = if text.is_null() {
            format!("NVRTC error {status}")
        } else {
            // SAFETY: the text is a static string of the library.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Err(NvrtcError::Call { function, reason })
    }
}

/// Loads the libraries of built-in functions beside a compiler. It loads one by its name, and not every package lets
/// the loader search the folder of the compiler.
fn load_builtins(compiler: &Path) {
    let files = compiler.parent().and_then(|folder| folder.read_dir().ok());
    for file in files.into_iter().flatten().flatten() {
        if file.file_name().as_encoded_bytes().starts_with(BUILTINS.as_bytes()) {
            // SAFETY: as for the compiler. A library that cannot be loaded is an error of the compilation, if it is
            // used.
            let library = unsafe { open_library(&file.path()) };
            std::mem::forget(library);
        }
    }
}

fn strings<'a>(texts: impl IntoIterator<Item = &'a str>, noun: &str) -> Result<Vec<CString>, NvrtcError> {
    let owned = texts.into_iter().map(CString::new).collect::<Result<_, _>>();
    owned.map_err(|_| NvrtcError::NullCharacter(noun.to_owned()))
}

fn pointers(strings: &[CString]) -> Vec<*const c_char> {
    strings.iter().map(|string| string.as_ptr()).collect()
}
