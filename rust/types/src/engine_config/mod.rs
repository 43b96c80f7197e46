//! [`EngineConfig`]: the options of an engine, and their checks as far as the model does not matter.

#[rustfmt::skip]
mod fields;

use std::fmt::Display;
use std::time::Duration;

pub use fields::EngineConfig;

use crate::config_limits::{MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_NUMA_NODES, MAX_THREADS};
use crate::{FieldError, PreemptionMode};

impl EngineConfig {
    /// Checks every field and its relations to others, except the [declared conflicts](Self::declared_conflict).
    pub fn check(&self) -> Result<(), FieldError> {
        self.check_ranges()?;
        self.check_numa_nodes()?;
        let (block_size, num_tokens) = (self.block_size(), self.max_num_batched_tokens());
        if num_tokens < block_size {
            let limit = format!("an integer from block_size={block_size} to {MAX_NUM_BATCHED_TOKENS}");
            return Err(FieldError::new("max_num_batched_tokens", num_tokens, limit));
        }
        // Every running sequence advances in every step, so a step has at least one token for each.
        let most = num_tokens.min(MAX_NUM_SEQS);
        if self.max_num_seqs() > most {
            let limit = format!("an integer from 1 to {most} with max_num_batched_tokens={num_tokens}");
            return Err(FieldError::new("max_num_seqs", self.max_num_seqs(), limit));
        }
        if self.max_cpu_adapters() < self.max_adapters {
            let limit = format!("at least max_adapters={}", self.max_adapters);
            return Err(FieldError::new("max_cpu_adapters", self.max_cpu_adapters(), limit));
        }
        if self.prefix_cache_lifetime().is_some_and(|lifetime| lifetime.is_zero()) {
            let limit = "at least a nanosecond";
            return Err(FieldError::new("prefix_cache_ttl", self.prefix_cache_ttl(), limit));
        }
        self.check_host_cache()
    }

    /// The nodes differ, and each has the same number of threads.
    fn check_numa_nodes(&self) -> Result<(), FieldError> {
        let Some(nodes) = &self.numa_nodes else { return Ok(()) };
        let refused = |limit| Err(FieldError::new("numa_nodes", format!("{nodes:?}"), limit));
        let num_nodes = nodes.len();
        if !(1..=MAX_NUMA_NODES).contains(&num_nodes) {
            return refused(format!("1 to {MAX_NUMA_NODES} nodes"));
        }
        if let Some((_, node)) = nodes.iter().enumerate().find(|(index, node)| nodes[..*index].contains(node))
        {
            return refused(format!("different nodes; {node} occurs twice"));
        }
        check_threads("threads", self.threads, num_nodes)
    }

    /// A host tier must have a use, and swapping must have a host tier.
    fn check_host_cache(&self) -> Result<(), FieldError> {
        let blocks = self.host_cache_blocks.map(|blocks| ("host_cache_blocks", blocks as u64));
        let bytes = self.host_cache_bytes.map(|bytes| ("host_cache_bytes", bytes));
        let Some((field, size)) = blocks.or(bytes) else { return Ok(()) };
        let is_swapping = self.preemption_mode == PreemptionMode::Swap;
        let limit = match size {
            0 if is_swapping => "above 0 if preemption_mode is swap",
            1.. if !is_swapping && !self.prefix_cache => {
                "0 if prefix_cache is False and preemption_mode is not swap"
            }
            _ => return Ok(()),
        };
        Err(FieldError::new(field, size, limit))
    }

    /// The number of nodes between which the threads are divided.
    pub fn num_numa_nodes(&self) -> usize {
        self.numa_nodes.as_ref().map_or(1, |nodes| nodes.len().max(1))
    }

    /// The time for which unused blocks stay in the prefix cache; `None` without a prefix cache.
    pub fn prefix_cache_lifetime(&self) -> Option<Duration> {
        self.prefix_cache.then(|| Duration::from_secs_f64(self.prefix_cache_ttl()))
    }

    /// The most draft tokens that a step verifies for a sequence; 0 without speculation.
    pub fn num_draft_tokens(&self) -> usize {
        self.speculation.map_or(0, |_| self.num_speculative_tokens())
    }

    /// The most loaded adapters.
    pub fn max_cpu_adapters(&self) -> usize {
        self.max_cpu_adapters.unwrap_or(self.max_adapters)
    }
}

/// Checks that a value, if it is set, is from `least` to `most`.
fn check_range<T: Copy + Display + PartialOrd>(
    field: &'static str,
    value: Option<T>,
    least: T,
    most: T,
) -> Result<(), FieldError> {
    match value {
        Some(value) if !(least..=most).contains(&value) => {
            Err(FieldError::new(field, value, format!("an integer from {least} to {most}")))
        }
        _ => Ok(()),
    }
}

/// Checks that a number, if it is set, is above `least` and at most `most`.
pub fn check_above(field: &'static str, value: Option<f64>, least: f64, most: f64) -> Result<(), FieldError> {
    match value {
        // The positive form excludes NaN.
        Some(value) if !(value > least && value <= most) => {
            Err(FieldError::new(field, value, format!("a number above {least} and at most {most}")))
        }
        _ => Ok(()),
    }
}

