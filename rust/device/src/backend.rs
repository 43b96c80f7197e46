//! The contract between a model and a device.
//!
//! A backend owns its device; one thread drives it. Weights, activations and caches are associated types that only the
//! backend looks into, so a model is written once and does not depend on the device. The inputs of a step (tokens,
//! positions, block tables) are uploaded once and shared by every layer.
//!
//! Operations take effect in the order of the calls, but may return before they have: only [`Backend::collect`],
//! [`Backend::download`] and [`Backend::synchronize`] wait for the device. Host arguments may be reused as soon as a
//! call returns.
//!
//! Every operation of a [deterministic](Backend::is_deterministic) backend is: an output row depends on its own input
//! row (and, for attention, on the sequence's own cache) alone, never on the number of rows or of threads.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;
use penstock_types::{
    AttentionParams, BlockCopy, Dtype, Epilogue, FieldError, GridRows, HeadShape, KvDtype, LowRankShape,
    PackedAdapter, WeightFormat,
};

use crate::error::DeviceError;
use crate::sample::{Sampled, SamplingBatch, SlotParams};
use crate::step::{AdapterSpec, StepInputs, StepRows, StepSpec};

/// A weight matrix before it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedMatrix {
    /// Columns of all parts.
    pub columns: usize,
    /// Rows and formats of its parts.
    pub parts: Vec<(usize, WeightFormat)>,
    /// Whether it is multiplied. Otherwise it is a table of embeddings alone.
    pub is_multiplied: bool,
}

/// The rows of a table, in order, as float32, wherever they are stored or computed.
pub trait RowSource: Sync {
    /// Number of rows (output features).
    fn rows(&self) -> usize;
    /// Values in a row (input features).
    fn columns(&self) -> usize;
    /// Writes rows `rows` into `out`, row after row. Called from several threads at once.
    fn read(&self, rows: Range<usize>, out: &mut [f32]);
}

/// The rows of a weight matrix, in the format they are stored in.
pub trait WeightSource: RowSource {
    /// The format that holds the values exactly.
    fn format(&self) -> WeightFormat {
        WeightFormat::Float(Dtype::F32)
    }
    /// Replaces `out` by rows `rows`. Called only if the format is a grid, from several threads at once.
    fn read_grid(&self, rows: Range<usize>, out: &mut GridRows) {
        let _ = out;
        unreachable!("rows {rows:?} of plain numbers; this is a bug")
    }
}

/// A part of a weight matrix: some of its rows.
#[derive(Clone, Copy)]
pub struct MatrixPart<'a> {
    /// The rows.
    pub source: &'a dyn WeightSource,
    /// The format in memory. A source of another format is rounded or quantised.
    pub format: WeightFormat,
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
    /// The type of the stored keys and values.
    pub dtype: KvDtype,
}

/// The layout of packed matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// The name of the layout. Matrices with the same layout are exchangeable between machines.
    pub name: &'static str,
    /// Matrices of multiples of these rows can be packed one after the other to form a larger one.
    pub rows: usize,
}

/// Use of a backend's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Bytes in use.
    pub in_use: u64,
    /// The highest value that `in_use` has had.
    pub peak: u64,
}

