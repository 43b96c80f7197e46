//! [`Limits`]: their values, their validation, and the needs of a request.

use std::time::Duration;

use penstock_types::config_limits::MAX_NUM_SPECULATIVE_TOKENS;
use penstock_types::{FieldError, PreemptionMode, PreemptionVictim, Unread};

use crate::request::Request;

/// The limits of an engine, fixed when it starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens of one sequence, prompt and output together.
    pub max_model_len: usize,
    /// The most sequences that run at once; the number of executor slots.
    pub max_num_seqs: usize,
    /// The most tokens computed in one step, and so the longest chunk of a prompt.
    pub max_num_batched_tokens: usize,
    /// The most tokens that a step computes of one sequence with several pending ones; `usize::MAX` for no bound but
    /// the budget.
    pub max_prefill_chunk: usize,
    /// The most new requests that may wait; `usize::MAX` for no bound but the mailbox.
    pub max_waiting: usize,
    /// The most sequences that may wait or run, without the paused ones. A request counts once for each choice.
    pub max_unfinished: usize,
    /// The most bytes that the tensors and logprobs of open requests may take together.
    pub max_output_bytes: usize,
    /// The most sequences that may be paused because their consumers do not read.
    pub max_paused: usize,
    /// Tokens per block of the KV cache.
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// The number of token ids of the model.
    pub vocabulary_size: usize,
    /// Events that a consumer may leave unread before its sequence pauses.
    pub queue_capacity: usize,
    /// The time for which unused blocks stay in the prefix cache; `None` for no prefix cache.
    pub prefix_cache_ttl: Option<Duration>,
    /// Sequences with longer prompts share no blocks, and blocks at positions from this on are not shared. For models
    /// whose keys depend on the prompt's length beyond this.
    pub max_shared_len: usize,
    /// The key of the block hashes in KV events. Engines with the same key give equal blocks equal hashes.
    pub kv_hash_key: u128,
    /// The effect of preemption when the blocks run out.
    pub preemption_mode: PreemptionMode,
    /// The sequence that `PreemptionMode::Interrupt` ends.
    pub preemption_victim: PreemptionVictim,
    /// Blocks of the host tier, where blocks are saved that the KV cache has no room for; 0 for none.
    pub host_blocks: usize,
    /// Whether the host tier also keeps prefixes, not only the blocks of swapped sequences.
    pub host_prefixes: bool,
    /// The most draft tokens of a sequence per step, predicted from earlier tokens; 0 without speculative decoding.
    pub num_speculative_tokens: usize,
    /// Adapters on the device; 0 without adapters.
    pub max_adapters: usize,
    /// Bytes of the adapters on the device.
    pub adapter_bytes: u64,
    /// The most adapters that take requests, those on the device included. At most twice as many are in host memory,
    /// those included that were unloaded or replaced and have open requests.
    pub max_registered_adapters: usize,
    /// The most bytes of adapters in host memory.
    pub max_registered_bytes: u64,
}

impl Limits {
    /// The limits of a small engine without prefix cache, host tier and adapters, for tests.
    #[cfg(any(test, feature = "testing"))]
    pub fn small() -> Self {
        Self {
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 16,
            max_prefill_chunk: usize::MAX,
            max_waiting: 8,
            max_unfinished: 1000,
            max_output_bytes: 1 << 30,
            max_paused: 100,
            block_size: 4,
            num_blocks: 64,
            vocabulary_size: 100,
            queue_capacity: 64,
            prefix_cache_ttl: None,
            max_shared_len: usize::MAX,
            kv_hash_key: 0,
            preemption_mode: PreemptionMode::Recompute,
            preemption_victim: PreemptionVictim::Newest,
            host_blocks: 0,
            host_prefixes: true,
            num_speculative_tokens: 0,
            max_adapters: 0,
            adapter_bytes: 0,
            max_registered_adapters: 0,
            max_registered_bytes: u64::MAX,
        }
    }

