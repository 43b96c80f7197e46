//! Test hooks, behind the feature `testing`.

use std::ops::ControlFlow;
use std::sync::{Arc, Weak};

use penstock_checkpoint::Checkpoint;
use penstock_device::{Backend, DeviceError, Memory};
use penstock_engine::request::Request;
use penstock_engine::{Engine, Limits, NewSequence, StepOutput, StepPlan};
use penstock_models::{ModelConfig, WeightFormats};
use penstock_types::config_limits::DEFAULT_BLOCK_SIZE;
use penstock_types::{EngineConfig, FieldError};

use crate::backend::{self, DefaultBackend, DeviceInfo};
use crate::grammar::KeptGrammars;
use crate::launch::{self, mask_threads};
use crate::memory::{CacheSize, HostCacheSize, KvCacheSize, MemoryPlan, MemoryRequest};
use crate::resolve::reserve;
use crate::runner::Runner;
use crate::slot::{HostSlot, slot_params};
use crate::{Host, LaunchConfig, LaunchError, ModelInfo};

/// A runner on the caller's thread, without an engine.
pub struct BareRunner<B: Backend = DefaultBackend>(Runner<B>);

impl BareRunner {
    /// Opens a model as [`crate::launch()`] does.
    pub fn open(checkpoint: &Checkpoint, config: &LaunchConfig) -> Result<(Self, Limits), LaunchError> {
        config.options.check()?;
        let (backend, device) = backend::open_cpu(config, Host::default().device())?;
        Self::open_on(backend, device, checkpoint, config)
    }
}

impl<B: Backend> BareRunner<B> {
    /// Opens a model on a backend.
    pub fn open_on(
        backend: B,
        device: DeviceInfo,
        checkpoint: &Checkpoint,
        config: &LaunchConfig,
    ) -> Result<(Self, Limits), LaunchError> {
        let opened = launch::open(backend, device, checkpoint, config, &Host::default(), &mut |_, _| {
            ControlFlow::Continue(())
        })?;
        let mut bare = Self(opened.runner);
        bare.0.set_faults(config.faults);
        Ok((bare, opened.limits))
    }

    /// Refuses memory for the details of a row from this number of values on.
    pub fn refuse_details(&mut self, num_values: usize) {
        self.0.faults.refused_details = Some(num_values);
    }

    /// Executes a plan and writes its output.
    pub fn run(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), DeviceError> {
        let flight = self.0.launch(plan, output, false)?;
        self.0.finish(flight, plan, output)
    }

    /// Executes two plans, the second of which is launched before the first is finished.
    pub fn run_overlapped(
        &mut self,
        plans: [&StepPlan; 2],
        outputs: [&mut StepOutput; 2],
    ) -> Result<(), DeviceError> {
        let [first_output, second_output] = outputs;
        let first = self.0.launch(plans[0], first_output, false)?;
        let mut second = self.0.launch(plans[1], second_output, true)?;
        self.0.finish(first, plans[0], first_output)?;
        if !second.is_sampled() {
            self.0.resume(&mut second)?;
        }
        self.0.finish(second, plans[1], second_output)
    }
}

/// Opens a model on a backend and starts its engine.
pub fn launch_on<B: Backend>(
    backend: B,
    device: DeviceInfo,
    checkpoint: &Checkpoint,
    config: &LaunchConfig,
) -> Result<(Engine, ModelInfo), LaunchError> {
    config.options.check()?;
    launch::start(
        backend,
        device,
        checkpoint,
        config,
        &Host::default(),
        &mut |_, _| ControlFlow::Continue(()),
    )
}

/// Logits of every position of `tokens`, computed in chunks of `chunk` tokens with the dtypes and threads of `options`,
/// without an engine and without sampling.
pub fn logits(
    checkpoint: &Checkpoint,
    tokens: &[u32],
    options: &EngineConfig,
    chunk: usize,
) -> Result<Vec<f32>, LaunchError> {
    let mut config = LaunchConfig::from(options.clone());
    config.options.threads = options.threads.or(Some(1));
    config.options.check()?;
    if chunk == 0 {
        return Err(FieldError::new("chunk", chunk, "at least 1").into());
    }
    let model = ModelConfig::from_json(checkpoint.config())?;
    if let Some(token) = tokens.iter().find(|token| **token as usize >= model.vocabulary_size) {
        return Err(FieldError::new("token_ids", token, format!("below {}", model.vocabulary_size)).into());
    }
    let (mut backend, device) = backend::open_cpu(&config, Host::default().device())?;
    let dtype = options.dtype.0.unwrap_or_else(|| checkpoint.dtype());
    let weights = Arc::new(WeightFormats::new(&backend, checkpoint, &model, dtype, &options.quantization)?);
    let mut request = MemoryRequest {
        dtype,
        weights: Arc::clone(&weights),
        kv_dtype: options.kv_cache_dtype.0,
        max_model_len: tokens.len().max(1),
        max_num_seqs: 1,
        max_num_batched_tokens: chunk,
        block_size: DEFAULT_BLOCK_SIZE,
        kv_cache: KvCacheSize::ALL,
        host_cache: HostCacheSize::Requested(CacheSize::Blocks(0)),
        has_prefix_cache: false,
        adapters: None,
    };
    request.kv_cache = KvCacheSize::Requested(CacheSize::Bytes(request.least_kv_bytes(&backend, &model)));
    let plan = MemoryPlan::new(&backend, &model, &request, backend.available_memory()?.bytes)
        .map_err(|error| LaunchError::OutOfMemory(error.to_string()))?;
    let inputs = reserve(&mut backend, &model, &request, &plan)?;
    let mut progress = |_, _| ControlFlow::Continue(());
    let decoder = penstock_models::load(&mut backend, checkpoint, model, &weights, 1, &mut progress)?;
    let masks = mask_threads(1)?;
    let device = (backend, device.turns);
    Ok(Runner::new(device, decoder, (&plan.cache, None), &plan.step, inputs, masks)?.logits(tokens, chunk)?)
}

/// The probabilities of the next token of a request with the output `generated` and these logits, 0 for masked and
/// filtered ids; `mask` is that of its grammar. Everything that sampling does but the random draw.
pub fn probabilities(
    request: Request,
    generated: &[u32],
    logits: &[f32],
    mask: Option<&[u32]>,
) -> Result<Vec<f32>, String> {
    let request = Arc::new(request);
    let mut processed = logits.to_vec();
    let mut slot = HostSlot::default();
    let sequence = NewSequence {
        slot: 0,
        request: Arc::clone(&request),
        choice: 0,
        generated: 0..generated.len() as u32,
        lifetime: Weak::new(),
    };
    slot.admit(&sequence, generated, logits.len(), &mut KeptGrammars::default(), false);
    slot.process(&mut processed)?;
    let params = slot_params(&request, 0, generated);
    Ok(penstock_device::probabilities_for_testing(logits, &params, mask, Some(&processed)))
}
