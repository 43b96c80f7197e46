//! Limits and requests for the unit tests.

use penstock_types::Sampling;

use super::limits::Limits;
use crate::request::Request;

pub(super) fn limits() -> Limits {
    Limits {
        max_waiting: 0,
        max_paused: 1,
        block_size: 16,
        num_blocks: 3,
        queue_capacity: 8,
        ..Limits::small()
    }
}

pub(super) fn request(num_prompt: usize, max_tokens: usize) -> Request {
    Request::new(vec![1; num_prompt], max_tokens, Sampling { temperature: 0.0, ..Sampling::default() })
}