    /// Checks whether an engine can run with these limits.
    pub fn validate(&self) -> Result<(), FieldError> {
        let sizes = [
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("vocabulary_size", self.vocabulary_size),
            ("queue_capacity", self.queue_capacity),
            ("max_paused", self.max_paused),
            ("max_unfinished", self.max_unfinished),
        ];
        if let Some((field, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(FieldError::new(field, value, "at least 1"));
        }
        // Positions, slots, blocks, numbers of adapters and offsets into a plan are 32 bits wide.
        let may_be_zero = [("host_blocks", self.host_blocks), ("max_adapters", self.max_adapters)];
        let mut indexed = sizes.into_iter().chain(may_be_zero);
        if let Some((field, value)) = indexed.find(|(_, value)| *value > i32::MAX as usize) {
            return Err(FieldError::new(field, value, format!("at most {}", i32::MAX)));
        }
        if self.max_prefill_chunk == 0 {
            return Err(FieldError::new("max_prefill_chunk", 0, "at least 1"));
        }
        if self.num_speculative_tokens > MAX_NUM_SPECULATIVE_TOKENS {
            let limit = format!("at most {MAX_NUM_SPECULATIVE_TOKENS}");
            return Err(FieldError::new("num_speculative_tokens", self.num_speculative_tokens, limit));
        }
        if self.prefix_cache_ttl.is_some_and(|ttl| ttl.is_zero()) {
            return Err(FieldError::new("prefix_cache_ttl", 0, "above 0, or absent for no prefix cache"));
        }
        if self.preemption_victim != PreemptionVictim::Newest
            && self.preemption_mode != PreemptionMode::Interrupt
        {
            let limit = "newest without preemption_mode=interrupt";
            return Err(FieldError::new("preemption_victim", self.preemption_victim.name(), limit));
        }
        let is_swapping = self.preemption_mode == PreemptionMode::Swap;
        if is_swapping && self.host_blocks == 0 {
            return Err(FieldError::new("host_blocks", 0, "at least 1 with preemption_mode=swap"));
        }
        if self.host_blocks > 0 && !is_swapping && self.prefix_cache_ttl.is_none() {
            let limit = "0 without a prefix cache and without preemption_mode=swap";
            return Err(FieldError::new("host_blocks", self.host_blocks, limit));
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            let limit =
                format!("at least max_num_seqs={}, one token per sequence and step", self.max_num_seqs);
            return Err(FieldError::new("max_num_batched_tokens", self.max_num_batched_tokens, limit));
        }
        Ok(())
    }

    /// The most tokens that `request` may generate: its `max_tokens`, limited by the model's length.
    pub fn max_new_tokens(&self, request: &Request) -> usize {
        request.max_tokens.min(self.max_model_len - request.prompt.len())
    }

    /// The number of first blocks that `request` may share with others.
    pub fn num_shareable_blocks(&self, request: &Request) -> usize {
        let may_share = self.prefix_cache_ttl.is_some() && request.prefix_cache;
        if may_share && request.prompt.len() <= self.max_shared_len {
            self.max_shared_len / self.block_size
        } else {
            0
        }
    }

    /// The most tokens of `request` that are in the KV cache. The last generated token is never computed.
    pub fn max_kv_tokens(&self, request: &Request) -> usize {
        request.prompt.len() + self.max_new_tokens(request).max(1) - 1
    }

    /// The most blocks that `request` needs.
    pub fn blocks_needed(&self, request: &Request) -> usize {
        self.max_kv_tokens(request).div_ceil(self.block_size)
    }

    /// The capacity of the result queue of a choice of `request`: that of the events it can have, which are `Admitted`,
    /// one per token, and at most one per position with prompt outputs; at most `queue_capacity` if it may pause.
    pub fn result_capacity(&self, request: &Request, choice: u32) -> usize {
        let num_positions =
            if request.choice_outputs(choice).has_prompt() { request.prompt.len() } else { 0 };
        let num_events = self.max_new_tokens(request) + num_positions + 1;
        match request.unread {
            Unread::Pause => self.queue_capacity.min(num_events),
            Unread::Keep => num_events,
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_types::RequestedOutputs;

    use super::super::test_support::{limits, request};
    use super::*;

    #[test]
    fn the_last_token_needs_no_block() {
        assert_eq!(limits().blocks_needed(&request(16, 1)), 1);
        assert_eq!(limits().blocks_needed(&request(16, 2)), 2);
        assert_eq!(limits().blocks_needed(&request(48, usize::MAX)), 4, "clipped to max_model_len");
        assert_eq!(limits().check(&request(48, 1)), Ok(()));
        assert!(limits().check(&request(48, 2)).is_err());
    }

    #[test]
    fn a_scored_prompt_needs_blocks_for_all_its_tokens() {
        assert_eq!(limits().blocks_needed(&request(16, 0)), 1);
        assert_eq!(limits().blocks_needed(&request(17, 0)), 2);
    }

    #[test]
    fn a_result_queue_is_no_longer_than_its_request_can_fill() {
        assert_eq!(limits().result_capacity(&request(8, 3), 0), 4);
        assert_eq!(limits().result_capacity(&request(8, usize::MAX), 0), 8, "queue_capacity");
        let outputs = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
        assert_eq!(limits().result_capacity(&Request { outputs, ..request(3, 2) }, 0), 6);
        assert_eq!(
            limits().result_capacity(&Request { outputs, ..request(3, 2) }, 1),
            3,
            "of another choice"
        );
        assert_eq!(limits().result_capacity(&Request { outputs, ..request(3, 0) }, 0), 4);
        assert_eq!(limits().result_capacity(&Request { outputs, ..request(3, usize::MAX) }, 0), 8);
    }

    #[test]
    fn a_result_queue_of_kept_output_holds_all_events() {
        let kept = |max_tokens| Request { unread: Unread::Keep, ..request(8, max_tokens) };
        assert_eq!(limits().result_capacity(&kept(30), 0), 31);
        assert_eq!(limits().result_capacity(&kept(usize::MAX), 0), 57, "limited by max_model_len");
        let outputs = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
        assert_eq!(limits().result_capacity(&Request { outputs, ..kept(30) }, 0), 39);
    }

    #[test]
    fn limits_out_of_range_are_rejected() {
        let error = Limits { block_size: 0, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "block_size=0 is not allowed: it must be at least 1");
        let error = Limits { max_prefill_chunk: 0, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "max_prefill_chunk=0 is not allowed: it must be at least 1");
        let error = Limits { max_num_batched_tokens: 3, ..limits() }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "max_num_batched_tokens=3 is not allowed: it must be at least max_num_seqs=4, one token per sequence and step"
        );
        assert!(Limits { num_blocks: 1 << 40, ..limits() }.validate().is_err());
        assert!(Limits { host_blocks: 1 << 40, ..limits() }.validate().is_err());
        assert!(Limits { max_adapters: 1 << 40, ..limits() }.validate().is_err());
        let error = Limits { num_speculative_tokens: 33, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "num_speculative_tokens=33 is not allowed: it must be at most 32");
    }

    #[test]
    fn limits_without_effect_are_rejected() {
        let check = |limits: Limits, message: &str| {
            assert_eq!(limits.validate().unwrap_err().to_string(), message);
        };
        check(
            Limits { prefix_cache_ttl: Some(Duration::ZERO), ..limits() },
            "prefix_cache_ttl=0 is not allowed: it must be above 0, or absent for no prefix cache",
        );
        check(
            Limits { preemption_mode: PreemptionMode::Swap, ..limits() },
            "host_blocks=0 is not allowed: it must be at least 1 with preemption_mode=swap",
        );
        check(
            Limits { host_blocks: 5, ..limits() },
            "host_blocks=5 is not allowed: it must be 0 without a prefix cache and without preemption_mode=swap",
        );
        check(
            Limits { preemption_victim: PreemptionVictim::Longest, ..limits() },
            "preemption_victim=longest is not allowed: it must be newest without preemption_mode=interrupt",
        );
        let prefix_cache_ttl = Some(Duration::from_secs(300));
        assert_eq!(Limits { host_blocks: 5, prefix_cache_ttl, ..limits() }.validate(), Ok(()));
    }

    #[test]
    fn blocks_and_prompts_beyond_max_shared_len_are_not_shared() {
        let prefix_cache_ttl = Some(Duration::from_secs(300));
        let limits = Limits { prefix_cache_ttl, max_shared_len: 40, ..limits() };
        assert_eq!(limits.num_shareable_blocks(&request(40, 1)), 2);
        assert_eq!(limits.num_shareable_blocks(&request(41, 1)), 0);
        assert_eq!(limits.num_shareable_blocks(&Request { prefix_cache: false, ..request(40, 1) }), 0);
        let limits = Limits { prefix_cache_ttl: None, ..limits };
        assert_eq!(limits.num_shareable_blocks(&request(40, 1)), 0);
    }
}
