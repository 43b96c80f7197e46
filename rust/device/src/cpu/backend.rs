//! The operations of the CPU backend: each lends the bytes of its buffers from the arena and calls a kernel.

use std::mem::size_of;
use std::ops::Range;
use std::sync::Arc;
use std::task::{Poll, Waker};

use bytemuck::{cast_slice, cast_slice_mut};
use bytes::Bytes;
use penstock_kernels::{
    AttentionCodes, MatrixLayout, OperandLayout, PACKED_LAYOUT, PANEL_ROWS, RopeWriteKv, Rows, RowsMut, Turn,
    is_supported, low_rank_bytes, pack_low_rank,
};
use penstock_types::{
    AttentionParams, BlockCopy, Epilogue, HeadShape, LowRankShape, PackedAdapter, WeightFormat,
};

use super::PAGE;
use super::buffers::{MOST_PARTS, Weights, arena, lend, lend_some};
use super::cache::{CacheShape, kv_layout};
use super::matrices::pack_part;
use super::{
    Cpu, CpuAdapters, CpuBuffer, CpuCache, CpuMatrix, CpuOperand, CpuRope, CpuScratch, CpuSlots, rope,
    sampling,
};
use crate::arena::Region;
use crate::backend::{Backend, CacheSpec, MatrixPart, MemoryUse, PackedLayout, RowSource};
use crate::bfc::Placement;
use crate::error::DeviceError;
use crate::sample::{Sampled, SamplingBatch, SlotParams};
use crate::step::{AdapterSpec, FOLLOWS, StepInputs, StepLimits, StepRows, StepSpec};
use crate::system::available_memory;

/// The results of a `sample` call.
pub struct CpuTicket(Vec<Sampled>);

/// Values of a row of the rope table.
fn rotation_width(spec: &StepSpec) -> usize {
    spec.heads.head_dim / 2 * 2
}

/// Floats of the products with A of all rows: query, key and value have one each.
fn hidden_len(adapters: &AdapterSpec, spec: &StepSpec) -> usize {
    spec.tokens.saturating_mul(adapters.rank).saturating_mul(MOST_PARTS)
}

impl Backend for Cpu {
    type Matrix = CpuMatrix;
    type Vector = CpuBuffer;
    type Buffer = CpuBuffer;
    type Operand = CpuOperand;
    type Scratch = CpuScratch;
    type Cache = CpuCache;
    type Rope = CpuRope;
    type Slots = CpuSlots;
    type Adapters = CpuAdapters;
    type Step<'a> = &'a StepInputs;
    type Ticket = CpuTicket;
    type Turn = Turn;

    fn available_memory(&self) -> Result<u64, DeviceError> {
        Ok(self.host.remaining(available_memory().min(self.numa_memory.available().unwrap_or(u64::MAX))))
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), DeviceError> {
        assert_eq!(self.memory().peak, 0, "memory is reserved after the first allocation; this is a bug");
        self.reservation = None;
        self.arena = arena(PAGE, &self.numa_memory)?; // releases the former reservation first
        self.arena = arena(usize::try_from(bytes).unwrap_or(usize::MAX), &self.numa_memory)?;
        self.reservation = Some(self.host.reserve(self.arena.slab().as_ref()));
        Ok(())
    }

    fn reserve_outside(&mut self, bytes: u64) {
        let reservation = self.reservation.as_ref().expect("memory is reserved first; this is a bug");
        reservation.set_outside(bytes);
    }

    fn memory(&self) -> MemoryUse {
        let stats = self.arena.bfc().stats();
        MemoryUse { in_use: stats.in_use as u64, peak: stats.peak as u64 }
    }

    fn host_memory(&self) -> Option<u64> {
        None
    }

    fn host_buffer_bytes(&self, _: &StepSpec, _: Option<&AdapterSpec>) -> u64 {
        0
    }

    fn supports(&self, format: WeightFormat, columns: usize) -> bool {
        match format {
            WeightFormat::Float(_) => true,
            WeightFormat::Grid(grid) => {
                is_supported(&grid) && (!format.reads_codes() || columns <= OperandLayout::MOST_COLUMNS)
            }
        }
    }

