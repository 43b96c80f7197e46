//! `convert` and `check_output`: conversion of a model.

use std::path::PathBuf;

use penstock_checkpoint::Checkpoint;
use pyo3::prelude::*;

use crate::classes::PyEngineConfig;
use crate::detach::detach;
use crate::errors::Error;
use crate::host::Host;
use crate::load_progress::LoadProgress;
use crate::logs;

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (output, *, overwrite = false))]
pub fn check_output(py: Python<'_>, output: PathBuf, overwrite: bool) -> Result<(), Error> {
    Ok(detach(py, || penstock_runner::check_output(&output, overwrite))??)
}

/// See `_core.pyi`.
#[pyfunction]
#[pyo3(signature = (path, output, config, host, *, overwrite = false, progress = None))]
pub fn convert(
    py: Python<'_>,
    path: PathBuf,
    output: PathBuf,
    config: &PyEngineConfig,
    host: &Host,
    overwrite: bool,
    progress: Option<Py<PyAny>>,
) -> Result<(), Error> {
    let host = host.inner()?;
    logs::listen(py)?;
    let config = config.with_environment(Vec::new())?;
    let converted = LoadProgress::new(progress).run(py, |report| {
        let checkpoint = Checkpoint::open(&path)?;
        Ok(penstock_runner::convert(&checkpoint, &config, host, &output, overwrite, report)?)
    });
    logs::drain(py)?;
    converted
}
