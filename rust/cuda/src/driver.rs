//! [`Driver`]: `libcuda.so.1`, loaded when CUDA is asked for.
//!
//! The functions have signatures of their own, in which a result is an `i32`: a newer driver may return codes that a Rust
//! enum of today does not have, which would be undefined behaviour.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::{Unavailable, Version};

/// The oldest version of CUDA that a driver may support.
pub const MIN_DRIVER: Version = Version::new(12, 0);

/// The name that the driver's library has on every system.
const LIBRARY: &str = "libcuda.so.1";
const NO_DEVICE: c_int = 100;

pub(crate) type Status = c_int;
pub(crate) type Ordinal = c_int;
pub(crate) type Context = *mut c_void;

/// Declares the functions, which are looked up when the library is loaded.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        pub(crate) struct Functions {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Functions {
            fn load(library: &Library, path: &str) -> Result<Self, Unavailable> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the driver's function of this name has this signature in every version of CUDA, and
                        // the library is never unloaded.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) -> Status>(concat!($name, "\0").as_bytes())
                        };
                        *found.map_err(|_| Unavailable::MissingFunction { path: path.to_owned(), function: $name })?
                    },)*
                })
            }
        }
    };
}

functions! {
    init = "cuInit": fn(c_uint);
    version = "cuDriverGetVersion": fn(*mut c_int);
    error_name = "cuGetErrorName": fn(c_int, *mut *const c_char);
    device_count = "cuDeviceGetCount": fn(*mut c_int);
    device = "cuDeviceGet": fn(*mut Ordinal, c_int);
    device_name = "cuDeviceGetName": fn(*mut c_char, c_int, Ordinal);
    device_uuid = "cuDeviceGetUuid_v2": fn(*mut [u8; 16], Ordinal);
    device_address = "cuDeviceGetPCIBusId": fn(*mut c_char, c_int, Ordinal);
    device_attribute = "cuDeviceGetAttribute": fn(*mut c_int, c_int, Ordinal);
    device_memory = "cuDeviceTotalMem_v2": fn(*mut usize, Ordinal);
    retain_context = "cuDevicePrimaryCtxRetain": fn(*mut Context, Ordinal);
    release_context = "cuDevicePrimaryCtxRelease_v2": fn(Ordinal);
    current_context = "cuCtxGetCurrent": fn(*mut Context);
    set_context = "cuCtxSetCurrent": fn(Context);
    memory_info = "cuMemGetInfo_v2": fn(*mut usize, *mut usize);
}

/// The loaded library. It is never unloaded: its threads would lose their code.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
/// The process that initialised the driver. A child of its forks cannot use CUDA.
static USER: OnceLock<u32> = OnceLock::new();

/// An initialised driver.
#[derive(Clone, Copy)]
pub struct Driver {
    functions: &'static Functions,
    version: Version,
}

impl Driver {
    /// Loads and initialises the driver; may be called again, also after a failure. `visible_devices` is the value of
    /// `CUDA_VISIBLE_DEVICES`, for the error only: the driver itself reads the variable.
    pub fn open(visible_devices: Option<&str>) -> Result<Self, Unavailable> {
        if let Some(process) = USER.get().filter(|process| **process != std::process::id()) {
            return Err(Unavailable::Forked(*process));
        }
        let functions = load()?;
        let mut number = 0;
        // SAFETY: the pointer is valid; the function may be called before `cuInit`.
        functions.check("cuDriverGetVersion", unsafe { (functions.version)(&raw mut number) })?;
        let number = u32::try_from(number).unwrap_or_default();
        let version = Version::new(number / 1000, number % 1000 / 10);
        if version < MIN_DRIVER {
            return Err(Unavailable::OldDriver(version));
        }
        // SAFETY: any number may be passed; 0 is the only one that is defined.
        let status = unsafe { (functions.init)(0) };
        if status != NO_DEVICE {
            functions.check("cuInit", status)?;
            USER.get_or_init(std::process::id);
        }
        let driver = Self { functions, version };
        if status == NO_DEVICE || driver.num_devices()? == 0 {
            return Err(match visible_devices {
                Some(devices @ ("" | "-1")) => Unavailable::NoVisibleDevice(devices.to_owned()),
                Some(devices) => Unavailable::NoSelectedDevice(devices.to_owned()),
                None => Unavailable::NoDevice,
            });
        }
        Ok(driver)
    }

    /// The newest version of CUDA that the driver supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The number of devices that this process sees.
    pub fn num_devices(&self) -> Result<u32, Unavailable> {
        let mut count = 0;
        // SAFETY: the pointer is valid.
        let status = unsafe { (self.functions.device_count)(&raw mut count) };
        self.check("cuDeviceGetCount", status)?;
        Ok(u32::try_from(count).unwrap_or_default())
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    pub(crate) fn check(&self, function: &'static str, status: Status) -> Result<(), Unavailable> {
        self.functions.check(function, status)
    }
}

impl Functions {
    fn check(&self, function: &'static str, status: Status) -> Result<(), Unavailable> {
        match status {
            0 => Ok(()),
            code => Err(Unavailable::Call { function, code, name: self.name(code) }),
        }
    }

    /// The driver's name of a code, or its number.
    fn name(&self, code: c_int) -> String {
        let mut name = ptr::null();
        // SAFETY: the pointer is valid; the function may be called before `cuInit`.
        let status = unsafe { (self.error_name)(code, &raw mut name) };
        if status != 0 || name.is_null() {
            return format!("CUDA error {code}");
        }
        // SAFETY: on success, `name` is a static string of the driver.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

fn load() -> Result<&'static Functions, Unavailable> {
    if let Some(functions) = FUNCTIONS.get() {
        return Ok(functions);
    }
    // SAFETY: the initialisers of the system's driver have no requirements.
    let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) }
        .map_err(|error| Unavailable::NoLibrary(crate::nvrtc::reason(LIBRARY.as_ref(), &error)))?;
    let functions = Functions::load(&library, LIBRARY)?;
    std::mem::forget(library);
    Ok(FUNCTIONS.get_or_init(|| functions))
}
