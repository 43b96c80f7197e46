//! The KV cache on the device, and its host tier in page-locked memory, which kernels read and write.
//!
//! ```text
//! cache       [layer][block][kv head] page        attention walks through one layer
//! host tier   [block][layer]                      all layers of a block are adjacent
//! ```

use std::ops::RangeInclusive;

use bytemuck::{NoUninit, Pod, Zeroable};
use penstock_cuda::{DevicePointer, Kernel, PinnedBlock};
use penstock_types::{BlockCopy, Dtype, HeadShape, KvDtype};

use super::attention::{
    DECODE_ROWS, MOST_STATIC_HEAD_DIM, PREFILL_ROWS, WARPGROUP_ROWS, WIDE_SHARED_BYTES, has_warpgroups,
    has_wide_decode, warpgroup_shared_bytes,
};
use super::kernels::{Loader, Source, short_kv_name, short_name};
use super::operand::OperandForm;
use super::pinned::Counted;
use super::queue::Shape;
use super::upload::Staging;
use super::{Cuda, start};
use crate::arena::Region;
use crate::error::DeviceError;
use crate::seam::CacheSpec;

/// The head sizes that `attention.cu` has: multiples of 16 in this range.
const TENSOR_CORE_HEADS: RangeInclusive<usize> = 32..=256;
/// Copies of one launch.
const MOST_COPIES: usize = 1024;
/// Lists of copies: more than launches that are not complete in common steps.
const COPY_LISTS: usize = 4;

const LIST_BYTES: usize = MOST_COPIES * size_of::<Copy>();
/// Bytes of all lists.
pub(super) const LISTS_BYTES: usize = COPY_LISTS * LIST_BYTES;

/// The KV cache.
pub struct CudaCache {
    pub(super) blocks: Region,
    pub(super) num_blocks: usize,
    pub(super) shape: CacheShape,
    pub(super) rope_write_kv: Kernel,
    host: Option<HostTier>,
}

/// The host tier, and what its copies need.
struct HostTier {
    /// With any contents: a block is saved before it is loaded.
    blocks: Counted<PinnedBlock>,
    /// The lists of copies, which the kernel reads where they are.
    lists: Vec<Staging>,
    next: usize,
}

/// The kernels of attention for each type of arithmetic, as far as they were used.
#[derive(Default)]
pub(super) struct LoadedAttention {
    kernels: [Option<AttentionKernels>; 3],
    /// Those that steps have used.
    are_used: [bool; 3],
    /// Whether a step has gone through all layers: the warm-up does not.
    is_complete: bool,
}

/// The kernels of attention.
pub(super) struct AttentionKernels {
    pub decode: Kernel,
    /// Decode by several warps for each split, if heads have it.
    pub decode_wide: Option<Kernel>,
    pub combine: Kernel,
    pub prefill: Prefill,
    /// Bytes of dynamic shared memory that decode needs for each of its rows.
    pub row_bytes: usize,
}

/// A kernel of prefill: the most packed rows of a work item, and the dynamic shared memory of a block.
pub(super) struct Prefill {
    pub kernel: Kernel,
    pub rows: usize,
    pub shared_bytes: usize,
}

impl Prefill {
    /// Threads of a block: a warp for the rows of a work item of decode.
    pub fn threads(&self) -> usize {
        self.rows / DECODE_ROWS * 32
    }
}

/// The type of the factors in attention. Tensor cores have no float32, and kernels for them not every head size.
fn arithmetic(shape: &CacheShape, operand: OperandForm) -> Dtype {
    let (out, dim) = (operand.arithmetic(), shape.heads.head_dim);
    let is_half = out != Dtype::F32 && dim.is_multiple_of(16) && TENSOR_CORE_HEADS.contains(&dim);
    match shape.dtype {
        KvDtype::F32 => Dtype::F32,
        _ if !is_half => Dtype::F32,
        KvDtype::F16 => Dtype::F16,
        KvDtype::Bf16 => Dtype::Bf16,
        KvDtype::Int8 | KvDtype::Uint4 => out,
    }
}

/// Bytes of dynamic shared memory for each row of decode and prefill: its query, if heads are large.
fn row_bytes(arithmetic: Dtype, head_dim: usize) -> usize {
    if arithmetic != Dtype::F32 && head_dim > MOST_STATIC_HEAD_DIM { 2 * head_dim } else { 0 }
}

