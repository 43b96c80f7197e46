//! Streams of operations of a device, and the events that order them.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::error::{CudaError, Named};
use crate::{Context, DeviceMemory, PinnedMemory};

/// A queue of operations, which the device executes in order. Streams do not wait for one another but by events.
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

impl Stream {
    /// A new stream.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let stream =
            result::stream::create(result::stream::StreamKind::NonBlocking).named("cuStreamCreate")?;
        Ok(Self { context: context.clone(), stream })
    }

    /// Waits until all operations have ended. Returns the error of any of them.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream is alive.
        unsafe { result::stream::synchronize(self.stream) }.named("cuStreamSynchronize")
    }

    /// Lets the operations that follow wait for an event.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the stream and the event are alive.
        unsafe { result::stream::wait_event(self.stream, event.event, flags) }.named("cuStreamWaitEvent")
    }

    /// Lets an event occur when the operations so far have ended.
    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: the event and the stream are alive.
        unsafe { result::event::record(event.event, self.stream) }.named("cuEventRecord")
    }

    /// Copies a range of `source` to the beginning of `target`.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, both live, the source does not change, and other operations do not use the target.
    ///
    /// # Panics
    ///
    /// If the range is not in both.
    pub unsafe fn upload(
        &self,
        source: &PinnedMemory,
        range: Range<usize>,
        target: &DeviceMemory,
    ) -> Result<(), CudaError> {
        let bytes = &source.bytes()[range];
        assert!(bytes.len() <= target.len(), "the target is too small");
        // SAFETY: the range is in both; the caller keeps them as they are.
        unsafe { result::memcpy_htod_async(target.pointer().0, bytes, self.stream) }
            .named("cuMemcpyHtoDAsync")
    }

    /// Copies the beginning of `source` to a range of `target`.
    ///
    /// # Safety
    ///
    /// Until the copy has ended, both live, the source does not change, and the target is not used.
    ///
    /// # Panics
    ///
    /// If the range is not in both.
    pub unsafe fn download(
        &self,
        source: &DeviceMemory,
        target: &mut PinnedMemory,
        range: Range<usize>,
    ) -> Result<(), CudaError> {
        let bytes = &mut target.bytes_mut()[range];
        assert!(bytes.len() <= source.len(), "the source is too small");
        // SAFETY: the range is in both; the caller keeps them as they are.
        unsafe { result::memcpy_dtoh_async(bytes, source.pointer().0, self.stream) }
            .named("cuMemcpyDtoHAsync")
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.stream
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: the stream is this object's; its operations end all the same.
        self.context.free(|| unsafe { result::stream::destroy(self.stream) }.named("cuStreamDestroy"));
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

impl Event {
    /// A new event, which has occurred.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
        let event = result::event::create(flags).named("cuEventCreate")?;
        Ok(Self { context: context.clone(), event })
    }

    /// Waits until it occurs. Returns the error of the operations before it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the event is alive.
        unsafe { result::event::synchronize(self.event) }.named("cuEventSynchronize")
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: the event is this object's.
        self.context.free(|| unsafe { result::event::destroy(self.event) }.named("cuEventDestroy"));
    }
}
