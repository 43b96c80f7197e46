//! Where the keys and values of one layer lie in its paged cache.
//!
//! ```text
//! cache   [block]
//! block   [kv head][tile of 16 tokens]
//! tile    grids, of codes only: [16 tokens] scales of K and V, two bf16 in 32 bits
//!                               [16 tokens] offsets of K, f32
//!                               [16 tokens] offsets of V, f32
//!         K panel: 16 lanes are the tokens, head_dim steps
//!         V panels: ceil(head_dim / 16) of them, 16 lanes are dimensions, 16 steps are the tokens
//! ```
//!
//! So the 16 scores of a tile come out in lanes without a horizontal sum, and everything one head needs of 16 tokens
//! is one contiguous run. The order inside a panel is [`Dtype`]'s for numbers and [`Quantiser`]'s for codes; the
//! codes of a tile share three cache lines for their grids:
//!
//! ```text
//! bytes of a tile    head_dim 64    128
//! bf16                      4096   8192
//! int8                      2240   4288    1.83 and 1.91 times less
//! uint4                     1216   2240    3.37 and 3.66 times less
//! ```

use std::ops::Range;

use half::bf16;
use penstock_types::{Dtype, KvDtype};

use crate::panel::{LANES, panel_bytes, panel_index, read_number, write_numbers};
use crate::quantiser::{Grid, Quantiser, WORD_BYTES};

/// Bytes of one 32-bit number for each token of a tile.
pub(crate) const GRID_LINE: usize = WORD_BYTES;

/// The two ways behind the types: rounded one by one, or on a grid of their own for each token and head.
#[derive(Clone, Copy)]
pub(crate) enum Stored {
    Numbers(Dtype),
    Codes(Quantiser),
}

impl Stored {
    /// How numbers of this type are stored.
    pub(crate) const fn of(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F32 => Stored::Numbers(Dtype::F32),
            KvDtype::F16 => Stored::Numbers(Dtype::F16),
            KvDtype::Bf16 => Stored::Numbers(Dtype::Bf16),
            KvDtype::Int8 => Stored::Codes(Quantiser::INT8),
            KvDtype::Uint4 => Stored::Codes(Quantiser::UINT4),
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
    pub dtype: KvDtype,
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

    /// Bytes of a tile before its K panel: the grids of codes.
    pub(crate) const fn grid_bytes(&self) -> usize {
        match Stored::of(self.dtype) {
            Stored::Numbers(_) => 0,
            Stored::Codes(_) => 3 * GRID_LINE,
        }
    }

    /// Bytes of the K panel of a tile; the V panels follow it.
    pub(crate) const fn key_bytes(&self) -> usize {
        self.panel_bytes(self.head_dim)
    }

    /// Bytes of one V panel: 16 dimensions of 16 tokens.
    pub(crate) const fn value_panel_bytes(&self) -> usize {
        self.panel_bytes(LANES)
    }

    const fn panel_bytes(&self, steps: usize) -> usize {
        match Stored::of(self.dtype) {
            Stored::Numbers(dtype) => panel_bytes(dtype, steps),
            Stored::Codes(quantiser) => quantiser.panel_bytes(steps),
        }
    }

    /// Bytes of 16 tokens of one head.
    pub(crate) const fn tile_bytes(&self) -> usize {
        self.grid_bytes() + self.key_bytes() + self.head_dim.div_ceil(LANES) * self.value_panel_bytes()
    }

    /// Bytes from the start of a block to the tile of `head` that holds the block's token `offset`.
    pub(crate) fn tile_offset(&self, head: usize, offset: usize) -> usize {
        (head * (self.block_size / LANES) + offset / LANES) * self.tile_bytes()
    }

    /// The bytes of block `block`.
    fn block_range(&self, block: u32, offset: usize) -> Range<usize> {
        assert!(offset < self.block_size, "place {offset} of a block of {}", self.block_size);
        let bytes = self.block_bytes();
        block as usize * bytes..(block as usize + 1) * bytes
    }

    /// See [`crate::Kernels::write_kv`].
    pub(crate) fn write(&self, cache: &mut [u8], block: u32, offset: usize, k: &[f32], v: &[f32]) {
        let Self { kv_heads, head_dim, .. } = *self;
        assert_eq!(
            (k.len(), v.len()),
            (kv_heads * head_dim, kv_heads * head_dim),
            "keys and values of {self:?}"
        );
        let block = &mut cache[self.block_range(block, offset)];
        let lane = offset % LANES;
        for (head, (k, v)) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
            let tile = &mut block[self.tile_offset(head, offset)..][..self.tile_bytes()];
            let (grids, panels) = tile.split_at_mut(self.grid_bytes());
            let (keys, values) = panels.split_at_mut(self.key_bytes());
            let values = v.chunks(LANES).zip(values.chunks_exact_mut(self.value_panel_bytes()));
            match Stored::of(self.dtype) {
                Stored::Numbers(dtype) => {
                    write_numbers(dtype, keys, head_dim, |dtype, d| (panel_index(dtype, d, lane), k[d]));
                    for (v, panel) in values {
                        write_numbers(dtype, panel, v.len(), |dtype, d| (panel_index(dtype, lane, d), v[d]));
                    }
                }
                Stored::Codes(quantiser) => {
                    let (k_grid, v_grid) = (quantiser.grid(k), quantiser.grid(v));
                    set_grids(grids, lane, k_grid, v_grid);
                    for (index, k) in k.chunks(LANES).enumerate() {
                        quantiser.set_steps(keys, index * LANES, lane, quantiser.codes(k_grid, k));
                    }
                    for (v, panel) in values {
                        quantiser.set_lanes(panel, lane, quantiser.codes(v_grid, v));
                    }
                }
            }
        }
    }