/// Checks that a value, if it is set, is one of the `choices`.
fn check_choice(field: &'static str, value: Option<usize>, choices: &[usize]) -> Result<(), FieldError> {
    match value {
        Some(value) if !choices.contains(&value) => {
            let (last, others) = choices.split_last().expect("there are choices");
            let others: Vec<String> = others.iter().map(ToString::to_string).collect();
            Err(FieldError::new(field, value, format!("{} or {last}", others.join(", "))))
        }
        _ => Ok(()),
    }
}

/// Checks a number of threads, and that each node has the same number.
pub fn check_threads(
    field: &'static str,
    threads: Option<usize>,
    num_nodes: usize,
) -> Result<(), FieldError> {
    check_range(field, threads, 1, MAX_THREADS)?;
    match threads {
        Some(threads) if !threads.is_multiple_of(num_nodes) => {
            let limit = format!("a multiple of {num_nodes}, the number of numa_nodes");
            Err(FieldError::new(field, threads, limit))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panics unless `change` makes the default configuration invalid with this message.
    #[track_caller]
    fn check(change: impl FnOnce(&mut EngineConfig), message: &str) {
        let mut config = EngineConfig::default();
        assert!(config.check().is_ok());
        change(&mut config);
        assert_eq!(config.check().expect_err("invalid").to_string(), message);
    }

    #[test]
    fn field_out_of_range_error_names_field_value_and_limit() {
        check(|c| c.block_size = Some(8), "block_size=8 is not allowed: it must be 16, 32, 64 or 128");
        check(|c| c.threads = Some(0), "threads=0 is not allowed: it must be an integer from 1 to 1024");
        check(
            |c| c.max_num_seqs = Some(513),
            "max_num_seqs=513 is not allowed: it must be an integer from 1 to 512 with max_num_batched_tokens=512",
        );
        check(|c| c.numa_nodes = Some(vec![]), "numa_nodes=[] is not allowed: it must be 1 to 16 nodes");
        check(
            |c| c.numa_nodes = Some(vec![1, 0, 1]),
            "numa_nodes=[1, 0, 1] is not allowed: it must be different nodes; 1 occurs twice",
        );
        check(
            |c| (c.threads, c.numa_nodes) = (Some(3), Some(vec![0, 1])),
            "threads=3 is not allowed: it must be a multiple of 2, the number of numa_nodes",
        );
        for ratio in [0.0, -0.5, 1.001, f64::NAN, f64::INFINITY] {
            let message =
                format!("memory_ratio={ratio} is not allowed: it must be a number above 0 and at most 1");
            check(|c| c.memory_ratio = Some(ratio), &message);
        }
        for num_tokens in [0, 33] {
            let message = format!(
                "num_speculative_tokens={num_tokens} is not allowed: it must be an integer from 1 to 32"
            );
            check(|c| c.num_speculative_tokens = Some(num_tokens), &message);
        }
        for (ttl, value) in [(0.0, "0"), (1e10, "10000000000")] {
            let message = format!(
                "prefix_cache_ttl={value} is not allowed: it must be a number above 0 and at most 1000000000"
            );
            check(|c| c.prefix_cache_ttl = Some(ttl), &message);
        }
        check(
            |c| c.prefix_cache_ttl = Some(1e-12),
            "prefix_cache_ttl=0.000000000001 is not allowed: it must be at least a nanosecond",
        );
        check(
            |c| (c.max_adapters, c.max_cpu_adapters) = (2, Some(1)),
            "max_cpu_adapters=1 is not allowed: it must be at least max_adapters=2",
        );
        check(
            |c| (c.preemption_mode, c.host_cache_bytes) = (PreemptionMode::Swap, Some(0)),
            "host_cache_bytes=0 is not allowed: it must be above 0 if preemption_mode is swap",
        );
        for blocks in [0, 1 << 31] {
            let message = format!(
                "kv_cache_blocks={blocks} is not allowed: it must be an integer from 1 to 2147483647"
            );
            check(|c| c.kv_cache_blocks = Some(blocks), &message);
        }
        check(
            |c| c.kv_cache_ratio = Some(1.5),
            "kv_cache_ratio=1.5 is not allowed: it must be a number above 0 and at most 1",
        );
        check(
            |c| (c.preemption_mode, c.host_cache_blocks) = (PreemptionMode::Swap, Some(0)),
            "host_cache_blocks=0 is not allowed: it must be above 0 if preemption_mode is swap",
        );
        check(
            |c| (c.prefix_cache, c.host_cache_blocks) = (false, Some(1)),
            "host_cache_blocks=1 is not allowed: it must be 0 if prefix_cache is False and preemption_mode is not swap",
        );
        check(
            |c| (c.prefix_cache, c.host_cache_bytes) = (false, Some(1 << 30)),
            "host_cache_bytes=1073741824 is not allowed: it must be 0 if prefix_cache is False and preemption_mode is \
             not swap",
        );
    }
}
