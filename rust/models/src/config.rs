//! The configuration of a decoder, independent of its family: sizes, rope, and its layers.

use penstock_types::HeadShape;

use crate::blocks::LayerSpec;
use crate::rope::Rope;

/// The configuration of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelConfig {
    /// Hugging Face architecture name.
    pub architecture: String,
    pub vocabulary_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// The heads of every layer.
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
    /// The layers, in their order.
    pub layers: Vec<LayerSpec>,
}

impl ModelConfig {
    /// Number of decoder layers.
    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Width of the widest feed-forward part.
    pub(crate) fn widest_mlp(&self) -> usize {
        self.layers.iter().map(|layer| layer.mlp.width).max().unwrap_or(0)
    }
}
