//! Opening a model: checks the options, divides the memory, loads the weights, warms up, starts the engine.

use std::fmt::Display;

use penstock_checkpoint::{Checkpoint, FileFormat};
use penstock_device::cpu::{Cpu, CpuError};
use penstock_device::{Backend, StepInputs};
use penstock_engine::{Engine, Limits, PreemptionMode};
use penstock_models::{LoadProgress, ModelConfig, ModelError, RopeScaling};
use penstock_types::Dtype;

use crate::device_thread::DeviceThread;
use crate::grammar::MaskThreads;
use crate::memory::{Demand, Division, HostShare, KvShare, divide, largest};
use crate::options::{Allowance, BLOCK_SIZES, Sizes, out_of_range, positive};
use crate::remedies::remedies;
use crate::runner::Runner;
use crate::warm_up::WarmUp;
use crate::{LaunchError, MemoryInfo, ModelInfo, Options};

/// Positions are counted in 32 bits.
const MOST_POSITIONS: usize = i32::MAX as usize;
/// Events a consumer may leave unread before its sequence pauses.
const QUEUE_CAPACITY: usize = 128;

/// See [`crate::launch()`].
pub(crate) fn launch(
    checkpoint: &Checkpoint,
    options: &Options,
    progress: LoadProgress<'_>,
) -> Result<(Engine, ModelInfo), LaunchError> {
    let Opened { runner, limits, info } = open(checkpoint, options, progress)?;
    let device = DeviceThread::spawn(runner).map_err(not_started)?;
    let engine =
        Engine::start(limits, |completions| Box::new(device.connect(completions))).map_err(not_started)?;
    log_opening(&info, engine.limits());
    Ok((engine, info))
}

/// A model in memory, warmed up.
pub(crate) struct Opened {
    pub runner: Runner<Cpu>,
    pub limits: Limits,
    pub info: ModelInfo,
}

pub(crate) fn open(
    checkpoint: &Checkpoint,
    options: &Options,
    progress: LoadProgress<'_>,
) -> Result<Opened, LaunchError> {
    let sizes = Sizes::check(options)?;
    let config = ModelConfig::from_json(checkpoint.config())?;
    let dtype = options.dtype.unwrap_or_else(|| default_dtype(checkpoint));
    let mut backend = Cpu::new(sizes.threads)?;
    let allowance = sizes.allowance(backend.available_memory())?;
    let division = divide_memory(&backend, &config, options, &sizes, dtype, allowance)?;
    let (held, longest) = (division.step.positions, longest_sequence(&config));
    if options.max_model_len.is_none() && held < longest {
        log::warn!(
            "max_model_len is {held}, for the KV cache holds no longer sequence; the model's own is {longest}"
        );
    }
    let demand = Demand::new(options, &sizes, dtype, held);
    let room = reserve(&mut backend, &config, &demand, &division)?;
    let decoder = penstock_models::load(&mut backend, checkpoint, config, dtype, progress)?;
    let (threads, isa, config) = (backend.threads(), backend.isa(), decoder.config());
    let (architecture, parameters) = (config.architecture.clone(), config.num_parameters());
    let hidden_size = config.hidden_size;
    let mut limits = limits(&division, options, &sizes, config.rope.shared_len());
    let Division { cache, weights, workspace, inputs, kv_cache, host_cache, .. } = division;
    let masks = mask_threads(division.step.sequences, threads)?;
    let mut runner = Runner::new(backend, decoder, &cache, &division.step, room, masks)?;
    let WarmUp { seconds, host_tier } = runner.warm_up(&cache, options.prefix_cache_ttl.is_some())?;
    // Swapping was asked for, whatever it costs; keeping prefixes must pay.
    limits.host_prefixes = host_tier.is_some_and(|tier| tier.keeps_prefixes);
    if !limits.host_prefixes && options.preemption_mode != PreemptionMode::Swap {
        limits.host_blocks = 0;
    }
    let peak = runner.memory().peak;
    let info = ModelInfo {
        architecture,
        parameters,
        hidden_size,
        dtype: dtype,
        kv_cache_dtype: cache.dtype,
        memory: MemoryInfo { limit: allowance.limit, weights, workspace, inputs, kv_cache, host_cache, peak },
        host_tier,
        warm_up_seconds: seconds,
        threads,
        isa,
    };
    runner.failing_token = options.failing_token;
    Ok(Opened { runner, limits, info })
}

