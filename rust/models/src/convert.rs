//! Writes a converted model: packs each matrix of a checkpoint, a range of rows at a time.

use std::ops::ControlFlow;
use std::path::Path;

use penstock_checkpoint::{
    Checkpoint, CheckpointError, Conversion, ConvertedWriter, FusedMatrix, FusedPart, NewTensor, Tensor,
};
use penstock_device::{Load, MatrixPart, RowSource};
use penstock_types::Dtype;

use crate::blocks::Fused;
use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::formats::WeightFormats;
use crate::model::weights_of;
use crate::packing::runs;
use crate::stacked::Slice;
use crate::weights::{ProgressCallback, sources, vector, warn_of_unused_head};

/// Minimum of packed bytes that are written at once, except at the end of a matrix.
const WRITTEN_AT_ONCE: u64 = 8 << 20;

/// The properties of a conversion.
#[derive(Clone, Copy, Debug)]
pub struct ConvertOptions<'a> {
    /// The directory, or the archive if it ends with `.tar`.
    pub output: &'a Path,
    /// Replace a converted model.
    pub overwrite: bool,
    /// The type of the matrices that are not quantised.
    pub dtype: Dtype,
    /// The requested quantisation, for messages.
    pub quantization: &'a str,
}

/// Writes the weights of `config` from `checkpoint`, packed for `backend`, with the texts of the checkpoint.
pub fn convert<B: Load>(
    backend: &B,
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    formats: &WeightFormats,
    options: ConvertOptions<'_>,
    progress: ProgressCallback<'_>,
) -> Result<(), ModelError> {
    if checkpoint.conversion().is_some() {
        let path = checkpoint.path().to_owned();
        let reason = "is converted already; convert the original model".to_owned();
        return Err(CheckpointError::NotAModel { path, reason }.into());
    }
    warn_of_unused_head(checkpoint, config);
    let weights = weights_of(config);
    let mut conversion = Conversion {
        layout: backend.packed_layout().name.to_owned(),
        dtype: options.dtype,
        quantization: options.quantization.to_owned(),
        matrices: Default::default(),
    };
    let mut tensors = Vec::new();
    for fused in &weights {
        let name = FusedMatrix::name(&fused.names);
        tensors.push(match fused.columns {
            None => NewTensor::Vector { name, len: fused.len() },
            Some(columns) => {
                let (matrix, bytes) = plan(backend, fused, columns, formats);
                conversion.matrices.insert(name.clone(), matrix);
                NewTensor::Matrix { name, bytes }
            }
        });
    }
    let total = tensors.iter().map(NewTensor::bytes).sum();
    let mut done = 0;
    let mut advance = |bytes: usize| {
        done += bytes as u64;
        match progress(done, total) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(ModelError::Cancelled),
        }
    };
    advance(0)?;
    let mut writer = ConvertedWriter::create(options.output, options.overwrite, &tensors)?;
    let mut packed = Vec::new();
    for fused in &weights {
        let Some(columns) = fused.columns else {
            let bytes: Vec<u8> =
                vector(checkpoint, fused)?.iter().flat_map(|value| value.to_le_bytes()).collect();
            writer.write(&bytes)?;
            advance(bytes.len())?;
            continue;
        };
        let runs = runs(backend, fused, columns, formats);
        for (source, run) in sources(checkpoint, fused, columns, &runs)?.iter().zip(&runs) {
            let align = backend.packed_layout().rows;
            let least = backend.packed_bytes(columns, align, run.format).max(1);
            let step = align * WRITTEN_AT_ONCE.div_ceil(least) as usize;
            for start in (0..source.rows()).step_by(step) {
                let rows = start..source.rows().min(start + step);
                packed.resize(backend.packed_bytes(columns, rows.len(), run.format) as usize, 0);
                backend.pack(MatrixPart { source: &Slice { source, rows }, format: run.format }, &mut packed);
                writer.write(&packed)?;
                source.tensors.iter().for_each(Tensor::release);
                advance(packed.len())?;
            }
        }
    }
    writer.finish(checkpoint, conversion)?;
    Ok(())
}

/// The parts of a matrix and its packed bytes.
fn plan<B: Load>(backend: &B, fused: &Fused, columns: usize, formats: &WeightFormats) -> (FusedMatrix, u64) {
    let (mut parts, mut bytes) = (Vec::new(), 0);
    for run in runs(backend, fused, columns, formats) {
        let rows = &fused.rows[run.parts.clone()];
        bytes += backend.packed_bytes(columns, rows.iter().sum(), run.format);
        parts.extend(fused.names[run.parts.clone()].iter().zip(rows).map(|(tensor, rows)| FusedPart {
            tensor: tensor.clone(),
            rows: *rows,
            format: run.format,
        }));
    }
    (FusedMatrix { columns, parts }, bytes)
}
