//! The operations of the CUDA backend, and the sizes of their memory. Each operation launches one kernel or a few.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

use bytes::Bytes;
use penstock_cuda::DevicePointer;
use penstock_types::{
    AttentionParams, BlockCopy, Dtype, Epilogue, FieldError, HeadShape, KvDtype, LowRankShape, PackedAdapter,
    WeightFormat,
};

use super::cache::{LISTS_BYTES, check_cache};
use super::cublas::WORKSPACE_BYTES;
use super::kernels::float_type;
use super::matrix::{PACKED_ROWS, matrix_bytes, pack, packed_bytes};
use super::operand::{OperandForm, QuantisedRows, Rows};
use super::operations::{Attention, DOWNLOAD_BYTES, RopeWriteKv};
use super::queue::Shape;
use super::upload::Uploader;
use super::{
    Cuda, CudaAdapters, CudaBuffer, CudaCache, CudaMatrix, CudaOperand, CudaRope, CudaSlots, CudaStep,
    CudaTicket, adapters, attention, codes, low_rank,
};
use crate::arena::Region;
use crate::backend::{Backend, CacheSpec, MatrixPart, MemoryUse, PackedLayout, PlannedMatrix, RowSource};
use crate::error::DeviceError;
use crate::sample::{Sampled, SamplingBatch, SlotParams};
use crate::step::{AdapterSpec, StepInputs, StepLimits, StepRows, StepSpec};

/// The layout of packed matrices in files.
pub(super) const PACKED_LAYOUT: &str = "cuda-rows-2";

impl Backend for Cuda {
    type Matrix = CudaMatrix;
    type Vector = CudaBuffer;
    type Buffer = CudaBuffer;
    type Operand = CudaOperand;
    /// Partial results of attention.
    type Scratch = Region;
    type Cache = CudaCache;
    type Rope = CudaRope;
    type Slots = CudaSlots;
    type Adapters = CudaAdapters;
    type Step<'a> = CudaStep<'a>;
    type Ticket = CudaTicket;
    /// The driver divides the device between engines.
    type Turn = ();

    fn check_cache(&self, heads: HeadShape, dtype: KvDtype) -> Result<(), FieldError> {
        check_cache(heads, dtype)
    }

    fn prepare(
        &mut self,
        matrices: &[PlannedMatrix],
        cache: &CacheSpec,
        has_adapters: bool,
    ) -> Result<(), DeviceError> {
        self.load_kernels(matrices, cache, has_adapters)
    }

    fn is_deterministic(&self) -> bool {
        self.cublas.is_none()
    }

    fn available_memory(&self) -> Result<u64, DeviceError> {
        self.memory.available()
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        self.memory.reserve(usize::try_from(bytes).unwrap_or(usize::MAX))
    }

    fn reserve_outside(&mut self, bytes: u64) {
        self.pinned.reserve(bytes);
    }

    fn memory(&self) -> MemoryUse {
        self.memory.usage()
    }

    fn host_memory(&self) -> Option<u64> {
        Some(self.host.available_memory().saturating_add(self.pinned.taken()))
    }

    fn host_buffer_bytes(&self, spec: &StepSpec, adapters: Option<&AdapterSpec>) -> u64 {
        let uploaders = if adapters.is_some() { 2 } else { 1 }; // of weights, and of adapters
        let parts = [
            DOWNLOAD_BYTES,
            uploaders * Uploader::BYTES,
            LISTS_BYTES,
            Self::input_buffer_bytes(spec),
            Self::sampling_buffer_bytes(spec),
        ];
        parts.into_iter().fold(0, usize::saturating_add) as u64
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        match format {
            WeightFormat::Float(_) => true,
            WeightFormat::Grid(grid) => codes::supports(&grid, columns),
        }
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        OperandForm::new(std::iter::once(format), self.has_fp8).name()
    }

    fn matrix_bytes(&self, columns: usize, parts: &[(usize, WeightFormat)]) -> u64 {
        self.memory.granted(matrix_bytes(columns, parts))
    }

    fn buffer_bytes(&self, len: usize) -> u64 {
        self.memory.granted(len.saturating_mul(size_of::<f32>()))
    }