fn log_opening(info: &ModelInfo, limits: &Limits) {
    let MemoryInfo { limit, weights, workspace, kv_cache, .. } = info.memory;
    let host_tier = match (limits.host_blocks, limits.host_prefixes) {
        (0, _) => "no host tier".to_owned(),
        (blocks, true) => format!("a host tier of {blocks} blocks that keeps prefixes"),
        (blocks, false) => format!("a host tier of {blocks} blocks for swapping alone"),
    };
    log::info!(
        "{} opened: of {limit} bytes {weights} hold weights, {workspace} the workspace, {kv_cache} the KV cache of {} \
         blocks; {host_tier}; warmed up in {:.2} s",
        info.architecture,
        limits.num_blocks,
        info.warm_up_seconds
    );
}

/// Logits of every position of `tokens`, computed in chunks of `chunk` tokens with the types and threads of `options`. A private
/// hook for tests: no engine, no sampling.
pub fn logits(
    checkpoint: &Checkpoint,
    tokens: &[u32],
    options: &Options,
    chunk: usize,
) -> Result<Vec<f32>, LaunchError> {
    let config = ModelConfig::from_json(checkpoint.config())?;
    let dtype = options.dtype.unwrap_or_else(|| default_dtype(checkpoint));
    let chunk = positive("chunk", chunk)?;
    if let Some(token) = tokens.iter().find(|token| **token as usize >= config.vocabulary_size) {
        return Err(out_of_range("token_ids", token, format!("below {}", config.vocabulary_size)));
    }
    let mut backend = Cpu::new(positive("threads", options.threads.unwrap_or(1))?)?;
    let block_size = BLOCK_SIZES[0];
    let mut demand = Demand {
        dtype,
        kv_dtype: options.kv_cache_dtype,
        max_model_len: tokens.len().max(1),
        max_num_seqs: 1,
        max_num_batched_tokens: chunk,
        block_size,
        kv_share: KvShare::All,
        host_share: HostShare::Bytes(0),
        has_prefix_cache: false,
    };
    demand.kv_share = KvShare::Bytes(demand.fewest_bytes(&backend, &config));
    let division = divide(&backend, &config, &demand, backend.available_memory())
        .map_err(|shortage| LaunchError::OutOfMemory(shortage.to_string()))?;
    let room = reserve(&mut backend, &config, &demand, &division)?;
    let mut progress = |_, _| std::ops::ControlFlow::Continue(());
    let decoder = penstock_models::load(&mut backend, checkpoint, config, dtype, &mut progress)?;
    let masks = mask_threads(1, 1)?;
    Ok(Runner::new(backend, decoder, &division.cache, &division.step, room, masks)?.logits(tokens, chunk)?)
}

fn not_started(error: impl Display) -> LaunchError {
    LaunchError::Start(error.to_string())
}

fn mask_threads(slots: usize, threads: usize) -> Result<MaskThreads, LaunchError> {
    MaskThreads::spawn(slots, threads).map_err(not_started)
}

/// Divides the memory for what was asked for. A default length gives way to the memory; one that was asked for does not.
fn divide_memory(
    backend: &Cpu,
    config: &ModelConfig,
    options: &Options,
    sizes: &Sizes,
    dtype: Dtype,
    allowance: Allowance,
) -> Result<Division, LaunchError> {
    let longest = longest_sequence(config);
    let asked = positive("max_model_len", options.max_model_len.unwrap_or(longest))?;
    if asked > longest {
        return Err(out_of_range("max_model_len", &asked, format!("at most {longest}, the model's own")));
    }
    let demand = |max_model_len| Demand::new(options, sizes, dtype, max_model_len);
    let one_block = demand(asked).fewest_host_bytes(backend, config);
    if let Some(bytes @ 1..) = options.host_cache_bytes
        && bytes < one_block
    {
        return Err(out_of_range("host_cache_bytes", &bytes, format!("at least {one_block}, one block")));
    }
    let division = |max_model_len| divide(backend, config, &demand(max_model_len), allowance.limit);
    let max_model_len = match options.max_model_len {
        Some(asked) => asked,
        None => {
            let most = largest(1, asked as u64, |len| division(len as usize).is_ok());
            // Where the cache that was asked for leaves no room for any length, what fits is told for the length that the
            // memory could hold.
            let whole = |len| Demand { kv_share: KvShare::All, ..demand(len as usize) };
            let could = |len| divide(backend, config, &whole(len), allowance.limit).is_ok();
            let most = most.or_else(|| largest(1, asked as u64, could));
            most.map_or(asked.min(sizes.block_size), |len| len as usize)
        }
    };
    division(max_model_len)
        .map_err(|shortage| refusal(&shortage, &remedies(backend, config, &demand(max_model_len), allowance)))
}

