//! The arguments of kernels of a step, and launches that several operations share.

use std::mem::size_of;

use bytemuck::NoUninit;
use penstock_cuda::{Argument, DevicePointer, Parameter};
use penstock_types::HeadShape;

use super::cache::CacheShape;
use super::operand::{OperandForm, Rows};
use super::queue::Shape;
use super::step::WorkItemList;
use super::{Cuda, CudaBuffer, CudaCache, CudaStep, attention};
use crate::error::DeviceError;

/// The pages of a layer, as kernels read them.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(super) struct KvCache {
    pub pages: DevicePointer,
    pub kv_heads: i32,
    pub block_size: i32,
    pub head_dim: i32,
    pub padding: u32,
}

/// The arguments of `rope_kv.cu`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(super) struct RopeWriteKv {
    pub qkv: DevicePointer,
    pub query_norm: DevicePointer,
    pub key_norm: DevicePointer,
    pub rotations: DevicePointer,
    pub extra_rotations: DevicePointer,
    pub positions: DevicePointer,
    pub query_scales: DevicePointer,
    pub blocks: DevicePointer,
    pub offsets: DevicePointer,
    pub cache: KvCache,
    pub heads: i32,
    pub angles: i32,
    pub epsilon: f32,
    pub padding: u32,
}

/// The arguments of `attention_call.cuh`.
#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
pub(super) struct Attention {
    pub qkv: DevicePointer,
    pub blocks: DevicePointer,
    pub work_items: DevicePointer,
    pub partials: DevicePointer,
    pub out: DevicePointer,
    pub cache: KvCache,
    pub heads: i32,
    /// 0 without a window.
    pub window: i32,
    pub scale: f32,
    /// 0 without a cap.
    pub softcap: f32,
    pub out_type: i32,
    pub padding: u32,
}

// SAFETY: the type is that of `rope_kv.cu`.
unsafe impl Parameter for RopeWriteKv {}
// SAFETY: the type is that of `attention_call.cuh`.
unsafe impl Parameter for Attention {}

impl Cuda {
    /// Launches the work items of decode, their merge, and the work items of prefill. `call` has those of decode.
    pub(super) fn launch_attention(
        &mut self,
        step: CudaStep<'_>,
        cache: &CacheShape,
        operand: OperandForm,
        layer: usize,
        call: &Attention,
    ) -> Result<(), DeviceError> {
        let kernels = self.attention.used(&mut self.loader, cache, operand, layer)?;
        let kv_heads = cache.heads.kv_heads;
        let grid = |list: WorkItemList, depth| [list.count, kv_heads, depth];
        let multiprocessors = self.tile_selector.multiprocessors;
        let is_wide = attention::is_wide_faster(step.decode.count, kv_heads, multiprocessors, cache.dtype);
        let decode = grid(step.decode, 1);
        let (kernel, shape) = match &kernels.decode_wide {
            Some(wide) if is_wide => (wide, Shape::of(decode, 128).with_shared(attention::WIDE_SHARED_BYTES)),
            _ => {
                let shared_bytes = attention::DECODE_ROWS * kernels.row_bytes;
                (&kernels.decode, Shape::of(decode, 32).with_shared(shared_bytes))
            }
        };
        self.queue.launch(kernel, shape, &[call.into()])?;
        let call = Attention { work_items: step.combine.work_items, ..*call };
        let combine = grid(step.combine, attention::combine_blocks(step.combine.count, kv_heads));
        self.queue.launch(&kernels.combine, Shape::of(combine, 128), &[(&call).into()])?;
        let call = Attention { work_items: step.prefill.work_items, ..call };
        let prefill = &kernels.prefill;
        assert!(
            step.prefill.count == 0 || step.prefill_rows <= prefill.rows,
            "work items of other kernels; this is a bug"
        );
        let shape = Shape::of(grid(step.prefill, 1), prefill.threads()).with_shared(prefill.shared_bytes);
        self.queue.launch(&prefill.kernel, shape, &[(&call).into()])
    }

    pub(super) fn layer(&self, cache: &CudaCache, layer: usize) -> KvCache {
        let HeadShape { kv_heads, head_dim, .. } = cache.shape.heads;
        KvCache {
            pages: self.memory.pointer(&cache.blocks).offset(cache.shape.layer_offset(layer)),
            kv_heads: kv_heads as i32,
            block_size: cache.shape.block_size as i32,
            head_dim: head_dim as i32,
            padding: 0,
        }
    }

    /// The norm of `rows` rows, as floats, or quantised.
    pub(super) fn launch_rms_norm(
        &self,
        rows: usize,
        [x, weight]: [&CudaBuffer; 2],
        epsilon: f32,
        out: Rows,
    ) -> Result<(), DeviceError> {
        let width = (weight.0.len() / size_of::<f32>()) as i32;
        let pointers = [x, weight].map(|buffer| self.memory.pointer(&buffer.0));
        let [x, factors] = pointers.each_ref().map(Argument::from);
        let (shape, epsilon) = (Shape::new(rows, 256), (&epsilon).into());
        match &out {
            Rows::Floats(out, dtype) => {
                let arguments = [x, factors, out.into(), (&width).into(), epsilon];
                self.queue.launch(self.kernels.rms_norm.get(*dtype), shape, &arguments)
            }
            Rows::Quantised(out, numbers) => {
                let kernel = self.kernels.quantised_norm.get(*numbers);
                self.queue.launch(kernel, shape, &[x, factors, out.into(), epsilon])
            }
        }
    }

    /// Gathers the output rows, of `bytes` bytes.
    pub(super) fn launch_gather(
        &self,
        step: CudaStep<'_>,
        bytes: usize,
        [x, out]: [DevicePointer; 2],
    ) -> Result<(), DeviceError> {
        let pointers = [x, step.output_rows, out];
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
