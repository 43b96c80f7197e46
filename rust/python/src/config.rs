//! `EngineConfig`: reading its keywords, and the configuration of the runner.

use std::path::PathBuf;
use std::time::Duration;

use penstock_frontend::field::Field;
use penstock_frontend::params::Json;
use penstock_types::config_limits::{DEFAULT_NUM_SPECULATIVE_TOKENS, DEFAULT_PREFIX_CACHE_TTL};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::class;
use crate::classes::PyEngineConfig;
use crate::errors::Error;
use crate::value::{PyValue, config_error};

impl PyEngineConfig {
    /// The configuration with the fields that `fields` has.
    pub fn with(mut self, fields: Option<&Bound<'_, PyDict>>) -> Result<Self, Error> {
        class::set_all("EngineConfig", fields, |name, value| {
            self.config.set(name, value.map(PyValue).as_ref()).map_err(config_error)
        })?;
        self.check()?;
        Ok(self)
    }

    /// Checks the fields together, as far as they do not depend on the model.
    fn check(&self) -> Result<(), Error> {
        let checked = match self.config.declared_conflict() {
            Some(conflict) => Err(conflict),
            None => self.requested().check().map_err(|error| (error.field, error.limit)),
        };
        checked.or_else(|(field, limit)| {
            Python::attach(|py| {
                let value = Bound::new(py, self.clone())?.getattr(field)?;
                Err(config_error(Field::new(field).refuse(&PyValue(value), limit)))
            })
        })
    }

    /// The configuration of the runner. Fields that are not set come from the environment; the libraries of CUDA are
    /// searched in `cuda_folders` first.
    pub fn with_environment(
        &self,
        cuda_folders: Vec<PathBuf>,
    ) -> Result<penstock_runner::EngineConfig, Error> {
        let config = self.requested().with_environment(cuda_folders);
        Ok(config.map_err(penstock_runner::LaunchError::Config)?)
    }

    fn requested(&self) -> penstock_runner::EngineConfig {
        let config = &self.config;
        let ttl = Duration::from_secs_f64(config.prefix_cache_ttl.unwrap_or(DEFAULT_PREFIX_CACHE_TTL));
        let num_drafts = config.num_speculative_tokens.unwrap_or(DEFAULT_NUM_SPECULATIVE_TOKENS);
        penstock_runner::EngineConfig {
            config_overrides: config.config_overrides.as_ref().map(overrides).unwrap_or_default(),
            device: config.device,
            deterministic: Some(config.deterministic),
            threads: config.threads,
            numa_nodes: config
                .numa_nodes
                .as_ref()
                .map(|nodes| nodes.iter().map(|node| *node as usize).collect()),
            dtype: config.dtype.0,
            quantization: config.quantization.clone(),
            kv_cache_dtype: config.kv_cache_dtype.0,
            max_model_len: config.max_model_len,
            max_num_seqs: config.max_num_seqs,
            max_num_batched_tokens: config.max_num_batched_tokens,
            max_waiting: config.max_waiting,
            max_unfinished: config.max_unfinished,
            max_output_bytes: config.max_output_bytes,
            max_paused: config.max_paused,
            block_size: config.block_size,
            kv_cache_bytes: config.kv_cache_bytes,
            kv_cache_blocks: config.kv_cache_blocks,
            kv_cache_ratio: config.kv_cache_ratio,
            memory_ratio: config.memory_ratio,
            prefix_cache_ttl: config.prefix_cache.then_some(ttl),
            host_cache_bytes: config.host_cache_bytes,
            host_cache_blocks: config.host_cache_blocks,
            preemption_mode: config.preemption_mode,
            preemption_victim: config.preemption_victim,
            max_adapters: config.max_adapters,
            max_adapter_rank: config.max_adapter_rank,
            adapter_cache_bytes: config.adapter_cache_bytes,
            max_cpu_adapters: config.max_cpu_adapters,
            max_cpu_adapter_bytes: config.max_cpu_adapter_bytes,
            num_speculative_tokens: config.speculation.map(|_| num_drafts),
            weights_cache_bytes: config.weights_cache_bytes,
            profile: config.profile,
            ..penstock_runner::EngineConfig::default()
        }
    }
}

/// The members of a JSON object.
fn overrides(json: &Json) -> serde_json::Map<String, serde_json::Value> {
    serde_json::from_str(&json.0).unwrap_or_default()
}