impl LoadedAttention {
    /// The files and the variants of the kernels for these operands.
    pub fn sources(
        loader: &Loader,
        shape: &CacheShape,
        operand: OperandForm,
    ) -> impl Iterator<Item = Source> {
        let arithmetic = arithmetic(shape, operand);
        let warpgroups = AttentionKernels::warpgroup_source(loader, shape, arithmetic);
        std::iter::once(AttentionKernels::source(shape, arithmetic)).chain(warpgroups)
    }

    /// The most packed rows of a work item that every kernel of prefill takes: of those that steps use, and until a
    /// step has used all, of those that are loaded.
    pub fn prefill_rows(&self) -> usize {
        let most = |is_counted: &dyn Fn(usize) -> bool| {
            let loaded = self.kernels.iter().enumerate().filter(|(index, _)| is_counted(*index));
            loaded.filter_map(|(_, kernels)| kernels.as_ref()).map(|kernels| kernels.prefill.rows).min()
        };
        most(&|index| self.are_used[index] || !self.is_complete).unwrap_or(PREFILL_ROWS)
    }

    /// The kernels for these operands, in a layer of a step.
    pub fn used(
        &mut self,
        loader: &mut Loader,
        shape: &CacheShape,
        operand: OperandForm,
        layer: usize,
    ) -> Result<&AttentionKernels, DeviceError> {
        self.are_used[arithmetic(shape, operand) as usize] = true;
        self.is_complete |= layer + 1 == shape.layers;
        self.get(loader, shape, operand)
    }

    /// The kernels for these operands, which are loaded with the cache.
    pub fn get(
        &mut self,
        loader: &mut Loader,
        shape: &CacheShape,
        operand: OperandForm,
    ) -> Result<&AttentionKernels, DeviceError> {
        let arithmetic = arithmetic(shape, operand);
        let slot = &mut self.kernels[arithmetic as usize];
        if slot.is_none() {
            *slot = Some(AttentionKernels::load(loader, shape, arithmetic)?);
        }
        Ok(slot.as_ref().expect("the kernels were loaded"))
    }
}

impl AttentionKernels {
    /// The file and the variant of the kernels.
    fn source(shape: &CacheShape, arithmetic: Dtype) -> Source {
        let (kv, dim, short) = (short_kv_name(shape.dtype), shape.heads.head_dim, short_name(arithmetic));
        match arithmetic {
            Dtype::F32 => ("attention_f32.cu", String::new()),
            Dtype::F16 | Dtype::Bf16 => {
                let encoding = if shape.dtype == KvDtype::Uint4 { "u4" } else { kv };
                ("attention.cu", format!("{short},{encoding},{kv},{dim}"))
            }
        }
    }

    /// Those of the prefill by warpgroups, if the device and the heads have it.
    fn warpgroup_source(loader: &Loader, shape: &CacheShape, arithmetic: Dtype) -> Option<Source> {
        let dim = shape.heads.head_dim;
        let exists = loader.has_warpgroups() && arithmetic != Dtype::F32 && has_warpgroups(dim, shape.dtype);
        let (short, kv) = (short_name(arithmetic), short_kv_name(shape.dtype));
        exists.then(|| ("attention_warpgroup.cu", format!("{short},{kv},{dim}")))
    }

    fn load(loader: &mut Loader, shape: &CacheShape, arithmetic: Dtype) -> Result<Self, DeviceError> {
        let (kv, dim, short) = (short_kv_name(shape.dtype), shape.heads.head_dim, short_name(arithmetic));
        let (file, variant) = Self::source(shape, arithmetic);
        let end = match arithmetic {
            Dtype::F32 => format!("f32_{kv}"),
            Dtype::F16 | Dtype::Bf16 => format!("{short}_{kv}_{dim}"),
        };
        let row_bytes = row_bytes(arithmetic, dim);
        let prefill = match Self::warpgroup_source(loader, shape, arithmetic) {
            Some((file, variant)) => Prefill {
                kernel: loader.kernel(file, &variant, &format!("attention_prefill_warpgroup_{end}"))?,
                rows: WARPGROUP_ROWS,
                shared_bytes: warpgroup_shared_bytes(dim, shape.dtype),
            },
            None => Prefill {
                kernel: loader.kernel(file, &variant, &format!("attention_prefill_{end}"))?,
                rows: PREFILL_ROWS,
                shared_bytes: PREFILL_ROWS * row_bytes,
            },
        };
        let mut load = |operation| loader.kernel(file, &variant, &format!("attention_{operation}_{end}"));
        let has_wide = arithmetic != Dtype::F32 && has_wide_decode(dim, shape.dtype);
        let kernels = Self {
            decode: load("decode")?,
            decode_wide: has_wide.then(|| load("decode_wide")).transpose()?,
            combine: load("combine")?,
            prefill,
            row_bytes,
        };
        if let Some(kernel) = &kernels.decode_wide {
            kernel.set_shared_limit(WIDE_SHARED_BYTES as u32).map_err(start)?;
        }
        let Prefill { kernel, shared_bytes, .. } = &kernels.prefill;
        if *shared_bytes > 0 {
            kernel.set_shared_limit(*shared_bytes as u32).map_err(start)?;
        }
        Ok(kernels)
    }
}

