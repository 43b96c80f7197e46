//! Opening a model: resolves the configuration, reserves the memory, loads the weights, warms up, starts the engine.

use penstock_models::WeightFormats;
use std::fmt::Display;
use std::sync::Arc;

use penstock_checkpoint::Checkpoint;
use penstock_device::{Backend, CacheSpec, Load, Timed};
use penstock_engine::{Engine, Limits, PreemptionMode};
use penstock_models::{ModelConfig, ModelError, ProgressCallback};
use penstock_types::{Device, EngineConfig, FieldError, Json, KvDtype};
use serde_json::{Map, Value};

use crate::adapters::AdapterLoader;
use crate::backend::{self, DeviceInfo};
use crate::budget::display_bytes;
use crate::device_thread::DeviceThread;
use crate::masks::{MaskLimits, MaskThreads};
use crate::memory::MemoryPlan;
use crate::resolve::{ResolvedConfig, reserve};
use crate::runner::Runner;
use crate::warm_up::WarmUp;
use crate::weights_cache::WeightsCache;
use crate::{Host, LaunchConfig, LaunchError, MemoryInfo, ModelInfo, WeightFormatInfo};

/// Opens a model on a host and starts its engine. Blocks until the weights are loaded and the warm-up has run.
pub fn launch(
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
    host: &Host,
    progress: ProgressCallback<'_>,
) -> Result<(Engine, ModelInfo), LaunchError> {
    let options = &config.options;
    options.check()?;
    if let Some(found) = backend::find_device(options.device, &config.cuda)? {
        let is_auto = options.device == Device::Auto;
        let _caller = backend::enter_thread(&found)?; // the thread's own context is current again in the end
        let opened = backend::open_cuda(found, config, host.device()).and_then(|(backend, device)| {
            if is_auto {
                check_cache(&backend, checkpoint, options)?
                    .map_err(|error| LaunchError::DeviceUnavailable(error.to_string()))?;
            }
            Ok((backend, device))
        });
        let with_choice = |error| match error {
            LaunchError::OutOfMemory(reason) if is_auto => LaunchError::OutOfMemory(format!(
                "{reason}; device='auto' is a CUDA device here, and device='cpu' is another choice"
            )),
            error => error,
        };
        match opened {
            Ok((backend, device)) => {
                return start_profiled(backend, device, checkpoint, config, host, progress)
                    .map_err(with_choice);
            }
            Err(LaunchError::DeviceUnavailable(reason)) if is_auto => {
                log::warn!("device='auto' is the CPU: {reason}");
            }
            Err(error) => return Err(with_choice(error)),
        }
    }
    let (backend, device) = backend::open_cpu(config, host.device())?;
    start_profiled(backend, device, checkpoint, config, host, progress)
}

/// Whether a backend has the kernels of a model.
pub(crate) fn check_cache<B: Load>(
    backend: &B,
    checkpoint: &Checkpoint,
    options: &EngineConfig,
) -> Result<Result<(), FieldError>, LaunchError> {
    let model = model_config(checkpoint, options)?;
    let dtype = options.dtype.0.unwrap_or_else(|| checkpoint.dtype());
    Ok(backend.check_cache(model.heads, options.kv_cache_dtype.0.unwrap_or(dtype.into())))
}

/// Opens a model on a backend and starts its engine, with a profile if the configuration asks for it.
fn start_profiled<B: Backend>(
    backend: B,
    device: DeviceInfo,
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
    host: &Host,
    progress: ProgressCallback<'_>,
) -> Result<(Engine, ModelInfo), LaunchError> {
    if !config.options.profile {
        return start(backend, device, checkpoint, config, host, progress);
    }
    let backend = Timed::new(backend);
    let profile = backend.profile();
    let (engine, info) = start(backend, device, checkpoint, config, host, progress)?;
    profile.reset(); // from the warm-up
    Ok((engine, ModelInfo { profile: Some(profile), ..info }))
}

