//! The fixed sizes of a running engine, and the checks of a request against them.

use std::time::Duration;

use crate::request::{Request, Sampling};

/// What happens to the newest of the least urgent sequences when the others need its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnExhaustion {
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
    pub on_exhaustion: OnExhaustion,
    /// Blocks of the host tier, to which blocks are saved that the KV cache has no room for; 0 for none.
    pub host_blocks: usize,
    /// Whether the host tier also keeps prefixes, not only the blocks of swapped sequences.
    pub host_prefixes: bool,
}

/// A request that can never run here. Each names the field, its value and the limit.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum InvalidRequest {
    /// The prompt has no tokens.
    #[error("prompt is empty; it needs at least one token")]
    EmptyPrompt,
    /// A token id the model does not know.
    #[error("prompt holds token id {token} at position {position}; the vocabulary has {vocabulary_size} ids")]
    UnknownToken {
        /// The id.
        token: u32,
        /// Where it stands.
        position: usize,
        /// Ids go up to this, exclusive.
        vocabulary_size: usize,
    },
    /// The prompt leaves no room for a single token.
    #[error(
        "prompt of {prompt} tokens exceeds the limit of {limit} (max_model_len {max_model_len} less one token of output)"
    )]
    PromptTooLong {
        /// Prompt tokens.
        prompt: usize,
        /// Most prompt tokens.
        limit: usize,
        /// The engine's `max_model_len`.
        max_model_len: usize,
    },
    /// The sequence could never fit the KV cache, however empty.
    #[error(
        "prompt of {prompt} tokens and max_tokens={max_tokens} need {needed} KV blocks; the cache has {available}"
    )]
    NeverFits {
        /// Prompt tokens.
        prompt: usize,
        /// Asked for.
        max_tokens: usize,
        /// Blocks needed at full length.
        needed: usize,
        /// Blocks there are.
        available: usize,
    },
    /// A number outside its range.
    #[error("{field}={value} is out of range: {limit}")]
    OutOfRange {
        /// The parameter's name as the user spells it.
        field: &'static str,
        /// What was given.
        value: String,
        /// What is allowed, in words.
        limit: String,
    },
}

/// A size an engine cannot start with.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}={value} is out of range: {limit}")]
pub struct InvalidLimits {
    /// The size's name.
    pub field: &'static str,
    /// What was given.
    pub value: usize,
    /// What is allowed, in words.
    pub limit: String,
}

impl Limits {
    /// Whether an engine can run with these sizes.
    pub fn validate(&self) -> Result<(), InvalidLimits> {
        let at_least_one = [
            ("max_model_len", self.max_model_len),
            ("max_num_seqs", self.max_num_seqs),
            ("max_num_batched_tokens", self.max_num_batched_tokens),
            ("block_size", self.block_size),
            ("num_blocks", self.num_blocks),
            ("vocabulary_size", self.vocabulary_size),
            ("queue_capacity", self.queue_capacity),
        ];
        for (field, value) in at_least_one {
            if value == 0 {
                return Err(InvalidLimits { field, value, limit: "at least 1".into() });
            }
            // Positions, slots, blocks and offsets into a plan are 32 bits wide; nothing waits on a longer queue.
            if value > i32::MAX as usize {
                return Err(InvalidLimits { field, value, limit: format!("at most {}", i32::MAX) });
            }
        }
        if self.host_blocks > i32::MAX as usize {
            let limit = format!("at most {}", i32::MAX);
            return Err(InvalidLimits { field: "host_blocks", value: self.host_blocks, limit });
        }
        if self.prefix_cache_ttl.is_some_and(|ttl| ttl.is_zero()) {
            let limit = "above 0; for no prefix cache, leave it out".into();
            return Err(InvalidLimits { field: "prefix_cache_ttl", value: 0, limit });
        }
        let is_swapping = self.on_exhaustion == OnExhaustion::Swap;
        if is_swapping && self.host_blocks == 0 {
            let limit = "at least 1, for on_exhaustion=swap to save blocks to".into();
            return Err(InvalidLimits { field: "host_blocks", value: 0, limit });
        }
        if self.host_blocks > 0 && !is_swapping && self.prefix_cache_ttl.is_none() {
            let limit =
                "0, for without a prefix cache and without on_exhaustion=swap nothing is saved".into();
            return Err(InvalidLimits { field: "host_blocks", value: self.host_blocks, limit });
        }
        if self.max_num_batched_tokens < self.max_num_seqs {
            return Err(InvalidLimits {
                field: "max_num_batched_tokens",
                value: self.max_num_batched_tokens,
                limit: format!(
                    "at least max_num_seqs={}, one token per sequence and step",
                    self.max_num_seqs
                ),
            });
        }
        Ok(())
    }

    /// Whether `request` can ever run here. Changes nothing, needs no engine thread.
    pub fn check(&self, request: &Request) -> Result<(), InvalidRequest> {
        self.check_prompt(&request.prompt)?;
        if request.max_tokens == 0 {
            return Err(out_of_range("max_tokens", request.max_tokens, "at least 1"));
        }
        if request.min_tokens > request.max_tokens {
            let limit = format!("at most max_tokens={}", request.max_tokens);
            return Err(out_of_range("min_tokens", request.min_tokens, limit));
        }
        if let Some(id) = request.stop_token_ids.iter().find(|id| **id as usize >= self.vocabulary_size) {
            let limit = format!("below the vocabulary's {} ids", self.vocabulary_size);
            return Err(out_of_range("stop_token_ids", id, limit));
        }
        check_sampling(&request.sampling)?;
        let needed = self.blocks_needed(request);
        if needed > self.num_blocks {
            return Err(InvalidRequest::NeverFits {
                prompt: request.prompt.len(),
                max_tokens: request.max_tokens,
                needed,
                available: self.num_blocks,
            });
        }
        Ok(())
    }

