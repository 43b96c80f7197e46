//! [`Timed`]: a backend that measures the operations of another one.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Instant;

use bytes::Bytes;
use penstock_types::{
    AttentionRow, BlockCopy, Dtype, Epilogue, FieldError, HeadShape, KvDtype, PackedAdapter, WeightFormat,
};

use crate::error::DeviceError;
use crate::profile::{FLOAT, Operation, Profile, Work, bytes, floats};
use crate::seam::{
    AdapterSpec, AdapterUpdates, Allocation, Backend, CacheSpec, Compute, HeadNorms, LayerAttention,
    LayerHeads, Load, MatrixPart, Memory, MemoryUse, PackedLayout, PlannedMatrix, RowSource, Sample, Sampled,
    SamplingBatch, SlotParams, StepInputs, StepSpec,
};
use crate::system::AvailableMemory;

/// Measures the operations of a backend, each from its call until its effects are complete. So an asynchronous backend
/// is slower with it; the results are the same.
pub struct Timed<B> {
    inner: B,
    profile: Arc<Profile>,
    vocabulary: usize,
    /// The cache and the inputs of the current step, which the work of operations depends on.
    cache: Option<CacheSpec>,
    inputs: StepInputs,
}

impl<B: Backend> Timed<B> {
    /// Measures `inner`.
    pub fn new(inner: B) -> Self {
        Self { inner, profile: Arc::default(), vocabulary: 0, cache: None, inputs: StepInputs::default() }
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

    /// Bytes of a block of the cache in all layers.
    fn block_bytes_in_use(&self) -> u64 {
        self.cache.as_ref().map_or(0, |cache| self.inner.block_bytes(cache))
    }

    /// Bytes of a position of the cache in one layer.
    fn position_bytes(&self) -> u64 {
        let positions = self.cache.as_ref().map_or(1, |cache| cache.layers * cache.block_size);
        self.block_bytes_in_use() / positions.max(1) as u64
    }

    /// The work of attention in one layer.
    fn attention_work(&self, shape: HeadShape, window: Option<usize>) -> Work {
        let mut work = floats(2 * self.inputs.tokens.len() * shape.query_width());
        for AttentionRow { num_queries, start, .. } in &self.inputs.sequences {
            let visible = |position: usize| (position + 1).min(window.unwrap_or(usize::MAX)) as u64;
            let scores: u64 = (*start..start + num_queries).map(visible).sum();
            // A multiplication and an addition for each value, once for the scores and once for the output.
            work.flops += 4 * scores * shape.query_width() as u64;
            let read = (start + num_queries).min(window.map_or(usize::MAX, |window| window + num_queries));
            work.bytes += read as u64 * self.position_bytes();
        }
        work
    }

    /// Rows of the step that have adapters.
    fn adapted_rows(&self) -> usize {
        self.inputs.adapters.iter().map(|rows| rows.rows.len()).sum()
    }
}

/// A weight with its size.
pub struct Measured<T> {
    inner: T,
    rows: usize,
    columns: usize,
    bytes: u64,
}

impl<T> Measured<T> {
    fn new(inner: T, columns: usize, parts: &[(usize, WeightFormat)]) -> Self {
        let rows = parts.iter().map(|(rows, _)| rows).sum();
        let bytes = parts.iter().map(|(rows, format)| format.bytes(*rows, columns) as u64).sum();
        Self { inner, rows, columns, bytes }
    }

    /// The work of reading some rows of a table.
    fn rows_work(&self, rows: usize) -> Work {
        bytes(rows as u64 * (self.bytes / self.rows.max(1) as u64 + self.columns as u64 * FLOAT))
    }

