//! Sequences of launches that are repeated step after step, kept as CUDA graphs.
//!
//! A step computes its launches as if each were submitted. [`Graphs`] compares them with those of the graph of its
//! shape: while they are equal, nothing is submitted, and after the last one the graph is. If one is different before,
//! those that were equal are submitted one by one. So a graph is a memory of launches, never a second description of
//! the model, and it cannot disagree with the operations.
//!
//! The addresses of a step's inputs depend on its shape alone (`step.rs`), so steps of equal shape have equal launches,
//! with two exceptions: a step that returns embeddings launches those alone first, and a step that waits for a grammar
//! ends before the logits. These leave the graph as it is. It is removed after several such steps in a row.
//!
//! A graph takes longer to make than its launches. So a shape gets one after a run of equal steps: at a constant load
//! at once, and never while the load changes from step to step.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_cuda::{Argument, CudaError, GraphExec, Grid, Kernel, MatrixProduct, ProductOperands, Stream};

/// Graphs that are kept. One takes some kilobytes of the driver's memory for each launch.
const MOST_GRAPHS: usize = 64;
/// Consecutive steps of equal shape before one is captured. They also choose the algorithms of cuBLASLt and load its
/// kernels, which may not be possible in a capture.
const RUN: u32 = 3;
/// The same, after a graph was removed for its launches, or could not be made.
const RUN_AFTER_FAILURE: u32 = 64;
/// Consecutive steps with other launches than those of the graph of their shape after which it is removed.
const MOST_MISSES: u32 = 3;
/// Launches of the smallest graph that is kept. The launches of embeddings alone are fewer.
const FEWEST_LAUNCHES: usize = 3;

/// The properties of a step that its launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    pub rows: usize,
    pub outputs: usize,
    /// Of `decode` and `combine`.
    pub work_items: [usize; 2],
    pub adapter_tiles: [usize; 2],
}

