//! Opening a model: checks the options, loads the weights, sizes the KV cache from what is left, starts the engine.

use penstock_checkpoint::{Checkpoint, Dtype, Format};
use penstock_device::cpu::{Cpu, CpuError};
use penstock_device::{Backend, CacheSpec, Element, KvElement};
use penstock_engine::{Engine, Limits, OnExhaustion};
use penstock_models::{Decoder, ModelConfig, ModelError, RopeScaling, Workspace};

use crate::runner::{DeviceThread, Runner};
use crate::{LaunchError, ModelInfo, Options, Progress};

const DEFAULT_MAX_NUM_SEQS: usize = 64;
const DEFAULT_MAX_NUM_BATCHED_TOKENS: usize = 512;
const DEFAULT_MAX_WAITING: usize = 1024;
const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];
/// Share of the memory that is left after the weights which the KV cache takes unless told otherwise.
const KV_CACHE_SHARE: u64 = 4;
/// Events a consumer may leave unread before its sequence pauses.
const QUEUE_CAPACITY: usize = 128;

/// See [`crate::launch()`].
pub(crate) fn launch(
    checkpoint: &Checkpoint,
    options: &Options,
    progress: Progress<'_>,
) -> Result<(Engine, ModelInfo), LaunchError> {
    let sizes = Sizes::check(options)?;
    let config = ModelConfig::from_json(checkpoint.config())?;
    let element = options.dtype.unwrap_or_else(|| usual_element(checkpoint));
    let mut backend = Cpu::new(sizes.threads)?;
    let decoder = load(&mut backend, checkpoint, config, element, progress)?;
    let kv_element = options.kv_cache_dtype.unwrap_or(element.into());
    let (limits, cache) = size(&backend, decoder.config(), options, &sizes, kv_element)?;
    let info = ModelInfo {
        architecture: decoder.config().architecture.clone(),
        parameters: decoder.config().num_parameters(),
        weight_bytes: penstock_models::weight_bytes(&backend, decoder.config(), element),
        dtype: element,
        kv_cache_dtype: cache.element,
        kv_cache_bytes: cache_bytes(&backend, &cache),
        threads: backend.threads(),
        isa: backend.isa(),
    };
    let mut runner =
        Runner::new(backend, decoder, &cache, limits.max_num_batched_tokens, limits.max_num_seqs)?;
    runner.failing_token = options.failing_token;
    let device = DeviceThread::spawn(runner).map_err(|error| LaunchError::Start(error.to_string()))?;
    let engine = Engine::start(limits, |completions| Box::new(device.connect(completions)))
        .map_err(|error| LaunchError::Start(error.to_string()))?;
    Ok((engine, info))
}

/// Logits of every position of `tokens`, computed in chunks of `chunk` tokens on `threads` threads. A private hook for tests:
/// no engine, no sampling.
pub fn logits(
    checkpoint: &Checkpoint,
    tokens: &[u32],
    dtype: Option<Element>,
    threads: usize,
    chunk: usize,
) -> Result<Vec<f32>, LaunchError> {
    let config = ModelConfig::from_json(checkpoint.config())?;
    let element = dtype.unwrap_or_else(|| usual_element(checkpoint));
    let chunk = positive("chunk", chunk)?;
    if let Some(token) = tokens.iter().find(|token| **token as usize >= config.vocabulary_size) {
        return Err(out_of_range("token_ids", token, format!("below {}", config.vocabulary_size)));
    }
    let mut backend = Cpu::new(positive("threads", threads)?)?;
    let decoder =
        load(&mut backend, checkpoint, config, element, &mut |_, _| std::ops::ControlFlow::Continue(()))?;
    let cache =
        cache_spec(decoder.config(), BLOCK_SIZES[0], tokens.len().div_ceil(BLOCK_SIZES[0]), element.into());
    Ok(Runner::new(backend, decoder, &cache, chunk, chunk)?.logits(tokens, chunk)?)
}

