//! Memory of the device, and memory of the host that the device copies from and to.

use std::sync::Arc;

use cudarc::driver::{result, sys};

use crate::Context;
use crate::error::{CudaError, Named};

/// An address on a device. A kernel takes it as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct DevicePointer(pub sys::CUdeviceptr);

impl DevicePointer {
    /// The address of a place behind it.
    pub fn offset(self, bytes: usize) -> Self {
        Self(self.0 + bytes as u64)
    }
}

/// Memory of a device.
#[derive(Debug)]
pub struct DeviceMemory {
    context: Arc<Context>,
    pointer: DevicePointer,
    bytes: usize,
}

impl DeviceMemory {
    /// New memory, with any contents. The size is not 0.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        // SAFETY: the memory is freed when it is dropped.
        let pointer = unsafe { result::malloc_sync(bytes) }.named("cuMemAlloc")?;
        Ok(Self { context: context.clone(), pointer: DevicePointer(pointer), bytes })
    }

    /// Its first address.
    pub fn pointer(&self) -> DevicePointer {
        self.pointer
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Whether its size is 0.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: the memory is this object's, and the operations that use it have ended, as their callers promise.
        self.context.free(|| unsafe { result::free_sync(self.pointer.0) }.named("cuMemFree"));
    }
}

/// Page-locked memory of the host: copies from and to it do not hold up the calling thread.
#[derive(Debug)]
pub struct PinnedMemory {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this object alone.
unsafe impl Send for PinnedMemory {}

impl PinnedMemory {
    /// New memory, filled with zeros. The size is not 0.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        // SAFETY: the memory is freed when it is dropped.
        let pointer = unsafe { result::malloc_host(bytes, 0) }.named("cuMemHostAlloc")?.cast::<u8>();
        // SAFETY: the memory has this size.
        unsafe { pointer.write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), pointer, bytes })
    }

    /// Its contents.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has this size and is initialised. `Stream`'s copies require that it is not read meanwhile.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    /// Its contents, to change them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: the memory is this object's, and the copies that use it have ended, as their callers promise.
        self.context.free(|| unsafe { result::free_host(self.pointer.cast()) }.named("cuMemFreeHost"));
    }
}
