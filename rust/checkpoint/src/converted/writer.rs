//! Writes a converted model to a temporary directory or file beside the output, then renames it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, ErrorKind, Write};
#[cfg(unix)]
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::json;

use super::checksum::Checksums;
use super::graph::{self, Conversion, Graph};
use super::{GRAPH, WEIGHTS, archive};
use crate::checkpoint::Checkpoint;
use crate::mapped::MappedFile;

/// The file is closed when nothing is left to write.
const OPEN: &str = "the file is open while it is written; this is a bug";
/// Tensors start at multiples of this size.
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
    /// The output exists or has the name of another format. `limit` completes the sentence "it must be ...".
    #[error("{}: must be {limit}", path.display())]
    Refused { path: PathBuf, limit: &'static str },
    /// An error of the operating system.
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
}

/// Writes a converted model. Dropping an unfinished writer removes its files.
pub struct ConvertedWriter {
    output: PathBuf,
    temporary: PathBuf,
    overwrite: bool,
    is_archive: bool,
    /// The file that is written; `None` after the last one.
    file: Option<File>,
    /// The path of `file`.
    path: PathBuf,
    checksums: Checksums,
    /// Bytes of the weights.
    size: u64,
    /// Bytes of the weights written so far.
    written: u64,
}

/// The number in the next temporary name.
static NEXT: AtomicU32 = AtomicU32::new(0);

impl ConvertedWriter {
    /// Checks that `output` may be written: only a converted model without other files is replaced, and no directory is
    /// named like a file of another format.
    pub fn check_output(output: &Path, overwrite: bool) -> Result<(), WriteError> {
        let suffix = output.extension().unwrap_or_default();
        if OTHER_FORMATS.iter().any(|other| suffix.eq_ignore_ascii_case(other)) {
            return Err(refused(output, OWN_FORMAT));
        }
        if output.symlink_metadata().is_err() {
            return Ok(());
        }
        if !overwrite {
            return Err(refused(output, NEW_OUTPUT));
        }
        let is_model = if is_archive(output) {
            MappedFile::open(output).is_ok_and(|file| archive::members(&file, [GRAPH, WEIGHTS]).is_ok())
        } else {
            super::is_converted(output) && has_only_own_files(output)
        };
        if is_model {
            Ok(())
        } else {
            Err(refused(output, "a new path or a converted model without other files"))
        }
    }

