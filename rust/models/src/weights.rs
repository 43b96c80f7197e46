//! Loads the weights of a decoder: packs the tensors of a checkpoint, or uses the packed matrices of a converted model.

use std::ops::ControlFlow;

use penstock_checkpoint::{Checkpoint, CheckpointError, FusedMatrix, Tensor};
use penstock_device::packed::PackedRows;
use penstock_device::{Allocation, Backend, MatrixPart, WeightSource};
use penstock_types::WeightFormat;

use crate::blocks::{Fused, Tensors};
use crate::config::ModelConfig;
use crate::decoder::Decoder;
use crate::error::ModelError;
use crate::formats::{Residence, WeightFormats};
use crate::model::{EMBEDDING, HEAD, Model, weights_of};
use crate::packing::{Run, parts, runs, weight_bytes};
use crate::stacked::Stacked;

/// Called with the loaded and the total bytes of packed weights; `Break` cancels the load.
pub type ProgressCallback<'a> = &'a mut dyn FnMut(u64, u64) -> ControlFlow<()>;

/// Loads every weight of `config` from `checkpoint` onto `backend`, matrices in `formats`.
///
/// The shape of a tensor is checked against the configuration before it is read, and the weights of a converted model
/// against their checksums on `threads` threads.
pub fn load<B: Backend>(
    backend: &mut B,
    checkpoint: &Checkpoint,
    config: ModelConfig,
    formats: &WeightFormats,
    threads: usize,
    progress: ProgressCallback<'_>,
) -> Result<Decoder<B>, ModelError> {
    let total = weight_bytes(backend, &config, formats).total();
    let mut loader = Loader { backend, checkpoint, formats, progress, done: 0, total };
    loader.advance(0)?;
    if checkpoint.verify(threads, &mut || (loader.progress)(0, total))?.is_break() {
        return Err(ModelError::Cancelled);
    }
    warn_of_unused_head(checkpoint, &config);
    let weights = Model::declare(&mut loader, &config)?;
    Ok(Decoder::new(config, weights))
}

/// Checks that a checkpoint has all tensors of `config` with its shapes, without reading them. The matrices of a
/// converted model are checked when it is loaded.
pub fn check_tensors(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<(), ModelError> {
    if checkpoint.conversion().is_some() {
        return Ok(());
    }
    for Fused { names, rows, columns, .. } in weights_of(config) {
        for (name, rows) in names.iter().zip(rows) {
            let shape: Vec<usize> = [rows].into_iter().chain(columns).collect();
            tensor(checkpoint, name, &shape)?;
        }
    }
    Ok(())
}

/// Warns if the embedding is the head and the file has a head with other values. The head of a converted model is that
/// of its embedding.
pub(crate) fn warn_of_unused_head(checkpoint: &Checkpoint, config: &ModelConfig) {
    if !config.tied_head || checkpoint.conversion().is_some() || !checkpoint.has(HEAD) {
        return;
    }
    let (Ok(head), Ok(embedding)) = (checkpoint.tensor(HEAD), checkpoint.tensor(EMBEDDING)) else { return };
    if !is_equal(&head, &embedding) {
        log::warn!(
            "{}: {HEAD} is not used: tie_word_embeddings is true, but its values are not those of {EMBEDDING}. Set \
             tie_word_embeddings=False in config_overrides to use it.",
            checkpoint.path().display()
        );
    }
}

/// Whether two matrices have the same values. Reads them up to the first row that differs.
fn is_equal(one: &Tensor<'_>, other: &Tensor<'_>) -> bool {
    if one.shape() != other.shape() {
        return false;
    }
    let mut rows = [vec![0.0; one.columns()], vec![0.0; one.columns()]];
    let equal = (0..one.rows()).all(|row| {
        let [left, right] = &mut rows;
        one.read_rows(row..row + 1, left);
        other.read_rows(row..row + 1, right);
        left == right
    });
    one.release();
    equal
}

struct Loader<'a, B: Backend> {
    backend: &'a mut B,
    checkpoint: &'a Checkpoint,
    formats: &'a WeightFormats,
    progress: ProgressCallback<'a>,
    done: u64,
    total: u64,
}