/// Takes what was divided. Where the system gives less, it is asked how much, and what fits into that is told.
fn reserve(
    backend: &mut Cpu,
    config: &ModelConfig,
    demand: &Demand,
    division: &Division,
) -> Result<StepInputs, LaunchError> {
    let taken = backend.reserve(division.arena());
    taken.and_then(|()| StepInputs::with_room(&division.step)).map_err(|error| {
        let given = largest(1, division.arena() >> 20, |mebibytes| backend.reserve(mebibytes << 20).is_ok());
        let limit = given.unwrap_or(0) << 20;
        refusal(&error, &remedies(backend, config, demand, Allowance { most: limit, limit }))
    })
}

fn refusal(why: &dyn Display, remedies: &[String]) -> LaunchError {
    let what_fits =
        if remedies.is_empty() { "no smaller size by itself".to_owned() } else { remedies.join(", or ") };
    LaunchError::OutOfMemory(format!("{why}; what fits: {what_fits}"))
}

/// The sizes; whether the host tier keeps prefixes only the warm-up can say.
fn limits(division: &Division, options: &Options, sizes: &Sizes, max_shared_len: usize) -> Limits {
    let Division { step, cache, .. } = division;
    Limits {
        max_model_len: step.positions,
        max_num_seqs: step.sequences,
        max_num_batched_tokens: step.tokens,
        max_waiting: sizes.max_waiting,
        block_size: step.block_size,
        num_blocks: cache.blocks,
        vocabulary_size: step.vocabulary,
        queue_capacity: QUEUE_CAPACITY,
        prefix_cache_ttl: options.prefix_cache_ttl,
        max_shared_len,
        preemption_mode: options.preemption_mode,
        host_blocks: cache.host_blocks,
        host_prefixes: false,
        num_speculative_tokens: options.num_speculative_tokens,
    }
}

/// The longest sequence the model's rope was made for.
fn longest_sequence(config: &ModelConfig) -> usize {
    let longest = config.max_position_embeddings;
    let stretched = match config.rope.scaling() {
        RopeScaling::Default | RopeScaling::Llama3 { .. } => 0.0,
        RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => factor * longest as f64,
        RopeScaling::Yarn { factor, original, .. } => factor * *original as f64,
    };
    longest.max(stretched as usize).min(MOST_POSITIONS)
}

