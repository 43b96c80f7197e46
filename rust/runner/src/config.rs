//! [`LaunchConfig`]: the options of an engine, and the settings of the process.

use std::path::PathBuf;
#[cfg(feature = "testing")]
use std::time::Duration;

use penstock_types::EngineConfig;

use crate::CudaSettings;

/// The configuration of a launch. Only the environment of the process sets the fields beside the options.
#[derive(Clone, Debug, Default)]
pub struct LaunchConfig {
    /// The options of the engine.
    pub options: EngineConfig,
    /// Instruction set of the kernels; by default the best of the CPU.
    pub isa: Option<String>,
    /// Bytes of the available memory that `memory_ratio` does not count.
    pub memory_leftover_bytes: u64,
    /// The settings of CUDA.
    pub cuda: CudaSettings,
    /// The directory of the cache of packed weights.
    pub cache_directory: Option<PathBuf>,
    /// Failures for tests.
    #[cfg(feature = "testing")]
    pub faults: Faults,
}

impl From<EngineConfig> for LaunchConfig {
    fn from(options: EngineConfig) -> Self {
        Self { options, ..Self::default() }
    }
}

/// Failures for tests. Steps fail after their model has been submitted.
#[cfg(feature = "testing")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// A step panics if it computes this token, as far as the host knows its tokens.
    pub token: Option<u32>,
    /// A step panics if a row begins at this position.
    pub position: Option<u32>,
    /// A step that computes this token loses the device.
    pub losing_token: Option<u32>,
    /// Memory for the details of a row is refused from this number of values on.
    pub refused_details: Option<usize>,
    /// Steps wait this long for the masks of grammars, of which none is slow.
    pub mask_wait: Option<Duration>,
}
