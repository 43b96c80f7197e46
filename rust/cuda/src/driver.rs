//! [`Driver`]: the library of the driver, loaded when CUDA is asked for.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::OnceLock;

use crate::error::{self, CallError, Described, NO_DEVICE};
use crate::library::reason;
use crate::system::{DRIVER, open_library};
use crate::table::{Address, functions};
use crate::unavailable::MIN_DRIVER;
use crate::{Unavailable, Version};

pub(crate) type Ordinal = c_int;
pub(crate) type Handle = *mut c_void;

functions! {
    /// The functions that describe devices.
    Functions {
        init = "cuInit"(flags: c_uint);
        version = "cuDriverGetVersion"(version: *mut c_int);
        error_name = "cuGetErrorName"(code: c_int, name: *mut *const c_char);
        error_text = "cuGetErrorString"(code: c_int, text: *mut *const c_char);
        device_count = "cuDeviceGetCount"(count: *mut c_int);
        device = "cuDeviceGet"(device: *mut Ordinal, index: c_int);
        device_name = "cuDeviceGetName"(name: *mut c_char, length: c_int, device: Ordinal);
        device_uuid = "cuDeviceGetUuid_v2"(uuid: *mut [u8; 16], device: Ordinal);
        device_address = "cuDeviceGetPCIBusId"(address: *mut c_char, length: c_int, device: Ordinal);
        device_attribute = "cuDeviceGetAttribute"(value: *mut c_int, attribute: c_int, device: Ordinal);
        device_memory = "cuDeviceTotalMem_v2"(bytes: *mut usize, device: Ordinal);
        retain_context = "cuDevicePrimaryCtxRetain"(context: *mut Handle, device: Ordinal);
        release_context = "cuDevicePrimaryCtxRelease_v2"(device: Ordinal);
        current_context = "cuCtxGetCurrent"(context: *mut Handle);
        set_context = "cuCtxSetCurrent"(context: Handle);
        memory_info = "cuMemGetInfo_v2"(free: *mut usize, total: *mut usize);
    }
}

/// The loaded library. It is never unloaded: its threads would lose their code.
static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
/// The process that initialised the driver. A child of its forks cannot use CUDA.
static USER: OnceLock<u32> = OnceLock::new();

/// An initialised driver.
#[derive(Clone, Copy, Debug)]
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
        unsafe { functions.version(&raw mut number) }?;
        let number = u32::try_from(number).unwrap_or_default();
        let version = Version::new(number / 1000, number % 1000 / 10);
        if version < MIN_DRIVER {
            return Err(Unavailable::OldDriver(version));
        }
        // SAFETY: any number may be passed; 0 is the only one that is defined.
        let has_device = match unsafe { functions.init(0) } {
            Err(error) if error.code() == NO_DEVICE => false,
            result => {
                result?;
                USER.get_or_init(std::process::id);
                true
            }
        };
        let driver = Self { functions, version };
        if !has_device || driver.num_devices()? == 0 {
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
        unsafe { self.functions.device_count(&raw mut count) }?;
        Ok(u32::try_from(count).unwrap_or_default())
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    /// Whether a function is the `cuInit` of this library.
    pub(crate) fn is_init(&self, function: Address) -> bool {
        std::ptr::fn_addr_eq(self.functions.init, function)
    }
}

fn describe(code: c_int) -> Described {
    // SAFETY: the pointers are valid; the functions may be called before `cuInit`.
    unsafe {
        (
            static_text(|functions, name| functions.error_name(code, name)),
            static_text(|functions, text| functions.error_text(code, text)),
        )
    }
}

/// A text of the loaded library, which never changes.
fn static_text(get: impl FnOnce(&Functions, *mut *const c_char) -> Result<(), CallError>) -> Option<String> {
    let mut text = ptr::null();
    get(FUNCTIONS.get()?, &raw mut text).ok()?;
    // SAFETY: on success, the text is a static string of the driver or null.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

fn load() -> Result<&'static Functions, Unavailable> {
    if let Some(functions) = FUNCTIONS.get() {
        return Ok(functions);
    }
    // SAFETY: the initialisers of the system's driver have no requirements.
    let library = unsafe { open_library(DRIVER.as_ref()) }
        .map_err(|error| Unavailable::NoLibrary(reason(DRIVER.as_ref(), &error)))?;
    // SAFETY: the function is not called with this signature.
    let find = |name: &[u8]| unsafe { library.get::<Address>(name) }.ok().map(|found| *found);
    // SAFETY: the library is the driver's.
    let functions = unsafe { Functions::load(find) }
        .map_err(|function| Unavailable::MissingFunction { path: DRIVER.to_owned(), function })?;
    std::mem::forget(library);
    error::set_describe(describe);
    Ok(FUNCTIONS.get_or_init(|| functions))
}
