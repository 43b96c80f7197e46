//! The contract between a model and a device.
//!
//! A backend owns its device; one thread drives it. Weights, activations and caches are associated types that only the
//! backend looks into, so a model is written once and never asks where it runs. Step metadata (tokens, positions, block
//! tables) is uploaded once per step and shared by every layer.
//!
//! The law of every operation: an output row depends on its own input row (and, for attention, on the sequence's own cache)
//! alone, never on how many rows are computed together or by how many threads.

use std::ops::Range;

use penstock_types::{AttentionParams, BlockCopy, Dtype, Epilogue, HeadShape, KvDtype};

use crate::bfc::Exhausted;
use crate::sample::{SampleParams, Sampled};
use crate::step::{StepInputs, StepSpec};

/// Rows of one weight, in order, as float32: how a backend pulls a weight from wherever it is stored.
pub trait RowSource: Sync {
    /// Number of rows (output features).
    fn rows(&self) -> usize;
    /// Values in a row (input features).
    fn columns(&self) -> usize;
    /// Writes rows `rows` into `out`, row after row. Called from several threads at once.
    fn read(&self, rows: Range<usize>, out: &mut [f32]);
}

/// The device failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The memory that was reserved is taken.
    #[error(transparent)]
    Exhausted(#[from] Exhausted),
    /// Memory cannot be had at all.
    #[error("{what} needs {bytes} bytes and the device refused them: {reason}")]
    OutOfMemory {
        /// What the memory was for.
        what: &'static str,
        /// How much was asked for.
        bytes: u64,
        /// The device's own words.
        reason: String,
    },
    /// The device or its threads could not be set up.
    #[error("the device could not be started: {0}")]
    Start(String),
}

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
    /// How keys and values are stored.
    pub dtype: KvDtype,
}

/// What a backend's memory holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use.
    pub in_use: u64,
    /// The most that ever were.
    pub peak: u64,
}

/// A device that can carry out a decoder. See the module's law.
///
/// All its memory is reserved once, divided while a model is loaded, and given back with the backend; so what is asked for
/// must be known, and each size can be asked for before anything is reserved.
pub trait Backend: Send + 'static {
    /// A weight matrix `[rows, columns]`, packed as the backend likes it.
    type Matrix: Send;
    /// A short float32 weight (a norm, a bias).
    type Vector: Send;
    /// Float32 activations, `[rows, width]` as the caller keeps track of.
    type Buffer: Send;
    /// What operations need for themselves while they run.
    type Scratch: Send;
    /// The KV cache of all layers, and its host tier.
    type Cache: Send;
    /// A step's metadata on the device, valid while the host arrays are.
    type Step<'a>: Copy;

    /// Bytes of memory that can still be had.
    fn available_memory(&self) -> u64;

    /// Sets `bytes` aside for everything that is allocated afterwards, in place of what was set aside before. Called before
    /// the first allocation.
    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// What is allocated of it.
    fn memory(&self) -> MemoryUse;

    /// Bytes that [`load_matrix`](Self::load_matrix) will take.
    fn matrix_bytes(&self, rows: usize, columns: usize, dtype: Dtype) -> u64;

    /// Bytes that [`load_vector`](Self::load_vector) or [`allocate`](Self::allocate) will take.
    fn buffer_bytes(&self, len: usize) -> u64;

    /// Bytes that [`allocate_scratch`](Self::allocate_scratch) will take.
    fn scratch_bytes(&self, spec: &StepSpec) -> u64;

    /// Bytes one block takes in all layers together.
    fn block_bytes(&self, spec: &CacheSpec) -> u64;

    /// Bytes that `blocks` blocks take as a cache or as a host tier.
    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64;

    /// Packs a matrix. Reads the rows from several threads; leaves nothing behind on failure.
    fn load_matrix(&mut self, source: &dyn RowSource, dtype: Dtype) -> Result<Self::Matrix, DeviceError>;

    /// Loads a vector.
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;

    /// Zeroed activations.
    fn allocate(&mut self, len: usize) -> Result<Self::Buffer, DeviceError>;

    /// What steps up to the largest need besides.
    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<Self::Scratch, DeviceError>;

    /// A zeroed KV cache and its host tier.
    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<Self::Cache, DeviceError>;

    /// Makes the copies, one after the other.
    fn copy_blocks(
        &mut self,
        cache: &mut Self::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError>;

    /// Brings a step's metadata to the device.
    fn upload<'a>(&mut self, inputs: &'a StepInputs) -> Result<Self::Step<'a>, DeviceError>;

    /// `out[row] = table[token of row]`
    fn embed(
        &mut self,
        step: Self::Step<'_>,
        table: &Self::Matrix,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[row] = x[row] / sqrt(mean(x[row]^2) + epsilon) * weight`, for the first `rows` rows.
    fn rms_norm(
        &mut self,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[i] = weight * x[rows[i]]`, then the epilogue.
    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &Self::Buffer,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Rows of `qkv` hold query, key and value heads side by side. Normalises the heads of q and k where `norms` (of q, of k,
    /// epsilon) are given, rotates them in place, and writes k and v into the layer's cache.
    fn rope_write_kv(
        &mut self,
        step: Self::Step<'_>,
        shape: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        qkv: &mut Self::Buffer,
        layer: usize,
        cache: &mut Self::Cache,
    ) -> Result<(), DeviceError>;

    /// Causal attention of the query part of every row of `qkv` over its sequence's cache.
    #[expect(clippy::too_many_arguments, reason = "one fused operation; a struct would only rename the list")]
    fn attention(
        &mut self,
        step: Self::Step<'_>,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &Self::Cache,
        qkv: &Self::Buffer,
        scratch: &mut Self::Scratch,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[row] = silu(gate) * up`, where row `row` of `gate_up` holds `width` gates, then `width` ups.
    fn silu_mul(
        &mut self,
        rows: usize,
        width: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[i] = x[output_rows[i]]`, rows of `width`.
    fn gather(
        &mut self,
        step: Self::Step<'_>,
        width: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Chooses a token for each place of `out` from a row of `logits` (rows of `vocabulary`), as `params(place)` asks. It
    /// is called once for each place, on any thread; several places may share a row.
    fn sample<'a>(
        &mut self,
        vocabulary: usize,
        logits: &Self::Buffer,
        params: &(dyn Fn(usize) -> SampleParams<'a> + Sync),
        scratch: &mut Self::Scratch,
        out: &mut [Sampled],
    ) -> Result<(), DeviceError>;

    /// Copies `out.len()` values, from the one at `start` on, to the host.
    fn download(&mut self, x: &Self::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError>;
}
