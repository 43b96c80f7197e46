//! A checkpoint as far as its headers show: its size, the memory that it needs, and what prevents it from being opened.

use std::sync::Arc;

use penstock_checkpoint::Checkpoint;
use penstock_models::{ModelConfig, WeightFormats};
use penstock_types::EngineConfig;

use crate::launch::check_cache;
use crate::memory::{CacheSize, KvCacheSize, MemoryPlan, MemoryRequest};
use crate::resolve::longest_sequence;
use crate::{Host, LaunchConfig, LaunchError, backend};

/// The result of [`inspect`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Inspection {
    /// The number of weights; `None` if the configuration is not supported.
    pub parameters: Option<u64>,
    /// `None` if the weights cannot be loaded.
    pub memory: Option<NeededMemory>,
    /// The reasons why the model cannot be opened.
    pub unsupported: Vec<String>,
}

/// The least memory of an engine on the CPU with default options, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededMemory {
    pub weights: u64,
    /// Activations and input arrays of the largest step.
    pub workspace: u64,
    /// The KV cache of one sequence of `max_model_len` tokens.
    pub kv_cache: u64,
    /// The longest sequence of the model.
    pub max_model_len: usize,
}

/// Inspects a checkpoint without reading its weights.
pub fn inspect(checkpoint: &Checkpoint) -> Inspection {
    let mut found = Inspection::default();
    let model = ModelConfig::from_json(checkpoint.config());
    found.unsupported.extend(model.as_ref().err().map(ToString::to_string));
    found.unsupported.extend(unsupported_types(checkpoint));
    let Ok(model) = model else { return found };
    found.parameters = Some(model.num_parameters());
    if found.unsupported.is_empty() {
        let memory = penstock_models::check_tensors(checkpoint, &model)
            .map_err(LaunchError::from)
            .and_then(|()| needed_memory(checkpoint, &model));
        match memory {
            Ok(memory) => found.memory = Some(memory),
            Err(error) => found.unsupported.push(error.to_string()),
        }
    }
    found
}

/// The error of the first tensor of a type that cannot be read.
fn unsupported_types(checkpoint: &Checkpoint) -> Option<String> {
    let is_packed = |name: &&str| {
        checkpoint.conversion().is_some_and(|conversion| conversion.matrices.contains_key(*name))
    };
    let names = checkpoint.names().filter(|name| !is_packed(name));
    let mut errors = names.filter_map(|name| checkpoint.tensor(name).err());
    errors.next().map(|error| match errors.count() {
        0 => error.to_string(),
        others => format!("{error} (and {others} more tensors)"),
    })
}

fn needed_memory(checkpoint: &Checkpoint, model: &ModelConfig) -> Result<NeededMemory, LaunchError> {
    let options = EngineConfig::default();
    let (backend, _) = backend::open_cpu(&LaunchConfig::default(), Host::new(None).device())?;
    check_cache(&backend, checkpoint, &options)??;
    let dtype = checkpoint.dtype();
    let formats = Arc::new(WeightFormats::new(&backend, checkpoint, model, dtype, &options.quantization)?);
    let max_model_len = longest_sequence(model);
    let request = MemoryRequest::new(&options, dtype, &formats, None, max_model_len);
    let kv_cache = KvCacheSize::Requested(CacheSize::Blocks(request.least_blocks()));
    let request = MemoryRequest { kv_cache, ..request };
    let plan = MemoryPlan::new(&backend, model, &request, u64::MAX)
        .map_err(|error| LaunchError::OutOfMemory(error.to_string()))?;
    Ok(NeededMemory {
        weights: plan.weights.total(),
        workspace: plan.workspace + plan.inputs,
        kv_cache: plan.kv_cache,
        max_model_len,
    })
}
