//! The layout of the keys and values of one layer in its paged cache.
//!
//! ```text
//! cache   [block]
//! block   [kv head][tile of 16 tokens]
//! tile    quantisation parameters, of quantised types only:
//!                 int8:  [16 tokens] scales of K and V, two bf16 in 32 bits
//!                        [16 tokens] offsets of K, f32
//!                        [16 tokens] offsets of V, f32
//!                 uint4: [16 tokens] the scales of K and V, 32 bits
//!         K panel: 16 lanes are the tokens, head_dim steps
//!         V panels: ceil(head_dim / 16) of them, 16 lanes are dimensions, 16 steps are the tokens
//! ```
//!
//! The 16 scores of a tile are computed in lanes without a horizontal sum, and the data of 16 tokens of one head is
//! contiguous. `panel` defines the order inside a panel of floats, [`Quantiser`] that of quantised values, and
//! [`rotated`] the encoding of `uint4`:
//!
//! ```text
//! bytes of a tile    head_dim 64    128
//! bf16                      4096   8192
//! int8                      2240   4288    smaller by a factor of 1.83 and 1.91
//! uint4                     1152   2240    smaller by a factor of 3.56 and 3.66; 4.5 and 4.375 bits per value
//! ```

use std::ops::Range;

use half::bf16;
use penstock_types::{Dtype, KvDtype};

use crate::panel::{LANES, panel_bytes, panel_index, read_float, write_floats};
use crate::quantiser::{QuantParams, Quantiser, WORD_BYTES};
use crate::rotated::{self, KeyParts, NIBBLES};

/// Bytes of one 32-bit value for each token of a tile.
pub(crate) const PARAMS_LINE: usize = WORD_BYTES;

/// The encoding of a [`KvDtype`]: floats, integers with quantisation parameters for each token and head, or rotated
/// integers.
#[derive(Clone, Copy)]
pub(crate) enum KvEncoding {
    Float(Dtype),
    Quantised(Quantiser),
    Rotated,
}

impl KvEncoding {
    pub(crate) const fn of(dtype: KvDtype) -> Self {
        match dtype {
            KvDtype::F32 => KvEncoding::Float(Dtype::F32),
            KvDtype::F16 => KvEncoding::Float(Dtype::F16),
            KvDtype::Bf16 => KvEncoding::Float(Dtype::Bf16),
            KvDtype::Int8 => KvEncoding::Quantised(Quantiser::INT8),
            KvDtype::Uint4 => KvEncoding::Rotated,
        }
    }
}

/// The shape of one layer's KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayout {
    /// Tokens per block; a multiple of 16.
    pub block_size: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub dtype: KvDtype,
}

impl KvLayout {
    /// Bytes of one block of one layer, keys and values together; a multiple of 64.
    ///
    /// # Panics
    /// If the layout is invalid (a block size that is not a multiple of 16, no heads, no dimensions) or too large.
    pub fn block_bytes(&self) -> usize {
        let Self { block_size, kv_heads, head_dim, .. } = *self;
        assert!(
            block_size > 0 && block_size.is_multiple_of(LANES),
            "block size {block_size} is not a multiple of {LANES}"
        );
        assert!(kv_heads > 0 && head_dim > 0, "a KV layout needs heads and dimensions: {self:?}");
        self.tile_bytes()
            .checked_mul(block_size / LANES)
            .and_then(|bytes| bytes.checked_mul(kv_heads))
            .unwrap_or_else(|| panic!("a block of {self:?} does not fit the address space"))
    }

    /// Bytes of a tile before its K panel: the quantisation parameters.
    pub(crate) const fn params_bytes(&self) -> usize {
        match KvEncoding::of(self.dtype) {
            KvEncoding::Float(_) => 0,
            KvEncoding::Quantised(_) => 3 * PARAMS_LINE,
            KvEncoding::Rotated => PARAMS_LINE,
        }
    }

    /// Bytes of the K panel of a tile; the V panels follow it.
    pub(crate) const fn key_bytes(&self) -> usize {
        match KvEncoding::of(self.dtype) {
            KvEncoding::Rotated => KeyParts::new(self.head_dim).panel_bytes(),
            KvEncoding::Float(_) | KvEncoding::Quantised(_) => self.panel_bytes(self.head_dim),
        }
    }

    /// Bytes of one V panel: 16 dimensions of 16 tokens.
    pub(crate) const fn value_panel_bytes(&self) -> usize {
        self.panel_bytes(LANES)
    }

    const fn panel_bytes(&self, steps: usize) -> usize {
        match KvEncoding::of(self.dtype) {
            KvEncoding::Float(dtype) => panel_bytes(dtype, steps),
            KvEncoding::Quantised(quantiser) => quantiser.panel_bytes(steps),
            KvEncoding::Rotated => NIBBLES.panel_bytes(steps),
        }
    }

    /// Bytes of 16 tokens of one head.
    pub(crate) const fn tile_bytes(&self) -> usize {
        self.params_bytes() + self.key_bytes() + self.head_dim.div_ceil(LANES) * self.value_panel_bytes()
    }

    /// Bytes from the start of a block to the tile of `head` that holds the block's token `offset`.
    pub(crate) fn tile_offset(&self, head: usize, offset: usize) -> usize {
        (head * (self.block_size / LANES) + offset / LANES) * self.tile_bytes()
    }

