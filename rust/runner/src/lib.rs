//! Opens a model: plans the memory, loads the weights, warms up, starts the device thread, and returns the engine's
//! handle. The device thread executes each [`StepPlan`](penstock_engine::StepPlan): input buffers, a forward pass,
//! sampling. The scheduling is in `penstock-engine`.

#![allow(missing_docs)]

mod adapters;
mod backend;
mod budget;
mod config;
mod convert;
mod cpu_time;
mod cuda;
mod device_thread;
mod environment;
mod error;
mod flight;
mod grammar;
mod host;
mod info;
mod inputs;
mod inspection;
mod launch;
mod logits_rows;
mod masks;
mod memory;
mod resolve;
mod runner;
mod slot;
mod suggestions;
#[cfg(feature = "testing")]
mod testing;
mod user_code;
mod warm_up;
mod weights_cache;

pub use adapters::{AdapterLoader, LoadAdapterError, LoadedAdapter};
pub use backend::{DefaultBackend, DeviceInfo, resolve_device};
#[cfg(feature = "testing")]
pub use config::Faults;
pub use config::LaunchConfig;
pub use convert::{check_output, convert};
pub use cuda::{CudaDevice, CudaInfo, CudaSettings, CudaUnavailable};
pub use error::LaunchError;
pub use host::Host;
pub use info::{HostTierInfo, MemoryInfo, ModelInfo, NumaInfo, WeightFormatInfo};
pub use inspection::{Inspection, NeededMemory, inspect};
pub use launch::launch;
#[cfg(feature = "testing")]
pub use penstock_cuda::OPTIONS as CUDA_COMPILE_OPTIONS;
pub use penstock_device::{Profile, ProfileRow};
pub use penstock_models::ProgressCallback;
#[cfg(feature = "testing")]
pub use testing::{BareRunner, launch_on, logits, probabilities};
