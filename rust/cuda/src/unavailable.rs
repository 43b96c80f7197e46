//! [`Unavailable`]: the reasons why there is no CUDA device, each with a remedy.

use crate::Version;
use crate::error::CallError;

/// The oldest version of CUDA that a driver may support.
pub const MIN_DRIVER: Version = Version::new(12, 0);
/// The oldest compute capability that the kernels are compiled for.
pub const MIN_COMPUTE_CAPABILITY: Version = Version::new(8, 0);

/// The reason why CUDA, or one device, cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unavailable {
    /// The driver's library cannot be loaded.
    #[error(
        "libcuda.so.1 cannot be loaded ({0}); install the NVIDIA driver, or start the container with GPUs"
    )]
    NoLibrary(String),
    /// The library lacks a function.
    #[error("{path} has no function {function}; update the NVIDIA driver")]
    MissingFunction {
        /// The library.
        path: String,
        /// The function.
        function: &'static str,
    },
    /// The driver is too old.
    #[error("the NVIDIA driver supports CUDA {0}, and {MIN_DRIVER} or newer is required; update the driver")]
    OldDriver(Version),
    /// The driver was initialised before a fork.
    #[error("process {0} used CUDA before it forked; start processes that use CUDA with the method 'spawn'")]
    Forked(u32),
    /// There is no device.
    #[error(
        "the driver finds no device; check that nvidia-smi lists one, and that a container was started with GPUs"
    )]
    NoDevice,
    /// `CUDA_VISIBLE_DEVICES` excludes all devices.
    #[error(
        "no device is visible, because CUDA_VISIBLE_DEVICES is {0:?}; unset it, or set it to indices of nvidia-smi"
    )]
    NoVisibleDevice(String),
    /// There is no device, or `CUDA_VISIBLE_DEVICES` names none of them.
    #[error(
        "the driver finds no device, and CUDA_VISIBLE_DEVICES is {0:?}; check that nvidia-smi lists a device of \
        the variable, and that a container was started with GPUs"
    )]
    NoSelectedDevice(String),
    /// There are devices, but not this one.
    #[error("device {index} does not exist; the driver has {count}: use an index below that")]
    NoSuchDevice {
        /// The index.
        index: u32,
        /// The number of devices.
        count: u32,
    },
    /// The device is too old.
    #[error(
        "the compute capability of {name} is {capability}, and {MIN_COMPUTE_CAPABILITY} or newer is required; use \
        another device, or the CPU"
    )]
    OldDevice {
        /// The name of the device.
        name: String,
        /// Its compute capability.
        capability: Version,
    },
    /// A call of the driver failed.
    #[error("{} failed with {}{}", .0.function(), .0.name(), hint(.0.code()))]
    Call(#[from] CallError),
}

impl Unavailable {
    /// Whether the machine has no driver, or no device is visible.
    pub fn is_absent(&self) -> bool {
        matches!(
            self,
            Self::NoLibrary(_) | Self::NoDevice | Self::NoVisibleDevice(_) | Self::NoSelectedDevice(_)
        )
    }
}

/// The remedy for an error of the driver, as the end of a sentence.
fn hint(code: i32) -> &'static str {
    match code {
        3 => "; start processes that use CUDA with the method 'spawn', not by a fork of one that used it",
        34 => "; this is the stub of the CUDA toolkit: remove its folder from LD_LIBRARY_PATH",
        46 => "; another process has the device for itself, or its compute mode prohibits use",
        2 => "; the device has no free memory, see nvidia-smi",
        101 => "; check CUDA_VISIBLE_DEVICES",
        802 => "; start the service nvidia-fabricmanager",
        803 => "; the driver's library and its kernel module have different versions: restart the machine",
        804 => "; remove the folder of the package cuda-compat from LD_LIBRARY_PATH",
        999 => "; run nvidia-smi, and check that the kernel module nvidia_uvm is loaded",
        _ => "; see the list of errors of the CUDA driver API",
    }
}
