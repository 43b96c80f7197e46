//! The feed-forward part of a layer: gate and up, their activation, and down.

use super::tensors::{Declaration, Linear, Tensors};

/// The feed-forward part of a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MlpSpec {
    /// Values of gate, and of up.
    pub width: usize,
    /// Biases on gate, up and down.
    pub bias: bool,
}

/// The weights of a feed-forward part.
pub(crate) struct Mlp<M, V> {
    /// Gate and up have the same input, so they are one product.
    pub(crate) gate_up: Linear<M, V>,
    pub(crate) down: Linear<M, V>,
    pub(crate) width: usize,
}

impl<M, V> Mlp<M, V> {
    pub(super) fn declare<T: Tensors<Matrix = M, Vector = V>>(
        tensors: &mut Declaration<'_, T>,
        spec: &MlpSpec,
        hidden: usize,
    ) -> Result<Self, T::Error> {
        let (width, bias) = (spec.width, spec.bias);
        Ok(Self {
            gate_up: tensors.linear(&["mlp.gate_proj", "mlp.up_proj"], &[width, width], hidden, bias)?,
            down: tensors.linear(&["mlp.down_proj"], &[hidden], width, bias)?,
            width,
        })
    }
}
