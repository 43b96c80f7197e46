//! [`Timed`]: a backend that measures the operations of another one.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use penstock_types::{
    AttentionParams, AttentionRow, BlockCopy, Epilogue, FieldError, HeadShape, KvDtype, LowRankShape,
    PackedAdapter, WeightFormat,
};

use crate::backend::{Backend, CacheSpec, MatrixPart, MemoryUse, PackedLayout, PlannedMatrix, RowSource};
use crate::error::DeviceError;
use crate::profile::{FLOAT, Operation, Profile, Work, bytes, floats};
use crate::sample::{Sampled, SamplingBatch, SlotParams};
use crate::step::{AdapterSpec, StepInputs, StepRows, StepSpec};

/// Measures the operations of a backend, each from its call until its effects are complete. So an asynchronous backend
/// is slower with it; the results are the same.
pub struct Timed<B> {
    inner: B,
    profile: Arc<Profile>,
    vocabulary: usize,
}

impl<B: Backend> Timed<B> {
    /// Measures `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, profile: Arc::default(), vocabulary: 0 }
    }

    /// The measurements, which continue as the backend is used.
    pub fn profile(&self) -> Arc<Profile> {
        Arc::clone(&self.profile)
    }

    fn measure<T>(
        &mut self,
        operation: Operation,
        work: Work,
        run: impl FnOnce(&mut B) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let started = Instant::now();
        let result = run(&mut self.inner)?;
        self.inner.synchronize()?;
        self.profile.add(operation, started, work);
        Ok(result)
    }
}

/// A matrix with its size.
pub struct TimedMatrix<M> {
    inner: M,
    rows: usize,
    columns: usize,
    bytes: u64,
}

impl<M> TimedMatrix<M> {
    fn new(inner: M, columns: usize, parts: &[(usize, WeightFormat)]) -> Self {
        let rows = parts.iter().map(|(rows, _)| rows).sum();
        let bytes = parts.iter().map(|(rows, format)| format.bytes(*rows, columns) as u64).sum();
        Self { inner, rows, columns, bytes }
    }
}

/// A vector with its length.
pub struct TimedVector<V> {
    inner: V,
    len: usize,
}

/// A cache with its size.
pub struct TimedCache<C> {
    inner: C,
    /// Bytes of a block in all layers.
    block_bytes: u64,
    /// Bytes of a position in one layer.
    position_bytes: u64,
}

/// An uploaded step with its inputs.
pub struct TimedStep<'a, B: Backend> {
    inner: B::Step<'a>,
    inputs: &'a StepInputs,
}

impl<B: Backend> Clone for TimedStep<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for TimedStep<'_, B> {}

/// The work of attention in one layer.
fn attention_work(inputs: &StepInputs, shape: HeadShape, window: Option<usize>, position_bytes: u64) -> Work {
    let mut work = floats(2 * inputs.tokens.len() * shape.query_width());
    for AttentionRow { num_queries, start, .. } in &inputs.sequences {
        let visible = |position: usize| (position + 1).min(window.unwrap_or(usize::MAX)) as u64;
        let scores: u64 = (*start..start + num_queries).map(visible).sum();
        // A multiplication and an addition for each value, once for the scores and once for the output.
        work.flops += 4 * scores * shape.query_width() as u64;
        let read = (start + num_queries).min(window.map_or(usize::MAX, |window| window + num_queries));
        work.bytes += read as u64 * position_bytes;
    }
    work
}

impl<B: Backend> Backend for Timed<B> {
    type Matrix = TimedMatrix<B::Matrix>;
    type Vector = TimedVector<B::Vector>;
    type Buffer = B::Buffer;
    type Operand = B::Operand;
    type Scratch = B::Scratch;
    type Cache = TimedCache<B::Cache>;
    type Rope = B::Rope;
    type Slots = B::Slots;
    type Adapters = B::Adapters;
    type Step<'a> = TimedStep<'a, B>;
    type Ticket = B::Ticket;
    type Turn = B::Turn;

    fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError> {
        self.inner.check_cache(heads, dtype)
    }

