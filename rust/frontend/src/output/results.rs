//! The construction of the generated result types.

use penstock_engine::request::{CachedTokens, Finish};

use super::{Timings, Usage};

impl Usage {
    pub(super) fn new(prompt_tokens: usize, completion_tokens: usize, cached: CachedTokens) -> Self {
        let CachedTokens { device, host } = cached;
        Self { prompt_tokens, completion_tokens, cached_tokens: device + host, cached_host_tokens: host }
    }

    /// Tokens of the prompt and of all choices.
    pub fn total_tokens(&self) -> usize {
        self.prompt_tokens + self.completion_tokens
    }
}

impl Timings {
    /// The timings of a request, from the first choice that was computed to the last one that ended.
    pub(super) fn new(finishes: &[&Finish]) -> Self {
        let first_token = finishes.iter().filter_map(|finish| finish.first_token).min();
        Self {
            queued: finishes.iter().map(|finish| finish.queued).min().unwrap_or_default().as_secs_f64(),
            first_token: first_token.map(|elapsed| elapsed.as_secs_f64()),
            total: finishes.iter().map(|finish| finish.total).max().unwrap_or_default().as_secs_f64(),
        }
    }
}