    /// The bytes of block `block`.
    fn block_range(&self, block: u32) -> Range<usize> {
        let bytes = self.block_bytes();
        block as usize * bytes..(block as usize + 1) * bytes
    }

    pub(crate) fn write(&self, cache: &mut [u8], block: u32, offset: usize, k: &[f32], v: &[f32]) {
        self.write_to_block(&mut cache[self.block_range(block)], offset, k, v);
    }

    /// Writes one token's keys and values to position `offset` of a block.
    pub(crate) fn write_to_block(&self, block: &mut [u8], offset: usize, k: &[f32], v: &[f32]) {
        let Self { kv_heads, head_dim, .. } = *self;
        assert_eq!(
            (k.len(), v.len()),
            (kv_heads * head_dim, kv_heads * head_dim),
            "keys and values of {self:?}"
        );
        assert!(offset < self.block_size, "position {offset} of a block of {}", self.block_size);
        let lane = offset % LANES;
        for (head, (k, v)) in k.chunks_exact(head_dim).zip(v.chunks_exact(head_dim)).enumerate() {
            let tile = &mut block[self.tile_offset(head, offset)..][..self.tile_bytes()];
            let (params, panels) = tile.split_at_mut(self.params_bytes());
            let (keys, values) = panels.split_at_mut(self.key_bytes());
            let value_bytes = self.value_panel_bytes();
            match KvEncoding::of(self.dtype) {
                KvEncoding::Float(dtype) => {
                    write_floats(dtype, keys, head_dim, |dtype, d| (panel_index(dtype, d, lane), k[d]));
                    for (v, panel) in v.chunks(LANES).zip(values.chunks_exact_mut(value_bytes)) {
                        write_floats(dtype, panel, v.len(), |dtype, d| (panel_index(dtype, lane, d), v[d]));
                    }
                }
                KvEncoding::Quantised(quantiser) => {
                    let (k_params, v_params) = (quantiser.params(k), quantiser.params(v));
                    write_params(params, lane, k_params, v_params);
                    for (index, k) in k.chunks(LANES).enumerate() {
                        quantiser.set_steps(keys, index * LANES, lane, quantiser.quantise(k_params, k));
                    }
                    for (v, panel) in v.chunks(LANES).zip(values.chunks_exact_mut(value_bytes)) {
                        quantiser.set_lanes(panel, lane, quantiser.quantise(v_params, v));
                    }
                }
                KvEncoding::Rotated => rotated::write(params, keys, values, lane, k, v),
            }
        }
    }

    /// The keys and values of one token as attention reads them, `[kv_heads * head_dim]` each; the reference
    /// implementation of the kernels' reads.
    pub fn read(&self, cache: &[u8], block: u32, offset: usize) -> (Vec<f32>, Vec<f32>) {
        assert!(offset < self.block_size, "position {offset} of a block of {}", self.block_size);
        let block = &cache[self.block_range(block)];
        let (mut k, mut v) = (Vec::new(), Vec::new());
        for head in 0..self.kv_heads {
            let tile = &block[self.tile_offset(head, offset)..][..self.tile_bytes()];
            let (params, panels) = tile.split_at(self.params_bytes());
            let (keys, values) = panels.split_at(self.key_bytes());
            let lane = offset % LANES;
            if let KvEncoding::Rotated = KvEncoding::of(self.dtype) {
                rotated::read(self.head_dim, [params, keys, values], lane, &mut k, &mut v);
                continue;
            }
            for d in 0..self.head_dim {
                let value = &values[d / LANES * self.value_panel_bytes()..];
                match KvEncoding::of(self.dtype) {
                    KvEncoding::Float(dtype) => {
                        k.push(read_float(dtype, keys, panel_index(dtype, d, lane)));
                        v.push(read_float(dtype, value, panel_index(dtype, lane, d % LANES)));
                    }
                    KvEncoding::Quantised(quantiser) => {
                        let (k_params, v_params) = read_params(params, lane);
                        k.push(k_params.value(quantiser.get(keys, d, lane)));
                        v.push(v_params.value(quantiser.get(value, lane, d % LANES)));
                    }
                    KvEncoding::Rotated => unreachable!("read above"),
                }
            }
        }
        (k, v)
    }
}

/// Writes the quantisation parameters of a token's keys and values.
fn write_params(params: &mut [u8], lane: usize, k: QuantParams, v: QuantParams) {
    let ([k_low, k_high], [v_low, v_high]) = (k.scale.to_le_bytes(), v.scale.to_le_bytes());
    let words = [[k_low, k_high, v_low, v_high], k.offset.to_le_bytes(), v.offset.to_le_bytes()];
    for (line, word) in params.chunks_exact_mut(PARAMS_LINE).zip(words) {
        line[4 * lane..][..4].copy_from_slice(&word);
    }
}

/// Reads the quantisation parameters of a token's keys and values.
fn read_params(params: &[u8], lane: usize) -> (QuantParams, QuantParams) {
    let word =
        |line: usize| -> [u8; 4] { std::array::from_fn(|i| params[line * PARAMS_LINE + 4 * lane + i]) };
    let [k_low, k_high, v_low, v_high] = word(0);
    (
        QuantParams { scale: bf16::from_le_bytes([k_low, k_high]), offset: f32::from_le_bytes(word(1)) },
        QuantParams { scale: bf16::from_le_bytes([v_low, v_high]), offset: f32::from_le_bytes(word(2)) },
    )
}
