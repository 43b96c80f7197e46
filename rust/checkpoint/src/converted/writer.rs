//! Writes a converted model: first into a temporary directory or file beside its place, which is then renamed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::checksum::Checksums;
use super::graph::{self, Conversion, Graph};
use super::{GRAPH, WEIGHTS, archive};
use crate::checkpoint::Checkpoint;

/// Tensors begin at a multiple of this.
const ALIGNMENT: usize = 64;

/// A tensor to write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewTensor {
    /// A packed matrix of this many bytes, a multiple of 64.
    Matrix { name: String, bytes: u64 },
    /// Float32 values. All vectors follow all matrices.
    Vector { name: String, len: usize },
}

impl NewTensor {
    /// The number of bytes.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Matrix { bytes, .. } => *bytes,
            Self::Vector { len, .. } => 4 * *len as u64,
        }
    }
}

/// A converted model cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The place is taken. `limit` completes the sentence "it must be ...".
    #[error("{}: must be {limit}", path.display())]
    Taken { path: PathBuf, limit: &'static str },
    /// An error of the operating system.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// A converted model that is being written. Dropped unfinished, it leaves nothing behind.
pub struct ConvertedWriter {
    output: PathBuf,
    temporary: PathBuf,
    overwrite: bool,
    is_archive: bool,
    file: File,
    /// The path of `file`.
    path: PathBuf,
    checksums: Checksums,
    /// Bytes of the weights, and how many of them are written.
    size: u64,
    written: u64,
}

/// The first free name for temporary files.
static NEXT: AtomicU32 = AtomicU32::new(0);

impl ConvertedWriter {
    /// Begins to write `tensors` to the directory `output`, or to an archive if its name ends with `.tar`.
    pub fn create(output: &Path, overwrite: bool, tensors: &[NewTensor]) -> Result<Self, WriteError> {
        let is_archive = is_archive(output);
        check_place(output, overwrite, is_archive)?;
        let parent = parent(output);
        let at = |path: &Path, source| WriteError::Io { path: path.to_owned(), source };
        fs::create_dir_all(parent).map_err(|source| at(parent, source))?;
        let temporary = free_name(parent, output, "tmp");
        let path = if is_archive {
            temporary.clone()
        } else {
            fs::create_dir(&temporary).map_err(|source| at(&temporary, source))?;
            temporary.join(WEIGHTS)
        };
        let header = header(tensors);
        let size = header.len() as u64 + tensors.iter().map(NewTensor::bytes).sum::<u64>();
        let created = File::create_new(&path);
        let file = match created {
            Ok(file) => file,
            Err(source) => {
                let _ = fs::remove_dir(&temporary);
                return Err(at(&path, source));
            }
        };
        let mut new = Self {
            output: output.to_owned(),
            temporary,
            overwrite,
            is_archive,
            file,
            path,
            checksums: Checksums::default(),
            size,
            written: 0,
        };
        if is_archive {
            new.write_raw(archive::header(WEIGHTS, size).as_bytes())?;
        }
        new.write(&header)?;
        Ok(new)
    }

    /// Writes the next bytes of the tensors, in their order.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        self.checksums.update(bytes);
        self.written += bytes.len() as u64;
        self.write_raw(bytes)
    }

    fn write_raw(&mut self, bytes: &[u8]) -> Result<(), WriteError> {
        let written = self.file.write_all(bytes);
        written.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> WriteError {
        WriteError::Io { path: self.path.clone(), source }
    }

    /// Writes the graph and puts the model in its place.
    ///
    /// # Panics
    /// If the tensors are not complete.
    pub fn finish(mut self, source: &Checkpoint, conversion: Conversion) -> Result<(), WriteError> {
        assert_eq!(self.written, self.size, "bytes of the tensors");
        let graph = graph::encode(&Graph {
            penstock: env!("CARGO_PKG_VERSION").to_owned(),
            conversion,
            weights: graph::Weights {
                bytes: self.size,
                checksums: std::mem::take(&mut self.checksums).finish(),
            },
            config: source.config.as_object().cloned().unwrap_or_default(),
            generation: source.generation.clone(),
            tokenizer: source.tokenizer.clone(),
            special_tokens: source.special_tokens.clone(),
            added_tokens: source.added_tokens.clone(),
            chat_templates: source.chat_templates.clone(),
        });
        if self.is_archive {
            self.write_raw(archive::padding(self.size))?;
            self.write_raw(archive::header(GRAPH, graph.len() as u64).as_bytes())?;
            self.write_raw(&graph)?;
            self.write_raw(archive::padding(graph.len() as u64))?;
            self.write_raw(&[0; 2 * archive::BLOCK])?;
        } else {
            self.sync()?;
            self.path = self.temporary.join(GRAPH);
            self.file = File::create_new(&self.path).map_err(|source| self.failed(source))?;
            self.write_raw(&graph)?;
        }
        self.sync()?;
        self.publish()
    }

    fn sync(&self) -> Result<(), WriteError> {
        self.file.sync_all().map_err(|source| self.failed(source))
    }

    /// Renames the temporary to the output. A directory that it replaces is renamed first, because directories cannot be
    /// exchanged.
    fn publish(&self) -> Result<(), WriteError> {
        check_place(&self.output, self.overwrite, self.is_archive)?;
        let failed = |source| WriteError::Io { path: self.output.clone(), source };
        let parent = parent(&self.output);
        let former =
            (!self.is_archive && self.output.exists()).then(|| free_name(parent, &self.output, "old"));
        if let Some(former) = &former {
            fs::rename(&self.output, former).map_err(failed)?;
        }
        if let Err(source) = fs::rename(&self.temporary, &self.output) {
            if let Some(former) = &former {
                let _ = fs::rename(former, &self.output);
            }
            return Err(failed(source));
        }
        if let Some(former) = former {
            let _ = fs::remove_dir_all(former);
        }
        if let Ok(directory) = File::open(parent) {
            let _ = directory.sync_all();
        }
        Ok(())
    }
}

impl Drop for ConvertedWriter {
    /// Removes the temporary; after `finish` there is none.
    fn drop(&mut self) {
        let _ = if self.is_archive {
            fs::remove_file(&self.temporary)
        } else {
            fs::remove_dir_all(&self.temporary)
        };
    }
}

/// Whether a path names an archive.
pub(crate) fn is_archive(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "tar")
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A name beside `output` that this process has not used.
fn free_name(parent: &Path, output: &Path, kind: &str) -> PathBuf {
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    parent.join(format!(".{name}.{}-{number}.{kind}", std::process::id()))
}

/// Whether `output` may be written: nothing else than a converted model is ever replaced.
fn check_place(output: &Path, overwrite: bool, is_archive: bool) -> Result<(), WriteError> {
    let Ok(metadata) = output.symlink_metadata() else { return Ok(()) };
    let limit = if !overwrite {
        "a new path, or a converted model with overwrite=True (--overwrite)"
    } else if is_archive && metadata.is_file() {
        return Ok(());
    } else if is_archive {
        "a new path or a regular file"
    } else if metadata.is_dir() && super::is_converted(output) {
        return Ok(());
    } else {
        "a new path or a converted model"
    };
    Err(WriteError::Taken { path: output.to_owned(), limit })
}

/// The header of the safetensors file, padded so that the data is aligned.
fn header(tensors: &[NewTensor]) -> Vec<u8> {
    let (mut fields, mut end) = (serde_json::Map::new(), 0);
    for tensor in tensors {
        let start = end;
        end += tensor.bytes();
        let (name, dtype, len) = match tensor {
            NewTensor::Matrix { name, bytes } => {
                assert!(bytes.is_multiple_of(ALIGNMENT as u64), "{tensor:?} is not a multiple of 64 bytes");
                (name, "U8", *bytes)
            }
            NewTensor::Vector { name, len } => (name, "F32", *len as u64),
        };
        let field = json!({"dtype": dtype, "shape": [len], "data_offsets": [start, end]});
        fields.insert(name.clone(), field);
    }
    let mut text = serde_json::Value::Object(fields).to_string().into_bytes();
    text.resize((8 + text.len()).next_multiple_of(ALIGNMENT) - 8, b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.extend_from_slice(&text);
    header
}