/// The layout of blocks.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub heads: HeadShape,
    pub block_size: usize,
    pub dtype: KvDtype,
    layers: usize,
    /// Bytes of a block in one layer.
    block: usize,
    /// Bytes of all blocks in one layer.
    layer: usize,
}

impl CacheShape {
    pub fn new(spec: &CacheSpec) -> Self {
        let &CacheSpec { layers, blocks, block_size, heads, dtype, .. } = spec;
        let block = heads.kv_heads * page_bytes(dtype, block_size, heads.head_dim);
        Self { heads, block_size, dtype, layers, block, layer: block.saturating_mul(blocks) }
    }

    /// Bytes of a block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.block.saturating_mul(self.layers)
    }

    /// The first byte of a layer.
    pub fn layer_offset(&self, layer: usize) -> usize {
        self.layer * layer
    }

    /// The strides of the cache, and of the host tier.
    fn strides(&self) -> [BlockStrides; 2] {
        let words = |bytes: usize| (bytes / 16) as u64;
        [
            BlockStrides { block: words(self.block), layer: words(self.layer) },
            BlockStrides { block: words(self.block_bytes()), layer: words(self.block) },
        ]
    }
}

/// Bytes of a page, as in `kv_page.cuh`.
fn page_bytes(dtype: KvDtype, block_size: usize, head_dim: usize) -> usize {
    let row = match dtype {
        KvDtype::F32 => 8 * head_dim,
        KvDtype::F16 | KvDtype::Bf16 => 4 * head_dim,
        KvDtype::Int8 => 2 * head_dim + 12,
        KvDtype::Uint4 => {
            let slow = if head_dim < 64 { head_dim } else { head_dim / 64 * 32 };
            head_dim + slow / 8 + 6
        }
    };
    block_size * row
}

/// Words of 16 bytes from one block, and from one layer, to the next.
#[repr(C)]
#[derive(Clone, Copy, Debug, NoUninit)]
struct BlockStrides {
    block: u64,
    layer: u64,
}

// SAFETY: the type is that of `copy.cu`.
unsafe impl penstock_cuda::Parameter for BlockStrides {}

/// A copy, as the kernel reads it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
struct Copy {
    from: u32,
    to: u32,
}

impl CudaCache {
    /// A zeroed cache, and its host tier.
    pub(super) fn new(cuda: &mut Cuda, spec: &CacheSpec) -> Result<Self, DeviceError> {
        let shape = CacheShape::new(spec);
        for operand in &cuda.operands.forms {
            cuda.attention.get(&mut cuda.loader, &shape, *operand)?;
        }
        let bytes = shape.block_bytes().saturating_mul(spec.blocks);
        let blocks = cuda.memory.allocate(bytes, "KV cache")?;
        cuda.queue.clear(cuda.memory.pointer(&blocks), bytes)?;
        let name = format!("rope_write_kv_{}", short_kv_name(spec.dtype));
        let rope_write_kv = cuda.loader.kernel("rope_kv.cu", "", &name)?;
        let host = if spec.host_blocks > 0 { Some(cuda.new_host_tier(spec, &shape)?) } else { None };
        Ok(Self { blocks, num_blocks: spec.blocks, shape, rope_write_kv, host })
    }
}

impl Cuda {
    fn new_host_tier(&mut self, spec: &CacheSpec, shape: &CacheShape) -> Result<HostTier, DeviceError> {
        let bytes = shape.block_bytes().saturating_mul(spec.host_blocks);
        let blocks = self.pinned.block("the host tier of the KV cache", bytes)?;
        let lists = (0..COPY_LISTS).map(|_| Staging::new(&self.pinned, "a list of block copies", LIST_BYTES));
        Ok(HostTier { blocks, lists: lists.collect::<Result<_, _>>()?, next: 0 })
    }

    /// Makes the copies in order.
    pub(super) fn run_copies(
        &mut self,
        cache: &mut CudaCache,
        copies: &mut dyn Iterator<Item = BlockCopy>,
    ) -> Result<(), DeviceError> {
        each_launch(copies, |is_saving, batch| self.launch_copies(cache, is_saving, batch))
    }

