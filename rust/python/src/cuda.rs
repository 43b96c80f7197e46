//! `cuda_info` and `resolve_device`: CUDA as the process finds it.

use std::path::PathBuf;
use std::sync::Arc;

use penstock_runner::CudaSettings;
use pyo3::prelude::*;

use crate::classes::{PyCudaInfo, PyEngineConfig};
use crate::detach::detach;
use crate::errors::Error;
use crate::logs;

/// See `_core.pyi`.
#[pyfunction]
pub fn cuda_info(py: Python<'_>, cuda_folders: Vec<PathBuf>) -> Result<PyCudaInfo, Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    Ok(PyCudaInfo(Arc::new(detach(py, || settings.info())?)))
}

/// See `_core.pyi`.
#[pyfunction]
pub fn resolve_device(
    py: Python<'_>,
    config: &PyEngineConfig,
    cuda_folders: Vec<PathBuf>,
) -> Result<String, Error> {
    let settings = CudaSettings::from_environment(cuda_folders);
    logs::listen(py)?;
    let device = config.config.device;
    Ok(detach(py, || penstock_runner::resolve_device(device, &settings))??.to_string())
}
