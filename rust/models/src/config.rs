//! The configuration of a decoder, independent of its family: sizes, biases, norms, rope, windows.

use penstock_types::HeadShape;

use crate::rope::Rope;

/// The configuration of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Hugging Face architecture name.
    pub architecture: String,
    pub vocabulary_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the feed-forward part.
    pub intermediate_size: usize,
    pub heads: HeadShape,
    /// Epsilon of every RMS norm.
    pub norm_epsilon: f32,
    /// The output head is the embedding table.
    pub tied_head: bool,
    /// Maximum sequence length of the model, in tokens.
    pub max_position_embeddings: usize,
    pub rope: Rope,
    /// With log-n attention, the trained length: queries at positions from it are scaled.
    pub logn_len: Option<usize>,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the output projection of the attention.
    pub output_bias: bool,
    /// Biases on gate, up and down.
    pub mlp_bias: bool,
    /// RMS norms over each head of q and k before the rotation.
    pub qk_norm: bool,
    /// The sliding window of each layer; its length is the number of layers.
    pub windows: Vec<Option<usize>>,
}

impl ModelConfig {
    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.windows.len()
    }

    /// Number of weights; tied weights count once.
    pub fn num_parameters(&self) -> u64 {
        let product = |rows: usize, columns: usize| rows as u64 * columns as u64;
        let attention = product(self.heads.qkv_width(), self.hidden_size)
            + product(self.hidden_size, self.heads.query_width())
            + if self.qkv_bias { self.heads.qkv_width() as u64 } else { 0 }
            + if self.output_bias { self.hidden_size as u64 } else { 0 }
            + if self.qk_norm { 2 * self.heads.head_dim as u64 } else { 0 };
        let mlp = 3 * product(self.intermediate_size, self.hidden_size)
            + if self.mlp_bias { (2 * self.intermediate_size + self.hidden_size) as u64 } else { 0 };
        let layer = attention + mlp + 2 * self.hidden_size as u64;
        let tables = product(self.vocabulary_size, self.hidden_size) * if self.tied_head { 1 } else { 2 };
        layer * self.num_layers() as u64 + tables + self.hidden_size as u64
    }
}