    fn launch_copies(
        &mut self,
        cache: &mut CudaCache,
        is_saving: bool,
        batch: &[Copy],
    ) -> Result<(), DeviceError> {
        let host = cache.host.as_mut().expect("copies without a host tier; this is a bug");
        let list = &mut host.lists[host.next];
        host.next = (host.next + 1) % COPY_LISTS;
        list.wait()?;
        let bytes: &[u8] = bytemuck::cast_slice(batch);
        list.memory.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
        let copies = list.memory.device_pointer();
        let device: DevicePointer = self.memory.pointer(&cache.blocks);
        let tier = host.blocks.device_pointer();
        let [own, other] = cache.shape.strides();
        let (from, from_strides, to, to_strides) =
            if is_saving { (device, own, tier, other) } else { (tier, other, device, own) };
        let words = (cache.shape.block / 16) as i32;
        self.queue.launch(
            &self.kernels.copy_blocks,
            Shape::of([batch.len(), cache.shape.layers, 1], 256),
            &[
                (&from).into(),
                (&from_strides).into(),
                (&to).into(),
                (&to_strides).into(),
                (&copies).into(),
                (&words).into(),
            ],
        )?;
        list.keep(&self.queue)
    }
}

/// Calls `launch` with the copies in order, in parts. The copies of a part are independent of one another. The first
/// argument is whether they save blocks.
fn each_launch(
    copies: &mut dyn Iterator<Item = BlockCopy>,
    mut launch: impl FnMut(bool, &[Copy]) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let mut batch: Vec<Copy> = Vec::new();
    let mut is_saving = true;
    for copy in copies {
        let (saves, from, to) = match copy {
            BlockCopy::Save { from, to } => (true, from.0, to.0),
            BlockCopy::Load { from, to } => (false, from.0, to.0),
        };
        let is_dependent =
            saves != is_saving || batch.len() == MOST_COPIES || batch.iter().any(|other| other.to == to);
        if is_dependent && !batch.is_empty() {
            launch(is_saving, &batch)?;
            batch.clear();
        }
        is_saving = saves;
        batch.push(Copy { from, to });
    }
    if batch.is_empty() { Ok(()) } else { launch(is_saving, &batch) }
}

#[cfg(test)]
mod tests {
    use penstock_types::{BlockId, HostBlockId};

    use super::*;

    #[test]
    fn copies_of_a_launch_may_be_made_in_any_order() {
        let mut random = 1_u32;
        let mut below = |limit: u32| {
            random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (random >> 16) % limit
        };
        for blocks in [1, 2, 3, 5, 50] {
            let copies: Vec<_> = (0..3_000)
                .map(|_| match (below(2), below(blocks), below(blocks)) {
                    (0, from, to) => BlockCopy::Save { from: BlockId(from), to: HostBlockId(to) },
                    (_, from, to) => BlockCopy::Load { from: HostBlockId(from), to: BlockId(to) },
                })
                .collect();
            let contents = || (Vec::from_iter(0..blocks), Vec::from_iter(blocks..2 * blocks));
            let (mut device, mut host) = contents();
            for copy in &copies {
                match *copy {
                    BlockCopy::Save { from, to } => host[to.0 as usize] = device[from.0 as usize],
                    BlockCopy::Load { from, to } => device[to.0 as usize] = host[from.0 as usize],
                }
            }
            let (mut launched_device, mut launched_host) = contents();
            let launch = |is_saving: bool, batch: &[Copy]| {
                assert!((1..=MOST_COPIES).contains(&batch.len()));
                let (from, to) = if is_saving {
                    (&launched_device, &mut launched_host)
                } else {
                    (&launched_host, &mut launched_device)
                };
                batch.iter().rev().for_each(|copy| to[copy.to as usize] = from[copy.from as usize]);
                Ok(())
            };
            each_launch(&mut copies.into_iter(), launch).expect("the launches succeed");
            assert_eq!((launched_device, launched_host), (device, host), "{blocks} blocks");
        }
    }

    #[test]
    fn a_launch_has_at_most_as_many_copies_as_its_list() {
        let mut copies =
            (0..1_500).map(|block| BlockCopy::Save { from: BlockId(block), to: HostBlockId(block) });
        let mut sizes = Vec::new();
        each_launch(&mut copies, |_, batch| {
            sizes.push(batch.len());
            Ok(())
        })
        .expect("the launches succeed");
        assert_eq!(sizes, [MOST_COPIES, 1_500 - MOST_COPIES]);
    }
}
