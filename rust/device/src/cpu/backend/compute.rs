//! The operations of the CPU: each lends the bytes of its buffers from the arena and calls a kernel.

use std::mem::size_of;
use std::ops::Range;

use bytemuck::{cast_slice, cast_slice_mut};
use penstock_kernels::{AttentionCodes, RopeWriteKv, Rows, RowsMut};
use penstock_types::Epilogue;

use crate::arena::Region;
use crate::cpu::buffers::{lend, lend_some};
use crate::cpu::{
    Cpu, CpuAdapters, CpuBuffer, CpuCache, CpuMatrix, CpuOperand, CpuRope, CpuScratch, CpuSlots, rope,
};
use crate::error::DeviceError;
use crate::seam::{
    AdapterUpdates, Compute, FOLLOWS, HeadNorms, LayerAttention, LayerHeads, StepInputs, StepLimits,
};

impl Compute for Cpu {
    type Step<'a> = &'a StepInputs;

    fn is_deterministic(&self) -> bool {
        true
    }

    fn bind_thread(&mut self) {
        self.pool.pin_caller();
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
        updates: AdapterUpdates<'_, &StepInputs, CpuAdapters>,
        x: &CpuOperand,
        weight: &CpuMatrix,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let AdapterUpdates { step, rows, matrix, adapters } = updates;
        let [x, hidden, out] = lend(&mut self.arena, [&x.floats, &adapters.hidden, &out.0]);
        let updates = adapters.updates_of(step, rows, matrix, (x, weight.columns), hidden);
        let Some(last) = updates.groups.last() else { return Ok(()) };
        let out = &mut cast_slice_mut(out)[..last.rows.end * weight.rows];
        self.kernels.add_low_rank(&self.pool, updates, weight.rows, out);
        Ok(())
    }

    fn linear_with_adapters(
        &mut self,
        count: usize,
        x: &CpuOperand,
        weight: &CpuMatrix,
        epilogue: Epilogue<&CpuBuffer>,
        updates: AdapterUpdates<'_, &StepInputs, CpuAdapters>,
        out: &mut CpuBuffer,
    ) -> Result<(), DeviceError> {
        let AdapterUpdates { step, rows, matrix, adapters } = updates;
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
        LayerHeads { shape, norms, layer }: LayerHeads<'_, CpuBuffer>,
        qkv: &mut CpuBuffer,
        cache: &mut CpuCache,
    ) -> Result<(), DeviceError> {
        let Self { kernels, pool, arena, .. } = self;
        let count = step.tokens.len();
        let (norms, [qkv, blocks, rotations]) = match norms {
            None => (None, lend(arena, [&qkv.0, &cache.blocks, &rope.step])),
            Some(HeadNorms { query, key, epsilon }) => {
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
        LayerAttention { shape, params, cache, layer }: LayerAttention<'_, CpuCache>,
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

    /// Every operation is complete when its call returns.
    fn flush(&mut self) -> Result<(), DeviceError> {
        Ok(())
    }
}