    /// The keys and values of one token as attention sees them, `[kv_heads * head_dim]` each: the slow twin of what
    /// the kernels read.
    pub fn read(&self, cache: &[u8], block: u32, offset: usize) -> (Vec<f32>, Vec<f32>) {
        let block = &cache[self.block_range(block, offset)];
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for head in 0..self.kv_heads {
            let tile = &block[self.tile_offset(head, offset)..][..self.tile_bytes()];
            let (grids, panels) = tile.split_at(self.grid_bytes());
            let (keys, values) = panels.split_at(self.key_bytes());
            let lane = offset % LANES;
            for d in 0..self.head_dim {
                let value = &values[d / LANES * self.value_panel_bytes()..];
                match Stored::of(self.dtype) {
                    Stored::Numbers(dtype) => {
                        k.push(read_number(dtype, keys, panel_index(dtype, d, lane)));
                        v.push(read_number(dtype, value, panel_index(dtype, lane, d % LANES)));
                    }
                    Stored::Codes(quantiser) => {
                        let (k_grid, v_grid) = get_grids(grids, lane);
                        k.push(k_grid.value(quantiser.get(keys, d, lane)));
                        v.push(v_grid.value(quantiser.get(value, lane, d % LANES)));
                    }
                }
            }
        }
        (k, v)
    }
}

/// Writes the grids of a token's keys and values.
fn set_grids(grids: &mut [u8], lane: usize, k: Grid, v: Grid) {
    let ([k_low, k_high], [v_low, v_high]) = (k.scale.to_le_bytes(), v.scale.to_le_bytes());
    let words = [[k_low, k_high, v_low, v_high], k.offset.to_le_bytes(), v.offset.to_le_bytes()];
    for (line, word) in grids.chunks_exact_mut(GRID_LINE).zip(words) {
        line[4 * lane..][..4].copy_from_slice(&word);
    }
}

/// Reads the grids of a token's keys and values.
fn get_grids(grids: &[u8], lane: usize) -> (Grid, Grid) {
    let word = |line: usize| -> [u8; 4] { std::array::from_fn(|i| grids[line * GRID_LINE + 4 * lane + i]) };
    let [k_low, k_high, v_low, v_high] = word(0);
    (
        Grid { scale: bf16::from_le_bytes([k_low, k_high]), offset: f32::from_le_bytes(word(1)) },
        Grid { scale: bf16::from_le_bytes([v_low, v_high]), offset: f32::from_le_bytes(word(2)) },
    )
}