impl<B: Backend> Loader<'_, B> {
    fn pack(&mut self, fused: &Fused, columns: usize, runs: &[Run]) -> Result<B::Matrix, ModelError> {
        let sources = sources(self.checkpoint, fused, columns, runs)?;
        let parts: Vec<_> =
            sources.iter().zip(runs).map(|(source, run)| MatrixPart { source, format: run.format }).collect();
        let matrix = self.backend.load_matrix(&parts)?;
        sources.iter().flat_map(|source| &source.tensors).for_each(Tensor::release);
        Ok(matrix)
    }

    /// A matrix of a converted model.
    fn converted(
        &mut self,
        fused: &Fused,
        columns: usize,
        sizes: &[(usize, WeightFormat)],
    ) -> Result<B::Matrix, ModelError> {
        let bytes = self.checkpoint.packed_matrix(&fused.names, &fused.rows, columns)?;
        let malformed = || {
            let problem =
                format!("{} bytes, which is not the size of {sizes:?} of {columns} columns", bytes.len());
            let field = format!("matrix {}", FusedMatrix::name(&fused.names));
            let file = self.checkpoint.path().to_owned();
            CheckpointError::Malformed { file, field, problem }
        };
        if self.formats.residence() == Residence::Repacked {
            let sources = PackedRows::parts(columns, sizes, &bytes).ok_or_else(malformed)?;
            let parts: Vec<_> =
                sources.iter().map(|source| MatrixPart { source, format: source.format() }).collect();
            return Ok(self.backend.load_matrix(&parts)?);
        }
        let size = |(rows, format): &(usize, _)| self.backend.packed_bytes(columns, *rows, *format);
        if bytes.len() as u64 != sizes.iter().map(size).sum::<u64>() {
            return Err(malformed().into());
        }
        Ok(self.backend.map_matrix(columns, sizes, bytes)?)
    }

    fn advance(&mut self, bytes: u64) -> Result<(), ModelError> {
        self.done += bytes;
        match (self.progress)(self.done, self.total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ModelError::Cancelled),
        }
    }
}

impl<B: Backend> Tensors for Loader<'_, B> {
    type Matrix = B::Matrix;
    type Vector = B::Vector;
    type Error = ModelError;

    fn matrix(&mut self, fused: Fused) -> Result<B::Matrix, ModelError> {
        let columns = fused.columns.expect("a matrix has columns; this is a bug");
        let runs = runs(&*self.backend, &fused, columns, self.formats);
        let sizes = parts(&runs, &fused.rows);
        let matrix = match self.checkpoint.conversion() {
            Some(_) => self.converted(&fused, columns, &sizes)?,
            None => self.pack(&fused, columns, &runs)?,
        };
        self.advance(self.backend.bytes(Allocation::Matrix { columns, parts: &sizes }))?;
        Ok(matrix)
    }

    fn vector(&mut self, fused: Fused) -> Result<B::Vector, ModelError> {
        let values = vector(self.checkpoint, &fused)?;
        let vector = self.backend.load_vector(&values)?;
        self.advance(self.backend.bytes(Allocation::Floats(values.len())))?;
        Ok(vector)
    }
}

/// The tensors of each run of a matrix, with the shapes that the configuration requires.
pub(crate) fn sources<'a>(
    checkpoint: &'a Checkpoint,
    fused: &Fused,
    columns: usize,
    runs: &[Run],
) -> Result<Vec<Stacked<'a>>, ModelError> {
    let tensors = fused
        .names
        .iter()
        .zip(&fused.rows)
        .map(|(name, rows)| tensor(checkpoint, name, &[*rows, columns]))
        .collect::<Result<Vec<_>, _>>()?;
    let stacked = |run: &Run| Stacked {
        tensors: tensors[run.parts.clone()].to_vec(),
        rows: fused.rows[run.parts.clone()].to_vec(),
        columns,
    };
    Ok(runs.iter().map(stacked).collect())
}

/// The values of a vector. A converted model stores a fused vector as one tensor.
pub(crate) fn vector(checkpoint: &Checkpoint, fused: &Fused) -> Result<Vec<f32>, ModelError> {
    let mut values = vec![0.0; fused.len()];
    if checkpoint.conversion().is_some() {
        let name = FusedMatrix::name(&fused.names);
        tensor(checkpoint, &name, &[fused.len()])?.read_rows(0..1, &mut values);
        return Ok(values);
    }
    let mut rest = &mut values[..];
    for (name, rows) in fused.names.iter().zip(&fused.rows) {
        let (part, others) = rest.split_at_mut(*rows);
        tensor(checkpoint, name, &[*rows])?.read_rows(0..1, part);
        rest = others;
    }
    Ok(values)
}

fn tensor<'a>(checkpoint: &'a Checkpoint, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
    let tensor = checkpoint.tensor(name)?;
    if tensor.shape() != shape {
        let found = tensor.shape().to_vec();
        return Err(ModelError::Shape { tensor: name.to_owned(), found, expected: shape.to_vec() });
    }
    Ok(tensor)
}
