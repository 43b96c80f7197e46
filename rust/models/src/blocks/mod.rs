//! The blocks of a decoder. A block declares its tensors once, to a receiver of [`Tensors`]: the loader makes weights of
//! them, and `model.rs` a list, from which the sizes, the converted model, the formats and the targets of adapters
//! follow.

mod attention;
mod layer;
mod mlp;
mod tensors;

pub(crate) use attention::Attention;
pub use attention::AttentionSpec;
pub(crate) use layer::Layer;
pub use layer::LayerSpec;
pub(crate) use mlp::Mlp;
pub use mlp::MlpSpec;
pub(crate) use tensors::{Declaration, Fused, Linear, Tensors, layer_of, module_name};
