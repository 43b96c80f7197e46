//! The error of opening a model.

use penstock_checkpoint::{CheckpointError, WriteError};
use penstock_device::DeviceError;
use penstock_models::ModelError;
use penstock_types::FieldError;

/// A model cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// A field of the configuration or an environment variable has a value that is not allowed.
    #[error(transparent)]
    Config(#[from] FieldError),
    /// The files cannot be read.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// The model is not supported or its configuration is invalid.
    #[error(transparent)]
    Model(ModelError),
    /// The memory is not sufficient.
    #[error("{0}")]
    OutOfMemory(String),
    /// The progress callback cancelled the load.
    #[error("loading was cancelled")]
    Cancelled,
    /// A converted model cannot be written.
    #[error(transparent)]
    Write(WriteError),
    /// The device of the configuration cannot be used.
    #[error("{0}")]
    DeviceUnavailable(String),
    /// A thread or the device cannot be started.
    #[error("the engine could not be started: {0}")]
    Start(String),
}

impl From<ModelError> for LaunchError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Checkpoint(error) => Self::Checkpoint(error),
            ModelError::Device(error) => error.into(),
            ModelError::Cancelled => Self::Cancelled,
            ModelError::Option(error) => Self::Config(error),
            ModelError::Write(error) => Self::Write(error),
            other => Self::Model(other),
        }
    }
}

impl From<DeviceError> for LaunchError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Exhausted(_) | DeviceError::OutOfMemory { .. } => {
                Self::OutOfMemory(error.to_string())
            }
            DeviceError::Start(reason) | DeviceError::Lost(reason) => Self::Start(reason),
            DeviceError::InvalidStep(_) => Self::Start(error.to_string()),
        }
    }
}
