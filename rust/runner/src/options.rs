//! The options as far as they do not depend on the model, checked: when a configuration is built and when a model is opened.

use std::fmt::Display;
use std::time::Duration;

use penstock_engine::PreemptionMode;
use penstock_engine::limits::MAX_SPECULATIVE_TOKENS;

use crate::{LaunchError, Options};

const DEFAULT_MAX_NUM_SEQS: usize = 64;
const DEFAULT_MAX_NUM_BATCHED_TOKENS: usize = 512;
const DEFAULT_MAX_WAITING: usize = 1024;
const DEFAULT_MEMORY_RATIO: f64 = 0.9;
pub(crate) const BLOCK_SIZES: [usize; 4] = [16, 32, 64, 128];

impl Options {
    /// What is wrong with the options, whatever the model is.
    pub fn check(&self) -> Result<(), LaunchError> {
        Sizes::check(self).map(drop)
    }
}

/// The options with their defaults.
pub(crate) struct Sizes {
    pub threads: usize,
    pub max_num_seqs: usize,
    pub max_num_batched_tokens: usize,
    pub max_waiting: usize,
    pub block_size: usize,
    memory_ratio: f64,
    memory_leftover_bytes: u64,
}

impl Sizes {
    pub fn check(options: &Options) -> Result<Self, LaunchError> {
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
            return Err(out_of_range("threads", &threads, "at most 1024"));
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
        let memory_ratio = options.memory_ratio.unwrap_or(DEFAULT_MEMORY_RATIO);
        // Written so that NaN is outside.
        if !(memory_ratio > 0.0 && memory_ratio <= 1.0) {
            return Err(out_of_range("memory_ratio", &memory_ratio, "above 0 and at most 1"));
        }
        if options.prefix_cache_ttl == Some(Duration::ZERO) {
            return Err(out_of_range("prefix_cache_ttl", &0, "above 0 seconds, or None for no prefix cache"));
        }
        if options.num_speculative_tokens > MAX_SPECULATIVE_TOKENS {
            let limit = format!("at most {MAX_SPECULATIVE_TOKENS}");
            return Err(out_of_range("num_speculative_tokens", &options.num_speculative_tokens, limit));
        }
        check_host_cache(options)?;
        let memory_leftover_bytes = options.memory_leftover_bytes.unwrap_or(0);
        Ok(Self {
            threads,
            max_num_seqs,
            max_num_batched_tokens,
            max_waiting,
            block_size,
            memory_ratio,
            memory_leftover_bytes,
        })
    }

    /// What may be taken of the bytes that are available.
    pub fn allowance(&self, available: u64) -> Result<Allowance, LaunchError> {
        let leftover = self.memory_leftover_bytes;
        if leftover >= available {
            // The one way for a user to ask for it.
            let limit = format!("less than the {} that are available", available >> 20);
            return Err(out_of_range("BFC_LEFTOVER_MB", &(leftover >> 20), limit));
        }
        let most = available - leftover;
        Ok(Allowance { most, limit: share(most, self.memory_ratio) })
    }
}

/// How many bytes the engine may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Allowance {
    /// With the largest `memory_ratio`.
    pub most: u64,
    /// With the one that was chosen.
    pub limit: u64,
}

/// Rounded, but never to more than there is.
pub(crate) fn share(most: u64, ratio: f64) -> u64 {
    ((most as f64 * ratio) as u64).min(most)
}

/// A host tier that nothing would use is refused, and so is a use for it without one.
fn check_host_cache(options: &Options) -> Result<(), LaunchError> {
    let swaps = options.preemption_mode == PreemptionMode::Swap;
    let limit = match options.host_cache_bytes {
        Some(0) if swaps => "above 0 where preemption_mode is swap",
        Some(1..) if !swaps && options.prefix_cache_ttl.is_none() => {
            "0 where there is neither a prefix cache nor swapping to use it"
        }
        _ => return Ok(()),
    };
    Err(out_of_range("host_cache_bytes", &options.host_cache_bytes.unwrap_or(0), limit))
}

pub(crate) fn positive(field: &'static str, value: usize) -> Result<usize, LaunchError> {
    if value == 0 { Err(out_of_range(field, &value, "at least 1")) } else { Ok(value) }
}

pub(crate) fn out_of_range(
    field: &'static str,
    value: &dyn Display,
    limit: impl Into<String>,
) -> LaunchError {
    LaunchError::Option { field, value: value.to_string(), limit: limit.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `change` makes good options bad, and the answer says so in these words.
    #[track_caller]
    fn check(change: impl FnOnce(&mut Options), message: &str) {
        let mut options = Options::default();
        assert!(Sizes::check(&options).is_ok());
        change(&mut options);
        assert_eq!(Sizes::check(&options).err().expect("refused").to_string(), message);
    }

    #[test]
    fn an_option_outside_its_range_is_named_with_its_value_and_the_limit() {
        check(|o| o.block_size = Some(8), "block_size=8 is out of range: one of [16, 32, 64, 128]");
        check(|o| o.threads = Some(0), "threads=0 is out of range: at least 1");
        check(
            |o| o.max_num_seqs = Some(513),
            "max_num_seqs=513 is out of range: at most 512 with max_num_batched_tokens=512",
        );
        for ratio in [0.0, -0.5, 1.001, f64::NAN, f64::INFINITY] {
            let message = format!("memory_ratio={ratio} is out of range: above 0 and at most 1");
            check(|o| o.memory_ratio = Some(ratio), &message);
        }
        check(|o| o.num_speculative_tokens = 33, "num_speculative_tokens=33 is out of range: at most 32");
        check(
            |o| o.prefix_cache_ttl = Some(Duration::ZERO),
            "prefix_cache_ttl=0 is out of range: above 0 seconds, or None for no prefix cache",
        );
        check(
            |o| (o.preemption_mode, o.host_cache_bytes) = (PreemptionMode::Swap, Some(0)),
            "host_cache_bytes=0 is out of range: above 0 where preemption_mode is swap",
        );
        check(
            |o| o.host_cache_bytes = Some(1 << 30),
            "host_cache_bytes=1073741824 is out of range: 0 where there is neither a prefix cache nor swapping to use it",
        );
    }

    #[test]
    fn the_limit_is_a_share_of_what_is_available_less_the_leftover() {
        let allowance = |memory_ratio, leftover, available| {
            let options =
                Options { memory_ratio, memory_leftover_bytes: Some(leftover), ..Options::default() };
            Sizes::check(&options).expect("good options").allowance(available)
        };
        assert_eq!(allowance(Some(0.5), 200, 1000).expect("a limit"), Allowance { most: 800, limit: 400 });
        assert_eq!(allowance(None, 0, 1000).expect("a limit").limit, 900);
        assert_eq!(allowance(Some(1.0), 1, u64::MAX).expect("a limit").limit, u64::MAX - 1);
        assert_eq!(
            allowance(None, 5 << 20, 5 << 20).expect_err("refused").to_string(),
            "BFC_LEFTOVER_MB=5 is out of range: less than the 5 that are available"
        );
    }
}
