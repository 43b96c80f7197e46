//! [`CudaError`]: an error of the backend's calls of the driver.

use cudarc::driver::result::DriverError;

/// A call of the driver has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The driver's error.
    #[error("{call} failed with {name} ({code})")]
    Driver {
        /// The function.
        call: &'static str,
        /// The driver's name of the code.
        name: String,
        /// The code.
        code: i32,
    },
    /// The arguments of a launch do not have the sizes of the kernel's parameters.
    #[error("the kernel {kernel} has parameters of {expected:?} bytes, and its arguments have {given:?}")]
    Arguments {
        /// The name of the kernel.
        kernel: String,
        /// The sizes of its parameters.
        expected: Vec<usize>,
        /// The sizes of the arguments.
        given: Vec<usize>,
    },
    /// Two libraries of the driver.
    #[error(
        "libcuda.so is another library than libcuda.so.1, the driver; remove the folder of libcuda.so, which may \
        be that of the CUDA toolkit's stubs, from LD_LIBRARY_PATH"
    )]
    OtherLibrary,
    /// The library of the driver lacks a function.
    #[error("libcuda.so.1 has no function {0}; update the NVIDIA driver")]
    MissingFunction(&'static str),
    /// A name has a null character.
    #[error("the name {0:?} has a null character")]
    NullCharacter(String),
}

/// Gives a result of the driver the name of its call.
pub(crate) trait Named<T> {
    fn named(self, call: &'static str) -> Result<T, CudaError>;
}

impl<T> Named<T> for Result<T, DriverError> {
    fn named(self, call: &'static str) -> Result<T, CudaError> {
        self.map_err(|error| {
            let name = error.error_name().map_or_else(|_| "CUDA error".into(), |name| name.to_string_lossy());
            CudaError::Driver { call, name: name.into_owned(), code: error.0 as i32 }
        })
    }
}

/// Logs the error of a call that frees something.
pub(crate) fn log_error(freed: Result<(), CudaError>) {
    if let Err(error) = freed {
        log::warn!("{error}");
    }
}
