//! The operations of a CUDA device: each launches one kernel or a few.

use std::mem::size_of;
use std::ops::Range;

use penstock_cuda::{Argument, DevicePointer};
use penstock_types::{Dtype, Epilogue};

use crate::arena::Region;
use crate::cuda::gemm_quantised::PartProduct;
use crate::cuda::kernels::float_type;
use crate::cuda::operand::{OperandForm, QuantisedRows, Rows};
use crate::cuda::operations::{Attention, RopeWriteKv};
use crate::cuda::queue::Shape;
use crate::cuda::{
    Cuda, CudaAdapters, CudaBuffer, CudaCache, CudaMatrix, CudaOperand, CudaRope, CudaSlots, CudaStep,
};
use crate::error::DeviceError;
use crate::seam::{AdapterUpdates, Compute, HeadNorms, LayerAttention, LayerHeads, StepInputs, StepLimits};

impl Compute for Cuda {
    type Step<'a> = CudaStep<'a>;

    fn is_deterministic(&self) -> bool {
        self.cublas.is_none()
    }

    fn bind_thread(&mut self) {
        // A failure is that of the first operation, too.
        let _ = self.context.bind_thread();
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
        let [part] = &table.parts[..] else { panic!("a table of several parts; this is a bug") };
        let (count, width) = (step.inputs.tokens.len(), table.columns as i32);
        let data = self.memory.pointer(&table.region);
        let rows = [step.tokens, slots.last_tokens(), self.memory.pointer(&out.0)];
        if let Some(kernels) = &part.quantised {
            return kernels.read_rows(&self.queue, (data, table.rows, table.columns), rows, count);
        }
        let [tokens, last_tokens, out] = rows.each_ref().map(Argument::from);
        let arguments = [(&data).into(), tokens, last_tokens, out, (&width).into()];
        let kernel = self.kernels.embed.get(table.operand.floats());
        self.queue.launch(kernel, Shape::new(count, 256), &arguments)
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
        self.launch_rms_norm(rows, [x, weight], epsilon, self.rows_for(reader.operand, reader.columns, out))
    }

    fn linear(
        &mut self,
        rows: Range<usize>,
        x: &CudaOperand,
        weight: &CudaMatrix,
        epilogue: Epilogue<&CudaBuffer>,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let form = weight.operand;
        let x = x.pointer(&self.memory, form).offset(rows.start * form.row_bytes(weight.columns));
        let mut output = 0;
        for part in &weight.parts {
            let product = PartProduct {
                x,
                w: self.memory.pointer(&weight.region).offset(part.offset),
                bias: epilogue.bias().map_or(DevicePointer::NULL, |bias| self.memory.float(bias, output)),
                out: self.memory.float(out, output),
                rows: rows.len(),
                outputs: part.rows,
                inner: weight.columns,
                pitch: weight.rows,
                accumulates: matches!(epilogue, Epilogue::Add | Epilogue::AddBias(_)),
                x_group_shift: form.group_shift(),
            };
            match &part.quantised {
                None => self.multiply_floats(&product, form.floats())?,
                Some(kernels) => kernels.multiply(&self.queue, &self.tile_selector, &product)?,
            }
            output += part.rows;
        }
        Ok(())
    }

    fn add_adapters(
        &mut self,
        updates: AdapterUpdates<'_, CudaStep<'_>, CudaAdapters>,
        x: &CudaOperand,
        weight: &CudaMatrix,
        out: &mut CudaBuffer,
    ) -> Result<(), DeviceError> {
        let AdapterUpdates { step, rows, matrix, adapters } = updates;
        let x = (x.floats(&self.memory), weight.operand.floats(), weight.columns);
        let out = self.memory.pointer(&out.0);
        self.launch_adapters(adapters, matrix, step.adapters[rows as usize], x, (out, weight.rows))
    }

    fn rope_write_kv(
        &mut self,
        step: CudaStep<'_>,
        rope: &CudaRope,
        LayerHeads { shape, norms, layer }: LayerHeads<'_, CudaBuffer>,
        qkv: &mut CudaBuffer,
        cache: &mut CudaCache,
    ) -> Result<(), DeviceError> {
        let norm = |buffer: &CudaBuffer| self.memory.pointer(&buffer.0);
        let (query_norm, key_norm, epsilon) = match norms {
            Some(HeadNorms { query, key, epsilon }) => (norm(query), norm(key), epsilon),
            None => (DevicePointer::NULL, DevicePointer::NULL, 0.0),
        };
        let call = RopeWriteKv {
            qkv: self.memory.pointer(&qkv.0),
            query_norm,
            key_norm,
            rotations: self.memory.pointer(&rope.table),
            extra_rotations: step.extra_rotations,
            positions: step.positions,
            query_scales: step.query_scales,
            blocks: step.write_blocks,
            offsets: step.write_offsets,
            cache: self.layer(cache, layer),
            heads: shape.heads as i32,
            angles: (rope.width / 2) as i32,
            epsilon,
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
        LayerAttention { shape, params, cache, layer }: LayerAttention<'_, CudaCache>,
        qkv: &mut CudaBuffer,
        scratch: &mut Region,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let call = Attention {
            qkv: self.memory.pointer(&qkv.0),
            blocks: step.blocks,
            work_items: step.decode.work_items,
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
        match self.rows_for(reader.operand, reader.columns, out) {
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
        match self.rows_for(reader.operand, reader.columns, out) {
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

    fn flush(&mut self) -> Result<(), DeviceError> {
        self.queue.end_step()
    }
}
