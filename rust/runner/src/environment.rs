//! The environment variables that set fields of a [`LaunchConfig`], and those of CUDA.

use std::env;
use std::path::PathBuf;

use penstock_types::config_limits::MAX_MEMORY_RATIO;
use penstock_types::engine_config::{check_above, check_threads};
use penstock_types::{EngineConfig, FieldError};

#[cfg(feature = "testing")]
use crate::Faults;
use crate::cuda::CUDA_ARCH;
use crate::{CudaSettings, LaunchConfig};

const THREADS: &str = "PENSTOCK_THREADS";
const ISA: &str = "PENSTOCK_ISA";
const CACHE: &str = "PENSTOCK_CACHE";
const NVRTC: &str = "PENSTOCK_NVRTC";
pub(crate) const CUBLAS: &str = "PENSTOCK_CUBLAS";
const KERNEL_DIR: &str = "PENSTOCK_KERNEL_DIR";
const KERNEL_ARCHIVE: &str = "PENSTOCK_KERNEL_ARCHIVE";
/// The engines check all their parts whenever they are idle.
#[cfg(feature = "testing")]
const CHECK_INTEGRITY: &str = "PENSTOCK_CHECK_INTEGRITY";
/// The variable that selects the visible devices; the driver reads it, too.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";
/// The variables that set `memory_ratio`. The second name is that of DashInfer.
const MEMORY_RATIO: [&str; 2] = ["PENSTOCK_MEMORY_RATIO", "BFC_MEM_RATIO"];
/// The variable that sets `memory_leftover_bytes`, in mebibytes, by DashInfer's name.
pub(crate) const MEMORY_LEFTOVER: &str = "BFC_LEFTOVER_MB";

impl LaunchConfig {
    /// The options, of which the environment sets those that are `None`, and the settings of the process.
    /// `cuda_folders` are the `library_folders` of [`CudaSettings`]. Another thread must not change the environment
    /// meanwhile: a thread of a Python program is attached to the interpreter here.
    pub fn from_environment(
        mut options: EngineConfig,
        cuda_folders: Vec<PathBuf>,
    ) -> Result<Self, FieldError> {
        if options.threads.is_none() {
            options.threads = read(THREADS, "an integer", |text| text.parse().ok())?;
            check_threads(THREADS, options.threads, options.num_numa_nodes())?;
        }
        // The first variable that is set counts.
        let variable = MEMORY_RATIO.into_iter().find(|variable| env::var_os(variable).is_some());
        if let (None, Some(variable)) = (options.memory_ratio, variable) {
            options.memory_ratio =
                read(variable, "a number above 0 and at most 1", |text| text.parse().ok())?;
            check_above(variable, options.memory_ratio, 0.0, MAX_MEMORY_RATIO)?;
        }
        let mebibytes = |text: &str| text.parse::<u64>().ok()?.checked_mul(1 << 20);
        let leftover = read(MEMORY_LEFTOVER, "an integer number of mebibytes", mebibytes)?;
        let bytes = options.weights_cache_bytes.unwrap_or_default();
        let cache_directory = if bytes > 0 { cache_directory("weights") } else { None };
        if bytes > 0 && cache_directory.is_none() {
            let limit = format!("0, because {CACHE} is not set and {HOME} is not an absolute path");
            return Err(FieldError::new("weights_cache_bytes", bytes, limit));
        }
        #[cfg(feature = "testing")]
        if env::var_os(CHECK_INTEGRITY).is_some() {
            penstock_engine::check_when_idle();
        }
        Ok(Self {
            options,
            isa: text(ISA),
            memory_leftover_bytes: leftover.unwrap_or_default(),
            cuda: CudaSettings::from_environment(cuda_folders),
            cache_directory,
            #[cfg(feature = "testing")]
            faults: Faults::default(),
        })
    }
}

impl CudaSettings {
    /// The settings of the environment, as for [`LaunchConfig::from_environment`]. The compiler and cuBLASLt are
    /// searched in `library_folders` first.
    pub fn from_environment(library_folders: Vec<PathBuf>) -> Self {
        let path = |variable| env::var_os(variable).filter(|path| !path.is_empty()).map(PathBuf::from);
        Self {
            visible_devices: text(VISIBLE_DEVICES),
            architecture: text(CUDA_ARCH).filter(|name| !name.is_empty()),
            nvrtc: path(NVRTC),
            cublas: path(CUBLAS),
            library_folders,
            kernel_directory: path(KERNEL_DIR),
            archive_directory: path(KERNEL_ARCHIVE),
            cache_directory: cache_directory("kernels"),
        }
    }
}

fn text(variable: &str) -> Option<String> {
    env::var_os(variable).map(|value| value.to_string_lossy().into_owned())
}

/// The directory of a cache: in `PENSTOCK_CACHE`, or in the user's directory of caches.
fn cache_directory(name: &str) -> Option<PathBuf> {
    let own =
        env::var_os(CACHE).filter(|path| !path.is_empty()).and_then(|path| std::path::absolute(path).ok());
    Some(own.or_else(|| Some(user_caches()?.join("penstock")))?.join(name))
}

/// The variable with the folder that has the user's caches.
const HOME: &str = if cfg!(windows) { "LOCALAPPDATA" } else { "HOME" };

/// The user's directory of caches.
fn user_caches() -> Option<PathBuf> {
    let path = |variable| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    if cfg!(windows) {
        path(HOME)
    } else {
        path("XDG_CACHE_HOME").or_else(|| Some(path(HOME)?.join(".cache")))
    }
}

/// The parsed value of a variable; `None` if it is not set.
fn read<T>(
    variable: &'static str,
    limit: &str,
    parse: impl Fn(&str) -> Option<T>,
) -> Result<Option<T>, FieldError> {
    let Some(value) = env::var_os(variable) else { return Ok(None) };
    match value.to_str().and_then(parse) {
        Some(parsed) => Ok(Some(parsed)),
        None => Err(FieldError::new(variable, format!("{value:?}"), limit)),
    }
}
