//! The memory of a device: one allocation, divided by the arena.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{Context, DeviceMemory, DevicePointer, Stream};

use super::{allocation, start};
use crate::arena::{Arena, ArenaError, Region, Slab, SlabError};
use crate::bfc::Placement;
use crate::error::DeviceError;
use crate::seam::MemoryUse;

/// Alignment of regions: that of `cuMemAlloc`, and a multiple of every access of a kernel.
const ALIGNMENT: usize = 256;

/// Float32 values on the device.
pub struct CudaBuffer(pub(super) Region);

/// One allocation of the driver; none before memory is reserved.
struct DeviceSlab(Option<DeviceMemory>);

impl Slab for DeviceSlab {
    fn commit(&mut self, bytes: usize) -> Result<(), SlabError> {
        let len = self.0.as_ref().map_or(ALIGNMENT, DeviceMemory::len);
        if bytes <= len {
            return Ok(());
        }
        Err(SlabError { bytes, reason: format!("only {len} are reserved") })
    }
}

/// The reserved memory.
pub(super) struct CudaMemory {
    context: Arc<Context>,
    /// The stream that uses the memory.
    #[cfg(feature = "testing")]
    stream: Arc<Stream>,
    arena: Arena<DeviceSlab>,
}

fn empty_arena() -> Arena<DeviceSlab> {
    Arena::new(DeviceSlab(None), ALIGNMENT, ALIGNMENT).expect("one unit; this is a bug")
}

impl CudaMemory {
    /// Memory before anything is reserved.
    pub fn empty(context: &Arc<Context>, stream: &Arc<Stream>) -> Self {
        #[cfg(not(feature = "testing"))]
        let _ = stream;
        Self {
            context: Arc::clone(context),
            #[cfg(feature = "testing")]
            stream: Arc::clone(stream),
            arena: empty_arena(),
        }
    }

    /// Takes memory from the driver, and returns that of the former reservation.
    pub fn reserve(&mut self, bytes: usize) -> Result<(), DeviceError> {
        assert_eq!(self.usage().peak, 0, "memory is reserved after the first allocation; this is a bug");
        self.arena = empty_arena(); // releases the former reservation first
        let what = "the model with its KV cache";
        let slab = DeviceMemory::new(&self.context, bytes.max(ALIGNMENT))
            .map_err(|error| allocation(what, bytes, error))?;
        self.arena = Arena::new(DeviceSlab(Some(slab)), bytes.max(ALIGNMENT), ALIGNMENT).map_err(
            |error: ArenaError| DeviceError::OutOfMemory {
                what,
                bytes: bytes as u64,
                reason: error.to_string(),
            },
        )?;
        Ok(())
    }

    /// Free bytes of the device.
    pub fn available(&self) -> Result<u64, DeviceError> {
        self.context.memory().map(|(free, _)| free as u64).map_err(start)
    }

    pub fn usage(&self) -> MemoryUse {
        let stats = self.arena.bfc().stats();
        MemoryUse { in_use: stats.in_use as u64, peak: stats.peak as u64 }
    }

    /// Bytes that an allocation of `bytes` takes.
    pub fn granted(&self, bytes: usize) -> u64 {
        self.arena.bfc().granted(bytes).map_or(u64::MAX, |granted| granted as u64)
    }

    /// A region of the weights and caches, with any contents.
    pub fn allocate(&mut self, bytes: usize, name: &'static str) -> Result<Region, DeviceError> {
        let region = self.arena.allocate(bytes, Placement::Low, name)?;
        self.report(&region, 0..region.len(), true);
        Ok(region)
    }

    /// A region of the workspace, with any contents.
    pub fn allocate_workspace(&mut self, bytes: usize, name: &'static str) -> Result<Region, DeviceError> {
        let region = self.arena.allocate(bytes, Placement::High, name)?;
        self.report(&region, 0..region.len(), true);
        Ok(region)
    }

    /// Reports to the observer of an emulated driver that a part of a region is given out, with any contents, or is
    /// free.
    #[cfg(feature = "testing")]
    pub fn report(&self, region: &Region, part: Range<usize>, is_live: bool) {
        self.stream.report_region(self.pointer(region).offset(part.start), part.len(), is_live);
    }

    /// Reports nothing: no driver of a device observes it.
    #[cfg(not(feature = "testing"))]
    pub fn report(&self, _: &Region, _: Range<usize>, _: bool) {}

    /// The address of a region.
    pub fn pointer(&self, region: &Region) -> DevicePointer {
        let slab = self.arena.slab().0.as_ref().expect("memory is reserved first; this is a bug");
        slab.pointer().offset(region.offset())
    }

    /// The address of the float32 value at an index of a buffer.
    pub fn float(&self, buffer: &CudaBuffer, index: usize) -> DevicePointer {
        self.pointer(&buffer.0).offset(index * size_of::<f32>())
    }
}