/// A launch.
#[derive(Clone, Copy)]
pub(super) enum Launch<'a> {
    Kernel { kernel: &'a Kernel, grid: Grid, arguments: &'a [Argument<'a>] },
    Product { product: &'a Arc<MatrixProduct>, operands: ProductOperands },
}

impl Launch<'_> {
    /// # Safety
    ///
    /// As for [`Kernel::launch`] and [`MatrixProduct::launch`].
    pub unsafe fn submit(&self, stream: &Stream) -> Result<(), CudaError> {
        match self {
            // SAFETY: the caller's.
            Self::Kernel { kernel, grid, arguments } => unsafe { kernel.launch(stream, *grid, arguments) },
            // SAFETY: the caller's.
            Self::Product { product, operands } => unsafe { product.launch(stream, operands) },
        }
    }
}

/// A launch that can be repeated.
enum RecordedLaunch {
    Kernel { kernel: Kernel, grid: Grid, arguments: Vec<Box<[u8]>> },
    Product { product: Arc<MatrixProduct>, operands: ProductOperands },
}

impl RecordedLaunch {
    fn new(launch: &Launch<'_>) -> Self {
        match *launch {
            Launch::Kernel { kernel, grid, arguments } => Self::Kernel {
                kernel: kernel.clone(),
                grid,
                arguments: arguments.iter().map(|argument| argument.0.into()).collect(),
            },
            Launch::Product { product, operands } => Self::Product { product: Arc::clone(product), operands },
        }
    }

    fn is(&self, launch: &Launch<'_>) -> bool {
        match (self, launch) {
            (
                Self::Kernel { kernel, grid, arguments },
                Launch::Kernel { kernel: other, grid: at, arguments: with },
            ) => {
                kernel.is(other)
                    && grid == at
                    && arguments.iter().map(|argument| &**argument).eq(with.iter().map(|argument| argument.0))
            }
            (Self::Product { product, operands }, Launch::Product { product: other, operands: with }) => {
                product.is(other) && operands == with
            }
            _ => false,
        }
    }

    /// # Safety
    ///
    /// As for [`Launch::submit`].
    unsafe fn submit(&self, stream: &Stream) -> Result<(), CudaError> {
        match self {
            Self::Kernel { kernel, grid, arguments } => {
                let arguments: Vec<_> = arguments.iter().map(|argument| Argument(argument)).collect();
                let launch = Launch::Kernel { kernel, grid: *grid, arguments: &arguments };
                // SAFETY: the caller's.
                unsafe { launch.submit(stream) }
            }
            // SAFETY: the caller's.
            Self::Product { product, operands } => unsafe {
                Launch::Product { product, operands: *operands }.submit(stream)
            },
        }
    }
}

/// The launches of a graph.
struct Entry {
    launches: Vec<RecordedLaunch>,
    graph: GraphExec,
    last_use: u64,
    /// Consecutive steps of its shape with other launches.
    misses: u32,
}

/// The use of the launches that come now.
enum Mode {
    Submit,
    /// The stream is being captured.
    Capture(StepShape, Vec<RecordedLaunch>),
    /// The first launches of the graph have come, and are not submitted yet. Its entry is here until the end.
    Compare(StepShape, Entry, usize),
}

/// The graphs of a stream.
///
/// Every operation of the stream but launches is preceded by [`Graphs::end`].
pub(super) struct Graphs {
    entries: HashMap<StepShape, Entry>,
    mode: Mode,
    clock: u64,
    /// The shape of the last step.
    last: Option<StepShape>,
    /// Steps of the shape of the step before them until one is captured.
    steps_to_capture: u32,
}

impl Graphs {
    pub fn new() -> Self {
        Self { entries: HashMap::new(), mode: Mode::Submit, clock: 0, last: None, steps_to_capture: RUN }
    }

    /// Begins a step. Without a shape its launches never become a graph.
    pub fn begin(&mut self, stream: &Stream, shape: Option<StepShape>) -> Result<(), CudaError> {
        self.end(stream)?;
        self.clock += 1;
        let is_repeated = std::mem::replace(&mut self.last, shape) == shape;
        let Some(shape) = shape else { return Ok(()) };
        if let Some(entry) = self.entries.remove(&shape) {
            self.mode = Mode::Compare(shape, Entry { last_use: self.clock, ..entry }, 0);
        } else if !is_repeated {
            self.steps_to_capture = self.steps_to_capture.max(RUN);
        } else if self.steps_to_capture > 1 {
            self.steps_to_capture -= 1;
        } else {
            self.steps_to_capture = RUN;
            stream.begin_capture()?;
            self.mode = Mode::Capture(shape, Vec::new());
        }
        Ok(())
    }

    /// Whether the launches of this step become a graph.
    pub fn is_capturing(&self) -> bool {
        matches!(self.mode, Mode::Capture(..))
    }

    /// Submits a launch, or recognises it.
    ///
    /// # Safety
    ///
    /// As for [`Launch::submit`], until the end of the step.
    pub unsafe fn launch(&mut self, stream: &Stream, launch: Launch<'_>) -> Result<(), CudaError> {
        if self.recognise(stream, &launch)? {
            return Ok(());
        }
        // SAFETY: the caller's.
        match unsafe { launch.submit(stream) } {
            // Another thread has waited for the device, which ends every capture.
            Err(error) if error.is_of_capture() && self.is_capturing() => self.abandon_capture(stream, true),
            submitted => submitted,
        }
    }

    /// Whether a launch is the next one of the graph, which is launched later. Otherwise those before it have been
    /// submitted, and this one has to be; if it is captured, it is recorded.
    pub fn recognise(&mut self, stream: &Stream, launch: &Launch<'_>) -> Result<bool, CudaError> {
        match &mut self.mode {
            Mode::Submit => {}
            Mode::Capture(_, launches) => launches.push(RecordedLaunch::new(launch)),
            Mode::Compare(_, entry, count) => {
                if entry.launches.get(*count).is_some_and(|next| next.is(launch)) {
                    *count += 1;
                    return Ok(true);
                }
                let is_longer = *count == entry.launches.len();
                self.end_comparison(stream, is_longer)?;
            }
        }
        Ok(false)
    }

    /// Ends a step: submits everything that was not submitted.
    pub fn end(&mut self, stream: &Stream) -> Result<(), CudaError> {
        match &mut self.mode {
            Mode::Submit => Ok(()),
            Mode::Capture(..) => self.end_capture(stream),
            Mode::Compare(..) => self.end_comparison(stream, false),
        }
    }

    fn end_capture(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let Mode::Capture(shape, launches) = std::mem::replace(&mut self.mode, Mode::Submit) else {
            return Ok(());
        };
        // SAFETY: the launches are those of this step.
        let launched = |graph: &GraphExec| unsafe { graph.launch(stream) };
        let graph = match stream.end_capture().and_then(|graph| launched(&graph).map(|()| graph)) {
            Ok(graph) => graph,
            // A graph takes memory of the driver when it is made, or launched first. Another thread may have ended the
            // capture.
            Err(error) if error.is_out_of_memory() || error.is_of_capture() => {
                return self.submit_all(stream, &launches);
            }
            Err(error) => return Err(error),
        };
        if launches.len() < FEWEST_LAUNCHES {
            self.steps_to_capture = 1; // that of the step after them
            return Ok(());
        }
        self.make_room();
        self.entries.insert(shape, Entry { launches, graph, last_use: self.clock, misses: 0 });
        Ok(())
    }

    /// Ends a capture after its last launch has failed, and submits the launches before it, and that one if `has_last`.
    pub fn abandon_capture(&mut self, stream: &Stream, has_last: bool) -> Result<(), CudaError> {
        let Mode::Capture(_, mut launches) = std::mem::replace(&mut self.mode, Mode::Submit) else {
            return Ok(());
        };
        let _ = stream.end_capture(); // without a graph; it may be an error, which also ends the capture
        if !has_last {
            launches.pop();
        }
        self.submit_all(stream, &launches)
    }

    /// Submits the launches of a step that become no graph. The next capture is later.
    fn submit_all(&mut self, stream: &Stream, launches: &[RecordedLaunch]) -> Result<(), CudaError> {
        self.steps_to_capture = RUN_AFTER_FAILURE;
        // SAFETY: the launches are those of this step.
        launches.iter().try_for_each(|launch| unsafe { launch.submit(stream) })
    }

    /// Submits the launches that were recognised: by the graph, if they are all of it. A step that is longer than its
    /// graph has other launches, too: the graph may be that of a step that has failed.
    fn end_comparison(&mut self, stream: &Stream, is_longer: bool) -> Result<(), CudaError> {
        let Mode::Compare(shape, mut entry, count) = std::mem::replace(&mut self.mode, Mode::Submit) else {
            return Ok(());
        };
        entry.misses = if count == entry.launches.len() && !is_longer { 0 } else { entry.misses + 1 };
        let submitted = if count == entry.launches.len() {
            // SAFETY: the launches are those of this step.
            unsafe { entry.graph.launch(stream) }
        } else {
            // SAFETY: as above.
            entry.launches[..count].iter().try_for_each(|launch| unsafe { launch.submit(stream) })
        };
        if entry.misses == MOST_MISSES {
            self.steps_to_capture = RUN_AFTER_FAILURE;
        } else {
            self.entries.insert(shape, entry);
        }
        submitted
    }

    /// Removes the graph that was not used for the longest time, if there are as many as are kept.
    fn make_room(&mut self) {
        if self.entries.len() < MOST_GRAPHS {
            return;
        }
        let oldest = self.entries.iter().min_by_key(|(_, entry)| entry.last_use);
        if let Some((&shape, _)) = oldest {
            self.entries.remove(&shape);
        }
    }
}
