//! Adapters: the memory that they may take, and loading one for an engine.
//!
//! A loaded adapter is in host memory once. The CPU uses it there, so `adapter_cache_bytes` is in the memory plan but
//! not in the arena. Another device copies an adapter into its arena when it is put on the device.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use penstock_checkpoint::{AdapterFiles, CheckpointError};
use penstock_device::{AdapterLayout, AdapterSpec};
use penstock_engine::{AdapterError, AdapterId, AdapterUse, Engine};
use penstock_models::{
    AdapterLimits, ModelConfig, ModelError, ProgressCallback, adapted_matrices, adapter_bytes, pack_adapter,
};
use penstock_types::{Dtype, EngineConfig, PackedAdapter};

/// The rank for which there is room by default.
const DEFAULT_RANK: usize = 16;

/// The adapters on the device that a configuration asks for; `None` without adapters.
pub(crate) fn adapter_spec<L: AdapterLayout>(
    options: &EngineConfig,
    model: &ModelConfig,
) -> Option<AdapterSpec> {
    let (adapters, rank) = (options.max_adapters, options.max_adapter_rank());
    // Published adapters are float32.
    let bytes = |rank| adapter_bytes::<L>(model, rank, Dtype::F32);
    let default = || bytes(rank).max(adapters as u64 * bytes(rank.min(DEFAULT_RANK)));
    let bytes = L::adapter_bytes(options.adapter_cache_bytes.unwrap_or_else(default));
    let matrices = adapted_matrices(model);
    (adapters > 0).then_some(AdapterSpec { adapters, bytes, rank, matrices })
}

/// The most bytes of a weight file beside its weights.
const MAX_HEADER: u64 = 16 << 20;

/// The function that packs an adapter for a device.
type Pack =
    fn(&AdapterFiles, &ModelConfig, AdapterLimits, ProgressCallback<'_>) -> Result<PackedAdapter, ModelError>;

/// Loads adapters for an open model.
#[derive(Clone)]
pub struct AdapterLoader {
    model: Arc<ModelConfig>,
    limits: AdapterLimits,
    pack: Pack,
    /// See [`AdapterLayout::adapter_bytes`].
    device_bytes: fn(u64) -> u64,
}

/// An adapter of an engine.
pub struct LoadedAdapter {
    /// The name of the adapter in requests to the engine.
    pub id: AdapterId,
    /// Its use by requests.
    pub usage: Arc<AdapterUse>,
    /// The model for which the adapter was trained, as its configuration names it.
    pub base_model: Option<String>,
    /// The highest rank of its updates.
    pub rank: usize,
    /// The number of linear layers that it updates.
    pub num_modules: usize,
    /// Bytes that it takes on the device.
    pub bytes: u64,
}

/// An adapter cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadAdapterError {
    /// The files cannot be read.
    #[error(transparent)]
    Files(#[from] CheckpointError),
    /// The adapter does not fit the model, or its memory.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The engine refuses it.
    #[error(transparent)]
    Engine(#[from] AdapterError),
}

impl AdapterLoader {
    pub(crate) fn new<L: AdapterLayout>(model: ModelConfig, spec: AdapterSpec) -> Self {
        Self {
            model: Arc::new(model),
            limits: AdapterLimits { rank: spec.rank, bytes: spec.bytes },
            pack: pack_adapter::<L>,
            device_bytes: L::adapter_bytes,
        }
    }

    /// Reads the files of an adapter.
    pub fn read(&self, path: &Path) -> Result<AdapterFiles, LoadAdapterError> {
        Ok(AdapterFiles::open(path, self.limits.bytes.saturating_add(MAX_HEADER))?)
    }

    /// Packs an adapter and registers it with the engine of the model; `former` is the adapter that it replaces, which
    /// the caller unloads. Slow, and needs no other thread until the end.
    pub fn load(
        &self,
        engine: &Engine,
        name: &str,
        files: &AdapterFiles,
        former: Option<AdapterId>,
        progress: ProgressCallback<'_>,
    ) -> Result<LoadedAdapter, LoadAdapterError> {
        let packed = (self.pack)(files, &self.model, self.limits, progress)?;
        let rank = packed.updates.iter().map(|update| update.shape.rank).max().unwrap_or(0);
        let (num_modules, bytes) = (packed.updates.len(), (self.device_bytes)(packed.bytes().len() as u64));
        let (id, usage) = match former {
            None => engine.load_adapter(name, Arc::new(packed), bytes)?,
            Some(former) => engine.replace_adapter(former, name, Arc::new(packed), bytes)?,
        };
        let base_model = files.base_model().map(str::to_owned);
        Ok(LoadedAdapter { id, usage, base_model, rank, num_modules, bytes })
    }
}

impl fmt::Debug for AdapterLoader {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("AdapterLoader").field("limits", &self.limits).finish_non_exhaustive()
    }
}
