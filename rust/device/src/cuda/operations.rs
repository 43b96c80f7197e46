//! Launches of a step: rotations with the write of keys and values, attention, and the operations of a row.

use std::mem::size_of;

use bytemuck::NoUninit;
use penstock_cuda::{Argument, DevicePointer, Parameter};
use penstock_types::{AttentionParams, Dtype, HeadShape};

use super::queue::Shape;
use super::step::WorkList;
use super::{Cuda, CudaBuffer, CudaCache, CudaMatrix, CudaOperand, CudaRope, CudaStep, attention};
use crate::arena::Region;
use crate::backend::DeviceError;

/// Floats that [`Cuda::read_floats`] copies at once.
const DOWNLOADED_AT_ONCE: usize = 1 << 18;
pub(super) const DOWNLOAD_BYTES: usize = DOWNLOADED_AT_ONCE * size_of::<f32>();

/// The pages of a layer, as kernels read them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct KvCache {
    pages: DevicePointer,
    kv_heads: i32,
    block_size: i32,
    head_dim: i32,
    padding: u32,
}

/// The arguments of `rope_kv.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct RopeWriteKv {
    qkv: DevicePointer,
    query_norm: DevicePointer,
    key_norm: DevicePointer,
    rotations: DevicePointer,
    extra_rotations: DevicePointer,
    positions: DevicePointer,
    query_scales: DevicePointer,
    blocks: DevicePointer,
    offsets: DevicePointer,
    cache: KvCache,
    heads: i32,
    angles: i32,
    epsilon: f32,
    padding: u32,
}

/// The arguments of `attention_call.cuh`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Attention {
    qkv: DevicePointer,
    blocks: DevicePointer,
    works: DevicePointer,
    partials: DevicePointer,
    out: DevicePointer,
    cache: KvCache,
    heads: i32,
    /// 0 without a window.
    window: i32,
    scale: f32,
    /// 0 without a cap.
    softcap: f32,
    out_type: i32,
    padding: u32,
}

// SAFETY: the type is that of `rope_kv.cu`.
unsafe impl Parameter for RopeWriteKv {}
// SAFETY: the type is that of `attention_call.cuh`.
unsafe impl Parameter for Attention {}

