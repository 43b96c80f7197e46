//! Streams of operations of a device, and the events that the host waits for.

use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::error::{CudaError, NOT_READY};
use crate::{Context, DevicePointer, PinnedMemory};

/// A queue of operations, which the device executes in order. Streams do not wait for one another.
///
/// The memory of an operation must stay as it is until the operation has ended, which only an event or
/// [`Stream::synchronize`] shows. No type says when that is, so the operations are `unsafe`.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    stream: sys::CUstream,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Stream {}

impl Stream {
    /// A new stream.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        let mut stream = ptr::null_mut();
        // SAFETY: the pointer is valid; the stream is destroyed when it is dropped.
        context.within(|| unsafe { context.calls().create_stream(&raw mut stream, flags) })?;
        Ok(Self { context: context.clone(), stream })
    }

    /// Waits until all operations have ended. Returns the error of any of them.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        Ok(unsafe { self.context.calls().synchronize_stream(self.stream) }?)
    }

    /// Lets an event occur when the operations so far have ended.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the event and the stream are alive.
        Ok(unsafe { self.context.calls().record_event(event.event, self.stream) }?)
    }

    /// Copies a range of memory of the host to the device.
    ///
    /// # Safety
    ///
    /// The target has as many bytes. Until the copy has ended, both memories live, the range does not change, and other
    /// operations do not use the target.
    ///
    /// # Panics
    ///
    /// If the range is not in the source.
    pub unsafe fn upload(
        &self,
        source: &PinnedMemory,
        range: Range<usize>,
        target: DevicePointer,
    ) -> Result<(), CudaError> {
        let (from, bytes) = source.range(range);
        // SAFETY: the range is in the source; the target is the caller's.
        Ok(unsafe { self.context.calls().upload(target.0, from, bytes, self.stream) }?)
    }

    /// Copies memory of the device to a range of memory of the host.
    ///
    /// # Safety
    ///
    /// The source has as many bytes. Until the copy has ended, both memories live, the source does not change, and the
    /// range is neither read nor changed.
    ///
    /// # Panics
    ///
    /// If the range is not in the target.
    pub unsafe fn download(
        &self,
        source: DevicePointer,
        target: &mut PinnedMemory,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let (to, bytes) = target.range(range);
        // SAFETY: the range is in the target; the source is the caller's.
        Ok(unsafe { self.context.calls().download(to, source.0, bytes, self.stream) }?)
    }

    /// Sets each byte of memory of the device.
    ///
    /// # Safety
    ///
    /// The memory has as many bytes. Until the operation has ended, it lives and other operations do not use it.
    pub unsafe fn fill(&self, to: DevicePointer, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        Ok(unsafe { self.context.calls().fill(to.0, byte, bytes, self.stream) }?)
    }

    /// Tells an emulated driver that from this point of the stream on a range of an arena is in use and not yet written,
    /// or is free.
    #[cfg(feature = "testing")]
    pub fn report_region(&self, pointer: DevicePointer, bytes: usize, is_live: bool) {
        if let Some(observer) = self.context.observer() {
            // SAFETY: the stream is alive.
            unsafe { observer.region(pointer.0, bytes, is_live, self.stream) };
        }
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is this object's; its operations end all the same.
        self.context.free(|calls| unsafe { calls.destroy_stream(self.stream) });
    }
}

/// A point in the operations of a stream.
#[derive(Debug)]
pub struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for Event {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for Event {}

impl Event {
    /// A new event, which has occurred.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let [blocking, untimed] =
            [sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC, sys::CUevent_flags::CU_EVENT_DISABLE_TIMING];
        let flags = blocking as u32 | untimed as u32;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is valid; the event is destroyed when it is dropped.
        context.within(|| unsafe { context.calls().create_event(&raw mut event, flags) })?;
        Ok(Self { context: context.clone(), event })
    }

    /// Whether it has occurred. Returns the error of the operations before it.
    pub fn query(&self) -> Result<bool, CudaError> {
        // SAFETY: the event is alive.
        match unsafe { self.context.calls().query_event(self.event) } {
            Ok(()) => Ok(true),
            Err(error) if error.code() == NOT_READY => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until it occurs, without using the processor. Returns the error of the operations before it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        Ok(unsafe { self.context.calls().synchronize_event(self.event) }?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this object's.
        self.context.free(|calls| unsafe { calls.destroy_event(self.event) });
    }
}
