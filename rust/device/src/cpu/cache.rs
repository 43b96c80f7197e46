//! The KV cache of the CPU and its host tier.
//!
//! ```text
//! cache       [layer][block]       attention walks through one layer
//! host tier   [block][layer]       all layers of a block are adjacent
//! ```
//!
//! So a copy is one contiguous run of bytes per layer, and a single run in the host tier.

use penstock_kernels::KvLayout;
use penstock_types::{BlockCopy, HeadShape};

use crate::arena::Region;
use crate::seam::CacheSpec;

/// The regions of the cache, and the layout of blocks in them.
pub struct CpuCache {
    pub(super) layout: KvLayout,
    pub(super) num_blocks: usize,
    pub(super) blocks: Region,
    pub(super) host_blocks: Option<Region>,
    pub(super) shape: CacheShape,
}

/// The layout of blocks in a region.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    layers: usize,
    /// Bytes of a block in one layer.
    block: usize,
    /// Bytes of all blocks in one layer.
    layer: usize,
}

impl CacheShape {
    pub fn new(spec: &CacheSpec) -> Self {
        let block = kv_layout(spec).block_bytes();
        Self { layers: spec.layers, block, layer: block.saturating_mul(spec.blocks) }
    }

    /// Bytes of a block in all layers.
    pub fn block_bytes(&self) -> usize {
        self.block.saturating_mul(self.layers)
    }

    /// The blocks of one layer.
    pub fn layer<'a>(&self, cache: &'a [u8], layer: usize) -> &'a [u8] {
        &cache[layer * self.layer..][..self.layer]
    }

    /// The blocks of one layer.
    pub fn layer_mut<'a>(&self, cache: &'a mut [u8], layer: usize) -> &'a mut [u8] {
        &mut cache[layer * self.layer..][..self.layer]
    }

    pub fn copy(&self, cache: &mut [u8], host: &mut [u8], copy: BlockCopy) {
        let (BlockCopy::Save { from: block, to: host_block }
        | BlockCopy::Load { from: host_block, to: block }) = copy;
        let host = &mut host[host_block.0 as usize * self.block_bytes()..][..self.block_bytes()];
        for (layer, host) in host.chunks_exact_mut(self.block).enumerate() {
            let part = &mut self.layer_mut(cache, layer)[block.0 as usize * self.block..][..self.block];
            match copy {
                BlockCopy::Save { .. } => host.copy_from_slice(part),
                BlockCopy::Load { .. } => part.copy_from_slice(host),
            }
        }
    }
}

pub(super) fn kv_layout(spec: &CacheSpec) -> KvLayout {
    let &CacheSpec { block_size, heads: HeadShape { kv_heads, head_dim, .. }, dtype, .. } = spec;
    KvLayout { block_size, kv_heads, head_dim, dtype }
}