/// The options that do not depend on the model, checked.
struct Sizes {
    threads: usize,
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    max_waiting: usize,
    block_size: usize,
}

impl Sizes {
    fn check(options: &Options) -> Result<Self, LaunchError> {
        let block_size = options.block_size.unwrap_or(BLOCK_SIZES[0]);
        if !BLOCK_SIZES.contains(&block_size) {
            return Err(out_of_range("block_size", &block_size, format!("one of {BLOCK_SIZES:?}")));
        }
        let max_num_batched_tokens = options.max_num_batched_tokens.unwrap_or(DEFAULT_MAX_NUM_BATCHED_TOKENS);
        if !(block_size..=1 << 20).contains(&max_num_batched_tokens) {
            let limit = format!("from block_size={block_size} to {}", 1 << 20);
            return Err(out_of_range("max_num_batched_tokens", &max_num_batched_tokens, limit));
        }
        let available = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let threads = positive("threads", options.threads.unwrap_or_else(available))?;
        if threads > 1024 {
            return Err(out_of_range("threads", &threads, "at most 1024".to_owned()));
        }
        // Every running stream advances in every step, so a step must have a token for each.
        let most = max_num_batched_tokens.min(1 << 16);
        let max_num_seqs =
            positive("max_num_seqs", options.max_num_seqs.unwrap_or(DEFAULT_MAX_NUM_SEQS.min(most)))?;
        if max_num_seqs > most {
            let limit = format!("at most {most} with max_num_batched_tokens={max_num_batched_tokens}");
            return Err(out_of_range("max_num_seqs", &max_num_seqs, limit));
        }
        let max_waiting = positive("max_waiting", options.max_waiting.unwrap_or(DEFAULT_MAX_WAITING))?;
        Ok(Self { threads, max_num_seqs, max_num_batched_tokens, max_waiting, block_size })
    }
}

/// Loads the weights, refusing at once what cannot fit.
fn load(
    backend: &mut Cpu,
    checkpoint: &Checkpoint,
    config: ModelConfig,
    element: Element,
    progress: Progress<'_>,
) -> Result<Decoder<Cpu>, LaunchError> {
    let (needed, available) =
        (penstock_models::weight_bytes(backend, &config, element), backend.available_memory());
    if needed > available {
        let text = format!(
            "the weights need {needed} bytes as {element:?} and {available} are available; a 16-bit dtype halves float32"
        );
        return Err(LaunchError::OutOfMemory(text));
    }
    Ok(penstock_models::load(backend, checkpoint, config, element, progress)?)
}

/// The limits of the engine and the KV cache, from the model, the options and the memory that is left.
fn size(
    backend: &Cpu,
    config: &ModelConfig,
    options: &Options,
    sizes: &Sizes,
    element: KvElement,
) -> Result<(Limits, CacheSpec), LaunchError> {
    let &Sizes { max_num_seqs, max_num_batched_tokens, max_waiting, block_size, .. } = sizes;
    let longest = longest_sequence(config);
    let mut max_model_len = positive("max_model_len", options.max_model_len.unwrap_or(longest))?;
    if max_model_len > longest {
        return Err(out_of_range(
            "max_model_len",
            &max_model_len,
            format!("at most {longest}, the model's own"),
        ));
    }
    let block_bytes = cache_bytes(backend, &cache_spec(config, block_size, 1, element));
    let workspace = Workspace::<Cpu>::bytes(config, max_num_batched_tokens, max_num_seqs);
    let available = backend.available_memory().saturating_sub(workspace);
    let bytes = options.kv_cache_bytes.unwrap_or(available / KV_CACHE_SHARE);
    if bytes > available {
        let text = format!("kv_cache_bytes={bytes} and {available} bytes are available");
        return Err(LaunchError::OutOfMemory(text));
    }
    let useful = max_num_seqs.saturating_mul(max_model_len.div_ceil(block_size));
    let num_blocks =
        usize::try_from(bytes / block_bytes).unwrap_or(usize::MAX).min(useful).min(u32::MAX as usize);
    let held = num_blocks.saturating_mul(block_size);
    if held < max_model_len {
        // A default gives way to the memory; a length that was asked for does not.
        if options.max_model_len.is_some() || held == 0 {
            let needed = block_bytes.saturating_mul(max_model_len.div_ceil(block_size) as u64);
            let text = format!(
                "a sequence of max_model_len={max_model_len} tokens needs a KV cache of {needed} bytes and it has {bytes}; \
                 lower max_model_len or raise kv_cache_bytes"
            );
            return Err(LaunchError::OutOfMemory(text));
        }
        max_model_len = held;
    }
    let limits = Limits {
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens,
        max_waiting,
        block_size,
        num_blocks,
        vocabulary_size: config.vocabulary_size,
        queue_capacity: QUEUE_CAPACITY,
        prefix_cache_ttl: None,
        max_shared_len: usize::MAX,
        on_exhaustion: OnExhaustion::Recompute,
        host_blocks: 0,
    };
    Ok((limits, cache_spec(config, block_size, num_blocks, element)))
}

