//! [`Context`]: a device in use.
//!
//! cudarc loads the library of the driver and has its types. The functions are called through [`Calls`], which
//! [`Context::open`] looks up in that library, after a check that it is the driver's.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys::CUstreamCaptureMode as CaptureMode;

use crate::driver::{Handle, Ordinal};
use crate::error::{CallError, CudaError};
use crate::functions::{Calls, Functions, Newer};
#[cfg(feature = "testing")]
use crate::observer::Observer;
use crate::{Device, Driver, device};

/// The primary context of a device, which other libraries in the process share.
///
/// All calls of its objects need it current in the calling thread, which [`Context::bind_thread`] does. All else, such
/// as [`Context::memory`], the constructors of objects and dropping them, may run in any thread, and leaves its current
/// context as it was. Objects keep the context alive.
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

    /// Makes the context current in the calling thread. Captures of graphs in other threads, also by other libraries,
    /// do not affect its calls from then on. In a thread of the caller, [`CallerThread`] restores both.
    pub fn bind_thread(&self) -> Result<(), CudaError> {
        exchange_mode(self.calls(), CaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
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
    #[cfg(feature = "testing")]
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

    /// Runs a call while the context is current, and captures in other threads do not affect it.
    pub(crate) fn within<E: From<CallError>>(&self, call: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        let _caller = CallerThread::with(&self.driver, self.calls())?;
        self.make_current(self.handle)?;
        call()
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

/// A thread of the caller that uses CUDA for a moment: dropping this restores its context, and its rule for captures.
#[derive(Debug)]
pub struct CallerThread {
    driver: Driver,
    calls: &'static Calls,
    context: Handle, // a pointer, so that the object stays in its thread
    mode: CaptureMode,
}

impl CallerThread {
    /// The calling thread, from now on not affected by captures in other threads.
    pub fn enter(driver: &Driver) -> Result<Self, CudaError> {
        Ok(Self::with(driver, &Functions::load(driver)?.calls)?)
    }

    fn with(driver: &Driver, calls: &'static Calls) -> Result<Self, CallError> {
        let mut context = ptr::null_mut();
        // SAFETY: the pointer is valid.
        unsafe { driver.functions().current_context(&raw mut context) }?;
        let mode = exchange_mode(calls, CaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)?;
        Ok(Self { driver: *driver, calls, context, mode })
    }
}

impl Drop for CallerThread {
    fn drop(&mut self) {
        // SAFETY: the context is that of the thread.
        log_error(unsafe { self.driver.functions().set_context(self.context) });
        log_error(exchange_mode(self.calls, self.mode).map(drop));
    }
}

/// Sets which captures affect the calls of the calling thread; returns what was set before.
fn exchange_mode(calls: &Calls, mut mode: CaptureMode) -> Result<CaptureMode, CallError> {
    // SAFETY: the pointer is valid; the driver writes a mode that was set, or the first of them.
    unsafe { calls.exchange_capture_mode(&raw mut mode) }?;
    Ok(mode)
}

/// Logs the error of a call that frees or restores something. After a sticky error, which has been reported, all
/// of them fail.
fn log_error(freed: Result<(), CallError>) {
    if let Err(error) = freed {
        let level = if error.is_sticky() { log::Level::Debug } else { log::Level::Warn };
        log::log!(level, "{error}");
    }
}
