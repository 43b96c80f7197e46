//! A decoder layer: attention and a feed-forward part, each behind a norm and added to the residual stream.

use penstock_types::HeadShape;

use super::attention::{Attention, AttentionSpec};
use super::mlp::{Mlp, MlpSpec};
use super::tensors::{Declaration, Tensors};

/// A decoder layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    pub attention: AttentionSpec,
    pub mlp: MlpSpec,
}

/// The weights of a decoder layer.
pub(crate) struct Layer<M, V> {
    pub(crate) attention_norm: V,
    pub(crate) attention: Attention<M, V>,
    pub(crate) mlp_norm: V,
    pub(crate) mlp: Mlp<M, V>,
}

impl<M, V> Layer<M, V> {
    pub(crate) fn declare<T: Tensors<Matrix = M, Vector = V>>(
        tensors: &mut Declaration<'_, T>,
        spec: &LayerSpec,
        heads: HeadShape,
        hidden: usize,
    ) -> Result<Self, T::Error> {
        Ok(Self {
            attention_norm: tensors.norm("input_layernorm", hidden)?,
            attention: Attention::declare(tensors, &spec.attention, heads, hidden)?,
            mlp_norm: tensors.norm("post_attention_layernorm", hidden)?,
            mlp: Mlp::declare(tensors, &spec.mlp, hidden)?,
        })
    }
}