    fn prepare(
        &mut self,
        matrices: &[PlannedMatrix],
        cache: &CacheSpec,
        has_adapters: bool,
    ) -> Result<(), DeviceError> {
        self.inner.prepare(matrices, cache, has_adapters)
    }

    fn is_deterministic(&self) -> bool {
        self.inner.is_deterministic()
    }

    fn available_memory(&self) -> Result<u64, DeviceError> {
        self.inner.available_memory()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.inner.reserve(bytes)
    }

    fn host_memory(&self) -> Option<u64> {
        self.inner.host_memory()
    }

    fn host_buffer_bytes(&self, spec: &StepSpec, adapters: Option<&AdapterSpec>) -> u64 {
        self.inner.host_buffer_bytes(spec, adapters)
    }

    fn reserve_outside(&mut self, bytes: u64) {
        self.inner.reserve_outside(bytes);
    }

    fn memory(&self) -> MemoryUse {
        self.inner.memory()
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        self.inner.supports(format, columns)
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        self.inner.activations(format)
    }

    fn matrix_bytes(&self, columns: usize, parts: &[(usize, WeightFormat)]) -> u64 {
        self.inner.matrix_bytes(columns, parts)
    }

    fn buffer_bytes(&self, len: usize) -> u64 {
        self.inner.buffer_bytes(len)
    }

    fn operand_bytes(&self, rows: usize, columns: usize) -> u64 {
        self.inner.operand_bytes(rows, columns)
    }

    fn rope_bytes(&self, positions: usize, spec: &StepSpec) -> u64 {
        self.inner.rope_bytes(positions, spec)
    }

    fn scratch_bytes(&self, spec: &StepSpec) -> u64 {
        self.inner.scratch_bytes(spec)
    }

    fn slots_bytes(&self, spec: &StepSpec) -> u64 {
        self.inner.slots_bytes(spec)
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        self.inner.block_bytes(spec)
    }

    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64 {
        self.inner.cache_bytes(spec, blocks)
    }

