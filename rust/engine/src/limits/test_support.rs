//! Limits and requests for the unit tests.

use penstock_types::{PreemptionMode, PreemptionVictim, Sampling};

use super::limits::Limits;
use crate::request::Request;

pub(super) fn limits() -> Limits {
    Limits {
        max_model_len: 64,
        max_num_seqs: 4,
        max_num_batched_tokens: 16,
        max_waiting: 0,
        max_unfinished: 1000,
        max_output_bytes: 1 << 30,
        max_paused: 1,
        block_size: 16,
        num_blocks: 3,
        vocabulary_size: 100,
        queue_capacity: 8,
        prefix_cache_ttl: None,
        max_shared_len: usize::MAX,
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

pub(super) fn request(num_prompt: usize, max_tokens: usize) -> Request {
    Request::new(vec![1; num_prompt], max_tokens, Sampling { temperature: 0.0, ..Sampling::default() })
}
