//! The errors of reading a configuration and loading a model.

/// The model is not supported or cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// No family has this architecture.
    #[error("architecture {found} is not supported; supported are {supported}")]
    UnknownArchitecture { found: String, supported: String },
    /// A required field is missing.
    #[error("config: {field} is missing")]
    Missing { field: String },
    /// A field has a value that is not allowed.
    #[error("config: {field}={value} is not allowed: it must be {limit}")]
    Field {
        field: String,
        value: String,
        /// The allowed values; completes the sentence "it must be ...".
        limit: String,
    },
    /// An overridden field has no effect.
    #[error("config: {field} has no effect: the configuration of this {architecture} does not read it")]
    NotRead { architecture: String, field: String },
    /// The shape of a tensor does not match the configuration.
    #[error("tensor {tensor} has shape {found:?}; the configuration requires {expected:?}")]
    Shape { tensor: String, found: Vec<usize>, expected: Vec<usize> },
    /// A module of an adapter cannot be used.
    #[error("{module} of the adapter {problem}")]
    Adapter { module: String, problem: String },
    /// An adapter takes more memory than there is for all adapters.
    #[error("the adapter needs {bytes} bytes on the device; adapter_cache_bytes is {limit}")]
    AdapterSize { bytes: u64, limit: u64 },
    /// The system refuses the memory of an adapter.
    #[error("the system has not {bytes} bytes of memory for the adapter")]
    AdapterMemory { bytes: usize },
    /// A tensor cannot be read.
    #[error(transparent)]
    Checkpoint(#[from] penstock_checkpoint::CheckpointError),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] penstock_device::DeviceError),
    /// An option contradicts the files.
    #[error(transparent)]
    Option(#[from] penstock_types::FieldError),
    /// A converted model cannot be written.
    #[error(transparent)]
    Write(#[from] penstock_checkpoint::WriteError),
    /// The progress callback cancelled the load.
    #[error("loading was cancelled")]
    Cancelled,
}

impl ModelError {
    /// The path of the field of the configuration that is not valid.
    pub fn field(&self) -> Option<&str> {
        match self {
            Self::Missing { field } | Self::Field { field, .. } | Self::NotRead { field, .. } => Some(field),
            _ => None,
        }
    }
}
