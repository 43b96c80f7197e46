//! The CPU backend: weights as packed panels, activations as float32 or as the 8-bit codes that a matrix reads, every
//! operation a call into `penstock-kernels` on a worker pool that several backends may share. Only sampling has
//! arithmetic of its own (`sampling/`).
//!
//! Every operation is complete when its call returns. No region of the arena is freed before the backend is dropped, so
//! fresh memory is zero. The system provides a page when it is first written.

mod adapters;
mod backend;
mod buffers;
mod cache;
mod host;
mod matrices;
mod numa;
mod rope;
mod sampling;

use std::mem::size_of;
use std::sync::Arc;

use penstock_kernels::{Kernels, Pool, SPLIT, attention_scratch};
use penstock_types::HeadShape;

use crate::arena::{Arena, HostSlab, Region};
use crate::bfc::Placement;
use crate::error::DeviceError;
use crate::seam::Sampled;
use crate::seam::StepSpec;
pub use adapters::{CpuAdapterLayout, CpuAdapters};
pub use backend::CpuTicket;
use buffers::arena;
pub use buffers::{CpuBuffer, CpuMatrix, CpuOperand, CpuScratch};
pub use cache::CpuCache;
pub use host::CpuHost;
pub(crate) use host::Reservation;
use numa::NumaMemory;
pub use numa::{NumaError, NumaNode, numa_nodes};
pub use penstock_kernels::{IsaError, Turn, usable_cpus};
pub use rope::CpuRope;
pub use sampling::CpuSlots;
#[cfg(feature = "testing")]
pub use sampling::probabilities_for_testing;

/// Alignment of every buffer, so that a panel of weights lies in as few pages as possible.
const PAGE: usize = 4096;

/// Positions for which splits of a long sequence's attention can be computed in parallel.
const MOST_SCRATCH_POSITIONS: usize = 1 << 20;

/// The turns of the backends that share a pool of threads.
#[derive(Clone, Debug)]
pub struct Turns(Arc<Pool>);

impl Turns {
    /// Waits for the threads, in the order in which the backends that share them ask. The caller holds the turn while
    /// it computes a step. Loading takes turns itself.
    pub fn take(&self) -> Turn {
        self.0.turn()
    }
}

/// The CPU.
pub struct Cpu {
    kernels: Kernels,
    host: Arc<CpuHost>,
    pool: Arc<Pool>,
    /// One page until memory is reserved.
    arena: Arena<HostSlab>,
    /// Of the arena, once memory is reserved.
    reservation: Option<Arc<Reservation>>,
    numa_memory: NumaMemory,
    /// Whether a row of the step has an adapter: operands have their rows as float32, too.
    keeps_floats: bool,
    /// Result buffers that were collected, for reuse.
    spare_results: Vec<Vec<Sampled>>,
}

impl Cpu {
    /// A backend on `threads` threads, the calling one included, with the best instruction set.
    pub fn new(threads: usize) -> Result<Self, CpuError> {
        Self::open(&Arc::default(), threads, "", &[])
    }

    /// The same on a host, with the instruction set of this name (an empty one means the best), and threads and memory
    /// on these NUMA nodes (none: anywhere).
    pub fn open(
        host: &Arc<CpuHost>,
        threads: usize,
        isa: &str,
        nodes: &[NumaNode],
    ) -> Result<Self, CpuError> {
        let pool = host.pool(threads, nodes).map_err(|error| DeviceError::Start(error.to_string()))?;
        let kernels = Kernels::from_name(isa)?;
        let ids = nodes.iter().map(|node| node.id).collect();
        let numa_memory = NumaMemory::new(ids, penstock_kernels::place);
        let arena = arena(PAGE, &numa_memory)?;
        Ok(Self {
            kernels,
            host: Arc::clone(host),
            pool,
            arena,
            reservation: None,
            numa_memory,
            keeps_floats: false,
            spare_results: Vec::new(),
        })
    }

    /// The reason why the threads are not on their NUMA nodes.
    pub fn pin_error(&self) -> Option<String> {
        self.pool.pin_error().map(ToString::to_string)
    }

    /// The reason why the memory is not on its NUMA nodes.
    pub fn place_error(&self) -> Option<String> {
        self.numa_memory.error().map(ToString::to_string)
    }

    /// The turns of its threads.
    pub fn turns(&self) -> Turns {
        Turns(Arc::clone(&self.pool))
    }

    /// Compute threads.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Instruction set, as `PENSTOCK_ISA` spells it.
    pub fn isa(&self) -> &'static str {
        self.kernels.isa().name()
    }

    /// Bytes that an allocation of `bytes` takes in the arena.
    fn granted(&self, bytes: usize) -> u64 {
        self.arena.bfc().granted(bytes).map_or(u64::MAX, |granted| granted as u64)
    }

    /// A zeroed region of the workspace for `len` floats. Its pages take memory when they are first written.
    fn workspace(&mut self, len: usize, name: &'static str) -> Result<Region, DeviceError> {
        self.region(len, size_of::<f32>(), Placement::High, name)
    }

    /// A region for `len` elements of `size` bytes.
    fn region(
        &mut self,
        len: usize,
        size: usize,
        placement: Placement,
        name: &'static str,
    ) -> Result<Region, DeviceError> {
        Ok(self.arena.allocate(len.saturating_mul(size), placement, name)?)
    }

    /// Floats of the scratch regions: for attention, and for sampling.
    fn scratch_lens(&self, spec: &StepSpec) -> (usize, usize) {
        let HeadShape { heads, kv_heads, head_dim } = spec.heads;
        // Attention is split only while it has fewer than four jobs a thread, and a sequence has one for each kv head.
        let spread = spec.sequences.min((4 * self.threads()).div_ceil(kv_heads));
        let positions = spread.saturating_mul(spec.positions.div_ceil(SPLIT)).saturating_mul(SPLIT);
        let attention = attention_scratch(heads, head_dim, positions.min(MOST_SCRATCH_POSITIONS));
        (attention, self.threads().saturating_mul(sampling::SamplingWorkspace::len(spec.vocabulary)))
    }
}

/// The reason why there is no CPU backend.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The instruction set cannot be used.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// The threads did not start.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