    fn operand_bytes(&self, rows: usize, columns: usize) -> u64 {
        self.memory.granted(self.operands.bytes(rows, columns).0)
    }

    fn rope_bytes(&self, positions: usize, spec: &StepSpec) -> u64 {
        self.rope_size(positions, spec)
    }

    fn scratch_bytes(&self, spec: &StepSpec) -> u64 {
        let row = attention::partial_row_bytes(spec.heads.head_dim);
        let partials = self.memory.granted(attention::partial_rows(spec).saturating_mul(row));
        let chains = self.memory.granted(self.division.chains_bytes(spec.tokens));
        let cublas = self.cublas.as_ref().map_or(0, |_| self.memory.granted(WORKSPACE_BYTES));
        partials.saturating_add(chains).saturating_add(cublas)
    }

    fn slots_bytes(&self, spec: &StepSpec) -> u64 {
        self.slots_size(spec)
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        super::cache::CacheShape::new(spec).block_bytes() as u64
    }

    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64 {
        match blocks {
            0 => 0,
            blocks => self.memory.granted((self.block_bytes(spec) as usize).saturating_mul(blocks)),
        }
    }

    fn adapters_bytes(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64 {
        self.adapters_size(adapters, spec)
    }

    fn shared_adapters_bytes(&self, _: &AdapterSpec) -> u64 {
        0
    }

    fn low_rank_bytes(shape: &LowRankShape) -> usize {
        low_rank::low_rank_bytes(shape)
    }

    fn adapter_bytes(packed: u64) -> u64 {
        adapters::adapter_bytes(packed)
    }

    fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        low_rank::pack_low_rank(shape, a, b, out);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CudaMatrix, DeviceError> {
        self.read_matrix(parts)
    }

    fn packed_layout(&self) -> PackedLayout {
        PackedLayout { name: PACKED_LAYOUT, rows: PACKED_ROWS }
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        packed_bytes(columns, rows, format) as u64
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        pack(part, out);
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<CudaMatrix, DeviceError> {
        self.copied_matrix(columns, parts, &bytes)
    }

    fn copies_mapped(&self) -> bool {
        true
    }

    fn bind_thread(&mut self) {
        // A failure is that of the first operation, too.
        let _ = self.context.bind_thread();
    }

    fn turn(&self) {}

    fn load_vector(&mut self, values: &[f32]) -> Result<CudaBuffer, DeviceError> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let region = self.memory.allocate(bytes.len(), "weights")?;
        let target = self.memory.pointer(&region);
        self.uploader.upload(&self.queue, target, (bytes.len(), 1), 1, &|range, out| {
            out.copy_from_slice(&bytes[range]);
        })?;
        Ok(CudaBuffer(region))
    }

    fn load_rope(&mut self, table: &dyn RowSource, spec: &StepSpec) -> Result<CudaRope, DeviceError> {
        let rope = self.new_rope(table, spec)?;
        self.uploader.release()?;
        Ok(rope)
    }

    fn allocate(&mut self, len: usize) -> Result<CudaBuffer, DeviceError> {
        self.zeroed(len.saturating_mul(size_of::<f32>()), "workspace").map(CudaBuffer)
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<CudaOperand, DeviceError> {
        let (bytes, quantised) = self.operands.bytes(rows, columns);
        let region = self.memory.allocate_workspace(bytes, "workspace")?;
        Ok(CudaOperand { region, quantised })
    }

    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<Region, DeviceError> {
        let chains = self.division.chains_bytes(spec.tokens);
        self.division.chains = Some(self.memory.allocate_workspace(chains, "workspace")?);
        if let Some(cublas) = &mut self.cublas {
            cublas.workspace = Some(self.memory.allocate_workspace(WORKSPACE_BYTES, "workspace")?);
        }
        self.most_partial_rows = attention::partial_rows(spec);
        let bytes = self.most_partial_rows * attention::partial_row_bytes(spec.heads.head_dim);
        self.memory.allocate_workspace(bytes, "attention scratch")
    }

    fn allocate_slots(&mut self, spec: &StepSpec) -> Result<CudaSlots, DeviceError> {
        self.new_slots(spec)
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<CudaCache, DeviceError> {
        self.new_cache(spec)
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<CudaAdapters, DeviceError> {
        self.new_adapters(adapters, spec)
    }

    fn load_adapter(
        &mut self,
        adapters: &mut CudaAdapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        self.put_adapter(adapters, number as usize, adapter)
    }

    fn unload_adapter(&mut self, adapters: &mut CudaAdapters, number: u32) -> Result<(), DeviceError> {
        self.remove_adapter(adapters, number as usize);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        cache: &mut CudaCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        self.run_copies(cache, copies)
    }

    fn admit_slot(
        &mut self,
        slots: &mut CudaSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        self.admit(slots, slot, params)
    }

    fn free_slot(&mut self, slots: &mut CudaSlots, slot: u32) -> Result<(), DeviceError> {
        slots.free(slot);
        Ok(())
    }

    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut CudaRope,
        slots: &CudaSlots,
        cache: &CudaCache,
        adapters: Option<&CudaAdapters>,
    ) -> Result<CudaStep<'a>, DeviceError> {
        inputs.validate(&StepLimits {
            vocabulary: slots.vocabulary(),
            slots: slots.len(),
            rope_positions: rope.positions,
            head_dim: rope.width,
            blocks: cache.num_blocks,
            block_size: cache.shape.block_size,
        })?;
        inputs.check_adapters(|number| adapters.is_some_and(|all| all.is_loaded(number)))?;
        self.upload_inputs(inputs, rope)
    }

    fn embed(
        &mut self,
        step: CudaStep<'_>,
        slots: &CudaSlots,
        table: &CudaMatrix,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.copy_rows_of_tokens(step, slots, table, out)
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaBuffer,
        epsilon: f32,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let out = Rows::Floats(self.memory.pointer(&out.0), Dtype::F32);
        self.launch_rms_norm(rows, [x, weight], epsilon, out)
    }

    fn rms_norm_for(
        &mut self,
        reader: &CudaMatrix,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaBuffer,
        epsilon: f32,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        self.launch_rms_norm(rows, [x, weight], epsilon, self.rows_for(reader, out))
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &CudaOperand,
        weight: &CudaMatrix,
        epilogue: Epilogue<&CudaBuffer>,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        self.multiply(rows, x, weight, &epilogue, out)
    }

    fn add_adapters(
        &mut self,
        step: CudaStep<'_>,
        rows: StepRows,
        x: &CudaOperand,
        weight: &CudaMatrix,
        matrix: u32,
        adapters: &mut CudaAdapters,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let x = (x.floats(&self.memory), weight.operand.floats(), weight.columns);
        let out = self.memory.pointer(&out.0);
        self.launch_adapters(adapters, matrix, step.adapters[rows as usize], x, (out, weight.rows))
    }

    fn rope_write_kv(
        &mut self,
        step: CudaStep<'_>,
        rope: &CudaRope,
        shape: HeadShape,
        norms: Option<(&CudaBuffer, &CudaBuffer, f32)>,
        qkv: &mut CudaBuffer,
        layer: usize,
        cache: &mut CudaCache,
    ) -> Result<(), DeviceError> {
        let norm = |buffer: Option<&CudaBuffer>| {
            buffer.map_or(DevicePointer::NULL, |buffer| self.memory.pointer(&buffer.0))
        };
        let call = RopeWriteKv {
            qkv: self.memory.pointer(&qkv.0),
            query_norm: norm(norms.map(|(query, _, _)| query)),
            key_norm: norm(norms.map(|(_, key, _)| key)),
            rotations: self.memory.pointer(&rope.table),
            extra_rotations: step.extra_rotations,
            positions: step.positions,
            query_scales: step.query_scales,
            blocks: step.write_blocks,
            offsets: step.write_offsets,
            cache: self.layer(cache, layer),
            heads: shape.heads as i32,
            angles: (rope.width / 2) as i32,
            epsilon: norms.map_or(0.0, |(_, _, epsilon)| epsilon),
            padding: 0,
        };
        let blocks = [step.inputs.tokens.len(), (shape.heads + 2 * shape.kv_heads).div_ceil(4), 1];
        let launch = Shape::of(blocks, 128).with_shared(8 * shape.head_dim * size_of::<f32>());
        self.queue.launch(&cache.rope_write_kv, launch, &[(&call).into()])
    }

    fn attention(
        &mut self,
        reader: &CudaMatrix,
        step: CudaStep<'_>,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &CudaCache,
        qkv: &mut CudaBuffer,
        scratch: &mut Region,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let call = Attention {
            qkv: self.memory.pointer(&qkv.0),
            blocks: step.blocks,
            works: step.decode.works,
            partials: self.memory.pointer(scratch),
            out: out.floats(&self.memory),
            cache: self.layer(cache, layer),
            heads: shape.heads as i32,
            window: params.window.map_or(0, |window| window.min(i32::MAX as usize) as i32),
            scale: params.scale,
            softcap: params.softcap.unwrap_or(0.0),
            out_type: float_type(reader.operand.floats()),
            padding: 0,
        };
        self.launch_attention(step, &cache.shape, reader.operand, layer, &call)?;
        match self.rows_for(reader, out) {
            Rows::Floats(..) => Ok(()),
            Rows::Quantised(to, numbers) => {
                let to = QuantisedRows { floats: DevicePointer::NULL, ..to };
                let arguments = [(&call.out).into(), (&to).into()];
                let shape = to.shape(step.inputs.tokens.len());
                self.queue.launch(self.kernels.quantise.get(numbers), shape, &arguments)
            }
        }
    }

    fn silu_mul(
        &mut self,
        reader: &CudaMatrix,
        rows: usize,
        width: usize,
        gate_up: &CudaBuffer,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let from = self.memory.pointer(&gate_up.0);
        match self.rows_for(reader, out) {
            Rows::Floats(to, dtype) => {
                let shape = Shape::of([rows, width.div_ceil(1024), 1], 256);
                let width = width as i32;
                let arguments = [(&from).into(), (&to).into(), (&width).into()];
                self.queue.launch(self.kernels.silu_mul.get(dtype), shape, &arguments)
            }
            Rows::Quantised(to, numbers) => {
                let arguments = [(&from).into(), (&to).into()];
                self.queue.launch(self.kernels.quantised_silu_mul.get(numbers), to.shape(rows), &arguments)
            }
        }
    }

    fn gather(
        &mut self,
        step: CudaStep<'_>,
        width: usize,
        x: &CudaBuffer,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let rows = [x, out].map(|buffer| self.memory.pointer(&buffer.0));
        self.launch_gather(step, width * size_of::<f32>(), rows)
    }

    fn gather_operand(
        &mut self,
        reader: &CudaMatrix,
        step: CudaStep<'_>,
        x: &CudaOperand,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let form = reader.operand;
        if matches!(form, OperandForm::Quantised(..)) && self.operands.has_adapters {
            let rows = [x, out].map(|operand| operand.floats(&self.memory));
            self.launch_gather(step, reader.columns * size_of::<f32>(), rows)?;
        }
        let rows = [x, out].map(|operand| operand.pointer(&self.memory, form));
        self.launch_gather(step, form.row_bytes(reader.columns), rows)
    }

    fn sample(
        &mut self,
        logits: &CudaBuffer,
        batch: &SamplingBatch,
        slots: &mut CudaSlots,
        _scratch: &mut Region,
    ) -> Result<CudaTicket, DeviceError> {
        let ticket = self.sample_batch(logits, batch, slots);
        let ended = self.queue.end_step();
        let ticket = ticket?; // the first error
        ended.map(|()| ticket)
    }

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.queue.end_step()
    }

    fn poll(&mut self, ticket: &mut CudaTicket, waker: &Waker) -> Poll<()> {
        ticket.poll(waker)
    }

    fn collect(&mut self, ticket: CudaTicket, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        ticket.collect(out)
    }

    fn download(&mut self, x: &CudaBuffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        self.read_floats(x, start, out)
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.queue.synchronize()
    }
}
