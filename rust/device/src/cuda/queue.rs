//! [`Queue`]: the stream of a backend. All operations on the memory of the device pass through it, in order.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::sync::Arc;

use penstock_cuda::{
    Argument, Context, CudaError, Device, DevicePointer, Driver, Event, Grid, Kernel, MatrixProduct,
    PinnedMemory, ProductOperands, Stream, Version,
};

use super::graphs::{Graphs, Launch, StepShape};
use super::lost;
use crate::error::DeviceError;

/// Whether a device of a compute capability has programmatic dependent launch, and its driver captures that in graphs.
fn has_dependent_launch(driver: Version, capability: Version) -> bool {
    driver >= Version::new(12, 3) && capability >= Version::new(9, 0)
}

/// A stream, and the rule that makes its operations safe: memory of the device is read and written in this stream only,
/// and is freed only after it has been waited for.
pub(super) struct Queue {
    context: Arc<Context>,
    stream: Arc<Stream>,
    has_dependent_launch: bool,
    /// Whether the calls belong to a step.
    is_in_step: Cell<bool>,
    /// Launches wait here while they repeat those of a graph.
    graphs: RefCell<Graphs>,
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    blocks: [usize; 3],
    threads: usize,
    shared_bytes: usize,
}

impl Shape {
    pub fn new(blocks: usize, threads: usize) -> Self {
        Self { blocks: [blocks, 1, 1], threads, shared_bytes: 0 }
    }

    /// With more than one dimension of blocks.
    pub fn of(blocks: [usize; 3], threads: usize) -> Self {
        Self { blocks, threads, shared_bytes: 0 }
    }

    pub fn with_shared(self, shared_bytes: usize) -> Self {
        Self { shared_bytes, ..self }
    }

    /// The blocks of each split of a product by split-K.
    pub fn with_splits(self, splits: usize) -> Self {
        Self { blocks: [self.blocks[0], splits, 1], ..self }
    }
}

impl Queue {
    pub fn new(context: &Arc<Context>, driver: &Driver, device: &Device) -> Result<Self, CudaError> {
        Ok(Self {
            context: Arc::clone(context),
            stream: Arc::new(Stream::new(context)?),
            has_dependent_launch: has_dependent_launch(driver.version(), device.compute_capability),
            is_in_step: Cell::new(false),
            graphs: RefCell::new(Graphs::new()),
        })
    }