    fn check_prompt(&self, prompt: &[u32]) -> Result<(), InvalidRequest> {
        if prompt.is_empty() {
            return Err(InvalidRequest::EmptyPrompt);
        }
        let limit = self.max_model_len - 1;
        if prompt.len() > limit {
            let (prompt, max_model_len) = (prompt.len(), self.max_model_len);
            return Err(InvalidRequest::PromptTooLong { prompt, limit, max_model_len });
        }
        match prompt.iter().position(|token| *token as usize >= self.vocabulary_size) {
            Some(position) => Err(InvalidRequest::UnknownToken {
                token: prompt[position],
                position,
                vocabulary_size: self.vocabulary_size,
            }),
            None => Ok(()),
        }
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
        (request.prompt.len() + self.max_new_tokens(request) - 1).div_ceil(self.block_size)
    }
}

fn check_sampling(sampling: &Sampling) -> Result<(), InvalidRequest> {
    // Written so that NaN is outside every range.
    if !(sampling.temperature.is_finite() && sampling.temperature >= 0.0) {
        return Err(out_of_range("temperature", sampling.temperature, "finite and at least 0"));
    }
    if !(sampling.top_p > 0.0 && sampling.top_p <= 1.0) {
        return Err(out_of_range("top_p", sampling.top_p, "above 0 and at most 1"));
    }
    if !(0.0..=1.0).contains(&sampling.min_p) {
        return Err(out_of_range("min_p", sampling.min_p, "from 0 to 1"));
    }
    Ok(())
}

fn out_of_range(field: &'static str, value: impl ToString, limit: impl Into<String>) -> InvalidRequest {
    InvalidRequest::OutOfRange { field, value: value.to_string(), limit: limit.into() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits() -> Limits {
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
            on_exhaustion: OnExhaustion::Recompute,
            host_blocks: 0,
            host_prefixes: true,
        }
    }

    fn request(num_prompt: usize, max_tokens: usize) -> Request {
        Request::new(vec![1; num_prompt], max_tokens, Sampling { temperature: 0.0, ..Sampling::default() })
    }

    /// `change` makes a good request bad, and the answer says so in these words.
    #[track_caller]
    fn check(change: impl FnOnce(&mut Request), message: &str) {
        let mut request = request(8, 8);
        assert_eq!(limits().check(&request), Ok(()));
        change(&mut request);
        assert_eq!(limits().check(&request).unwrap_err().to_string(), message);
    }

    #[test]
    fn a_bad_request_is_named_with_its_value_and_the_limit() {
        check(|r| r.prompt = [].into(), "prompt is empty; it needs at least one token");
        check(
            |r| r.prompt = [1; 64].into(),
            "prompt of 64 tokens exceeds the limit of 63 (max_model_len 64 less one token of output)",
        );
        check(
            |r| r.prompt = [1, 1, 1, 100].into(),
            "prompt holds token id 100 at position 3; the vocabulary has 100 ids",
        );
        check(|r| r.max_tokens = 0, "max_tokens=0 is out of range: at least 1");
        check(|r| r.min_tokens = 9, "min_tokens=9 is out of range: at most max_tokens=8");
        check(
            |r| r.stop_token_ids = vec![2, 100],
            "stop_token_ids=100 is out of range: below the vocabulary's 100 ids",
        );
        check(
            |r| r.sampling.temperature = f32::NAN,
            "temperature=NaN is out of range: finite and at least 0",
        );
        check(|r| r.sampling.temperature = -0.5, "temperature=-0.5 is out of range: finite and at least 0");
        check(|r| r.sampling.top_p = 0.0, "top_p=0 is out of range: above 0 and at most 1");
        check(|r| r.sampling.top_p = f32::NAN, "top_p=NaN is out of range: above 0 and at most 1");
        check(|r| r.sampling.min_p = 1.5, "min_p=1.5 is out of range: from 0 to 1");
        check(
            |r| r.max_tokens = 1_000,
            "prompt of 8 tokens and max_tokens=1000 need 4 KV blocks; the cache has 3",
        );
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
    fn sizes_that_cannot_run_are_refused() {
        let error = Limits { block_size: 0, ..limits() }.validate().unwrap_err();
        assert_eq!(error.to_string(), "block_size=0 is out of range: at least 1");
        let error = Limits { max_num_batched_tokens: 3, ..limits() }.validate().unwrap_err();
        assert_eq!(
            error.to_string(),
            "max_num_batched_tokens=3 is out of range: at least max_num_seqs=4, one token per sequence and step"
        );
        assert!(Limits { num_blocks: 1 << 40, ..limits() }.validate().is_err());
        assert!(Limits { host_blocks: 1 << 40, ..limits() }.validate().is_err());
    }

    #[test]
    fn options_that_could_do_nothing_are_refused() {
        let check = |limits: Limits, message: &str| {
            assert_eq!(limits.validate().unwrap_err().to_string(), message);
        };
        check(
            Limits { prefix_cache_ttl: Some(Duration::ZERO), ..limits() },
            "prefix_cache_ttl=0 is out of range: above 0; for no prefix cache, leave it out",
        );
        check(
            Limits { on_exhaustion: OnExhaustion::Swap, ..limits() },
            "host_blocks=0 is out of range: at least 1, for on_exhaustion=swap to save blocks to",
        );
        check(
            Limits { host_blocks: 5, ..limits() },
            "host_blocks=5 is out of range: 0, for without a prefix cache and without on_exhaustion=swap nothing is saved",
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