/// Opens a model on a backend, with a valid configuration, and starts its engine.
pub(crate) fn start<B: Backend>(
    backend: B,
    device: DeviceInfo,
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
    host: &Host,
    progress: ProgressCallback<'_>,
) -> Result<(Engine, ModelInfo), LaunchError> {
    let Opened { runner, limits, info } = open(backend, device, checkpoint, config, host, progress)?;
    let device = DeviceThread::spawn(runner).map_err(start_error)?;
    let engine =
        Engine::start(limits, |completions| Box::new(device.connect(completions))).map_err(start_error)?;
    log_launch(&info, engine.limits());
    Ok((engine, info))
}

/// An open model after its warm-up.
pub(crate) struct Opened<B: Backend> {
    pub runner: Runner<B>,
    pub limits: Limits,
    pub info: ModelInfo,
}

/// Opens a model on a backend, with a valid configuration.
pub(crate) fn open<B: Backend>(
    mut backend: B,
    device: DeviceInfo,
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
    host: &Host,
    progress: ProgressCallback<'_>,
) -> Result<Opened<B>, LaunchError> {
    let options = &config.options;
    let model = model_config(checkpoint, options)?;
    let dtype = options.dtype.0.unwrap_or_else(|| checkpoint.dtype());
    let kv_dtype = options.kv_cache_dtype.0.unwrap_or(dtype.into());
    check_cache(&backend, checkpoint, options)??;
    let mut formats = WeightFormats::new(&backend, checkpoint, &model, dtype, &options.quantization)?;
    let mut total = 0;
    let mut counted = |done, of| {
        total = of;
        progress(done, of)
    };
    let cached = match WeightsCache::new(config) {
        None => None,
        Some(cache) => {
            cache.open(&backend, checkpoint, options, (&model, &formats), device.threads, &mut counted)?
        }
    };
    let checkpoint = cached.as_ref().unwrap_or(checkpoint);
    if cached.is_some() {
        formats = WeightFormats::new(&backend, checkpoint, &model, dtype, &options.quantization)?;
    } else {
        total = 0;
    }
    let formats = Arc::new(formats);
    prepare(&mut backend, &model, &formats, options, kv_dtype)?;
    let deterministic = backend.is_deterministic();
    let planning = host.plan_memory();
    let (available, reserved) = (backend.available_memory()?, host.reserved_bytes());
    let is_of_host = backend.host_memory().is_none();
    let planned =
        ResolvedConfig::new(&backend, &model, config, dtype, &formats, available.bytes).and_then(|plan| {
            let inputs = reserve(&mut backend, &model, &plan.memory_request, &plan.memory_plan)?;
            Ok((plan, inputs))
        });
    let explained = |error| if is_of_host { host.explain(error, &available, reserved) } else { error };
    let (resolved, inputs) = planned.map_err(explained)?;
    drop(planning);
    let ResolvedConfig { dtype, memory_limit, memory_plan, mut limits, .. } = resolved;
    if options.max_cpu_adapter_bytes.is_none() {
        let adapters = memory_plan.shared_adapters + memory_plan.copied_adapters;
        limits.max_registered_bytes = adapters.saturating_add(host.available_bytes());
    }
    let weight_formats = penstock_models::module_formats(&backend, &model, &formats);
    let weight_formats = weight_formats.into_iter().map(|module| {
        let activations = backend.activations(module.format);
        WeightFormatInfo::new(module, activations)
    });
    let weight_formats = weight_formats.collect();
    // After a conversion the counts stay those of its end.
    let mut after = |done, of| if total > 0 { progress(total, total) } else { progress(done, of) };
    let decoder =
        penstock_models::load(&mut backend, checkpoint, model, &formats, device.threads, &mut after)?;
    let model = decoder.config().clone();
    let MemoryPlan { step, cache, adapter_spec, .. } = &memory_plan;
    let masks = mask_threads(device.threads)?;
    let mut runner =
        Runner::new((backend, device.turns), decoder, (cache, adapter_spec.as_ref()), step, inputs, masks)?;
    let WarmUp { seconds, host_tier } = runner.warm_up(cache, options.prefix_cache)?;
    // Swapping uses the host tier at any cost; prefixes only if loading them is faster than computing them.
    limits.host_prefixes = host_tier.is_some_and(|tier| tier.keeps_prefixes);
    if !limits.host_prefixes && options.preemption_mode != PreemptionMode::Swap {
        limits.host_blocks = 0;
    }
    let adapters = adapter_spec.map(|spec| AdapterLoader::new::<B::AdapterLayout>(model.clone(), spec));
    let MemoryPlan { weights, workspace, inputs, kv_cache, host_cache, .. } = memory_plan;
    let adapter_bytes = memory_plan.adapters + memory_plan.shared_adapters;
    let (weights, peak) = (weights.total(), runner.memory().peak);
    let info = ModelInfo {
        parameters: model.num_parameters(),
        architecture: model.architecture,
        hidden_size: model.hidden_size,
        dtype,
        weight_formats,
        kv_cache_dtype: memory_plan.cache.dtype,
        memory: MemoryInfo {
            limit: memory_limit,
            weights,
            workspace,
            inputs,
            kv_cache,
            host_cache,
            adapters: adapter_bytes,
            peak,
        },
        memory_ratio: options.memory_ratio(),
        host_tier,
        warm_up_seconds: seconds,
        device: device.device,
        threads: device.threads,
        isa: device.isa,
        deterministic,
        numa: device.numa,
        adapters,
        profile: None,
    };
    #[cfg(feature = "testing")]
    {
        runner.set_faults(config.faults);
    }
    Ok(Opened { runner, limits, info })
}

