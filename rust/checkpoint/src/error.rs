//! Errors of checkpoints.

use std::io;
use std::path::{Path, PathBuf};

/// The reason why a checkpoint, or a part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// An error of the operating system.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    /// The path is not a model. The reason says what is missing.
    #[error("{}: {reason}", path.display())]
    NotAModel { path: PathBuf, reason: String },
    /// A file violates its format.
    #[error("{}: {field}: {problem}", file.display())]
    Malformed { file: PathBuf, field: String, problem: String },
    /// A valid file uses an unsupported feature.
    #[error("{}: {field} is {found}; supported: {supported}", file.display())]
    Unsupported { file: PathBuf, field: String, found: String, supported: String },
    /// The checkpoint does not contain a tensor of the model.
    #[error("{}: there is no tensor named {name}", path.display())]
    MissingTensor { path: PathBuf, name: String },
}

/// The probable cause of a file that is shorter than its header says, or that ends in the middle of a JSON value.
pub const TRUNCATED: &str = "the file is truncated or damaged; download it again";

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

/// A string from a file, made printable for a message: special characters are escaped, long strings are truncated.
pub(crate) fn shown(name: &str) -> String {
    const MAX_CHARS: usize = 160;
    let mut text = String::new();
    for (count, character) in name.chars().enumerate() {
        match character {
            _ if count == MAX_CHARS => {
                text.push('…');
                break;
            }
            '"' | '\'' | '\\' => text.push(character),
            _ => text.extend(character.escape_debug()),
        }
    }
    text
}
