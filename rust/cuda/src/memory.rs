//! Memory of the device, and memory of the host that the device copies from and to.

use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;

use bytemuck::NoUninit;
use cudarc::driver::sys;

use crate::Context;
use crate::error::CudaError;

/// An address on a device. A kernel takes it as a pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit)]
#[repr(transparent)]
pub struct DevicePointer(pub sys::CUdeviceptr);

impl DevicePointer {
    /// No address, for optional arguments of kernels.
    pub const NULL: Self = Self(0);

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
        let mut pointer = 0;
        // SAFETY: the pointer is valid; the memory is freed when it is dropped.
        context.within(|| unsafe { context.calls().allocate(&raw mut pointer, bytes) })?;
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
        self.context.free(|calls| unsafe { calls.free(self.pointer.0) });
    }
}

/// Page-locked memory of the host that kernels use; its contents are not visible here.
#[derive(Debug)]
pub struct PinnedBlock {
    context: Arc<Context>,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: the memory belongs to this object alone.
unsafe impl Send for PinnedBlock {}
// SAFETY: an object has no access to the contents. Kernels write them only with an address, as their callers promise.
unsafe impl Sync for PinnedBlock {}

impl PinnedBlock {
    /// New memory, with any contents. The size is not 0.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let mut pointer = ptr::null_mut();
        // SAFETY: the pointer is valid; the memory is freed when it is dropped.
        context.within(|| unsafe { context.calls().allocate_host(&raw mut pointer, bytes, 0) })?;
        Ok(Self { context: context.clone(), pointer: pointer.cast(), bytes })
    }

    /// Its first address, as kernels see it: with unified addressing, which every supported device has, it is that of
    /// the host.
    pub fn device_pointer(&self) -> DevicePointer {
        DevicePointer(self.pointer.expose_provenance() as u64)
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

impl Drop for PinnedBlock {
    fn drop(&mut self) {
        // SAFETY: the memory is this object's, and the copies that use it have ended, as their callers promise.
        self.context.free(|calls| unsafe { calls.free_host(self.pointer.cast()) });
    }
}

/// Page-locked memory of the host: copies from and to it do not hold up the calling thread, and kernels can read it.
#[derive(Debug)]
pub struct PinnedMemory(PinnedBlock);

impl PinnedMemory {
    /// New memory, filled with zeros. The size is not 0.
    pub fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, CudaError> {
        let block = PinnedBlock::new(context, bytes)?;
        // SAFETY: the memory has this size.
        unsafe { block.pointer.write_bytes(0, bytes) };
        Ok(Self(block))
    }

    /// Its first address, as kernels see it.
    pub fn device_pointer(&self) -> DevicePointer {
        self.0.device_pointer()
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether its size is 0.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Its contents.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has this size and is initialised. `Stream`'s copies require that it is not read meanwhile.
        unsafe { std::slice::from_raw_parts(self.0.pointer, self.0.bytes) }
    }

    /// Its contents, to change them.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`; the reference is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.0.pointer, self.0.bytes) }
    }

    /// The first address of a range and its size, without a reference: a copy may use other parts meanwhile.
    pub(crate) fn range(&self, range: Range<usize>) -> (*mut c_void, usize) {
        assert!(range.start <= range.end && range.end <= self.0.bytes, "the range is not in the memory");
        // SAFETY: the beginning is in the memory or at its end.
        (unsafe { self.0.pointer.add(range.start) }.cast(), range.len())
    }
}
