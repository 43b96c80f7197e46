//! Conversion of a model: opens the backend and resolves the formats, as a launch does.

use std::path::Path;

use penstock_checkpoint::{Checkpoint, ConvertedWriter, WriteError};
use penstock_models::{ConvertOptions, ModelError, ProgressCallback, WeightFormats};
use penstock_types::FieldError;

use crate::launch::model_config;
use crate::{Host, LaunchConfig, LaunchError, backend};

/// Writes a converted model with the `dtype` and the `quantization` of a configuration. Nothing is left behind on
/// failure.
pub fn convert(
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
    host: &Host,
    output: &Path,
    overwrite: bool,
    progress: ProgressCallback<'_>,
) -> Result<(), LaunchError> {
    let options = &config.options;
    options.check()?;
    let (backend, _) = backend::open_cpu(config, host.device())?;
    let model = model_config(checkpoint, options)?;
    let dtype = options.dtype.0.unwrap_or_else(|| checkpoint.dtype());
    let formats = WeightFormats::new(&backend, checkpoint, &model, dtype, &options.quantization)?;
    let quantization = &options.quantization.to_string();
    let options = ConvertOptions { output, overwrite, dtype, quantization };
    penstock_models::convert(&backend, checkpoint, &model, &formats, options, progress).map_err(output_error)
}

/// Checks that a converted model may be written to `output`.
pub fn check_output(output: &Path, overwrite: bool) -> Result<(), LaunchError> {
    ConvertedWriter::check_output(output, overwrite).map_err(|error| output_error(error.into()))
}

fn output_error(error: ModelError) -> LaunchError {
    match error {
        ModelError::Write(WriteError::Refused { path, limit }) => {
            LaunchError::Config(FieldError::new("output", path.display(), limit))
        }
        error => error.into(),
    }
}
