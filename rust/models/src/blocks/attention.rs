//! Attention: query, key and value of a row, its attention over the cache, and the projection back.

use penstock_types::HeadShape;

use super::tensors::{Declaration, Linear, Tensors};

/// The attention of a layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AttentionSpec {
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the output projection.
    pub output_bias: bool,
    /// RMS norms over each head of q and k before the rotation.
    pub qk_norm: bool,
    /// The sliding window, in tokens.
    pub window: Option<usize>,
}

/// The weights of an attention.
pub(crate) struct Attention<M, V> {
    /// Query, key and value have the same input, so they are one product.
    pub(crate) qkv: Linear<M, V>,
    pub(crate) qk_norm: Option<(V, V)>,
    pub(crate) output: Linear<M, V>,
    pub(crate) window: Option<usize>,
}

impl<M, V> Attention<M, V> {
    pub(super) fn declare<T: Tensors<Matrix = M, Vector = V>>(
        tensors: &mut Declaration<'_, T>,
        spec: &AttentionSpec,
        heads: HeadShape,
        hidden: usize,
    ) -> Result<Self, T::Error> {
        let (query, kv) = (heads.query_width(), heads.kv_width());
        let parts = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        Ok(Self {
            qkv: tensors.linear(&parts, &[query, kv, kv], hidden, spec.qkv_bias)?,
            qk_norm: if spec.qk_norm {
                let query = tensors.norm("self_attn.q_norm", heads.head_dim)?;
                Some((query, tensors.norm("self_attn.k_norm", heads.head_dim)?))
            } else {
                None
            },
            output: tensors.linear(&["self_attn.o_proj"], &[hidden], query, spec.output_bias)?,
            window: spec.window,
        })
    }
}
