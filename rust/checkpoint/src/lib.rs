//! Model files on disk: safetensors, GGUF, configuration, tokenizer and template texts.
//!
//! [`Checkpoint::open`] takes a Hugging Face directory or a `.gguf` file and answers in one vocabulary: Hugging Face
//! names, shapes and configuration keys, whatever the file calls them. Weights stay memory-mapped until
//! [`Tensor::read_rows`] converts them to `f32`, a range of rows at a time.
//!
//! Every file is taken for hostile. A count, length, offset or name is checked against the bytes that are really there
//! before it is used or allocated for, and a violation is a [`CheckpointError`] that names the file, the field, the
//! value and the limit. Nothing here knows what a model does with its weights, tokens or templates.

mod checkpoint;
mod dequantize;
mod directory;
mod error;
mod generation;
mod gguf;
mod json;
mod mapped;
mod safetensors;
mod storage;
mod tensor;
mod tokenizer;

pub use checkpoint::{Checkpoint, Description, Format};
pub use error::CheckpointError;
pub use generation::Generation;
pub use storage::Storage;
pub use tensor::Tensor;
pub use tokenizer::{AddedToken, GgufVocabulary, SpecialTokens, TokenType, TokenizerSource};