    /// The work of a product of some rows.
    fn linear_work(&self, rows: usize) -> Work {
        let (rows, inputs, outputs) = (rows as u64, self.columns as u64, self.rows as u64);
        Work { bytes: self.bytes + rows * (inputs + outputs) * FLOAT, flops: 2 * rows * inputs * outputs }
    }
}

/// Writes methods that only call those of the inner backend.
macro_rules! forward {
    () => {};
    (fn $name:ident(&mut $self:ident $(, $argument:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&mut $self $(, $argument: $type)*) $(-> $result)? { $self.inner.$name($($argument),*) }
        forward! { $($rest)* }
    };
    (fn $name:ident(&$self:ident $(, $argument:ident: $type:ty)*) $(-> $result:ty)?; $($rest:tt)*) => {
        fn $name(&$self $(, $argument: $type)*) $(-> $result)? { $self.inner.$name($($argument),*) }
        forward! { $($rest)* }
    };
}

/// Writes methods that measure those of the inner backend: after the signature, the operation, its work, and the
/// arguments of the inner method.
macro_rules! measure {
    ($(
        fn $name:ident(&mut $self:ident, $($argument:ident: $type:ty),*):
        $operation:ident, $work:expr, ($($inner:expr),*);
    )*) => {$(
        fn $name(&mut $self, $($argument: $type),*) -> Result<(), DeviceError> {
            let work = $work;
            $self.measure(Operation::$operation, work, |inner| inner.$name($($inner),*))
        }
    )*};
}

impl<B: Backend> Memory for Timed<B> {
    type Buffer = B::Buffer;
    type Operand = B::Operand;
    type Scratch = B::Scratch;
    type Cache = B::Cache;

    forward! {
        fn bytes(&self, allocation: Allocation<'_>) -> u64;
        fn block_bytes(&self, cache: &CacheSpec) -> u64;
        fn host_buffer_bytes(&self, step: &StepSpec, adapters: Option<&AdapterSpec>) -> u64;
        fn host_memory(&self) -> Option<u64>;
        fn available_memory(&self) -> Result<AvailableMemory, DeviceError>;
        fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError>;
        fn reserve_outside(&mut self, bytes: u64);
        fn memory(&self) -> MemoryUse;
        fn allocate(&mut self, len: usize) -> Result<B::Buffer, DeviceError>;
        fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<B::Operand, DeviceError>;
        fn allocate_scratch(&mut self, step: &StepSpec) -> Result<B::Scratch, DeviceError>;
        fn synchronize(&mut self) -> Result<(), DeviceError>;
    }

    measure! {
        fn download(&mut self, x: &B::Buffer, start: usize, out: &mut [f32]):
            Download, floats(out.len()), (x, start, out);
    }

    fn allocate_cache(&mut self, cache: &CacheSpec) -> Result<B::Cache, DeviceError> {
        self.cache = Some(cache.clone());
        self.inner.allocate_cache(cache)
    }

    fn copy_blocks(
        &mut self,
        cache: &mut B::Cache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        let (started, mut count) = (Instant::now(), 0);
        self.inner.copy_blocks(cache, &mut copies.inspect(|_| count += 1))?;
        self.inner.synchronize()?;
        self.profile.add(Operation::CopyBlocks, started, bytes(2 * count * self.block_bytes_in_use()));
        Ok(())
    }
}

impl<B: Backend> Load for Timed<B> {
    type Matrix = Measured<B::Matrix>;
    type Vector = Measured<B::Vector>;
    type Rope = B::Rope;
    type Adapters = B::Adapters;
    type AdapterLayout = B::AdapterLayout;

    forward! {
        fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError>;
        fn supports(&self, format: WeightFormat, columns: usize) -> bool;
        fn activations(&self, format: WeightFormat) -> &'static str;
        fn prepare(&mut self, matrices: &[PlannedMatrix], cache: &CacheSpec, has_adapters: bool)
            -> Result<(), DeviceError>;
        fn packed_layout(&self) -> PackedLayout;
        fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64;
        fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]);
        fn copies_mapped(&self) -> bool;
        fn load_rope(&mut self, table: &dyn RowSource, step: &StepSpec) -> Result<B::Rope, DeviceError>;
        fn allocate_adapters(&mut self, adapters: &AdapterSpec, step: &StepSpec)
            -> Result<B::Adapters, DeviceError>;
        fn unload_adapter(&mut self, adapters: &mut B::Adapters, number: u32) -> Result<(), DeviceError>;
    }

    measure! {
        // The CPU moves no bytes.
        fn load_adapter(&mut self, adapters: &mut B::Adapters, number: u32, adapter: &Arc<PackedAdapter>):
            LoadAdapter, bytes(0), (adapters, number, adapter);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<Self::Matrix, DeviceError> {
        let columns = parts.first().map_or(0, |part| part.source.columns());
        let sizes: Vec<_> = parts.iter().map(|part| (part.source.rows(), part.format)).collect();
        Ok(Measured::new(self.inner.load_matrix(parts)?, columns, &sizes))
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<Self::Matrix, DeviceError> {
        Ok(Measured::new(self.inner.map_matrix(columns, parts, bytes)?, columns, parts))
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<Self::Vector, DeviceError> {
        Ok(Measured::new(self.inner.load_vector(values)?, values.len(), &[(1, Dtype::F32.into())]))
    }
}

impl<B: Backend> Sample for Timed<B> {
    type Slots = B::Slots;
    type Ticket = B::Ticket;

    forward! {
        fn free_slot(&mut self, slots: &mut B::Slots, slot: u32) -> Result<(), DeviceError>;
        fn poll(&mut self, ticket: &mut B::Ticket, waker: &Waker) -> Poll<()>;
        fn collect(&mut self, ticket: B::Ticket, out: &mut Vec<Sampled>) -> Result<(), DeviceError>;
    }

    measure! {
        fn admit_slot(&mut self, slots: &mut B::Slots, slot: u32, params: &SlotParams<'_>):
            AdmitSlot, floats(params.prompt.len() + params.generated.len()), (slots, slot, params);
    }

    fn allocate_slots(&mut self, step: &StepSpec) -> Result<B::Slots, DeviceError> {
        self.vocabulary = step.vocabulary;
        self.inner.allocate_slots(step)
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
}

impl<B: Backend> Compute for Timed<B> {
    type Step<'a> = B::Step<'a>;

    forward! {
        fn is_deterministic(&self) -> bool;
        fn bind_thread(&mut self);
        fn flush(&mut self) -> Result<(), DeviceError>;
    }

    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut B::Rope,
        slots: &B::Slots,
        cache: &B::Cache,
        adapters: Option<&B::Adapters>,
    ) -> Result<B::Step<'a>, DeviceError> {
        self.inputs.clone_from(inputs);
        let rotations = inputs.extra_rotations.len() + inputs.query_scales.len();
        let work = floats(5 * inputs.tokens.len() + inputs.blocks.len() + rotations); // ids are as wide
        self.measure(Operation::Upload, work, |inner| inner.upload(inputs, rope, slots, cache, adapters))
    }

    measure! {
        fn embed(&mut self, step: B::Step<'_>, slots: &B::Slots, table: &Self::Matrix, out: &mut B::Buffer):
            Embed, table.rows_work(self.inputs.tokens.len()), (step, slots, &table.inner, out);

        fn rms_norm(
            &mut self, rows: usize, x: &B::Buffer, weight: &Self::Vector, epsilon: f32, out: &mut B::Buffer
        ):
            RmsNorm, floats((2 * rows + 1) * weight.columns), (rows, x, &weight.inner, epsilon, out);

        fn rms_norm_for(
            &mut self, reader: &Self::Matrix, rows: usize, x: &B::Buffer, weight: &Self::Vector, epsilon: f32,
            out: &mut B::Operand
        ):
            RmsNorm, floats((2 * rows + 1) * weight.columns),
            (&reader.inner, rows, x, &weight.inner, epsilon, out);

        fn linear(
            &mut self, rows: Range<usize>, x: &B::Operand, weight: &Self::Matrix,
            epilogue: Epilogue<&Self::Vector>, out: &mut B::Buffer
        ):
            Linear, weight.linear_work(rows.len()),
            (rows, x, &weight.inner, epilogue.map(|bias| &bias.inner), out);

        fn add_adapters(
            &mut self, updates: AdapterUpdates<'_, B::Step<'_>, B::Adapters>, x: &B::Operand,
            weight: &Self::Matrix, out: &mut B::Buffer
        ):
            AddAdapters, floats(self.adapted_rows() * (weight.columns + 2 * weight.rows)),
            (updates, x, &weight.inner, out);

        fn attention(
            &mut self, reader: &Self::Matrix, step: B::Step<'_>, attention: LayerAttention<'_, B::Cache>,
            qkv: &mut B::Buffer, scratch: &mut B::Scratch, out: &mut B::Operand
        ):
            Attention, self.attention_work(attention.shape, attention.params.window),
            (&reader.inner, step, attention, qkv, scratch, out);

        fn silu_mul(
            &mut self, reader: &Self::Matrix, rows: usize, width: usize, gate_up: &B::Buffer,
            out: &mut B::Operand
        ):
            SiluMul, floats(3 * rows * width), (&reader.inner, rows, width, gate_up, out);

        fn gather(&mut self, step: B::Step<'_>, width: usize, x: &B::Buffer, out: &mut B::Buffer):
            Gather, floats(2 * self.inputs.output_rows.len() * width), (step, width, x, out);

        fn gather_operand(
            &mut self, reader: &Self::Matrix, step: B::Step<'_>, x: &B::Operand, out: &mut B::Operand
        ):
            Gather, floats(2 * self.inputs.output_rows.len() * reader.columns),
            (&reader.inner, step, x, out);
    }

    fn rope_write_kv(
        &mut self,
        step: B::Step<'_>,
        rope: &B::Rope,
        LayerHeads { shape, norms, layer }: LayerHeads<'_, Self::Vector>,
        qkv: &mut B::Buffer,
        cache: &mut B::Cache,
    ) -> Result<(), DeviceError> {
        let rows = self.inputs.tokens.len();
        let rotated = floats(2 * rows * (shape.query_width() + shape.kv_width()));
        let work = bytes(rotated.bytes + rows as u64 * self.position_bytes());
        let norms = norms.map(|HeadNorms { query, key, epsilon }| HeadNorms {
            query: &query.inner,
            key: &key.inner,
            epsilon,
        });
        let heads = LayerHeads { shape, norms, layer };
        self.measure(Operation::RopeWriteKv, work, |inner| inner.rope_write_kv(step, rope, heads, qkv, cache))
    }
}
