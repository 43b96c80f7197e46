//! Graphs: operations that are captured once, and launched together.

use std::ptr;
use std::sync::Arc;

use cudarc::driver::sys;

use crate::error::CudaError;
use crate::{Context, Stream};

impl Stream {
    /// Begins a capture: the operations that follow are recorded, and not executed. [`Stream::end_capture`] ends it,
    /// also after an error. Meanwhile, calls of this thread that allocate, wait or query are errors.
    pub fn begin_capture(&self) -> Result<(), CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        Ok(unsafe { self.context().calls().begin_capture(self.handle(), mode) }?)
    }

    /// Ends a capture that this thread has begun, and makes its operations a graph. An error of the capture ends it,
    /// too.
    pub fn end_capture(&self) -> Result<GraphExec, CudaError> {
        let context = self.context();
        let calls = context.calls();
        let mut graph = ptr::null_mut();
        // SAFETY: the stream is alive and the pointer is valid.
        unsafe { calls.end_capture(self.handle(), &raw mut graph) }?;
        let mut executable = ptr::null_mut();
        // SAFETY: the graph is alive and the pointer is valid; the executable is destroyed when it is dropped.
        let instantiated = unsafe { calls.instantiate_graph(&raw mut executable, graph, 0) };
        // SAFETY: the graph is this function's; the executable does not need it.
        context.free(|calls| unsafe { calls.destroy_graph(graph) });
        instantiated?;
        Ok(GraphExec { context: context.clone(), executable })
    }
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct GraphExec {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver's functions may be called from any thread.
unsafe impl Send for GraphExec {}
// SAFETY: as above, also at the same time.
unsafe impl Sync for GraphExec {}

impl GraphExec {
    /// Launches the operations in a stream, with the arguments that they were captured with. The next launch of the
    /// same graph waits for this one.
    ///
    /// # Safety
    ///
    /// The modules of its kernels and the handle of its products are alive, and each operation may be executed now: see
    /// [`Stream`], [`crate::Kernel::launch`] and [`crate::MatrixProduct::launch`].
    pub unsafe fn launch(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the graph and the stream are alive; the operations are the caller's.
        Ok(unsafe { self.context.calls().launch_graph(self.executable, stream.handle()) }?)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: the graph is this object's; launches that have not ended are not disturbed.
        self.context.free(|calls| unsafe { calls.destroy_executable(self.executable) });
    }
}
