//! [`Context`]: a device in use.
//!
//! From here on, the driver is called through cudarc, which finds its functions itself when they are first called, and
//! panics without one. [`Context::open`] checks before that its library is the driver's and has all functions.

use std::ffi::c_uint;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::driver::Status;
use crate::error::{CudaError, Named, log_error};
use crate::module::HAS_PARAMETERS;
use crate::{Device, Driver, Version};

/// The functions that every driver has and cudarc calls here, besides those of [`Driver`].
const FUNCTIONS: [&str; 18] = [
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernelEx",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuStreamDestroy_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
];

/// The primary context of a device, which other libraries in the process share.
///
/// A thread binds it before it makes objects of the device. All of those keep the context alive.
#[derive(Debug)]
pub struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    driver_version: Version,
}

// SAFETY: the driver's functions may be called from any thread; the handles are numbers to it.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in the context changes.
unsafe impl Sync for Context {}

impl Context {
    /// Uses a device, and binds it to the calling thread.
    pub fn open(driver: &Driver, device: &Device) -> Result<Arc<Self>, CudaError> {
        check_library(driver)?;
        let device = result::device::get(device.index.cast_signed()).named("cuDeviceGet")?;
        // SAFETY: the device exists. The context is released when it is dropped.
        let context = unsafe { result::primary_ctx::retain(device) }.named("cuDevicePrimaryCtxRetain")?;
        let context = Arc::new(Self { device, context, driver_version: driver.version() });
        context.bind_thread()?;
        Ok(context)
    }

    /// Makes the context current in the calling thread.
    pub fn bind_thread(&self) -> Result<(), CudaError> {
        // SAFETY: the context is retained.
        unsafe { result::ctx::set_current(self.context) }.named("cuCtxSetCurrent")
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        self.bind_thread()?;
        result::mem_get_info().named("cuMemGetInfo")
    }

    /// The newest version of CUDA that the driver supports.
    pub(crate) fn driver_version(&self) -> Version {
        self.driver_version
    }

    /// Runs a call that frees an object, in any thread.
    pub(crate) fn free(&self, call: impl FnOnce() -> Result<(), CudaError>) {
        log_error(self.bind_thread().and_then(|()| call()));
    }
}

/// An error if cudarc's library is not the driver's, or lacks a function.
fn check_library(driver: &Driver) -> Result<(), CudaError> {
    // SAFETY: initialisers of a driver have no requirements. A library is found: the driver's name is the last candidate.
    let library = unsafe { sys::culib() };
    // SAFETY: the function is compared, not called.
    let init = unsafe { library.get::<unsafe extern "C" fn(c_uint) -> Status>(b"cuInit\0") };
    if !init.is_ok_and(|init| std::ptr::fn_addr_eq(*init, driver.functions().init)) {
        return Err(CudaError::OtherLibrary);
    }
    let newer = (driver.version() >= HAS_PARAMETERS).then_some("cuFuncGetParamInfo");
    // SAFETY: the function is not called.
    let is_missing = |name: &&str| unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) }.is_err();
    match FUNCTIONS.into_iter().chain(newer).find(is_missing) {
        Some(name) => Err(CudaError::MissingFunction(name)),
        None => Ok(()),
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the context was retained once, and nothing uses it any more.
        log_error(unsafe { result::primary_ctx::release(self.device) }.named("cuDevicePrimaryCtxRelease"));
    }
}