    fn adapters_bytes(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64 {
        self.inner.adapters_bytes(adapters, spec)
    }

    fn shared_adapters_bytes(&self, adapters: &AdapterSpec) -> u64 {
        self.inner.shared_adapters_bytes(adapters)
    }

    fn low_rank_bytes(shape: &LowRankShape) -> usize {
        B::low_rank_bytes(shape)
    }

    fn adapter_bytes(packed: u64) -> u64 {
        B::adapter_bytes(packed)
    }

    fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        B::pack_low_rank(shape, a, b, out);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<Self::Matrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.source.columns());
        let sizes: Vec<_> = parts.iter().map(|part| (part.source.rows(), part.format)).collect();
        Ok(TimedMatrix::new(self.inner.load_matrix(parts)?, columns, &sizes))
    }

    fn packed_layout(&self) -> PackedLayout {
        self.inner.packed_layout()
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        self.inner.packed_bytes(columns, rows, format)
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        self.inner.pack(part, out);
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<Self::Matrix, DeviceError> {
        Ok(TimedMatrix::new(self.inner.map_matrix(columns, parts, bytes)?, columns, parts))
    }

    fn copies_mapped(&self) -> bool {
        self.inner.copies_mapped()
    }

    fn bind_thread(&mut self) {
        self.inner.bind_thread();
    }

    fn turn(&self) -> B::Turn {
        self.inner.turn()
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError> {
        Ok(TimedVector { inner: self.inner.load_vector(values)?, len: values.len() })
    }

    fn load_rope(&mut self, table: &dyn RowSource, spec: &StepSpec) -> Result<B::Rope, DeviceError> {
        self.inner.load_rope(table, spec)
    }

    fn allocate(&mut self, len: usize) -> Result<B::Buffer, DeviceError> {
        self.inner.allocate(len)
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<B::Operand, DeviceError> {
        self.inner.allocate_operand(rows, columns)
    }

    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<B::Scratch, DeviceError> {
        self.inner.allocate_scratch(spec)
    }

    fn allocate_slots(&mut self, spec: &StepSpec) -> Result<B::Slots, DeviceError> {
        self.vocabulary = spec.vocabulary;
        self.inner.allocate_slots(spec)
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<Self::Cache, DeviceError> {
        let block_bytes = self.inner.block_bytes(spec);
        let positions = (spec.layers * spec.block_size).max(1) as u64;
        let inner = self.inner.allocate_cache(spec)?;
        Ok(TimedCache { inner, block_bytes, position_bytes: block_bytes / positions })
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<B::Adapters, DeviceError> {
        self.inner.allocate_adapters(adapters, spec)
    }

    fn load_adapter(
        &mut self,
        adapters: &mut B::Adapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        // The CPU moves no bytes.
        self.measure(Operation::LoadAdapter, bytes(0), |inner| inner.load_adapter(adapters, number, adapter))
    }

    fn unload_adapter(&mut self, adapters: &mut B::Adapters, number: u32) -> Result<(), DeviceError> {
        self.inner.unload_adapter(adapters, number)
    }

    fn copy_blocks(
        &mut self,
        cache: &mut Self::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        let (started, mut count) = (Instant::now(), 0);
        self.inner.copy_blocks(&mut cache.inner, &mut copies.inspect(|_| count += 1))?;
        self.inner.synchronize()?;
        self.profile.add(Operation::CopyBlocks, started, bytes(2 * count * cache.block_bytes));
        Ok(())
    }

    fn admit_slot(
        &mut self,
        slots: &mut B::Slots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        let work = bytes(4 * (params.prompt.len() + params.generated.len()) as u64);
        self.measure(Operation::AdmitSlot, work, |inner| inner.admit_slot(slots, slot, params))
    }

    fn free_slot(&mut self, slots: &mut B::Slots, slot: u32) -> Result<(), DeviceError> {
        self.inner.free_slot(slots, slot)
    }

    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut B::Rope,
        slots: &B::Slots,
        cache: &Self::Cache,
        adapters: Option<&B::Adapters>,
    ) -> Result<Self::Step<'a>, DeviceError> {
        let floats = inputs.extra_rotations.len() + inputs.query_scales.len();
        let words = 5 * inputs.tokens.len() + inputs.blocks.len() + floats;
        let inner = self.measure(Operation::Upload, bytes(4 * words as u64), |inner| {
            inner.upload(inputs, rope, slots, &cache.inner, adapters)
        })?;
        Ok(TimedStep { inner, inputs })
    }

    fn embed(
        &mut self,
        step: Self::Step<'_>,
        slots: &B::Slots,
        table: &Self::Matrix,
        out: &mut B::Buffer,
    ) -> Result<(), DeviceError> {
        let rows = step.inputs.tokens.len() as u64;
        let row_bytes = table.bytes / table.rows.max(1) as u64 + table.columns as u64 * FLOAT;
        self.measure(Operation::Embed, bytes(rows * row_bytes), |inner| {
            inner.embed(step.inner, slots, &table.inner, out)
        })
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &B::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut B::Buffer,
    ) -> Result<(), DeviceError> {
        self.measure(Operation::RmsNorm, floats((2 * rows + 1) * weight.len), |inner| {
            inner.rms_norm(rows, x, &weight.inner, epsilon, out)
        })
    }

    fn rms_norm_for(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        x: &B::Buffer,
        weight: &Self::Vector,
        epsilon: f32,
        out: &mut B::Operand,
    ) -> Result<(), DeviceError> {
        self.measure(Operation::RmsNorm, floats((2 * rows + 1) * weight.len), |inner| {
            inner.rms_norm_for(&reader.inner, rows, x, &weight.inner, epsilon, out)
        })
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &B::Operand,
        weight: &Self::Matrix,
        epilogue: Epilogue<&Self::Vector>,
        out: &mut B::Buffer,
    ) -> Result<(), DeviceError> {
        let count = rows.len() as u64;
        let (inputs, outputs) = (weight.columns as u64, weight.rows as u64);
        let work = Work {
            bytes: weight.bytes + count * (inputs + outputs) * FLOAT,
            flops: 2 * count * inputs * outputs,
        };
        let epilogue = epilogue.map(|bias| &bias.inner);
        self.measure(Operation::Linear, work, |inner| inner.linear(rows, x, &weight.inner, epilogue, out))
    }

    fn add_adapters(
        &mut self,
        step: Self::Step<'_>,
        rows: StepRows,
        x: &B::Operand,
        weight: &Self::Matrix,
        matrix: u32,
        adapters: &mut B::Adapters,
        out: &mut B::Buffer,
    ) -> Result<(), DeviceError> {
        let count: usize = step.inputs.adapters.iter().map(|rows| rows.rows.len()).sum();
        let work = floats(count * (weight.columns + 2 * weight.rows));
        self.measure(Operation::AddAdapters, work, |inner| {
            inner.add_adapters(step.inner, rows, x, &weight.inner, matrix, adapters, out)
        })
    }

    fn rope_write_kv(
        &mut self,
        step: Self::Step<'_>,
        rope: &B::Rope,
        shape: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        qkv: &mut B::Buffer,
        layer: usize,
        cache: &mut Self::Cache,
    ) -> Result<(), DeviceError> {
        let rows = step.inputs.tokens.len();
        let rotated = floats(2 * rows * (shape.query_width() + shape.kv_width()));
        let work = bytes(rotated.bytes + rows as u64 * cache.position_bytes);
        let norms = norms.map(|(query, key, epsilon)| (&query.inner, &key.inner, epsilon));
        self.measure(Operation::RopeWriteKv, work, |inner| {
            inner.rope_write_kv(step.inner, rope, shape, norms, qkv, layer, &mut cache.inner)
        })
    }

    fn attention(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &Self::Cache,
        qkv: &mut B::Buffer,
        scratch: &mut B::Scratch,
        out: &mut B::Operand,
    ) -> Result<(), DeviceError> {
        let work = attention_work(step.inputs, shape, params.window, cache.position_bytes);
        self.measure(Operation::Attention, work, |inner| {
            inner.attention(&reader.inner, step.inner, shape, params, layer, &cache.inner, qkv, scratch, out)
        })
    }

    fn silu_mul(
        &mut self,
        reader: &Self::Matrix,
        rows: usize,
        width: usize,
        gate_up: &B::Buffer,
        out: &mut B::Operand,
    ) -> Result<(), DeviceError> {
        self.measure(Operation::SiluMul, floats(3 * rows * width), |inner| {
            inner.silu_mul(&reader.inner, rows, width, gate_up, out)
        })
    }

    fn gather(
        &mut self,
        step: Self::Step<'_>,
        width: usize,
        x: &B::Buffer,
        out: &mut B::Buffer,
    ) -> Result<(), DeviceError> {
        self.measure(Operation::Gather, floats(2 * step.inputs.output_rows.len() * width), |inner| {
            inner.gather(step.inner, width, x, out)
        })
    }

    fn gather_operand(
        &mut self,
        reader: &Self::Matrix,
        step: Self::Step<'_>,
        x: &B::Operand,
        out: &mut B::Operand,
    ) -> Result<(), DeviceError> {
        self.measure(Operation::Gather, floats(2 * step.inputs.output_rows.len() * reader.columns), |inner| {
            inner.gather_operand(&reader.inner, step.inner, x, out)
        })
    }

    fn sample(
        &mut self,
        logits: &B::Buffer,
        batch: &SamplingBatch,
        slots: &mut B::Slots,
        scratch: &mut B::Scratch,
    ) -> Result<B::Ticket, DeviceError> {
        if batch.is_empty() {
            return self.inner.sample(logits, batch, slots, scratch);
        }
        let work = floats(batch.len() * self.vocabulary);
        self.measure(Operation::Sample, work, |inner| inner.sample(logits, batch, slots, scratch))
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.inner.flush()
    }

    fn poll(&mut self, ticket: &mut B::Ticket, waker: &Waker) -> Poll<()> {
        self.inner.poll(ticket, waker)
    }

    fn collect(&mut self, ticket: B::Ticket, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        self.inner.collect(ticket, out)
    }

    fn download(&mut self, x: &B::Buffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let work = floats(out.len());
        self.measure(Operation::Download, work, |inner| inner.download(x, start, out))
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.inner.synchronize()
    }
}
