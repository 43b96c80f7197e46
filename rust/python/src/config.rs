//! `EngineConfig`: the configuration of an engine. Its fields are converted here; the runner checks them.

use std::path::PathBuf;
use std::time::Duration;

use penstock_runner::{DEFAULT_PREFIX_CACHE_TTL, DEFAULT_SPECULATIVE_TOKENS, PreemptionMode};
use penstock_types::{Dtype, FieldError, KvDtype};
use pyo3::prelude::*;

use crate::errors::Error;
use crate::fields::Field;
use crate::record::options;

const TOOL_PARSERS: [&str; 5] = ["auto", "none", "hermes", "llama3_json", "mistral"];
const REASONING_PARSERS: [&str; 3] = ["auto", "none", "think"];

options! {
    /// See `_core.pyi`. `None` and `"auto"` mean that the engine chooses.
    EngineConfig(Field::config, check) {
        device: String = auto, read_device;
        dtype: String = auto, read_dtype;
        threads: Option<usize> = None, Field::size;
        max_model_len: Option<usize> = None, Field::size;
        max_num_seqs: Option<usize> = None, Field::size;
        max_num_batched_tokens: Option<usize> = None, Field::size;
        max_waiting: Option<usize> = None, Field::size;
        block_size: Option<usize> = None, Field::size;
        kv_cache_dtype: String = auto, read_kv_dtype;
        kv_cache_bytes: Option<u64> = None, Field::unsigned;
        memory_ratio: Option<f64> = None, Field::float;
        prefix_cache: bool = true, Field::boolean;
        prefix_cache_ttl: Option<f64> = None, Field::float;
        host_cache_bytes: Option<u64> = None, Field::unsigned;
        preemption_mode: String = recompute, read_preemption_mode;
        tokenizer: Option<String> = None, read_tokenizer;
        speculation: Option<String> = None, |field: Field, value| field.choice(value, &["ngram"]).map(str::to_owned);
        num_speculative_tokens: Option<usize> = None, Field::size;
        tool_parser: String = auto, |field: Field, value| field.choice(value, &TOOL_PARSERS);
        reasoning_parser: String = auto, |field: Field, value| field.choice(value, &REASONING_PARSERS);
        profile: bool = false, Field::boolean;
    }
}

fn read_device(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let name = field.text(value)?;
    match name.as_str() {
        "auto" | "cpu" => Ok(name),
        cuda if cuda.split(':').next() == Some("cuda") => {
            Err(field.refuse(value, "'auto' or 'cpu': this build of penstock has no CUDA backend"))
        }
        _ => Err(field.refuse(value, "'auto' or 'cpu'")),
    }
}

fn read_dtype(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    let names = Dtype::ALL.iter().map(|dtype| dtype.name());
    field.choice(value, &std::iter::once("auto").chain(names).collect::<Vec<_>>())
}

fn read_kv_dtype(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    let names = KvDtype::ALL.iter().map(|dtype| dtype.name());
    field.choice(value, &std::iter::once("auto").chain(names).collect::<Vec<_>>())
}

fn read_preemption_mode(field: Field, value: &Bound<'_, PyAny>) -> Result<&'static str, Error> {
    field.choice(value, &["recompute", "swap", "interrupt"])
}

fn read_tokenizer(field: Field, value: &Bound<'_, PyAny>) -> Result<String, Error> {
    let path: PathBuf = value.extract().map_err(|_| field.refuse(value, "a path"))?;
    path.into_os_string().into_string().map_err(|_| field.refuse(value, "a path that is valid Unicode"))
}

/// Checks the fields together, as far as they do not depend on the model.
fn check(config: &EngineConfig) -> Result<(), Error> {
    let error = |field: &'static str, limit: String| {
        Python::attach(|py| {
            let value = Bound::new(py, config.clone())?.getattr(field)?;
            Err(Field::config(field).refuse(&value, limit))
        })
    };
    if !config.prefix_cache && config.prefix_cache_ttl.is_some() {
        return error("prefix_cache_ttl", "omitted if prefix_cache is False".to_owned());
    }
    if config.speculation.is_none() && config.num_speculative_tokens.is_some() {
        return error("num_speculative_tokens", "omitted if speculation is None".to_owned());
    }
    config.requested().check().or_else(|FieldError { field, limit, .. }| error(field, limit))
}

impl EngineConfig {
    /// The configuration of the runner. Fields that are not set come from the environment.
    pub fn with_environment(&self) -> Result<penstock_runner::EngineConfig, Error> {
        Ok(self.requested().with_environment().map_err(penstock_runner::LaunchError::Config)?)
    }

    fn requested(&self) -> penstock_runner::EngineConfig {
        // A time that is not a `Duration` is out of range, like the longest one.
        let ttl = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let ttl = self.prefix_cache_ttl.map_or(DEFAULT_PREFIX_CACHE_TTL, ttl);
        let num_drafts = self.num_speculative_tokens.unwrap_or(DEFAULT_SPECULATIVE_TOKENS);
        penstock_runner::EngineConfig {
            threads: self.threads,
            dtype: Dtype::from_name(&self.dtype),
            kv_cache_dtype: KvDtype::from_name(&self.kv_cache_dtype),
            max_model_len: self.max_model_len,
            max_num_seqs: self.max_num_seqs,
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_waiting: self.max_waiting,
            block_size: self.block_size,
            kv_cache_bytes: self.kv_cache_bytes,
            memory_ratio: self.memory_ratio,
            prefix_cache_ttl: self.prefix_cache.then_some(ttl),
            host_cache_bytes: self.host_cache_bytes,
            preemption_mode: match self.preemption_mode.as_str() {
                "swap" => PreemptionMode::Swap,
                "interrupt" => PreemptionMode::Interrupt,
                _ => PreemptionMode::Recompute,
            },
            num_speculative_tokens: self.speculation.as_ref().map(|_| num_drafts),
            profile: self.profile,
            ..penstock_runner::EngineConfig::default()
        }
    }
}
