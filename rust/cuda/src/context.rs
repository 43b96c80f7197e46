//! [`Context`]: a device in use.
//!
//! cudarc loads the library of the driver and has its types. The functions are called through [`Calls`], which
//! [`Context::open`] looks up in that library, after a check that it is the driver's.

use std::ptr;
use std::sync::Arc;

use crate::driver::{Handle, Ordinal};
use crate::error::{CallError, CudaError};
use crate::functions::{Calls, Functions, Newer};
use crate::{Device, Driver, Observer, device};

/// The primary context of a device, which other libraries in the process share.
///
/// All calls of its objects need it current in the calling thread. [`Context::bind_thread`] and the constructors of the
/// objects make it current, and leave it so. All else, such as [`Context::memory`] and dropping an object, may run in
/// any thread, and leaves its current context as it was. Objects keep the context alive.
///
/// In a child that the process forks, dropping an object does nothing: the driver's state is that of the parent.
#[derive(Debug)]
pub struct Context {
    driver: Driver,
    functions: &'static Functions,
    ordinal: Ordinal,
    handle: Handle,
    process: u32,
}

// SAFETY: the driver's functions may be called from any thread; the handle is a number to it.
unsafe impl Send for Context {}
// SAFETY: as above; nothing in the context changes.
unsafe impl Sync for Context {}

impl Context {
    /// Uses a device.
    pub fn open(driver: &Driver, device: &Device) -> Result<Arc<Self>, CudaError> {
        let functions = Functions::load(driver)?;
        let ordinal = device::ordinal(driver, device.index)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the pointer is valid and the device exists. The context is released when it is dropped.
        unsafe { driver.functions().retain_context(&raw mut handle, ordinal) }?;
        let process = std::process::id();
        Ok(Arc::new(Self { driver: *driver, functions, ordinal, handle, process }))
    }

    /// Makes the context current in the calling thread.
    pub fn bind_thread(&self) -> Result<(), CudaError> {
        Ok(self.make_current(self.handle)?)
    }

    /// Free and total bytes of the device.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are valid.
        self.within(|| unsafe { self.driver.functions().memory_info(&raw mut free, &raw mut total) })?;
        Ok((free, total))
    }

    /// The functions of an emulated driver.
    pub fn observer(&self) -> Option<&Observer> {
        self.functions.observer.as_ref()
    }

    pub(crate) fn calls(&self) -> &'static Calls {
        &self.functions.calls
    }

    pub(crate) fn newer(&self) -> Option<&'static Newer> {
        self.functions.newer.as_ref()
    }

    /// Runs a call that frees an object, in any thread.
    pub(crate) fn free(&self, call: impl FnOnce(&Calls) -> Result<(), CallError>) {
        if self.process == std::process::id() {
            log_error(self.within(|| call(self.calls())));
        }
    }

    /// Runs a call while the context is current.
    fn within(&self, call: impl FnOnce() -> Result<(), CallError>) -> Result<(), CallError> {
        let mut former = ptr::null_mut();
        // SAFETY: the pointer is valid.
        unsafe { self.driver.functions().current_context(&raw mut former) }?;
        if former == self.handle {
            return call();
        }
        self.make_current(self.handle)?;
        let result = call();
        result.and(self.make_current(former))
    }

    fn make_current(&self, handle: Handle) -> Result<(), CallError> {
        // SAFETY: the context is this one, which is retained, or that of the thread.
        unsafe { self.driver.functions().set_context(handle) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.process == std::process::id() {
            // SAFETY: the context was retained once, and nothing uses it any more.
            log_error(unsafe { self.driver.functions().release_context(self.ordinal) });
        }
    }
}

/// Logs the error of a call that frees something. After a sticky error, which has been reported, all of them fail.
fn log_error(freed: Result<(), CallError>) {
    if let Err(error) = freed {
        let level = if error.is_sticky() { log::Level::Debug } else { log::Level::Warn };
        log::log!(level, "{error}");
    }
}