/// The longest sequence the model's rope was made for.
fn longest_sequence(config: &ModelConfig) -> usize {
    let longest = config.max_position_embeddings;
    let stretched = match config.rope.scaling() {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => 0.0,
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => factor * longest as f64,
        RopeScaling::Yarn { factor, original, .. } => factor * *original as f64,
    };
    longest.max(stretched as usize)
}

fn cache_spec(config: &ModelConfig, block_size: usize, blocks: usize, element: KvElement) -> CacheSpec {
    CacheSpec { layers: config.num_layers(), blocks, block_size, heads: config.heads, element }
}

fn cache_bytes(backend: &Cpu, cache: &CacheSpec) -> u64 {
    backend.block_bytes(cache) * cache.blocks as u64 * cache.layers as u64
}

/// The type weights are kept in unless told otherwise: the checkpoint's own, but float32 for a GGUF file, whose tensors are
/// of many types; that loses nothing.
fn usual_element(checkpoint: &Checkpoint) -> Element {
    if matches!(checkpoint.description().format, Format::Gguf(_)) {
        return Element::F32;
    }
    match checkpoint.dtype() {
        Dtype::F32 => Element::F32,
        Dtype::F16 => Element::F16,
        Dtype::Bf16 => Element::Bf16,
    }
}

fn positive(field: &'static str, value: usize) -> Result<usize, LaunchError> {
    if value == 0 { Err(out_of_range(field, &value, "at least 1".to_owned())) } else { Ok(value) }
}

fn out_of_range(field: &'static str, value: &dyn std::fmt::Display, limit: String) -> LaunchError {
    LaunchError::Option { field, value: value.to_string(), limit }
}

impl From<ModelError> for LaunchError {
    fn from(error: ModelError) -> Self {
        match error {
            ModelError::Checkpoint(error) => Self::Checkpoint(error),
            ModelError::Device(error) => error.into(),
            ModelError::Cancelled => Self::Cancelled,
            other => Self::Model(other.to_string()),
        }
    }
}

impl From<penstock_device::DeviceError> for LaunchError {
    fn from(error: penstock_device::DeviceError) -> Self {
        match error {
            penstock_device::DeviceError::OutOfMemory { .. } => Self::OutOfMemory(error.to_string()),
            penstock_device::DeviceError::Start(text) => Self::Start(text),
        }
    }
}

impl From<CpuError> for LaunchError {
    fn from(error: CpuError) -> Self {
        match error {
            CpuError::Isa(error) => out_of_range("PENSTOCK_ISA", &error.value(), error.limit()),
            CpuError::Device(error) => error.into(),
        }
    }
}
