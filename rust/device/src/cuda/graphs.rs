//! Sequences of launches that are repeated step after step, kept as CUDA graphs.
//!
//! A step computes its launches as if each were submitted. [`Graphs`] compares them with those of the last step of the
//! same shape: while they are equal, nothing is submitted, and at the end the graph is. If one is different, those before
//! it are submitted one by one, and the graph is forgotten. So a graph is a memory of launches, never a second
//! description of the model, and it cannot disagree with the operations.
//!
//! The addresses of a step's inputs depend on its shape alone (`step.rs`), so steps of equal shape have equal launches.

use std::collections::HashMap;

use penstock_cuda::{Argument, CudaError, GraphExec, Grid, Kernel, Stream};

/// Graphs that are kept. One takes some kilobytes of the driver's memory for each launch.
const MOST_GRAPHS: usize = 64;
/// Shapes that are remembered.
const MOST_SHAPES: usize = 4 * MOST_GRAPHS;

/// The properties of a step that its launches depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct StepShape {
    pub rows: usize,
    pub outputs: usize,
    /// Of `decode` and `combine`.
    pub works: [usize; 2],
    pub adapter_tiles: [usize; 2],
}

/// A launch that can be repeated.
#[derive(Debug)]
struct Launch {
    kernel: Kernel,
    grid: Grid,
    arguments: Vec<Box<[u8]>>,
}

