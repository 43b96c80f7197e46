//! [`CudaError`]: an error of a device in use, and [`CallError`], that of one call of the driver.

use std::fmt::{self, Display, Formatter};
use std::ops::RangeInclusive;
use std::sync::OnceLock;

use crate::library::{NotFound, Status};

/// Codes of the driver.
pub(crate) const INVALID_VALUE: i32 = 1;
pub(crate) const OUT_OF_MEMORY: i32 = 2;
pub(crate) const NO_DEVICE: i32 = 100;
pub(crate) const NOT_READY: i32 = 600;
/// The codes of captures: of calls that a capture does not allow, and of captures that another call has ended.
const CAPTURE: RangeInclusive<i32> = 900..=908;
/// The codes after which every call of the process for the device fails: errors of memory, links and containment, of
/// kernels, and of external devices.
const STICKY: [i32; 15] = [214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 911];

/// The driver's name and description of a code, if it has them.
pub(crate) type Described = (Option<String>, Option<String>);

/// Describes codes. The driver sets it when it is loaded.
static DESCRIBE: OnceLock<fn(i32) -> Described> = OnceLock::new();

pub(crate) fn set_describe(describe: fn(i32) -> Described) {
    let _ = DESCRIBE.set(describe); // the same one
}

fn described(code: i32) -> Described {
    DESCRIBE.get().map_or((None, None), |describe| describe(code))
}

/// An error of a call of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallError {
    function: &'static str,
    code: i32,
}

impl CallError {
    /// The result of a function. Its name in the library may have the suffix of a version.
    pub(crate) fn check(name: &'static str, status: Status) -> Result<(), Self> {
        match status {
            0 => Ok(()),
            code => Err(Self { function: name.strip_suffix("_v2").unwrap_or(name), code }),
        }
    }

    /// The function that failed.
    pub fn function(&self) -> &'static str {
        self.function
    }

    /// The driver's code.
    pub fn code(&self) -> i32 {
        self.code
    }

    /// Whether every later call for the device fails, too: an operation of the device has failed.
    pub fn is_sticky(&self) -> bool {
        STICKY.contains(&self.code)
    }

    /// The driver's name of the code, or its number.
    pub fn name(&self) -> String {
        described(self.code).0.unwrap_or_else(|| format!("CUDA error {}", self.code))
    }
}

impl Display for CallError {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {}", self.function, self.name())?;
        match described(self.code).1 {
            Some(text) => write!(f, " ({text})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for CallError {}

/// An error of cuBLASLt, or of finding it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CublasError {
    /// No library can be used.
    #[error(
        "cuBLASLt is not available: {0}; install the package nvidia-cublas, or nvidia-cublas-cu12 for drivers of CUDA \
        12"
    )]
    NotFound(NotFound),
    /// A call failed.
    #[error("{function} failed with status {status}, {name}")]
    Call {
        /// The function.
        function: &'static str,
        /// The library's code.
        status: i32,
        /// The library's name of the error.
        name: String,
    },
}

/// An error of a device in use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// A call of the driver failed.
    #[error(transparent)]
    Call(#[from] CallError),
    /// A call of cuBLASLt failed.
    #[error(transparent)]
    Cublas(#[from] CublasError),
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

impl CudaError {
    /// Whether every later call for the device fails, too.
    pub fn is_sticky(&self) -> bool {
        matches!(self, Self::Call(error) if error.is_sticky())
    }

    /// Whether it is an error of cuBLASLt, which the device may have survived.
    pub fn is_of_cublas(&self) -> bool {
        matches!(self, Self::Cublas(_))
    }

    /// Whether it is an error of a capture: nothing was executed.
    pub fn is_of_capture(&self) -> bool {
        matches!(self, Self::Call(error) if CAPTURE.contains(&error.code))
    }

    /// Whether the device, or the host for pinned memory, has not as much free memory.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call(error) if error.code == OUT_OF_MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_kernels_are_sticky_and_others_are_not() {
        let error = |code| CudaError::from(CallError::check("cuX_v2", code).expect_err("an error"));
        assert!([700, 719].map(error).iter().all(CudaError::is_sticky));
        assert!(![1, 2, 400, 600, 999].map(error).iter().any(CudaError::is_sticky));
        assert!(error(2).is_out_of_memory() && !error(700).is_out_of_memory());
        assert!(!CudaError::OtherLibrary.is_sticky());
        assert!(error(901).is_of_capture() && !error(901).is_sticky() && !error(911).is_of_capture());
    }

    #[test]
    fn code_without_a_name_is_a_number() {
        let error = CallError::check("cuMemAlloc_v2", 917).expect_err("an error");
        assert_eq!(error.to_string(), "cuMemAlloc failed with CUDA error 917");
        assert_eq!(CallError::check("cuMemAlloc_v2", 0), Ok(()));
    }
}