    /// Starts to write `tensors` to the directory `output`, or to an archive if its name ends with `.tar`.
    pub fn create(output: &Path, overwrite: bool, tensors: &[NewTensor]) -> Result<Self, WriteError> {
        let is_archive = is_archive(output);
        Self::check_output(output, overwrite)?;
        let parent = parent(output);
        let at = |path: &Path, source| WriteError::Io { path: path.to_owned(), source };
        fs::create_dir_all(parent).map_err(|source| at(parent, source))?;
        let temporary = create_new(parent, output, "tmp", |path| {
            if is_archive { File::create_new(path).map(drop) } else { create_dir(path) }
        })?;
        let header = header(tensors);
        let size = header.len() as u64 + tensors.iter().map(NewTensor::bytes).sum::<u64>();
        let path = if is_archive { temporary.clone() } else { temporary.join(WEIGHTS) };
        let file = match create_file(&path) {
            Ok(file) => file,
            Err(source) => {
                let _ = if is_archive { fs::remove_file(&temporary) } else { fs::remove_dir(&temporary) };
                return Err(at(&path, source));
            }
        };
        let mut new = Self {
            output: output.to_owned(),
            temporary,
            overwrite,
            is_archive,
            file: Some(file),
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
        let written = self.file.as_mut().expect(OPEN).write_all(bytes);
        written.map_err(|source| self.failed(source))
    }

    fn failed(&self, source: io::Error) -> WriteError {
        WriteError::Io { path: self.path.clone(), source }
    }

    /// Writes the graph and renames the model to the output.
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
            generation: source.text.generation.clone(),
            tokenizer: source.text.tokenizer.clone(),
            special_tokens: source.text.special_tokens.clone(),
            added_tokens: source.text.added_tokens.clone(),
            chat_templates: source.text.chat_templates.clone(),
            embedding: source.text.embedding.clone(),
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
            self.file = Some(create_file(&self.path).map_err(|source| self.failed(source))?);
            self.write_raw(&graph)?;
        }
        self.sync()?;
        self.file = None; // Windows renames no directory with an open file
        self.publish()
    }

    fn sync(&self) -> Result<(), WriteError> {
        self.file.as_ref().expect(OPEN).sync_all().map_err(|source| self.failed(source))
    }

    /// Renames the temporary directory or file to the output. An existing output directory is renamed first, because a
    /// rename cannot replace it.
    fn publish(&self) -> Result<(), WriteError> {
        Self::check_output(&self.output, self.overwrite)?;
        let failed = |source| WriteError::Io { path: self.output.clone(), source };
        let parent = parent(&self.output);
        let mut previous = None;
        if !self.is_archive && self.output.exists() {
            let name = create_new(parent, &self.output, "old", |path| fs::create_dir(path))?;
            if let Err(source) = fs::rename(&self.output, &name) {
                let _ = fs::remove_dir(&name);
                return Err(failed(source));
            }
            previous = Some(name);
        }
        let renamed = if self.is_archive && !self.overwrite {
            // A hard link fails if the output was created in the meantime; a rename would replace it. Not all file
            // systems support hard links.
            match fs::hard_link(&self.temporary, &self.output) {
                Err(error) if error.kind() != ErrorKind::AlreadyExists => {
                    fs::rename(&self.temporary, &self.output)
                }
                linked => linked,
            }
        } else {
            fs::rename(&self.temporary, &self.output)
        };
        if let Err(source) = renamed {
            if let Some(previous) = &previous {
                let _ = fs::rename(previous, &self.output);
            }
            let exists = matches!(source.kind(), ErrorKind::AlreadyExists | ErrorKind::DirectoryNotEmpty);
            return Err(if exists { refused(&self.output, NEW_OUTPUT) } else { failed(source) });
        }
        if let Some(previous) = previous {
            let _ = fs::remove_dir_all(previous);
        }
        if let Ok(directory) = File::open(parent) {
            let _ = directory.sync_all();
        }
        Ok(())
    }
}

/// Creates a directory that only its owner may write to. The weights are used as they are in the files.
fn create_dir(path: &Path) -> io::Result<()> {
    #[cfg_attr(windows, expect(unused_mut, reason = "the mode is that of Unix"))]
    let mut builder = DirBuilder::new();
    #[cfg(unix)]
    builder.mode(0o755);
    builder.create(path)
}

/// Creates a file that only its owner may write to, or empties one.
fn create_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    options.mode(0o644);
    options.open(path)
}

impl Drop for ConvertedWriter {
    /// Removes the temporary directory or file if it was not renamed.
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

/// Creates a file or directory with a new name beside `output`. Existing names, such as those left by a killed process,
/// are skipped.
fn create_new(
    parent: &Path,
    output: &Path,
    kind: &str,
    create: impl Fn(&Path) -> io::Result<()>,
) -> Result<PathBuf, WriteError> {
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = parent.join(format!(".{name}.{}-{number}.{kind}", std::process::id()));
        match create(&path) {
            Ok(()) => return Ok(path),
            Err(source) if source.kind() == ErrorKind::AlreadyExists => {}
            Err(source) => return Err(WriteError::Io { path, source }),
        }
    }
}

/// Suffixes of model files that are not written.
const OTHER_FORMATS: [&str; 5] = ["gguf", "safetensors", "bin", "pt", "pth"];
const OWN_FORMAT: &str = "a new directory, or an archive that ends with .tar: a converted model is in penstock's own \
                          format, and files of other formats are not written";
const NEW_OUTPUT: &str = "a new path, or a converted model with overwrite=True (--overwrite)";

fn refused(output: &Path, limit: &'static str) -> WriteError {
    WriteError::Refused { path: output.to_owned(), limit }
}

fn has_only_own_files(directory: &Path) -> bool {
    directory.read_dir().is_ok_and(|mut entries| {
        entries.all(|entry| {
            entry.is_ok_and(|entry| [GRAPH, WEIGHTS].iter().any(|name| entry.file_name() == *name))
        })
    })
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