impl Launch {
    fn new(kernel: &Kernel, grid: Grid, arguments: &[Argument<'_>]) -> Self {
        Self {
            kernel: kernel.clone(),
            grid,
            arguments: arguments.iter().map(|argument| argument.0.into()).collect(),
        }
    }

    fn is(&self, kernel: &Kernel, grid: Grid, arguments: &[Argument<'_>]) -> bool {
        self.kernel.is(kernel)
            && self.grid == grid
            && self
                .arguments
                .iter()
                .map(|argument| &**argument)
                .eq(arguments.iter().map(|argument| argument.0))
    }

    /// # Safety
    ///
    /// As for [`Kernel::launch`].
    unsafe fn submit(&self, stream: &Stream) -> Result<(), CudaError> {
        let arguments: Vec<_> = self.arguments.iter().map(|argument| Argument(argument)).collect();
        // SAFETY: the caller's.
        unsafe { self.kernel.launch(stream, self.grid, &arguments) }
    }
}

/// The launches of the last step of a shape.
#[derive(Debug, Default)]
struct Entry {
    /// The launches of the graph.
    launches: Vec<Launch>,
    /// `None` before the shape has occurred twice.
    graph: Option<GraphExec>,
    last_use: u64,
}

/// The use of the launches that come now.
#[derive(Debug)]
enum Mode {
    Submit,
    /// The stream is being captured.
    Capture(StepShape, Vec<Launch>),
    /// The first launches of the graph have come, and are not submitted yet.
    Compare(StepShape, usize),
}

/// The graphs of a stream.
///
/// Every operation of the stream but launches is preceded by [`Graphs::end`].
#[derive(Debug)]
pub(super) struct Graphs {
    entries: HashMap<StepShape, Entry>,
    mode: Mode,
    clock: u64,
}

impl Graphs {
    pub fn new() -> Self {
        Self { entries: HashMap::new(), mode: Mode::Submit, clock: 0 }
    }

    /// Begins a step.
    pub fn begin(&mut self, stream: &Stream, shape: StepShape) -> Result<(), CudaError> {
        self.end(stream)?;
        self.clock += 1;
        let clock = self.clock;
        let is_known = self.entries.contains_key(&shape);
        let entry = self.entries.entry(shape).or_default();
        entry.last_use = clock;
        if entry.graph.is_some() {
            self.mode = Mode::Compare(shape, 0);
        } else if is_known {
            self.forget_oldest(MOST_GRAPHS, |entry| entry.graph.is_some());
            stream.begin_capture()?;
            self.mode = Mode::Capture(shape, Vec::new());
        } else {
            self.forget_oldest(MOST_SHAPES, |_| true);
        }
        Ok(())
    }

    /// Whether the launches of this step become a graph.
    pub fn is_capturing(&self) -> bool {
        matches!(self.mode, Mode::Capture(..))
    }

    /// Launches a kernel, or recognises its launch.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::launch`], until the end of the step.
    pub unsafe fn launch(
        &mut self,
        stream: &Stream,
        kernel: &Kernel,
        grid: Grid,
        arguments: &[Argument<'_>],
    ) -> Result<(), CudaError> {
        match &mut self.mode {
            Mode::Submit => {}
            Mode::Capture(_, launches) => launches.push(Launch::new(kernel, grid, arguments)),
            Mode::Compare(shape, count) => {
                let next = self.entries[shape].launches.get(*count);
                if next.is_some_and(|launch| launch.is(kernel, grid, arguments)) {
                    *count += 1;
                    return Ok(());
                }
                // SAFETY: the caller's.
                unsafe { self.submit_first(stream) }?;
            }
        }
        // SAFETY: the caller's.
        unsafe { kernel.launch(stream, grid, arguments) }
    }

    /// Ends a step: submits everything that was not submitted.
    pub fn end(&mut self, stream: &Stream) -> Result<(), CudaError> {
        match &mut self.mode {
            Mode::Submit => Ok(()),
            Mode::Capture(..) => self.end_capture(stream),
            Mode::Compare(shape, count) => {
                let Entry { launches, graph, .. } = &self.entries[shape];
                let graph = graph.as_ref().filter(|_| *count == launches.len());
                if let Some(graph) = graph {
                    // SAFETY: the launches are equal to those of this step.
                    let launched = unsafe { graph.launch(stream) };
                    self.mode = Mode::Submit;
                    return launched;
                }
                // SAFETY: as above.
                unsafe { self.submit_first(stream) }
            }
        }
    }

    fn end_capture(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let Mode::Capture(shape, launches) = std::mem::replace(&mut self.mode, Mode::Submit) else {
            return Ok(());
        };
        let graph = match stream.end_capture() {
            Ok(graph) => graph,
            // A graph takes memory of the driver. Without it, the launches are submitted as they are.
            Err(error) if error.is_out_of_memory() => {
                // SAFETY: the launches are those of this step.
                return launches.iter().try_for_each(|launch| unsafe { launch.submit(stream) });
            }
            Err(error) => return Err(error),
        };
        // SAFETY: as above.
        unsafe { graph.launch(stream) }?;
        let entry = self.entries.entry(shape).or_default();
        (entry.launches, entry.graph) = (launches, Some(graph));
        Ok(())
    }

    /// Submits the launches that were recognised, and forgets the graph.
    ///
    /// # Safety
    ///
    /// As for [`Kernel::launch`].
    unsafe fn submit_first(&mut self, stream: &Stream) -> Result<(), CudaError> {
        let Mode::Compare(shape, count) = std::mem::replace(&mut self.mode, Mode::Submit) else {
            return Ok(());
        };
        let entry = self.entries.remove(&shape).unwrap_or_default();
        for launch in &entry.launches[..count] {
            // SAFETY: the caller's.
            unsafe { launch.submit(stream) }?;
        }
        Ok(())
    }

    /// Makes room for an entry among at most `most` of those that `counts`.
    fn forget_oldest(&mut self, most: usize, counts: impl Fn(&Entry) -> bool) {
        while self.entries.values().filter(|entry| counts(entry)).count() >= most {
            let oldest = self
                .entries
                .iter()
                .filter(|(_, entry)| counts(entry))
                .min_by_key(|(_, entry)| entry.last_use);
            let Some((shape, _)) = oldest else { return };
            let shape = *shape;
            self.entries.remove(&shape);
        }
    }
}
