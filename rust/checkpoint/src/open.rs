//! Opening a checkpoint: chooses the reader by the kind of path.

use std::path::Path;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::mapped::MappedFile;
use crate::{converted, directory, gguf};

impl Checkpoint {
    /// Opens a Hugging Face directory (`config.json` and safetensors), a `.gguf` file, a directory that has one
    /// `.gguf` file and no `config.json`, or a converted model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        let metadata = path.metadata().map_err(|source| CheckpointError::io(path, source))?;
        if metadata.is_dir() {
            return directory::open(path);
        }
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("safetensors" | "json" | "bin" | "pt" | "pth") => Err(CheckpointError::not_a_model(
                path,
                "is one file of a model; open the directory that contains it",
            )),
            Some("tar") => converted::open_archive(&MappedFile::open(path)?),
            _ => gguf::open(path),
        }
    }
}
