//! Converted models: weights that are packed for a backend, used where they are mapped.
//!
//! ```text
//! model.penstock        msgpack: configuration, tokenizer, chat templates, the matrices, the checksums of the weights
//! weights.safetensors   a tensor of bytes for each packed matrix, a tensor of float32 for each vector
//! ```
//!
//! A converted model is a directory with these files, or one uncompressed tar archive of them. The tensors of the
//! weights begin at multiples of 64 bytes of the file, and files at multiples of 512 bytes of an archive.

mod archive;
mod checksum;
mod graph;
mod writer;

use std::mem::take;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use bytes::Bytes;

use crate::checkpoint::Checkpoint;
use crate::error::{CheckpointError, shown};
use crate::mapped::MappedFile;
use crate::safetensors::{self, HeaderBytes};
use crate::tensor::StoredType;
use crate::text_files::{FileFormat, TextFiles};
pub(crate) use graph::Converted;
use graph::Graph;
pub use graph::{Conversion, FusedMatrix, FusedPart};
pub use writer::{ConvertedWriter, NewTensor, WriteError};

/// The file that makes a directory a converted model.
pub(crate) const GRAPH: &str = "model.penstock";
const WEIGHTS: &str = "weights.safetensors";
const NOT_CONVERTED: &str = "is not a converted model; `penstock convert` writes one";

/// Whether a directory is a converted model.
pub(crate) fn is_converted(directory: &Path) -> bool {
    directory.join(GRAPH).exists()
}

/// Whether a file begins as an archive does.
pub(crate) fn is_archive(file: &MappedFile) -> bool {
    archive::has_magic(file.bytes())
}

/// Opens a directory.
pub(crate) fn open(path: &Path) -> Result<Checkpoint, CheckpointError> {
    let graph = MappedFile::open(&path.join(GRAPH))?;
    assemble(path, &graph, MappedFile::open(&path.join(WEIGHTS))?)
}

/// Opens an archive.
pub(crate) fn open_archive(file: &MappedFile) -> Result<Checkpoint, CheckpointError> {
    let [graph, weights] = archive::members(file, [GRAPH, WEIGHTS])?;
    assemble(file.path(), &graph, weights)
}

/// Reads the text files of a directory.
pub(crate) fn open_text(path: &Path) -> Result<TextFiles, CheckpointError> {
    let graph = MappedFile::open(&path.join(GRAPH))?;
    Ok(text_files(path, &mut graph::read(&graph)?))
}

/// Reads the text files of an archive.
pub(crate) fn open_archive_text(file: &MappedFile) -> Result<TextFiles, CheckpointError> {
    let [graph] = archive::members(file, [GRAPH])?;
    Ok(text_files(file.path(), &mut graph::read(&graph)?))
}

fn assemble(path: &Path, graph: &MappedFile, weights: MappedFile) -> Result<Checkpoint, CheckpointError> {
    let mut graph = graph::read(graph)?;
    if graph.weights.bytes != weights.bytes().len() as u64 {
        let problem =
            format!("{} bytes; the conversion wrote {}", weights.bytes().len(), graph.weights.bytes);
        return Err(CheckpointError::malformed(weights.path(), "size", problem));
    }
    for (name, matrix) in &graph.conversion.matrices {
        let tensors: Vec<_> = matrix.parts.iter().map(|part| part.tensor.clone()).collect();
        let parts = FusedMatrix::name(&tensors);
        if *name != parts {
            let field = format!("matrix {}", shown(name));
            return Err(CheckpointError::malformed(path, field, format!("its parts are {}", shown(&parts))));
        }
    }
    let tensors = safetensors::tensors(&weights, 0, &mut HeaderBytes::default())?;
    Ok(Checkpoint {
        text: text_files(path, &mut graph),
        files: vec![weights],
        tensors,
        quantization: Some(graph.conversion.quantization.clone()),
        config: graph.config.into(),
        converted: Some(Converted {
            conversion: graph.conversion,
            writer_version: graph.penstock,
            checksums: graph.weights.checksums,
            is_verified: AtomicBool::new(false),
        }),
    })
}

/// Takes the text files out of the graph.
fn text_files(path: &Path, graph: &mut Graph) -> TextFiles {
    TextFiles {
        path: path.to_owned(),
        format: FileFormat::Converted(graph::VERSION),
        generation: take(&mut graph.generation),
        tokenizer: graph.tokenizer.take(),
        special_tokens: take(&mut graph.special_tokens),
        added_tokens: take(&mut graph.added_tokens),
        chat_templates: take(&mut graph.chat_templates),
        embedding: take(&mut graph.embedding),
    }
}

impl Checkpoint {
    /// The properties of a converted model; `None` for any other.
    pub fn conversion(&self) -> Option<&Conversion> {
        self.converted.as_ref().map(|converted| &converted.conversion)
    }

    /// The version of Penstock that wrote a converted model; `None` for any other.
    pub fn writer_version(&self) -> Option<&str> {
        self.converted.as_ref().map(|converted| converted.writer_version.as_str())
    }

    /// Whether the files are mapped, not in memory.
    pub fn is_mapped(&self) -> bool {
        self.files.iter().any(MappedFile::is_mapped)
    }

    /// Compares the weights of a converted model with their checksums, on `threads` threads. The first call reads all
    /// weights. `proceed` is called between chunks; `Break` ends the comparison.
    pub fn verify(
        &self,
        threads: usize,
        proceed: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>, CheckpointError> {
        match &self.converted {
            Some(converted) if !converted.is_verified.load(Relaxed) => {
                let flow = checksum::verify(&self.files[0], &converted.checksums, threads, proceed)?;
                converted.is_verified.store(flow.is_continue(), Relaxed);
                Ok(flow)
            }
            _ => Ok(ControlFlow::Continue(())),
        }
    }

    /// The packed bytes of a fused matrix of a converted model.
    ///
    /// # Errors
    /// If there is no such matrix, or it has other tensors or another number of columns.
    pub fn packed_matrix(
        &self,
        tensors: &[String],
        rows: &[usize],
        columns: usize,
    ) -> Result<Bytes, CheckpointError> {
        let name = FusedMatrix::name(tensors);
        let missing = || CheckpointError::MissingTensor { path: self.path().to_owned(), name: shown(&name) };
        let malformed = |problem| CheckpointError::malformed(self.path(), format!("matrix {name}"), problem);
        let matrix = self.conversion().and_then(|conversion| conversion.matrices.get(&name));
        let matrix = matrix.ok_or_else(missing)?;
        let entry = self.tensors.get(&name).ok_or_else(missing)?;
        let stored: Vec<usize> = matrix.parts.iter().map(|part| part.rows).collect();
        if stored != rows || matrix.columns != columns {
            return Err(malformed(format!(
                "rows {stored:?} of {} columns; the configuration requires {rows:?} of {columns}",
                matrix.columns
            )));
        }
        if !matches!(entry.stored, StoredType::Other("U8")) {
            return Err(malformed(format!("type {}; U8 is expected", entry.stored)));
        }
        Ok(self.files[0].share(entry.at.range.clone()))
    }
}