/// A device that can run a decoder. See the module's contract.
///
/// All memory of the device is reserved once, divided while a model is loaded, and released with the backend. So every
/// size must be known in advance, and the `*_bytes` methods return it before anything is reserved. What a backend takes
/// of the host beside that is counted in its [`host`](crate::cpu::CpuHost).
pub trait Backend: Send + 'static {
    /// A weight matrix `[rows, columns]`, in a layout of the backend's choice.
    type Matrix: Send;
    /// A short float32 weight (a norm, a bias).
    type Vector: Send;
    /// Float32 activations, `[rows, width]` as the caller keeps track of.
    type Buffer: Send;
    /// The rows that a matrix product reads, in the form that the matrix requires.
    type Operand: Send;
    /// Memory that operations need while they run.
    type Scratch: Send;
    /// The KV cache of all layers, and its host tier.
    type Cache: Send;
    /// A table of rotary position embeddings, and the rotations of the current step.
    type Rope: Send;
    /// For each sequence, its sampling parameters, its tokens so far and all other state that sampling depends on.
    type Slots: Send;
    /// Low-rank updates of the matrices, of which each row of a step may have others.
    type Adapters: Send;
    /// The inputs of a step on the device.
    type Step<'a>: Copy;
    /// The tokens of a [`sample`](Self::sample) call, which may still be computed. May be dropped instead of collected,
    /// at any time: the call still takes effect, and its tokens are discarded.
    type Ticket: Send;
    /// The right to compute a step, if several backends share the device.
    type Turn;

    /// An error if there are no operations for such a cache.
    fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError> {
        let _ = (heads, dtype);
        Ok(())
    }

    /// Prepares all operations of a model, before memory is [reserved](Self::reserve): those with these matrices, with
    /// a cache, and with adapters.
    fn prepare(
        &mut self,
        matrices: &[PlannedMatrix],
        cache: &CacheSpec,
        has_adapters: bool,
    ) -> Result<(), DeviceError> {
        let _ = (matrices, cache, has_adapters);
        Ok(())
    }

    /// Whether an output row never depends on the other rows; known when the operations are
    /// [prepared](Self::prepare).
    fn is_deterministic(&self) -> bool {
        true
    }

    /// Bytes of memory that are available: neither in use nor reserved by a backend that shares the device.
    fn available_memory(&self) -> Result<u64, DeviceError>;

    /// Reserves `bytes` for all later allocations and releases the former reservation. Called before the first
    /// allocation.
    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError>;

    /// Counts bytes of the host beside the arena as reserved: those that will be [mapped](Self::map_matrix),
    /// adapters, and, if the device has memory of its own, the host tier and the buffers of
    /// [`host_buffer_bytes`](Self::host_buffer_bytes). Called after [`reserve`](Self::reserve).
    fn reserve_outside(&mut self, bytes: u64);

    /// Use of the reserved memory.
    fn memory(&self) -> MemoryUse;

    /// Bytes of the host that are available, if the device has memory of its own: the host tier is not part of the
    /// reserved memory then. `None` if the memory is that of the host.
    fn host_memory(&self) -> Option<u64>;

    /// Bytes of the host, beside the reserved memory and the host tier, that copies from and to the device go through.
    fn host_buffer_bytes(&self, spec: &StepSpec, adapters: Option<&AdapterSpec>) -> u64;

    /// Whether a matrix of this many columns can have this format.
    fn supports(&self, format: WeightFormat, columns: usize) -> bool;

    /// The type of the activations in a product with a matrix of this format.
    fn activations(&self, format: WeightFormat) -> &'static str;

    /// Bytes that [`load_matrix`](Self::load_matrix) takes for parts of these numbers of rows.
    fn matrix_bytes(&self, columns: usize, parts: &[(usize, WeightFormat)]) -> u64;

    /// Bytes that [`load_vector`](Self::load_vector) or [`allocate`](Self::allocate) takes.
    fn buffer_bytes(&self, len: usize) -> u64;

    /// Bytes that [`allocate_operand`](Self::allocate_operand) takes.
    fn operand_bytes(&self, rows: usize, columns: usize) -> u64;

    /// Bytes that [`load_rope`](Self::load_rope) takes for a table of `positions`.
    fn rope_bytes(&self, positions: usize, spec: &StepSpec) -> u64;

    /// Bytes that [`allocate_scratch`](Self::allocate_scratch) takes.
    fn scratch_bytes(&self, spec: &StepSpec) -> u64;

    /// Bytes that [`allocate_slots`](Self::allocate_slots) takes.
    fn slots_bytes(&self, spec: &StepSpec) -> u64;

    /// Bytes one block takes in all layers together.
    fn block_bytes(&self, spec: &CacheSpec) -> u64;

    /// Bytes that `blocks` blocks take as a cache or as a host tier.
    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64;

    /// Bytes that [`allocate_adapters`](Self::allocate_adapters) takes.
    fn adapters_bytes(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64;

    /// Bytes of [`AdapterSpec::bytes`] that are not among those, because the device uses the memory of the host: a
    /// loaded adapter has no other copy.
    fn shared_adapters_bytes(&self, adapters: &AdapterSpec) -> u64;

    /// Bytes that [`pack_low_rank`](Self::pack_low_rank) writes; a multiple of 64.
    fn low_rank_bytes(shape: &LowRankShape) -> usize;

    /// Bytes of [`AdapterSpec::bytes`] that an adapter of `packed` bytes takes.
    fn adapter_bytes(packed: u64) -> u64;

    /// Packs A, `[rank, columns]`, and B, `[rows, rank]`, for [`load_adapter`](Self::load_adapter). Called from any
    /// thread.
    fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]);

    /// Packs a matrix whose parts are one below the other. Either all parts read codes or none does
    /// ([`WeightFormat::reads_codes`]). Reads the rows from several threads; leaves nothing behind on failure.
    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<Self::Matrix, DeviceError>;

    /// The layout of packed matrices, for files.
    fn packed_layout(&self) -> PackedLayout;

    /// Bytes that [`pack`](Self::pack) writes for this number of rows; a multiple of 64.
    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64;

    /// Packs a part of a matrix into `out`. Reads the rows from several threads.
    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]);

    /// Makes a matrix of the bytes of its packed parts, one after the other, without copying them unless
    /// [`copies_mapped`](Self::copies_mapped). The formats are supported, and the number of bytes is right.
    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<Self::Matrix, DeviceError>;

    /// Whether [`map_matrix`](Self::map_matrix) takes memory and copies the bytes.
    fn copies_mapped(&self) -> bool;

    /// Prepares the calling thread, which makes all later calls. Called again after code of the user has run in it.
    fn bind_thread(&mut self);

    /// Waits for the device, in the order in which the backends that share it ask. The caller holds the turn while it
    /// computes a step. Loading takes turns itself.
    fn turn(&self) -> Self::Turn;

    /// Loads a vector.
    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError>;

    /// Loads a rope table. A row of `table` is a position: the cosines of its `head_dim / 2` angles, then the sines.
    fn load_rope(&mut self, table: &dyn RowSource, spec: &StepSpec) -> Result<Self::Rope, DeviceError>;

    /// Zeroed activations.
    fn allocate(&mut self, len: usize) -> Result<Self::Buffer, DeviceError>;

    /// Room for `rows` rows that matrices of `columns` columns read.
    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<Self::Operand, DeviceError>;

    /// Scratch for steps up to the largest.
    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<Self::Scratch, DeviceError>;

    /// Empty slots, one for each sequence of the largest step.
    fn allocate_slots(&mut self, spec: &StepSpec) -> Result<Self::Slots, DeviceError>;

    /// A zeroed KV cache and its host tier.
    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<Self::Cache, DeviceError>;

    /// Room for adapters, of which none is loaded.
    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<Self::Adapters, DeviceError>;

    /// Loads an adapter under a number below [`AdapterSpec::adapters`] that is free. It fits if the
    /// [`adapter_bytes`](Self::adapter_bytes) of all loaded adapters do.
    fn load_adapter(
        &mut self,
        adapters: &mut Self::Adapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError>;

    /// Frees an adapter and its number.
    fn unload_adapter(&mut self, adapters: &mut Self::Adapters, number: u32) -> Result<(), DeviceError>;

    /// Makes the copies, one after the other.
    fn copy_blocks(
        &mut self,
        cache: &mut Self::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError>;

    /// Replaces all state of a slot by that of a new sequence.
    fn admit_slot(
        &mut self,
        slots: &mut Self::Slots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError>;

    /// Drops all state of a slot.
    fn free_slot(&mut self, slots: &mut Self::Slots, slot: u32) -> Result<(), DeviceError>;

    /// Checks the inputs of a step and copies them to the device. Later operations take them as valid. An operand of
    /// integer codes has its rows as float32, too, if a row of the step has an adapter.
    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut Self::Rope,
        slots: &Self::Slots,
        cache: &Self::Cache,
        adapters: Option<&Self::Adapters>,
    ) -> Result<Self::Step<'a>, DeviceError>;

    /// `out[row] = table[token of row]`. A token `FOLLOWS | slot` is the one sampled last for that slot.
    fn embed(
        &mut self,
        step: Self::Step<'_>,
        slots: &Self::Slots,
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

    /// The same, in the form that `reader` reads.
    fn rms_norm_for(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        x: &Self::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// `out[i] = weight * x[rows[i]]`, then the epilogue. `x` was written for `weight`.
    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &Self::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// Adds to the rows of `out`, which were computed by [`linear`](Self::linear) with `weight`, the updates of matrix
    /// number `matrix` of their adapters, times the rows of `x`, before those become integer codes.
    #[expect(clippy::too_many_arguments, reason = "one fused operation; a struct would only rename the list")]
    fn add_adapters(
        &mut self,
        step: Self::Step<'_>,
        rows: StepRows,
        x: &Self::Operand,
        weight: &Self::Matrix,
        matrix: u32,
        adapters: &mut Self::Adapters,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// [`linear`](Self::linear) of the first rows of `x`, then [`add_adapters`](Self::add_adapters), with the same
    /// results.
    #[expect(clippy::too_many_arguments, reason = "one fused operation; a struct would only rename the list")]
    fn linear_with_adapters(
        &mut self,
        step: Self::Step<'_>,
        rows: StepRows,
        count: usize,
        x: &Self::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        matrix: u32,
        adapters: &mut Self::Adapters,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError> {
        self.linear(0..count, x, weight, epilogue, out)?;
        self.add_adapters(step, rows, x, weight, matrix, adapters, out)
    }

    /// Rows of `qkv` hold query, key and value heads side by side. Normalises the heads of q and k if `norms` (of q, of
    /// k, epsilon) are given, rotates them in place, multiplies q by [`StepInputs::query_scales`], and writes k and v
    /// into the layer's cache.
    #[expect(clippy::too_many_arguments, reason = "one fused operation; a struct would only rename the list")]
    fn rope_write_kv(
        &mut self,
        step: Self::Step<'_>,
        rope: &Self::Rope,
        shape: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        qkv: &mut Self::Buffer,
        layer: usize,
        cache: &mut Self::Cache,
    ) -> Result<(), DeviceError>;

    /// Causal attention of the query part of every row of `qkv` over its sequence's cache, in the form that `reader`
    /// reads. The contents of `qkv` are lost.
    #[expect(clippy::too_many_arguments, reason = "one fused operation; a struct would only rename the list")]
    fn attention(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &Self::Cache,
        qkv: &mut Self::Buffer,
        scratch: &mut Self::Scratch,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// `out[row] = silu(gate) * up`, where row `row` of `gate_up` holds `width` gates, then `width` ups, in the form
    /// that `reader` reads.
    fn silu_mul(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        width: usize,
        gate_up: &Self::Buffer,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// `out[i] = x[output_rows[i]]`, rows of `width`.
    fn gather(
        &mut self,
        step: Self::Step<'_>,
        width: usize,
        x: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), DeviceError>;

    /// `out[i] = x[output_rows[i]]`, for rows that were written for `reader`.
    fn gather_operand(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        x: &Self::Operand,
        out: &mut Self::Operand,
    ) -> Result<(), DeviceError>;

    /// Samples every entry of `batch` from its row of `logits` and appends the tokens to the slots. See
    /// [`SamplingBatch`] for entries that verify drafts. Tickets complete in order, each after all earlier calls; that
    /// of an empty batch does nothing else.
    fn sample(
        &mut self,
        logits: &Self::Buffer,
        batch: &SamplingBatch,
        slots: &mut Self::Slots,
        scratch: &mut Self::Scratch,
    ) -> Result<Self::Ticket, DeviceError>;

    /// Begins to compute all earlier calls: those of a step that is sampled later, or that has failed.
    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }

    /// Ready if [`collect`](Self::collect) does not wait for the device. Otherwise `waker` is woken when it may have
    /// become ready. A lost device makes every ticket ready and wakes its waker; `collect` then returns the loss.
    fn poll(&mut self, ticket: &mut Self::Ticket, waker: &Waker) -> Poll<()>;

    /// Replaces `out` by the results of a [`sample`](Self::sample) call, one for each entry. Waits for the device.
    fn collect(&mut self, ticket: Self::Ticket, out: &mut Vec<Sampled>) -> Result<(), DeviceError>;

    /// Copies `out.len()` values, beginning at index `start`, to the host. Waits for the device.
    fn download(&mut self, x: &Self::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError>;

    /// Waits until the effects of all earlier calls are complete.
    fn synchronize(&mut self) -> Result<(), DeviceError>;
}