    /// Launches a kernel; nothing if there are no blocks.
    pub fn launch(
        &self,
        kernel: &Kernel,
        shape: Shape,
        arguments: &[Argument<'_>],
    ) -> Result<(), DeviceError> {
        if shape.blocks.contains(&0) {
            return Ok(());
        }
        let grid = Grid {
            blocks: shape.blocks.map(|blocks| blocks as u32),
            threads: shape.threads as u32,
            shared_bytes: shape.shared_bytes as u32,
            is_dependent: self.has_dependent_launch,
        };
        let launch = Launch::Kernel { kernel, grid, arguments };
        // SAFETY: the callers pass the types of the kernel, and addresses of regions as large as the shape requires.
        // The memory is used in this stream only. Before a kernel waits for the one before it, it reads only what that one
        // does not write, and writes nothing.
        unsafe { self.graphs.borrow_mut().launch(&self.stream, launch) }.map_err(lost)
    }

    /// Whether launches are captured into a graph.
    pub fn is_capturing(&self) -> bool {
        self.graphs.borrow().is_capturing()
    }

    /// Launches a product of cuBLASLt, or returns the library's error, if the device has not failed. Its kernels wait
    /// for all before them, and those after them wait for it.
    pub fn multiply(
        &self,
        product: &Arc<MatrixProduct>,
        operands: ProductOperands,
    ) -> Result<Option<CudaError>, DeviceError> {
        let launch = Launch::Product { product, operands };
        let mut graphs = self.graphs.borrow_mut();
        if graphs.recognise(&self.stream, &launch).map_err(lost)? {
            return Ok(None);
        }
        // SAFETY: the callers pass aligned addresses of regions as large as the product's shape requires. The memory is
        // used in this stream only. Kernels wait for those before them.
        let submit = || unsafe { launch.submit(&self.stream) };
        let mut submitted = submit();
        if graphs.is_capturing() && submitted.as_ref().is_err_and(CudaError::is_of_cublas) {
            // The reason may be the capture, which another thread may have ended.
            graphs.abandon_capture(&self.stream, false).map_err(lost)?;
            submitted = submit();
        }
        match submitted {
            Ok(()) => Ok(None),
            Err(error) if error.is_of_cublas() => {
                self.context.memory().map_err(lost)?; // the driver's error, if the device is lost
                Ok(Some(error))
            }
            Err(error) => Err(lost(error)),
        }
    }

    /// Begins a step. If it has a shape, its launches may become a graph; they end with the next operation that is not
    /// a launch.
    pub fn begin_step(&self, shape: Option<StepShape>) -> Result<(), DeviceError> {
        let mut graphs = self.graphs.borrow_mut();
        let begun = graphs.begin(&self.stream, shape);
        self.set_in_step(!graphs.is_capturing());
        begun.map_err(lost)
    }

    /// Reports to the observer of an emulated driver whether the calls that follow belong to a step, which neither
    /// waits nor takes memory.
    fn set_in_step(&self, is_in_step: bool) {
        self.is_in_step.set(is_in_step);
        #[cfg(feature = "testing")]
        if let Some(observer) = self.context.observer() {
            observer.arm(is_in_step);
        }
    }

    /// Waits for an event, which no step but the largest has to.
    pub fn wait(&self, event: &Event) -> Result<(), DeviceError> {
        if event.query().map_err(lost)? {
            return Ok(());
        }
        let is_in_step = self.is_in_step.get();
        self.set_in_step(false);
        let waited = event.synchronize().map_err(lost);
        self.set_in_step(is_in_step);
        waited
    }

    /// Ends the calls of a step. What it has submitted may still be computed.
    pub fn end_step(&self) -> Result<(), DeviceError> {
        self.set_in_step(false);
        self.submit()
    }

    /// Submits everything so far.
    pub fn submit(&self) -> Result<(), DeviceError> {
        self.graphs.borrow_mut().end(&self.stream).map_err(lost)
    }

    /// The stream itself.
    pub fn shared_stream(&self) -> &Arc<Stream> {
        &self.stream
    }

    /// The stream, after everything so far has been submitted.
    pub fn stream(&self) -> Result<&Stream, DeviceError> {
        self.submit()?;
        Ok(&self.stream)
    }

    /// Waits until the device has stopped using memory, also after an error.
    pub fn stop(&self) -> Result<(), CudaError> {
        self.set_in_step(false);
        let ended = self.graphs.borrow_mut().end(&self.stream);
        self.stream.synchronize().and(ended)
    }

    /// Copies a range of page-locked memory, which does not change until the copy has ended.
    pub fn upload(
        &self,
        source: &PinnedMemory,
        range: Range<usize>,
        target: DevicePointer,
    ) -> Result<(), DeviceError> {
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the target is a region with room for the bytes; the caller keeps the source.
        unsafe { self.stream()?.upload(source, range, target) }.map_err(lost)
    }

    /// Copies `bytes` to the beginning of page-locked memory, which is not read until the copy has ended.
    pub fn download(
        &self,
        source: DevicePointer,
        target: &mut PinnedMemory,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the source is a region with as many bytes; the caller keeps the target.
        unsafe { self.stream()?.download(source, target, 0..bytes) }.map_err(lost)
    }

    /// Fills memory with zeros.
    pub fn clear(&self, target: DevicePointer, bytes: usize) -> Result<(), DeviceError> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the target is a region with as many bytes.
        unsafe { self.stream()?.fill(target, 0, bytes) }.map_err(lost)
    }

    /// Waits until everything so far is complete.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.end_step()?;
        self.stream()?.synchronize().map_err(lost)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dependent_launch_needs_a_device_and_a_driver() {
        let has = |driver: (u32, u32), capability: (u32, u32)| {
            has_dependent_launch(Version::new(driver.0, driver.1), Version::new(capability.0, capability.1))
        };
        assert!(has((12, 3), (9, 0)) && has((13, 0), (12, 0)));
        assert!(!has((12, 2), (9, 0)) && !has((13, 0), (8, 9)));
    }
}
