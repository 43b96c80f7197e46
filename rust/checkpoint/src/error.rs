//! What can be wrong with a checkpoint. Few variants, because callers only ever tell apart: not readable, not a model,
//! broken, not supported, not there.

use std::io;
use std::path::{Path, PathBuf};

/// Why a checkpoint, or a part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// The path holds nothing that can be opened as a model; the reason says what was looked for.
    #[error("{}: {reason}", path.display())]
    NotAModel {
        /// The file or directory.
        path: PathBuf,
        /// What is missing or too many, and what to do.
        reason: String,
    },
    /// A file contradicts itself or its format.
    #[error("{}: {field}: {problem}", file.display())]
    Malformed {
        /// The file.
        file: PathBuf,
        /// The field or tensor.
        field: String,
        /// The value found and the limit it breaks.
        problem: String,
    },
    /// A sound file that asks for something this crate does not do.
    #[error("{}: {field} is {found}; supported: {supported}", file.display())]
    Unsupported {
        /// The file.
        file: PathBuf,
        /// The field or tensor.
        field: String,
        /// What the file holds.
        found: String,
        /// What could be used.
        supported: String,
    },
    /// The model asks for a tensor that the checkpoint does not hold.
    #[error("{}: there is no tensor named {name}", path.display())]
    MissingTensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's Hugging Face name.
        name: String,
    },
}

impl CheckpointError {
    pub(crate) fn io(path: &Path, source: io::Error) -> Self {
        CheckpointError::Io { path: path.to_owned(), source }
    }

    pub(crate) fn not_a_model(path: &Path, reason: impl Into<String>) -> Self {
        CheckpointError::NotAModel { path: path.to_owned(), reason: reason.into() }
    }

    pub(crate) fn malformed(file: &Path, field: impl Into<String>, problem: impl Into<String>) -> Self {
        CheckpointError::Malformed { file: file.to_owned(), field: field.into(), problem: problem.into() }
    }

    pub(crate) fn unsupported(
        file: &Path,
        field: impl Into<String>,
        found: impl Into<String>,
        supported: impl Into<String>,
    ) -> Self {
        CheckpointError::Unsupported {
            file: file.to_owned(),
            field: field.into(),
            found: found.into(),
            supported: supported.into(),
        }
    }
}

/// A text out of a file, fit for a message: what cannot be printed is escaped, and what is too long is cut.
pub(crate) fn shown(name: &str) -> String {
    const MOST: usize = 160;
    let mut text = String::new();
    for (count, character) in name.chars().enumerate() {
        match character {
            _ if count == MOST => {
                text.push('…');
                break;
            }
            '"' | '\'' | '\\' => text.push(character),
            _ => text.extend(character.escape_debug()),
        }
    }
    text
}
