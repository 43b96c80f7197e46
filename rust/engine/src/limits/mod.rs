//! The fixed sizes of a running engine, and what a request needs of them.

mod check;

use std::time::Duration;

use penstock_types::FieldError;

use crate::request::Request;
pub use check::InvalidRequest;

/// Guesses further ahead hardly ever come true.
pub const MAX_SPECULATIVE_TOKENS: usize = 32;

/// What happens to the newest of the least urgent sequences when the others need its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PreemptionMode {
    /// It waits, and is then computed again from its beginning.
    #[default]
    Recompute,
    /// It waits, its blocks saved in the host tier; where the tier is full, as `Recompute`.
    Swap,
    /// It ends, with what it has generated. Only where running sequences grow: who makes way for a more urgent arrival,
    /// or for anybody while its own consumer does not read, waits as with `Recompute`.
    Interrupt,
}

/// Fixed when the engine starts; nothing changes it afterwards.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most tokens of one sequence, prompt and output together.
    pub max_model_len: usize,
    /// Most sequences computed together; the number of executor slots.
    pub max_num_seqs: usize,
    /// Most tokens computed in one step, so also the longest chunk of a prompt.
    pub max_num_batched_tokens: usize,
    /// Most requests that may wait for a place.
    pub max_waiting: usize,
    /// Tokens per block of the KV cache.
    pub block_size: usize,
    /// Blocks of the KV cache.
    pub num_blocks: usize,
    /// Number of token ids the model knows.
    pub vocabulary_size: usize,
    /// Events a consumer may leave unread before its sequence pauses.
    pub queue_capacity: usize,
    /// How long blocks that nobody uses stay in the prefix cache after their last use; `None` for no prefix cache.
    pub prefix_cache_ttl: Option<Duration>,
    /// Sequences with longer prompts share no blocks, and nobody shares the blocks at positions from this on: where a
    /// model's keys depend on the prompt's length, they do so beyond this.
    pub max_shared_len: usize,
    /// What happens when the blocks run out.
    pub preemption_mode: PreemptionMode,
    /// Blocks of the host tier, to which blocks are saved that the KV cache has no room for; 0 for none.
    pub host_blocks: usize,
    /// Whether the host tier also keeps prefixes, not only the blocks of swapped sequences.
    pub host_prefixes: bool,
    /// Most tokens of a sequence that a step verifies in advance, guessed from what came before; 0 for no guesses.
    pub num_speculative_tokens: usize,
}