/// The type weights are kept in unless told otherwise: the checkpoint's own, but float32 for a GGUF file, whose tensors are
/// of many types; that loses nothing.
fn default_dtype(checkpoint: &Checkpoint) -> Dtype {
    if matches!(checkpoint.description().format, FileFormat::Gguf(_)) {
        return Dtype::F32;
    }
    checkpoint.dtype()
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
            penstock_device::DeviceError::Start(text) => Self::Start(text),
            _ => Self::OutOfMemory(error.to_string()),
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

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::time::Duration;

    use penstock_types::KvDtype;
    use serde_json::json;

    use super::*;
    use crate::memory::tests::config;

    /// Blocks of it are smaller than a page.
    fn tiny() -> ModelConfig {
        ModelConfig::from_json(&json!({
            "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48,
            "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": 50,
            "max_position_embeddings": 512,
        }))
        .expect("a good configuration")
    }

    /// Divides as a launch does on a machine with so many bytes.
    fn divided(backend: &Cpu, options: &Options, available: u64) -> Result<Division, LaunchError> {
        let sizes = Sizes::check(options)?;
        let dtype = options.dtype.unwrap_or(Dtype::F32);
        divide_memory(backend, &tiny(), options, &sizes, dtype, sizes.allowance(available)?)
    }

    /// The options with a remedy as it was told.
    fn with(options: &Options, remedy: &str) -> Options {
        let (field, value) = remedy.split_once('=').expect("a setting");
        let (mut changed, number) = (options.clone(), value.parse::<u64>().ok());
        let size = number.map(|number| number as usize);
        match field {
            "max_model_len" => changed.max_model_len = size,
            "max_num_seqs" => changed.max_num_seqs = size,
            "max_num_batched_tokens" => changed.max_num_batched_tokens = size,
            "dtype" => changed.dtype = Dtype::ALL.iter().copied().find(|dtype| dtype.name() == value),
            "kv_cache_dtype" => {
                changed.kv_cache_dtype = KvDtype::ALL.iter().copied().find(|dtype| dtype.name() == value);
            }
            "kv_cache_bytes" => changed.kv_cache_bytes = number,
            "memory_ratio" => changed.memory_ratio = value.parse().ok(),
            "host_cache_bytes" => changed.host_cache_bytes = number,
            other => panic!("{other} is no option"),
        }
        changed
    }

    #[test]
    fn every_remedy_that_is_told_is_one() {
        let backend = Cpu::new(1).expect("a thread");
        let options = Options {
            threads: Some(1),
            max_num_seqs: Some(8),
            max_num_batched_tokens: Some(32),
            max_model_len: Some(512),
            prefix_cache_ttl: Some(Duration::from_secs(300)),
            ..Options::default()
        };
        let mut told = BTreeSet::new();
        for (kv_cache_bytes, host_cache_bytes, memory_ratio) in [
            (None, None, None),
            (None, None, Some(0.5)),
            (Some(100_000), None, None),
            (Some(1 << 40), None, None),
            (None, Some(1 << 40), None),
            (Some(150_000), Some(80_000), Some(0.5)),
        ] {
            let options = Options { kv_cache_bytes, host_cache_bytes, memory_ratio, ..options.clone() };
            for available in (100_000..1_500_000).step_by(1_117) {
                let Err(refusal) = divided(&backend, &options, available) else { continue };
                let refusal = refusal.to_string();
                let (_, remedies) =
                    refusal.split_once("; what fits: ").expect("a refusal that tells remedies");
                for remedy in remedies.split(", or ").filter(|remedy| remedy.contains('=')) {
                    if let Err(error) = divided(&backend, &with(&options, remedy), available) {
                        panic!("with {remedy}, told for {options:?} of {available} bytes: {error}");
                    }
                    told.insert(remedy.split('=').next().expect("a field").to_owned());
                }
            }
        }
        let all = "dtype, host_cache_bytes, kv_cache_bytes, kv_cache_dtype, max_model_len, max_num_batched_tokens, \
            max_num_seqs, memory_ratio";
        assert_eq!(told.into_iter().collect::<Vec<_>>().join(", "), all);
    }
    #[test]
    fn what_the_system_refuses_is_refused_with_what_it_gives() {
        let mut backend = Cpu::new(1).expect("a thread");
        // No address space has as many bytes.
        let (config, block_size, host_cache_bytes) = (config(), Some(128), Some(1 << 49));
        let options = Options {
            threads: Some(1),
            preemption_mode: PreemptionMode::Swap,
            block_size,
            host_cache_bytes,
            kv_cache_bytes: Some(128 << 20),
            max_model_len: Some(4096),
            ..Options::default()
        };
        let mut taken = |options: &Options| {
            let sizes = Sizes::check(options)?;
            let allowance = Allowance { most: 1 << 50, limit: 1 << 50 };
            let division = divide_memory(&backend, &config, options, &sizes, Dtype::F32, allowance)?;
            let demand = Demand::new(options, &sizes, Dtype::F32, division.step.positions);
            reserve(&mut backend, &config, &demand, &division)
        };
        let refusal = taken(&options).expect_err("refused").to_string();
        assert!(refusal.starts_with("the model with its KV cache needs 562"), "{refusal}");
        let (_, remedy) = refusal.split_once("; what fits: ").expect("a remedy");
        assert!(remedy.starts_with("host_cache_bytes=") && !remedy.contains(", or "), "{refusal}");
        assert!(taken(&with(&options, remedy)).is_ok(), "{refusal}");
    }
}