    fn activations(&self, format: WeightFormat) -> &'static str {
        if format.reads_codes() { "int8" } else { "float32" }
    }

    fn matrix_bytes(&self, columns: usize, parts: &[(usize, WeightFormat)]) -> u64 {
        let bytes = |(rows, format): &(usize, WeightFormat)| {
            MatrixLayout { rows: *rows, columns, format: *format }.bytes()
        };
        self.granted(parts.iter().map(bytes).fold(0, usize::saturating_add))
    }

    fn buffer_bytes(&self, len: usize) -> u64 {
        self.granted(len.saturating_mul(size_of::<f32>()))
    }

    fn operand_bytes(&self, rows: usize, columns: usize) -> u64 {
        let codes = self.granted(rows.saturating_mul(OperandLayout::most_row_bytes(columns)));
        self.buffer_bytes(rows.saturating_mul(columns)).saturating_add(codes)
    }

    fn rope_bytes(&self, positions: usize, spec: &StepSpec) -> u64 {
        let bytes = |rows: usize| self.buffer_bytes(rows.saturating_mul(rotation_width(spec)));
        bytes(positions).saturating_add(bytes(spec.tokens))
    }

    fn scratch_bytes(&self, spec: &StepSpec) -> u64 {
        let (attention, sampling) = self.scratch_lens(spec);
        [attention, spec.tokens, sampling]
            .into_iter()
            .fold(0, |bytes, len| bytes.saturating_add(self.buffer_bytes(len)))
    }

    /// Slots are on the host's heap: their size depends on the requests.
    fn slots_bytes(&self, _: &StepSpec) -> u64 {
        0
    }

    fn block_bytes(&self, spec: &CacheSpec) -> u64 {
        CacheShape::new(spec).block_bytes() as u64
    }

    fn cache_bytes(&self, spec: &CacheSpec, blocks: usize) -> u64 {
        match blocks {
            0 => 0,
            blocks => self.granted(CacheShape::new(spec).block_bytes().saturating_mul(blocks)),
        }
    }

    fn adapters_bytes(&self, adapters: &AdapterSpec, spec: &StepSpec) -> u64 {
        self.buffer_bytes(hidden_len(adapters, spec))
    }

    /// Adapters are used where the host has them.
    fn shared_adapters_bytes(&self, adapters: &AdapterSpec) -> u64 {
        adapters.bytes
    }

    fn low_rank_bytes(shape: &LowRankShape) -> usize {
        low_rank_bytes(shape)
    }

    fn adapter_bytes(packed: u64) -> u64 {
        packed.next_multiple_of(PAGE as u64)
    }

    fn pack_low_rank(shape: &LowRankShape, a: &[f32], b: &[f32], out: &mut [u8]) {
        pack_low_rank(shape, a, b, out);
    }

    fn load_matrix(&mut self, parts: &[MatrixPart<'_>]) -> Result<CpuMatrix, DeviceError> {
        self.read_matrix(parts)
    }

    fn packed_layout(&self) -> PackedLayout {
        PackedLayout { name: PACKED_LAYOUT, rows: PANEL_ROWS }
    }

    fn packed_bytes(&self, columns: usize, rows: usize, format: WeightFormat) -> u64 {
        MatrixLayout { rows, columns, format }.bytes() as u64
    }

    fn pack(&self, part: MatrixPart<'_>, out: &mut [u8]) {
        pack_part(&self.pool, part, out);
    }

    fn map_matrix(
        &mut self,
        columns: usize,
        parts: &[(usize, WeightFormat)],
        bytes: Bytes,
    ) -> Result<CpuMatrix, DeviceError> {
        let layout =
            |(rows, format): &(usize, WeightFormat)| MatrixLayout { rows: *rows, columns, format: *format };
        let parts = parts.iter().map(layout).collect();
        match self.copies_mapped() {
            true => self.copied_matrix(columns, parts, &bytes),
            false => Ok(self.matrix(columns, parts, Weights::Mapped(bytes))),
        }
    }

    /// Pages of a file cannot be placed.
    fn copies_mapped(&self) -> bool {
        self.numa_memory.is_set()
    }

    fn bind_thread(&mut self) {
        self.pool.pin_caller();
    }

    fn turn(&self) -> Turn {
        self.pool.turn()
    }

    fn load_vector(&mut self, values: &[f32]) -> Result<CpuBuffer, DeviceError> {
        let region = self.region(values.len(), size_of::<f32>(), Placement::Low, "weights")?;
        let [bytes] = lend(&mut self.arena, [&region]);
        cast_slice_mut(bytes).copy_from_slice(values);
        Ok(CpuBuffer(region))
    }

    fn load_rope(&mut self, table: &dyn RowSource, spec: &StepSpec) -> Result<CpuRope, DeviceError> {
        let (positions, width) = (table.rows(), rotation_width(spec));
        assert_eq!(table.columns(), width, "values of a rotation; this is a bug");
        let mut rotations = |rows: usize| self.workspace(rows.saturating_mul(width), "workspace");
        let rope = CpuRope { table: rotations(positions)?, step: rotations(spec.tokens)?, positions, width };
        let [bytes] = lend(&mut self.arena, [&rope.table]);
        rope::fill(&self.pool, table, &mut cast_slice_mut(bytes)[..positions * width]);
        Ok(rope)
    }

    fn allocate(&mut self, len: usize) -> Result<CpuBuffer, DeviceError> {
        self.workspace(len, "workspace").map(CpuBuffer)
    }

    fn allocate_operand(&mut self, rows: usize, columns: usize) -> Result<CpuOperand, DeviceError> {
        let codes = OperandLayout::most_row_bytes(columns) / size_of::<f32>();
        Ok(CpuOperand {
            floats: self.workspace(rows.saturating_mul(columns), "workspace")?,
            codes: self.workspace(rows.saturating_mul(codes), "workspace")?,
        })
    }

    fn allocate_scratch(&mut self, spec: &StepSpec) -> Result<CpuScratch, DeviceError> {
        let (attention, sampling) = self.scratch_lens(spec);
        Ok(CpuScratch {
            attention: self.workspace(attention, "attention scratch")?,
            counters: self.workspace(spec.tokens, "attention scratch")?,
            sampling: self.workspace(sampling, "sampling scratch")?,
        })
    }

    fn allocate_slots(&mut self, spec: &StepSpec) -> Result<CpuSlots, DeviceError> {
        Ok(CpuSlots::new(spec.sequences, spec.vocabulary))
    }

    fn allocate_cache(&mut self, spec: &CacheSpec) -> Result<CpuCache, DeviceError> {
        let shape = CacheShape::new(spec);
        let mut blocks = |count, name| self.region(count, shape.block_bytes(), Placement::Low, name);
        let cache = blocks(spec.blocks, "KV cache")?;
        let host_blocks =
            (spec.host_blocks > 0).then(|| blocks(spec.host_blocks, "host cache")).transpose()?;
        Ok(CpuCache { layout: kv_layout(spec), num_blocks: spec.blocks, blocks: cache, host_blocks, shape })
    }

    fn allocate_adapters(
        &mut self,
        adapters: &AdapterSpec,
        spec: &StepSpec,
    ) -> Result<CpuAdapters, DeviceError> {
        let hidden = self.workspace(hidden_len(adapters, spec), "workspace")?;
        Ok(CpuAdapters::new(hidden, adapters.adapters))
    }

    fn load_adapter(
        &mut self,
        adapters: &mut CpuAdapters,
        number: u32,
        adapter: &Arc<PackedAdapter>,
    ) -> Result<(), DeviceError> {
        adapters.load(number as usize, adapter);
        Ok(())
    }

    fn unload_adapter(&mut self, adapters: &mut CpuAdapters, number: u32) -> Result<(), DeviceError> {
        adapters.unload(number as usize);
        Ok(())
    }

    fn copy_blocks(
        &mut self,
        cache: &mut CpuCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        let host = cache.host_blocks.as_ref().expect("copies without a host tier; this is a bug");
        let [blocks, host] = lend(&mut self.arena, [&cache.blocks, host]);
        copies.for_each(|copy| cache.shape.copy(blocks, host, copy));
        Ok(())
    }

    fn admit_slot(
        &mut self,
        slots: &mut CpuSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        slots.admit(slot as usize, params);
        Ok(())
    }

    fn free_slot(&mut self, slots: &mut CpuSlots, slot: u32) -> Result<(), DeviceError> {
        slots.free(slot as usize);
        Ok(())
    }

    fn upload<'a>(
        &mut self,
        inputs: &'a StepInputs,
        rope: &mut CpuRope,
        slots: &CpuSlots,
        cache: &CpuCache,
        adapters: Option<&CpuAdapters>,
    ) -> Result<&'a StepInputs, DeviceError> {
        inputs.validate(&StepLimits {
            vocabulary: slots.vocabulary,
            slots: slots.len(),
            rope_positions: rope.positions,
            head_dim: rope.width,
            blocks: cache.num_blocks,
            block_size: cache.layout.block_size,
        })?;
        inputs.check_adapters(|number| adapters.is_some_and(|all| all.is_loaded(number)))?;
        self.keeps_floats = !inputs.adapters.is_empty();
        let [table, step] = lend(&mut self.arena, [&rope.table, &rope.step]);
        rope::gather(inputs, cast_slice(table), cast_slice_mut(step), rope.width);
        Ok(inputs)
    }

    fn embed(
        &mut self,
        step: &StepInputs,
        slots: &CpuSlots,
        table: &CpuMatrix,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [bytes, out] = lend_some(&mut self.arena, [table.weights.region(), Some(&out.0)]);
        let (matrix, width) = (table.matrices(bytes)[0], table.columns);
        let row_of = |row: usize| match step.tokens[row] {
            token if token & FOLLOWS == 0 => token as usize,
            token => slots.last_token((token ^ FOLLOWS) as usize) as usize,
        };
        let out = RowsMut::dense(&mut cast_slice_mut(out)[..step.tokens.len() * width], width);
        self.kernels.read_rows(&self.pool, matrix, &row_of, out);
        Ok(())
    }

    fn rms_norm(
        &mut self,
        rows: usize,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        epsilon: f32,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [x, weight, out] = lend(&mut self.arena, [&x.0, &weight.0, &out.0]);
        let weight: &[f32] = cast_slice(weight);
        let width = weight.len();
        let x = Rows::dense(&cast_slice(x)[..rows * width], width);
        let out = RowsMut::dense(&mut cast_slice_mut(out)[..rows * width], width);
        self.kernels.rms_norm(&self.pool, x, weight, epsilon, out);
        Ok(())
    }

    fn rms_norm_for(
        &mut self,
        reader: &CpuMatrix,
        rows: usize,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        epsilon: f32,
        out: &mut CpuOperand,
    ) -> Result<(), DeviceError> {
        let [x, weight, floats, codes] = lend(&mut self.arena, [&x.0, &weight.0, &out.floats, &out.codes]);
        let (kernels, pool) = (&self.kernels, &self.pool);
        let weight: &[f32] = cast_slice(weight);
        let width = weight.len();
        let x = Rows::dense(&cast_slice(x)[..rows * width], width);
        let floats = &mut cast_slice_mut(floats)[..rows * width];
        match &reader.operand {
            None => kernels.rms_norm(pool, x, weight, epsilon, RowsMut::dense(floats, width)),
            Some(layout) => {
                let codes = &mut codes[..rows * layout.row_bytes()];
                let floats = self.keeps_floats.then_some(floats);
                kernels.rms_norm_codes(pool, x, weight, epsilon, layout, floats, codes);
            }
        }
        Ok(())
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &CpuOperand,
        weight: &CpuMatrix,
        epilogue: Epilogue<&CpuBuffer>,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let bias = epilogue.bias().map(|bias| &bias.0);
        let regions = [Some(x.read_by(weight)), weight.weights.region(), bias, Some(&out.0)];
        let [x, bytes, bias, out] = lend_some(&mut self.arena, regions);
        let count = rows.len();
        let out = &mut cast_slice_mut(out)[..count * weight.rows];
        let epilogue = epilogue.map(|_| cast_slice(bias));
        let matrices = &weight.matrices(bytes)[..weight.parts.len()];
        self.kernels.matmul(&self.pool, weight.operand_rows(x, rows), count, matrices, epilogue, out);
        Ok(())
    }

    fn add_adapters(
        &mut self,
        step: &StepInputs,
        rows: StepRows,
        x: &CpuOperand,
        weight: &CpuMatrix,
        matrix: u32,
        adapters: &mut CpuAdapters,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [x, hidden, out] = lend(&mut self.arena, [&x.floats, &adapters.hidden, &out.0]);
        let updates = adapters.updates_of(step, rows, matrix, (x, weight.columns), hidden);
        let Some(last) = updates.groups.last() else { return Ok(()) };
        let out = &mut cast_slice_mut(out)[..last.rows.end * weight.rows];
        self.kernels.add_low_rank(&self.pool, updates, weight.rows, out);
        Ok(())
    }

    fn linear_with_adapters(
        &mut self,
        step: &StepInputs,
        rows: StepRows,
        count: usize,
        x: &CpuOperand,
        weight: &CpuMatrix,
        epilogue: Epilogue<&CpuBuffer>,
        matrix: u32,
        adapters: &mut CpuAdapters,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        // Floats are both the operand of the product and that of the updates, and a region is lent once.
        let codes = weight.operand.is_some().then_some(&x.codes);
        let bias = epilogue.bias().map(|bias| &bias.0);
        let regions =
            [codes, weight.weights.region(), bias, Some(&out.0), Some(&x.floats), Some(&adapters.hidden)];
        let [codes, bytes, bias, out, floats, hidden] = lend_some(&mut self.arena, regions);
        let floats: &[u8] = floats;
        let x = if weight.operand.is_some() { codes } else { floats };
        let x = weight.operand_rows(x, 0..count);
        let updates = adapters.updates_of(step, rows, matrix, (floats, weight.columns), hidden);
        let out = &mut cast_slice_mut(out)[..count * weight.rows];
        let epilogue = epilogue.map(|_| cast_slice(bias));
        let matrices = &weight.matrices(bytes)[..weight.parts.len()];
        self.kernels.matmul_low_rank(&self.pool, x, count, matrices, epilogue, updates, out);
        Ok(())
    }

    fn rope_write_kv(
        &mut self,
        step: &StepInputs,
        rope: &CpuRope,
        shape: HeadShape,
        norms: Option<(&CpuBuffer, &CpuBuffer, f32)>,
        qkv: &mut CpuBuffer,
        layer: usize,
        cache: &mut CpuCache,
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena, .. } = self;
        let count = step.tokens.len();
        let (norms, [qkv, blocks, rotations]) = match norms {
            None => (None, lend(arena, [&qkv.0, &cache.blocks, &rope.step])),
            Some((query, key, epsilon)) => {
                let [query, key, qkv, blocks, rotations] =
                    lend(arena, [&query.0, &key.0, &qkv.0, &cache.blocks, &rope.step]);
                (Some((cast_slice(query), cast_slice(key), epsilon)), [qkv, blocks, rotations])
            }
        };
        let [cos, sin] = rope::split(cast_slice(rotations), count, rope.width);
        let call = RopeWriteKv {
            heads: shape,
            norms,
            cos,
            sin,
            query_scales: (!step.query_scales.is_empty()).then_some(&step.query_scales),
            layout: &cache.layout,
            blocks: &step.write_blocks,
            offsets: &step.write_offsets,
        };
        let qkv = &mut cast_slice_mut(qkv)[..count * shape.qkv_width()];
        kernels.rope_write_kv(pool, &call, qkv, cache.shape.layer_mut(blocks, layer));
        Ok(())
    }

    fn attention(
        &mut self,
        reader: &CpuMatrix,
        step: &StepInputs,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &CpuCache,
        qkv: &mut CpuBuffer,
        scratch: &mut CpuScratch,
        out: &mut CpuOperand,
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena, .. } = self;
        let (tokens, stride, width) = (step.tokens.len(), shape.qkv_width(), shape.query_width());
        let CpuScratch { attention, counters, .. } = scratch;
        let [blocks, qkv, partials, counters, floats, codes] =
            lend(arena, [&cache.blocks, &qkv.0, attention, counters, &out.floats, &out.codes]);
        let codes = reader.operand.as_ref().map(|layout| AttentionCodes {
            layout,
            codes: &mut codes[..tokens * layout.row_bytes()],
            counters: cast_slice_mut(counters),
        });
        let floats = &mut cast_slice_mut(floats)[..tokens * width];
        kernels.attention(
            pool,
            &cache.layout,
            cache.shape.layer(blocks, layer),
            &step.sequences,
            &step.blocks,
            Rows::columns(&cast_slice(qkv)[..tokens * stride], stride, 0..width),
            shape.heads,
            params,
            cast_slice_mut(partials),
            RowsMut::dense(floats, width),
            codes,
        );
        Ok(())
    }

    fn silu_mul(
        &mut self,
        reader: &CpuMatrix,
        rows: usize,
        width: usize,
        gate_up: &CpuBuffer,
        out: &mut CpuOperand,
    ) -> Result<(), DeviceError> {
        let [gate_up, floats, codes] = lend(&mut self.arena, [&gate_up.0, &out.floats, &out.codes]);
        let (kernels, pool) = (&self.kernels, &self.pool);
        let gate_up = Rows::dense(&cast_slice(gate_up)[..rows * 2 * width], 2 * width);
        let floats = &mut cast_slice_mut(floats)[..rows * width];
        match &reader.operand {
            None => kernels.silu_mul(pool, gate_up, RowsMut::dense(floats, width)),
            Some(layout) => {
                let codes = &mut codes[..rows * layout.row_bytes()];
                let floats = self.keeps_floats.then_some(floats);
                kernels.silu_mul_codes(pool, gate_up, layout, floats, codes);
            }
        }
        Ok(())
    }

    fn gather(
        &mut self,
        step: &StepInputs,
        width: usize,
        x: &CpuBuffer,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let [x, out] = lend(&mut self.arena, [&x.0, &out.0]);
        let x = Rows::dense(&cast_slice(x)[..step.tokens.len() * width], width);
        let out = RowsMut::dense(&mut cast_slice_mut(out)[..step.output_rows.len() * width], width);
        self.kernels.gather(&self.pool, x, &step.output_rows, out);
        Ok(())
    }

    fn gather_operand(
        &mut self,
        reader: &CpuMatrix,
        step: &StepInputs,
        x: &CpuOperand,
        out: &mut CpuOperand,
    ) -> Result<(), DeviceError> {
        // Rows are only copied, and their length is a multiple of that of a float.
        let mut copy = |x: &Region, out: &Region, width: usize| {
            let [x, out] = lend(&mut self.arena, [x, out]);
            let x = Rows::dense(&cast_slice(x)[..step.tokens.len() * width], width);
            let out = RowsMut::dense(&mut cast_slice_mut(out)[..step.output_rows.len() * width], width);
            self.kernels.gather(&self.pool, x, &step.output_rows, out);
        };
        if let Some(layout) = &reader.operand {
            copy(&x.codes, &out.codes, layout.row_bytes() / size_of::<f32>());
        }
        if reader.operand.is_none() || self.keeps_floats {
            copy(&x.floats, &out.floats, reader.columns);
        }
        Ok(())
    }

    fn sample(
        &mut self,
        logits: &CpuBuffer,
        batch: &SamplingBatch,
        slots: &mut CpuSlots,
        scratch: &mut CpuScratch,
    ) -> Result<CpuTicket, DeviceError> {
        let mut results = self.spare_results.pop().unwrap_or_default();
        results.resize_with(batch.len(), Sampled::default);
        let [logits, floats] = lend(&mut self.arena, [&logits.0, &scratch.sampling]);
        let (logits, floats) = (cast_slice(logits), cast_slice_mut(floats));
        sampling::sample_batch(self.kernels, &self.pool, logits, batch, slots, floats, &mut results);
        Ok(CpuTicket(results))
    }

    fn poll(&mut self, _: &mut CpuTicket, _: &Waker) -> Poll<()> {
        Poll::Ready(())
    }

    fn collect(&mut self, ticket: CpuTicket, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        self.spare_results.push(std::mem::replace(out, ticket.0));
        Ok(())
    }

    fn download(&mut self, x: &CpuBuffer, start: usize, out: &mut [f32]) -> Result<(), DeviceError> {
        let [x] = lend(&mut self.arena, [&x.0]);
        out.copy_from_slice(&cast_slice(x)[start..][..out.len()]);
        Ok(())
    }

    fn synchronize(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
