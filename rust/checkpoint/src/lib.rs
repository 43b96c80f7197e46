//! Model files on disk: safetensors, GGUF, configuration, tokenizer and chat templates.
//!
//! [`Checkpoint::open`] opens a Hugging Face directory or a `.gguf` file, [`TextFiles::open`] only its tokenizer and
//! templates. Directories and files have the same interface, with Hugging Face's names, shapes and configuration keys.
//! Converted models have it, too, but their matrices are packed for a backend ([`Checkpoint::packed_matrix`]);
//! [`ConvertedWriter`] writes them. Weights are memory-mapped; [`Tensor::read_rows`] converts a range of rows to `f32`,
//! [`Tensor::read_grid`] reads the integer codes and the scales of quantised rows.
//!
//! Files are untrusted input. Every count, length, offset and name is checked against the actual bytes before it is
//! used or memory is allocated for it. A violation is a [`CheckpointError`] that names the file, the field, the value
//! and the limit. The crate does not know how a model uses its weights, tokens or templates.

#![allow(missing_docs)]

mod adapter;
mod blocks;
mod checkpoint;
mod converted;
mod dequantize;
mod directory;
mod embedding;
mod error;
mod generation;
mod gguf;
mod json;
mod lfs;
mod mapped;
mod open;
mod packed;
mod quantization;
mod safetensors;
mod storage;
mod tensor;
mod text_files;
mod tokenizer;

pub use adapter::{AdapterFiles, AdapterModule};
pub use checkpoint::{Checkpoint, Description};
pub use converted::{Conversion, ConvertedWriter, FusedMatrix, FusedPart, NewTensor, WriteError};
pub use embedding::EmbeddingConfig;
pub use error::{CheckpointError, TRUNCATED};
pub use lfs::check_lfs_pointer;
pub use penstock_types::GenerationConfig;
pub use tensor::Tensor;
pub use text_files::{FileFormat, TextFiles};
pub use tokenizer::{AddedToken, GgufVocabulary, SpecialTokens, TokenType, TokenizerSource};