impl Limits {
    /// Whether an engine can run with these sizes.
    pub fn validate(&self) -> Result<(), FieldError> {
        let sizes = [
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("vocabulary_size", self.vocabulary_size),
            ("queue_capacity", self.queue_capacity),
        ];
        if let Some((field, value)) = sizes.into_iter().find(|(_, value)| *value == 0) {
            return Err(FieldError::new(field, value, "at least 1"));
        }
        // Positions, slots, blocks and offsets into a plan are 32 bits wide.
        let mut indexed = sizes.into_iter().chain([("host_blocks", self.host_blocks)]);
        if let Some((field, value)) = indexed.find(|(_, value)| *value > i32::MAX as usize) {
            return Err(FieldError::new(field, value, format!("at most {}", i32::MAX)));
        }
        if self.num_speculative_tokens > MAX_SPECULATIVE_TOKENS {
            let limit = format!("at most {MAX_SPECULATIVE_TOKENS}");
            return Err(FieldError::new("num_speculative_tokens", self.num_speculative_tokens, limit));
        }
        if self.prefix_cache_ttl.is_some_and(|ttl| ttl.is_zero()) {
            return Err(FieldError::new("prefix_cache_ttl", 0, "above 0, or absent for no prefix cache"));
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

    /// How many tokens `request` may generate at most: what it asks for, clipped to the model's length.
    pub fn max_new_tokens(&self, request: &Request) -> usize {
        request.max_tokens.min(self.max_model_len - request.prompt.len())
    }

    /// How many of its first blocks `request` may share with others.
    pub fn num_shareable_blocks(&self, request: &Request) -> usize {
        let may_share = self.prefix_cache_ttl.is_some() && request.prefix_cache;
        if may_share && request.prompt.len() <= self.max_shared_len {
            self.max_shared_len / self.block_size
        } else {
            0
        }
    }

    /// Blocks that hold `request` at its longest. The last generated token is never computed, so it needs no place.
    pub fn blocks_needed(&self, request: &Request) -> usize {
        (request.prompt.len() + self.max_new_tokens(request).max(1) - 1).div_ceil(self.block_size)
    }

    /// Events of `request` that may wait unread, the last one apart: no more than it can come to have, which are
    /// `Admitted`, one a token, and at most one a position that it is told of.
    pub fn result_capacity(&self, request: &Request) -> usize {
        let num_reports = if request.outputs.has_prompt() { request.prompt.len() } else { 0 };
        self.queue_capacity.min(request.max_tokens.saturating_add(num_reports).saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use penstock_types::{RequestedOutputs, Sampling};

    pub(super) fn limits() -> Limits {
        Limits {
            max_model_len: 64,
            max_num_seqs: 4,
            max_num_batched_tokens: 16,
            max_waiting: 0,
            block_size: 16,
            num_blocks: 3,
            vocabulary_size: 100,
            queue_capacity: 8,
            prefix_cache_ttl: None,
            max_shared_len: usize::MAX,
            preemption_mode: PreemptionMode::Recompute,
            host_blocks: 0,
            host_prefixes: true,
            num_speculative_tokens: 0,
        }
    }

    pub(super) fn request(num_prompt: usize, max_tokens: usize) -> Request {
        Request::new(vec![1; num_prompt], max_tokens, Sampling { temperature: 0.0, ..Sampling::default() })
    }

    #[test]
    fn the_last_token_needs_no_place() {
        assert_eq!(limits().blocks_needed(&request(16, 1)), 1);
        assert_eq!(limits().blocks_needed(&request(16, 2)), 2);
        assert_eq!(limits().blocks_needed(&request(48, usize::MAX)), 4, "clipped to max_model_len");
        assert_eq!(limits().check(&request(48, 1)), Ok(()));
        assert!(limits().check(&request(48, 2)).is_err());
    }

    #[test]
    fn a_prompt_that_is_only_reported_on_needs_blocks_for_all_its_tokens() {
        assert_eq!(limits().blocks_needed(&request(16, 0)), 1);
        assert_eq!(limits().blocks_needed(&request(17, 0)), 2);
    }

    #[test]
    fn a_result_queue_is_no_longer_than_its_request_can_fill_it() {
        assert_eq!(limits().result_capacity(&request(8, 3)), 4);
        assert_eq!(limits().result_capacity(&request(8, usize::MAX)), 8, "queue_capacity");
        let outputs = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
        assert_eq!(limits().result_capacity(&Request { outputs, ..request(3, 0) }), 4);
        assert_eq!(limits().result_capacity(&Request { outputs, ..request(3, usize::MAX) }), 8);
    }

    #[test]
    fn sizes_that_cannot_run_are_refused() {
        let error = Limits { block_size: 0, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "block_size=0 is not allowed: it must be at least 1");
        let error = Limits { max_num_batched_tokens: 3, ..limits() }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "max_num_batched_tokens=3 is not allowed: it must be at least max_num_seqs=4, one token per sequence and step"
        );
        assert!(Limits { num_blocks: 1 << 40, ..limits() }.validate().is_err());
        assert!(Limits { host_blocks: 1 << 40, ..limits() }.validate().is_err());
        let error = Limits { num_speculative_tokens: 33, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "num_speculative_tokens=33 is not allowed: it must be at most 32");
    }

    #[test]
    fn options_that_could_do_nothing_are_refused() {
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
        let prefix_cache_ttl = Some(Duration::from_secs(300));
        assert_eq!(Limits { host_blocks: 5, prefix_cache_ttl, ..limits() }.validate(), Ok(()));
    }

    #[test]
    fn only_blocks_below_the_shared_length_are_shared_and_only_by_prompts_within_it() {
        let prefix_cache_ttl = Some(Duration::from_secs(300));
        let limits = Limits { prefix_cache_ttl, max_shared_len: 40, ..limits() };
        assert_eq!(limits.num_shareable_blocks(&request(40, 1)), 2);
        assert_eq!(limits.num_shareable_blocks(&request(41, 1)), 0);
        assert_eq!(limits.num_shareable_blocks(&Request { prefix_cache: false, ..request(40, 1) }), 0);
        let limits = Limits { prefix_cache_ttl: None, ..limits };
        assert_eq!(limits.num_shareable_blocks(&request(40, 1)), 0);
    }
}
