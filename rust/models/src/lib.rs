//! Decoder models: [`ModelConfig`] is read from a Hugging Face configuration, [`load`] loads the tensors of a
//! checkpoint into a [`Decoder`], whose forward pass is written once over [`Backend`](penstock_device::Backend).
//!
//! `registry.rs` lists the supported architectures; a file of `families/` reads the configuration fields that are
//! specific to its family and has no arithmetic. The tables in `weights.rs` list the tensors that are fused into one
//! matrix.

#![allow(missing_docs)]

mod config;
mod decoder;
mod error;
mod families;
mod fields;
mod formats;
mod registry;
mod rope;
mod rotations;
mod weights;

pub use config::ModelConfig;
pub use decoder::{Decoder, Workspace};
pub use error::ModelError;
pub use formats::WeightFormats;
pub use rope::{Rope, RopeScaling};
pub use weights::{ModuleFormat, ProgressCallback, load, module_formats, weight_bytes};
