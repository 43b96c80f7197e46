//! Decoder models: a Hugging Face configuration becomes a [`ModelConfig`], a checkpoint's tensors become the weights of a
//! [`Decoder`], and the decoder's forward pass is written once over [`Backend`](penstock_device::Backend).
//!
//! A family's file (`llama.rs`, `mistral.rs`, ...) says only what that family reads from its configuration; it contains no
//! arithmetic. Which tensors are fused into one matrix is a table in `weights.rs`. Nothing here knows a request.

mod config;
mod decoder;
mod fields;
mod llama;
mod mistral;
mod qwen2;
mod qwen3;
mod rope;
mod weights;

pub use config::{ModelConfig, ModelError};
pub use decoder::{Decoder, Workspace};
pub use rope::{Rope, RopeScaling};
pub use weights::{Progress, load, weight_bytes};