/// Prepares the operations of a model, which may take memory of the device, before the rest is measured.
fn prepare<B: Load>(
    backend: &mut B,
    model: &ModelConfig,
    formats: &WeightFormats,
    options: &EngineConfig,
    kv_dtype: KvDtype,
) -> Result<(), LaunchError> {
    let matrices = penstock_models::planned_matrices(backend, model, formats);
    let cache = CacheSpec {
        layers: model.num_layers(),
        blocks: 0,
        host_blocks: 0,
        block_size: options.block_size(),
        heads: model.heads,
        dtype: kv_dtype,
    };
    Ok(backend.prepare(&matrices, &cache, options.max_adapters > 0)?)
}

/// The model's configuration with the overrides. Errors of overridden fields name `config_overrides`.
pub(crate) fn model_config(
    checkpoint: &Checkpoint,
    options: &EngineConfig,
) -> Result<ModelConfig, LaunchError> {
    let overrides = options.config_overrides.as_ref().map(members).unwrap_or_default();
    ModelConfig::with_overrides(checkpoint.config(), &overrides).map_err(|error| {
        let name = error.field().and_then(|field| field.split('.').next());
        match name.and_then(|name| Some((name, overrides.get(name)?))) {
            Some((name, value)) => {
                let value = format!("{{'{name}': {value}}}");
                let limit = match &error {
                    ModelError::Field { field, limit, .. } => format!("valid: {field} must be {limit}"),
                    error => format!("valid and read by the model ({error})"),
                };
                LaunchError::Config(FieldError::new("config_overrides", value, limit))
            }
            None => error.into(),
        }
    })
}

/// The members of a JSON object.
fn members(json: &Json) -> Map<String, Value> {
    serde_json::from_str(&json.0).unwrap_or_default()
}

fn log_launch(info: &ModelInfo, limits: &Limits) {
    let MemoryInfo { limit, weights, workspace, kv_cache, .. } = info.memory;
    let host_tier = match (limits.host_blocks, limits.host_prefixes) {
        (0, _) => "no host tier".to_owned(),
        (blocks, true) => format!("host tier of {blocks} blocks"),
        (blocks, false) => format!("host tier of {blocks} blocks for swapping only"),
    };
    log::info!(
        "{} loaded: {} weights, {} workspace, {} reserved for a KV cache of {} blocks (limit {}), {host_tier}, warm-up \
         {:.2} s",
        info.architecture,
        display_bytes(weights),
        display_bytes(workspace),
        display_bytes(kv_cache),
        limits.num_blocks,
        display_bytes(limit),
        info.warm_up_seconds
    );
}

fn start_error(error: impl Display) -> LaunchError {
    LaunchError::Start(error.to_string())
}

pub(crate) fn mask_threads(threads: usize) -> Result<MaskThreads, LaunchError> {
    MaskThreads::spawn(threads, MaskLimits::default()).map_err(start_error)
}
