//! `ModelFiles`: the argument that names a model.

use std::path::PathBuf;

use bytes::Bytes;
use penstock_checkpoint::{Checkpoint, CheckpointError, TextFiles};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// The files of a model: a path, or an archive of a converted model in memory.
#[derive(FromPyObject)]
pub enum ModelFiles {
    Memory(PyBackedBytes),
    Path(PathBuf),
}

impl ModelFiles {
    pub fn open(self) -> Result<Checkpoint, CheckpointError> {
        match self {
            Self::Memory(bytes) => Checkpoint::from_bytes(Bytes::from_owner(bytes)),
            Self::Path(path) => Checkpoint::open(path),
        }
    }

    /// Opens the tokenizer and the chat templates without the weights.
    pub fn open_text(self) -> Result<TextFiles, CheckpointError> {
        match self {
            Self::Memory(bytes) => TextFiles::from_bytes(Bytes::from_owner(bytes)),
            Self::Path(path) => TextFiles::open(path),
        }
    }
}
