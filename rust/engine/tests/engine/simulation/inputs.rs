//! Random limits, hashers, requests and prompts.

use std::sync::Arc;
use std::time::Duration;

use penstock_engine::testing::BlockHasher;
use penstock_engine::{ClientId, Limits, OutputScope, PreemptionMode, PreemptionVictim, Request};

use super::{Observed, World};
use crate::oracle::{self, Rails, VOCABULARY};
use crate::random::Random;

pub fn random_limits(random: &mut Random) -> Limits {
    let max_num_seqs = random.between(1, 6);
    let max_model_len = random.between(4, 48);
    let block_size = random.between(1, 5);
    let blocks_of_one = max_model_len.div_ceil(block_size);
    let prefix_cache_ttl = random.chance(85).then(|| Duration::from_millis(random.between(5, 300) as u64));
    let (preemption_mode, preemption_victim) = [
        (PreemptionMode::Recompute, PreemptionVictim::Newest),
        (PreemptionMode::Swap, PreemptionVictim::Newest),
        (PreemptionMode::Interrupt, PreemptionVictim::Newest),
        (PreemptionMode::Interrupt, PreemptionVictim::Longest),
    ][random.below(4)];
    let host_blocks = match (preemption_mode, prefix_cache_ttl) {
        (PreemptionMode::Swap, _) => random.between(1, 16),
        (_, Some(_)) if random.chance(85) => random.between(1, 16),
        _ => 0,
    };
    let limits = Limits {
        max_model_len,
        max_num_seqs,
        max_num_batched_tokens: max_num_seqs + random.below(20),
        max_waiting: random.below(6),
        max_unfinished: if random.chance(85) { 1000 } else { random.between(4, 12) },
        max_paused: if random.chance(50) { 100 } else { random.between(1, 4) },
        block_size,
        num_blocks: random.between(blocks_of_one.div_ceil(2), blocks_of_one + 6),
        vocabulary_size: VOCABULARY as usize,
        queue_capacity: random.between(1, 12),
        prefix_cache_ttl,
        max_shared_len: if random.chance(80) { usize::MAX } else { random.below(max_model_len) },
        preemption_mode,
        preemption_victim,
        host_blocks,
        host_prefixes: random.chance(95),
        max_adapters: random.below(4),
        adapter_bytes: random.between(4, 10) as u64,
        max_registered_adapters: 6,
        max_registered_bytes: random.between(10, 40) as u64,
        num_speculative_tokens: if random.chance(50) { random.between(1, 8) } else { 0 },
        ..Limits::small()
    };
    limits.validate().unwrap();
    limits
}

/// Usually the engine's own, or one with many collisions.
pub fn random_hasher(random: &mut Random) -> BlockHasher {
    let key = u128::from(random.next());
    match random.below(4) {
        0 => BlockHasher::with_function(key, |_, _, _| 0),
        1 => BlockHasher::with_function(key, |_, parent, tokens| {
            tokens.iter().fold(parent, |sum, token| sum + u128::from(*token)) % 4
        }),
        _ => BlockHasher::new(key),
    }
}
impl World {
    pub fn random_request(&mut self) -> Request {
        let prompt = self.random_prompt();
        let random = &mut self.random;
        let is_scored = random.chance(20);
        let max_tokens = random.between(usize::from(!is_scored), 20);
        let mut request = oracle::request(0, max_tokens, random.below(4) as u64);
        request.prompt = prompt.into();
        request.stop_token_ids =
            (0..random.below(3)).map(|_| random.below(VOCABULARY as usize) as u32).collect();
        if random.chance(20) {
            let sequence = |random: &mut Random| {
                (0..random.between(1, 2)).map(|_| random.below(VOCABULARY as usize) as u32).collect()
            };
            request.stop_token_sequences = (0..random.between(1, 8)).map(|_| sequence(random)).collect();
        }
        if random.chance(15) {
            request.grammar = Some(Arc::new(Rails));
        }
        if is_scored {
            request.outputs.logits = Some([OutputScope::Prompt, OutputScope::All][random.below(2)]);
        }
        if random.chance(30) {
            request.min_tokens = random.below(max_tokens + 1);
        }
        request.priority = [0, 0, 0, 1, -1][random.below(5)];
        request.client = [None, Some(1), Some(1), Some(2)][random.below(4)].map(ClientId);
        request.prefix_cache = random.chance(90);
        let left = Duration::from_millis(random.below(2000) as u64);
        request.deadline = random.chance(60).then(|| self.harness.now + left);
        let adapters: Vec<_> = self.adapters.iter().chain(&self.holds).copied().collect();
        if !adapters.is_empty() && random.chance(60) {
            request.adapter = Some(adapters[random.below(adapters.len())]);
        }
        request.cache_salt = [None, None, None, Some("mine"), Some("yours")][random.below(5)].map(Arc::from);
        request
    }

    /// Begins like others, or continues an earlier output.
    fn random_prompt(&mut self) -> Vec<u32> {
        let random = &mut self.random;
        let num_prompt = random.between(1, self.harness.limits.max_model_len - 1);
        let mut prompt = if random.chance(30) && !self.observed.is_empty() {
            let Observed { client, tokens, .. } = &self.observed[random.below(self.observed.len())];
            client.request.prompt.iter().copied().chain(tokens.iter().map(|token| token.id)).collect()
        } else {
            self.openings[random.below(3)].clone()
        };
        prompt.truncate(num_prompt.saturating_sub(random.below(6)));
        prompt.resize_with(num_prompt, || random.below(VOCABULARY as usize) as u32);
        prompt
    }
}
