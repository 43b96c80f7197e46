//! The warm-up: the largest steps that were promised, before anybody waits for one. What cannot be had fails here.
//!
//! All layers share one workspace, so a step goes through one of them, and the head and sampling; that uses all the memory
//! of the whole step in a fraction of its time. Two steps are the largest, each in its way: the one with the most rows, and
//! one row alone at the end of the longest context, whose attention is spread over the threads.

use std::sync::Arc;
use std::time::Instant;

use penstock_device::{Backend, BlockCopy, CacheSpec, DeviceError};
use penstock_engine::executor::{BlockId, Sample, StepPlan, Work};
use penstock_engine::{Request, Sampling};

use crate::HostTierCost;
use crate::runner::{Depth, Runner};

/// Blocks that are copied to see how long that takes.
const COPIES: usize = 8;

/// What was learnt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarmUp {
    pub seconds: f64,
    pub host_tier: Option<HostTierCost>,
}

impl<B: Backend> Runner<B> {
    /// Runs the largest steps, and weighs the host tier's copies against computing again.
    pub(crate) fn warm_up(&mut self, cache: &CacheSpec) -> Result<WarmUp, DeviceError> {
        let start = Instant::now();
        let spec = *self.spec();
        // The first sequence has a chunk of a prompt; the others, a row each, are where the longest ones end.
        let mut widest = Vec::with_capacity(spec.sequences);
        let mut rows = spec.tokens;
        for others in (0..spec.sequences).rev() {
            let num_tokens = (rows - others).min(spec.positions);
            rows -= num_tokens;
            let first = if widest.is_empty() { 0 } else { spec.positions - num_tokens };
            widest.push((first, num_tokens));
        }
        self.run_through_one(&widest)?;
        self.run_through_one(&[(spec.positions - 1, 1)])?;
        let host_tier = (cache.host_blocks > 0).then(|| self.weigh_host_tier(cache)).transpose()?;
        Ok(WarmUp { seconds: start.elapsed().as_secs_f64(), host_tier })
    }

    /// A step of one layer: for each sequence the position of its first row, and how many rows it has. All lie in the same
    /// blocks, because there need not be as many as that; what is in them afterwards nobody reads.
    fn run_through_one(&mut self, sequences: &[(usize, usize)]) -> Result<(), DeviceError> {
        let spec = *self.spec();
        let mut plan = StepPlan::default();
        let sampling =
            Sampling { temperature: 1.0, top_k: 0, top_p: 0.9, min_p: 0.0, seed: 0, logprobs: true };
        let request = Arc::new(Request {
            prompt: Vec::new(),
            max_tokens: 1,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            sampling,
            priority: 0,
            prefix_cache: false,
            cache_salt: None,
        });
        for (slot, (start, num_tokens)) in sequences.iter().enumerate() {
            let (first_token, first_block) = (plan.tokens.len(), plan.blocks.len());
            plan.tokens.resize(first_token + num_tokens, 0);
            plan.blocks.extend((0..(start + num_tokens).div_ceil(spec.block_size) as u32).map(BlockId));
            plan.work.push(Work {
                slot: slot as u32,
                start: *start as u32,
                prompt_len: spec.positions as u32,
                num_tokens: *num_tokens as u32,
                tokens: first_token as u32..plan.tokens.len() as u32,
                follows_sample: false,
                blocks: first_block as u32..plan.blocks.len() as u32,
                sample: Some(Sample { request: Arc::clone(&request), index: 0, suppress_stops: false }),
            });
        }
        self.compute(&mut plan, Depth::OneLayer)
    }

    fn weigh_host_tier(&mut self, cache: &CacheSpec) -> Result<HostTierCost, DeviceError> {
        let copies = COPIES.min(cache.blocks).min(cache.host_blocks) as u32;
        let saves = || (0..copies).map(|block| BlockCopy::Save { from: block, to: block });
        let loads = || (0..copies).map(|block| BlockCopy::Load { from: block, to: block });
        self.copy(&mut saves().chain(loads()))?; // the system gives the pages
        let save = seconds(|| self.copy(&mut saves()))? / f64::from(copies);
        let load = seconds(|| self.copy(&mut loads()))? / f64::from(copies);
        let chunk = self.spec().tokens.min(self.spec().positions);
        let layer = seconds(|| self.run_through_one(&[(0, chunk)]))?;
        let recompute = layer * cache.layers as f64 * cache.block_size as f64 / chunk as f64;
        Ok(HostTierCost { save, load, recompute })
    }
}

fn seconds(run: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}
