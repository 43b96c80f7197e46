//! [`Memory`]: what a device takes of memory, its buffers and its copies.

use penstock_types::{BlockCopy, HeadShape, KvDtype, WeightFormat};

use super::step::{AdapterSpec, StepSpec};
use crate::error::DeviceError;
use crate::system::AvailableMemory;

/// The KV cache of all layers: `blocks` blocks of `block_size` tokens, each with a part in every layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheSpec {
    /// Decoder layers.
    pub layers: usize,
    /// Blocks.
    pub blocks: usize,
    /// Blocks of the host tier, to which the cache's can be saved.
    pub host_blocks: usize,
    /// Tokens per block; a multiple of 16.
    pub block_size: usize,
    /// Query, key and value heads.
    pub heads: HeadShape,
    /// The type of the stored keys and values.
    pub dtype: KvDtype,
}

/// Something that takes reserved memory, described before it exists.
#[derive(Clone, Copy, Debug)]
pub enum Allocation<'a> {
    /// A matrix of [`Load::load_matrix`](super::Load::load_matrix).
    Matrix {
        /// Columns of all parts.
        columns: usize,
        /// Rows and formats of the parts.
        parts: &'a [(usize, WeightFormat)],
    },
    /// Float32 values of [`Memory::allocate`] or [`Load::load_vector`](super::Load::load_vector).
    Floats(usize),
    /// An operand of [`Memory::allocate_operand`].
    Operand {
        /// Rows of the largest step.
        rows: usize,
        /// Columns of the widest matrix that reads it.
        columns: usize,
    },
    /// A table of [`Load::load_rope`](super::Load::load_rope).
    Rope {
        /// Rows of the table.
        positions: usize,
        /// The largest step.
        step: &'a StepSpec,
    },
    /// The memory of [`Memory::allocate_scratch`].
    Scratch(&'a StepSpec),
    /// The slots of [`Sample::allocate_slots`](super::Sample::allocate_slots).
    Slots(&'a StepSpec),
    /// Blocks of a cache or of a host tier of [`Memory::allocate_cache`].
    Blocks {
        /// The layout of a block; its numbers of blocks have no effect.
        cache: &'a CacheSpec,
        /// The number of blocks.
        count: usize,
    },
    /// The room of [`Load::allocate_adapters`](super::Load::allocate_adapters).
    Adapters {
        /// The adapters. A device that uses the memory of the host does not count their
        /// [`bytes`](AdapterSpec::bytes): a loaded adapter has no other copy.
        adapters: &'a AdapterSpec,
        /// The largest step.
        step: &'a StepSpec,
    },
}

/// Use of a backend's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use.
    pub in_use: u64,
    /// The highest value that `in_use` has had.
    pub peak: u64,
}

/// The memory of a device.
///
/// All memory of the device is reserved once, divided while a model is loaded, and released with the backend. So every
/// size must be known in advance, and [`bytes`](Self::bytes) returns it before anything is reserved. The memory that a
/// backend takes of the host beside that is counted in its [`host`](crate::cpu::CpuHost).
pub trait Memory: Send + 'static {
    /// Float32 activations, `[rows, width]` as the caller keeps track of.
    type Buffer: Send;
    /// The rows that a matrix product reads, in the form that the matrix requires.
    type Operand: Send;
    /// Memory that operations need while they run.
    type Scratch: Send;
    /// The KV cache of all layers, and its host tier.
    type Cache: Send;

    /// Bytes that an allocation takes.
    fn bytes(&self, allocation: Allocation<'_>) -> u64;

    /// Bytes that one block has in all layers together, without the rounding of an allocation.
    fn block_bytes(&self, cache: &CacheSpec) -> u64;

    /// Bytes of the host, beside the reserved memory and the host tier, that copies from and to the device go through.
    fn host_buffer_bytes(&self, step: &StepSpec, adapters: Option<&AdapterSpec>) -> u64;

    /// Bytes of the host that are available, if the device has memory of its own: the host tier is not part of the
    /// reserved memory then. `None` if the memory is that of the host.
    fn host_memory(&self) -> Option<u64>;

    /// The memory that is available: neither in use nor reserved by a backend that shares the device.
    fn available_memory(&self) -> Result<AvailableMemory, DeviceError>;

    /// Reserves `bytes` for all later allocations and releases the former reservation. Called before the first
    /// allocation.
    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// Counts bytes of the host beside the arena as reserved: those that will be
    /// [mapped](super::Load::map_matrix), adapters, and, if the device has memory of its own, the host tier and the
    /// buffers of [`host_buffer_bytes`](Self::host_buffer_bytes). Called after [`reserve`](Self::reserve).
    fn reserve_outside(&mut self, bytes: u64);

    /// Use of the reserved memory.
    fn memory(&self) -> MemoryUse;

    /// Zeroed activations.
    fn allocate(&mut self, len: usize) -> Result<Self::Buffer, DeviceError>;

    /// Room for `rows` rows that matrices of `columns` columns read.
    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<Self::Operand, DeviceError>;

    /// Scratch for steps up to the largest.
    fn allocate_scratch(&mut self, step: &StepSpec) -> Result<Self::Scratch, DeviceError>;

    /// A zeroed KV cache and its host tier.
    fn allocate_cache(&mut self, cache: &CacheSpec) -> Result<Self::Cache, DeviceError>;

    /// Makes the copies, one after the other.
    fn copy_blocks(
        &mut self,
        cache: &mut Self::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError>;

    /// Copies `out.len()` values, beginning at index `start`, to the host. Waits for the device.
    fn download(&mut self, x: &Self::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError>;

    /// Waits until the effects of all earlier calls are complete.
    fn synchronize(&mut self) -> Result<(), DeviceError>;
}
