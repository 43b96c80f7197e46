//! Opening a checkpoint, or only its text files: chooses the reader by the kind of path.

use std::path::Path;

use bytes::Bytes;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::mapped::MappedFile;
use crate::text_files::TextFiles;
use crate::{converted, directory, gguf};

/// The kind of a path, by its extension, or by the content of a file with an unknown one.
enum PathKind {
    Directory,
    Archive,
    /// A `.json` file.
    Json,
    /// A file with weights of a directory.
    Weights,
    /// A GGUF file; also the kind of unknown contents.
    Gguf,
}

impl PathKind {
    fn of(path: &Path) -> Result<Self, CheckpointError> {
        let metadata = path.metadata().map_err(|source| CheckpointError::io(path, source))?;
        if metadata.is_dir() {
            return Ok(Self::Directory);
        }
        Ok(match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => Self::Json,
            Some("safetensors" | "bin" | "pt" | "pth") => Self::Weights,
            Some("tar") => Self::Archive,
            Some("gguf") => Self::Gguf,
            _ if converted::is_archive(&MappedFile::open(path)?) => Self::Archive,
            _ => Self::Gguf,
        })
    }
}

impl Checkpoint {
    /// Opens a Hugging Face directory (`config.json` and safetensors), a `.gguf` file, a directory that has one
    /// `.gguf` file and no `config.json`, or a converted model.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        match PathKind::of(path)? {
            PathKind::Directory => directory::open(path),
            PathKind::Json | PathKind::Weights => Err(one_file(path)),
            PathKind::Archive => converted::open_archive(&MappedFile::open(path)?),
            PathKind::Gguf => gguf::open(path),
        }
    }

    /// Opens a converted model that is an archive in memory. The weights are used in place.
    pub fn from_bytes(bytes: Bytes) -> Result<Self, CheckpointError> {
        converted::open_archive(&in_memory(bytes))
    }
}

impl TextFiles {
    /// Reads those of the models that [`Checkpoint::open`] opens; the weights need not exist. A directory with a
    /// `tokenizer.json` needs no `config.json`. The path of a `tokenizer.json` stands for this file alone.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, CheckpointError> {
        let path = path.as_ref();
        match PathKind::of(path)? {
            PathKind::Directory => directory::open_text(path),
            PathKind::Json => directory::open_tokenizer(path),
            PathKind::Weights => Err(one_file(path)),
            PathKind::Archive => converted::open_archive_text(&MappedFile::open(path)?),
            PathKind::Gguf => gguf::open_text(path),
        }
    }

    /// Reads those of a converted model that is an archive in memory.
    pub fn from_bytes(bytes: Bytes) -> Result<Self, CheckpointError> {
        converted::open_archive_text(&in_memory(bytes))
    }
}

fn one_file(path: &Path) -> CheckpointError {
    CheckpointError::not_a_model(path, "is one file of a model; open the directory that contains it")
}

fn in_memory(bytes: Bytes) -> MappedFile {
    MappedFile::in_memory(Path::new("<bytes>"), bytes)
}