impl Cuda {
    #[allow(clippy::too_many_arguments, reason = "those of the operation of a backend")]
    pub(super) fn launch_rope_write_kv(
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

    #[allow(clippy::too_many_arguments, reason = "those of the operation of a backend")]
    pub(super) fn launch_attention(
        &mut self,
        reader: &CudaMatrix,
        step: CudaStep<'_>,
        shape: HeadShape,
        params: AttentionParams,
        layer: usize,
        cache: &CudaCache,
        qkv: &CudaBuffer,
        scratch: &mut Region,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let call = Attention {
            qkv: self.memory.pointer(&qkv.0),
            blocks: step.blocks,
            works: step.decode.works,
            partials: self.memory.pointer(scratch),
            out: self.memory.pointer(&out.0),
            cache: self.layer(cache, layer),
            heads: shape.heads as i32,
            window: params.window.map_or(0, |window| window.min(i32::MAX as usize) as i32),
            scale: params.scale,
            softcap: params.softcap.unwrap_or(0.0),
            out_type: match reader.operand {
                Dtype::F32 => 0,
                Dtype::Bf16 => 1,
                Dtype::F16 => 2,
            },
            padding: 0,
        };
        let kernels = self.attention.get(&mut self.loader, &cache.shape, reader.operand)?;
        let grid = |list: WorkList, depth| [list.count, shape.kv_heads, depth];
        self.queue.launch(&kernels.decode, Shape::of(grid(step.decode, 1), 32), &[(&call).into()])?;
        let call = Attention { works: step.combine.works, ..call };
        let combine = grid(step.combine, attention::combine_blocks(step.combine.count, shape.kv_heads));
        self.queue.launch(&kernels.combine, Shape::of(combine, 128), &[(&call).into()])?;
        let call = Attention { works: step.prefill.works, ..call };
        self.queue.launch(&kernels.prefill, Shape::of(grid(step.prefill, 1), 128), &[(&call).into()])
    }

    pub(super) fn launch_silu_mul(
        &mut self,
        reader: &CudaMatrix,
        rows: usize,
        width: usize,
        gate_up: &CudaBuffer,
        out: &mut CudaOperand,
    ) -> Result<(), DeviceError> {
        let (from, to) = (self.memory.pointer(&gate_up.0), self.memory.pointer(&out.0));
        let shape = Shape::of([rows, width.div_ceil(1024), 1], 256);
        let width = width as i32;
        let kernel = self.kernels.silu_mul.get(reader.operand);
        self.queue.launch(kernel, shape, &[(&from).into(), (&to).into(), (&width).into()])
    }

    /// Copies floats from `start` to the host, and waits for them.
    pub(super) fn read_floats(
        &mut self,
        x: &CudaBuffer,
        start: usize,
        out: &mut [f32],
    ) -> Result<(), DeviceError> {
        let mut rest = out;
        let mut index = start;
        while !rest.is_empty() {
            let (part, others) = rest.split_at_mut(rest.len().min(DOWNLOADED_AT_ONCE));
            rest = others;
            let bytes = size_of_val(part);
            let source = self.memory.float(x, index);
            self.queue.download(source, &mut self.downloads, bytes)?;
            self.queue.synchronize()?;
            part.copy_from_slice(bytemuck::cast_slice(&self.downloads.bytes()[..bytes]));
            index += part.len();
        }
        Ok(())
    }

    /// Zeroed memory of the workspace.
    pub(super) fn zeroed(&mut self, bytes: usize, name: &'static str) -> Result<Region, DeviceError> {
        let region = self.memory.allocate_workspace(bytes, name)?;
        self.queue.clear(self.memory.pointer(&region), bytes)?;
        Ok(region)
    }

    fn layer(&self, cache: &CudaCache, layer: usize) -> KvCache {
        let HeadShape { kv_heads, head_dim, .. } = cache.shape.heads;
        KvCache {
            pages: self.memory.pointer(&cache.blocks).offset(cache.shape.layer_offset(layer)),
            kv_heads: kv_heads as i32,
            block_size: cache.shape.block_size as i32,
            head_dim: head_dim as i32,
            padding: 0,
        }
    }

    pub(super) fn launch_rms_norm(
        &self,
        dtype: Dtype,
        rows: usize,
        x: &CudaBuffer,
        weight: &CudaBuffer,
        epsilon: f32,
        out: &Region,
    ) -> Result<(), DeviceError> {
        let pointers = [&x.0, &weight.0, out].map(|region| self.memory.pointer(region));
        let [x, factors, out] = pointers.each_ref().map(Argument::from);
        let width = (weight.0.len() / size_of::<f32>()) as i32;
        let arguments = [x, factors, out, (&width).into(), (&epsilon).into()];
        self.queue.launch(self.kernels.rms_norm.get(dtype), Shape::new(rows, 256), &arguments)
    }

    /// Gathers the output rows, of `bytes` bytes.
    pub(super) fn launch_gather(
        &self,
        step: CudaStep<'_>,
        bytes: usize,
        x: &Region,
        out: &Region,
    ) -> Result<(), DeviceError> {
        let pointers = [self.memory.pointer(x), step.output_rows, self.memory.pointer(out)];
        let [x, rows, out] = pointers.each_ref().map(Argument::from);
        let shape = Shape::new(step.inputs.output_rows.len(), 256);
        let (kernel, unit) = match bytes.is_multiple_of(size_of::<u32>()) {
            true => (&self.kernels.gather, size_of::<u32>()),
            false => (&self.kernels.gather_halves, size_of::<u16>()),
        };
        let count = (bytes / unit) as i32;
        self.queue.launch(kernel, shape, &[x, rows, out, (&count).into()])
    }
}
