//! Where the keys and values of one layer lie in its paged cache.
//!
//! ```text
//! cache   [block]
//! block   [kv head][tile of 16 tokens]
//! tile    K panel: 16 lanes are the tokens, head_dim steps
//!         V panels: ceil(head_dim / 16) of them, 16 lanes are dimensions, 16 steps are the tokens
//! ```
//!
//! So the 16 scores of a tile come out in lanes without a horizontal sum, and everything one head needs of 16 tokens
//! is one contiguous run (4 KiB for 64 dimensions of bf16). The order inside a panel is [`Element`]'s.

use crate::element::{Element, LANES};

/// How keys and values are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvElement {
    /// As IEEE single precision.
    F32,
    /// As IEEE half precision.
    F16,
    /// As the upper half of an f32.
    Bf16,
}

impl KvElement {
    /// Every way.
    pub const ALL: &[KvElement] = &[KvElement::F32, KvElement::F16, KvElement::Bf16];

    pub(crate) fn element(self) -> Element {
        match self {
            KvElement::F32 => Element::F32,
            KvElement::F16 => Element::F16,
            KvElement::Bf16 => Element::Bf16,
        }
    }
}

impl From<Element> for KvElement {
    fn from(element: Element) -> Self {
        match element {
            Element::F32 => KvElement::F32,
            Element::F16 => KvElement::F16,
            Element::Bf16 => KvElement::Bf16,
        }
    }
}

/// The shape of one layer's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Tokens of a block; a multiple of 16.
    pub block_size: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Storage type of keys and values.
    pub element: KvElement,
}

impl KvLayout {
    /// Bytes of one block of one layer, keys and values together; a multiple of 64.
    ///
    /// # Panics
    /// If the layout is not one (a block size that is no multiple of 16, no heads, no dimensions) or too large.
    pub fn block_bytes(&self) -> usize {
        let Self { block_size, kv_heads, head_dim, .. } = *self;
        assert!(
            block_size > 0 && block_size.is_multiple_of(LANES),
            "block size {block_size} is no multiple of {LANES}"
        );
        assert!(kv_heads > 0 && head_dim > 0, "a KV layout needs heads and dimensions: {self:?}");
        self.tile_bytes()
            .checked_mul(block_size / LANES)
            .and_then(|bytes| bytes.checked_mul(kv_heads))
            .unwrap_or_else(|| panic!("a block of {self:?} does not fit the address space"))
    }

    /// Bytes of the K panel of a tile; the V panels follow it.
    pub(crate) fn key_bytes(&self) -> usize {
        self.element.element().panel_bytes(self.head_dim)
    }

    /// Bytes of one V panel: 16 dimensions of 16 tokens.
    pub(crate) fn value_panel_bytes(&self) -> usize {
        self.element.element().panel_bytes(LANES)
    }

    /// Bytes of 16 tokens of one head.
    pub(crate) fn tile_bytes(&self) -> usize {
        self.key_bytes() + self.head_dim.div_ceil(LANES) * self.value_panel_bytes()
    }

    /// Bytes from the start of a block to the tile of `head` that holds the block's token `offset`.
    pub(crate) fn tile_offset(&self, head: usize, offset: usize) -> usize {
        (head * (self.block_size / LANES) + offset / LANES) * self.tile_bytes()
    }

    /// See [`crate::Kernels::write_kv`].
    pub(crate) fn write(&self, cache: &mut [u8], block: u32, offset: usize, k: &[f32], v: &[f32]) {
        let Self { kv_heads, head_dim, .. } = *self;
        let element = self.element.element();
        assert!(offset < self.block_size, "place {offset} of a block of {}", self.block_size);
        assert_eq!(
            (k.len(), v.len()),
            (kv_heads * head_dim, kv_heads * head_dim),
            "keys and values of {self:?}"
        );
        let block_bytes = self.block_bytes();
        let block = &mut cache[block as usize * block_bytes..][..block_bytes];
        let lane = offset % LANES;
        for (head, (k, v)) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
            let tile = &mut block[self.tile_offset(head, offset)..][..self.tile_bytes()];
            let (keys, values) = tile.split_at_mut(self.key_bytes());
            element.set_all(keys, head_dim, |element, d| (element.panel_index(d, lane), k[d]));
            for (v, panel) in v.chunks(LANES).zip(values.chunks_exact_mut(self.value_panel_bytes())) {
                element.set_all(panel, v.len(), |element, d| (element.panel_index(lane, d), v[d]));
            }
        }
    }
}
