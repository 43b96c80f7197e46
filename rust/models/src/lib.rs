//! Decoder models: [`ModelConfig`] is read from a Hugging Face configuration, [`load`] loads the tensors of a
//! checkpoint into a [`Decoder`], whose forward pass is written once over [`Backend`](penstock_device::Backend).
//!
//! `registry.rs` lists the supported architectures; a file of `families/` reads the configuration fields that are
//! specific to its family and has no arithmetic. Each file of `blocks/` declares the tensors of a block, from which
//! loading, sizes, conversion, formats and adapters follow. [`convert()`] writes the packed matrices to a file, from
//! which [`load`] uses them without a copy.

#![allow(missing_docs)]

mod adapter;
mod blocks;
mod config;
mod convert;
mod decoder;
mod error;
mod families;
mod fields;
mod formats;
mod model;
mod packing;
mod registry;
mod rope;
mod rotations;
mod stacked;
mod weights;

pub use adapter::{AdapterLimits, adapted_matrices, adapter_bytes, pack_adapter};
pub use blocks::{AttentionSpec, LayerSpec, MlpSpec};
pub use config::ModelConfig;
pub use convert::{ConvertOptions, convert};
pub use decoder::{Decoder, Workspace};
pub use error::ModelError;
pub use formats::WeightFormats;
pub use packing::{ModuleFormat, WeightBytes, module_formats, planned_matrices, weight_bytes};
pub use rope::{Rope, RopeScaling};
pub use weights::{ProgressCallback, check_tensors, load};
