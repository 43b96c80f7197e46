//! The warm-up: the largest steps that were promised, before anybody waits for one. What cannot be had fails here.
//!
//! All layers share one workspace, so a step goes through one of them, and the head and sampling; that uses all the memory
//! of the whole step in a fraction of its time. Three steps are the largest, each in its way: the one with the most rows,
//! one row alone at the end of the longest context, whose attention is spread over the threads, and one that tells
//! something of all its rows, of which only as many go through the head as do at a time.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_device::{Backend, CacheSpec, DeviceError};
use penstock_engine::Request;
use penstock_engine::{NewSequence, Sample, ScheduledRow, StepOutput, StepPlan};
use penstock_types::{BlockCopy, BlockId, HostBlockId, RequestedOutputs, Sampling};

use crate::HostTierInfo;
use crate::runner::{Depth, Runner};

/// Blocks that are copied to see how long that takes.
const COPIES: usize = 8;
/// How often a run is timed at most, and for how long together before no further run begins.
const TIMINGS: usize = 5;
const TIMING_BUDGET: Duration = Duration::from_millis(200);

/// What was learnt.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarmUp {
    pub seconds: f64,
    pub host_tier: Option<HostTierInfo>,
}

/// What a step tells.
#[derive(Clone, Copy, PartialEq)]
enum Wanted {
    Nothing,
    NextToken,
    /// Of every position of the prompt.
    Prompt,
}

impl<B: Backend> Runner<B> {
    /// Runs the largest steps, and weighs the host tier's copies against computing again.
    pub(crate) fn warm_up(
        &mut self,
        cache: &CacheSpec,
        has_prefix_cache: bool,
    ) -> Result<WarmUp, DeviceError> {
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
        self.run_through(1, &widest, Wanted::NextToken)?;
        self.run_through(1, &[(spec.positions - 1, 1)], Wanted::NextToken)?;
        self.run_through(1, &[(0, spec.tokens.min(spec.positions))], Wanted::Prompt)?;
        let weighed = (cache.host_blocks > 0).then(|| self.weigh_host_tier(cache)).transpose()?;
        let host_tier = weighed.map(|costs| costs.judged(has_prefix_cache));
        Ok(WarmUp { seconds: start.elapsed().as_secs_f64(), host_tier })
    }

    /// A step of a few layers: for each sequence the position of its first row, and how many rows it has. All lie in the same
    /// blocks, because there need not be as many as that; what is in them afterwards nobody reads.
    fn run_through(
        &mut self,
        num_layers: usize,
        sequences: &[(usize, usize)],
        wanted: Wanted,
    ) -> Result<(), DeviceError> {
        let spec = *self.spec();
        let mut plan = StepPlan::default();
        let sampling = Sampling { top_p: 0.9, ..Sampling::default() };
        let outputs =
            RequestedOutputs { logprobs: Some(0), prompt_logprobs: Some(0), ..RequestedOutputs::default() };
        let prompt = vec![0; spec.positions];
        let request = Arc::new(Request { outputs, ..Request::new(prompt, 1, sampling) });
        for (slot, (start, num_tokens)) in sequences.iter().enumerate() {
            let (first_token, first_block) = (plan.tokens.len(), plan.blocks.len());
            plan.tokens.resize(first_token + num_tokens, 0);
            plan.blocks.extend((0..(start + num_tokens).div_ceil(spec.block_size) as u32).map(BlockId));
            plan.rows.push(ScheduledRow {
                slot: slot as u32,
                start: *start as u32,
                prompt_len: spec.positions as u32,
                num_tokens: *num_tokens as u32,
                tokens: first_token as u32..plan.tokens.len() as u32,
                follows_sample: false,
                blocks: first_block as u32..plan.blocks.len() as u32,
                num_drafts: 0,
                prompt_outputs: if wanted == Wanted::Prompt { 0..*num_tokens as u32 } else { 0..0 },
                sample: (wanted == Wanted::NextToken).then_some(Sample { index: 0 }),
            });
            plan.new_sequences.push(NewSequence {
                slot: slot as u32,
                request: Arc::clone(&request),
                generated: 0..0,
            });
        }
        self.change_slots(&plan)?;
        let flight = self.compute(&plan, false, Depth::Layers(num_layers))?;
        self.finish(flight, &plan, &mut StepOutput::default())?;
        self.synchronize()
    }

    fn copy_and_wait(&mut self, copies: &mut dyn Iterator<Item = BlockCopy>) -> Result<(), DeviceError> {
        self.copy(copies)?;
        self.synchronize()
    }

    fn weigh_host_tier(&mut self, cache: &CacheSpec) -> Result<Costs, DeviceError> {
        let copies = COPIES.min(cache.blocks).min(cache.host_blocks) as u32;
        let saves =
            || (0..copies).map(|block| BlockCopy::Save { from: BlockId(block), to: HostBlockId(block) });
        let loads =
            || (0..copies).map(|block| BlockCopy::Load { from: HostBlockId(block), to: BlockId(block) });
        self.copy(&mut saves().chain(loads()))?; // the system gives the pages
        let save = quickest(|| seconds(|| self.copy_and_wait(&mut saves())))? / f64::from(copies);
        let load = quickest(|| seconds(|| self.copy_and_wait(&mut loads())))? / f64::from(copies);
        let chunk = self.spec().tokens.min(self.spec().positions);
        // A chunk in the middle of a prompt samples nothing, and its last layer ends with its keys and values: so does the
        // only layer of the one, and the other has a whole layer more.
        let last_layer = quickest(|| seconds(|| self.run_through(1, &[(0, chunk)], Wanted::Nothing)))?;
        let two_layers = quickest(|| seconds(|| self.run_through(2, &[(0, chunk)], Wanted::Nothing)))?;
        let share = cache.block_size as f64 / chunk as f64;
        Ok(Costs { save, load, recompute: share * all_layers(cache.layers, last_layer, two_layers) })
    }
}

/// Seconds per block, of all layers.
#[derive(Clone, Copy, Debug)]
struct Costs {
    save: f64,
    load: f64,
    recompute: f64,
}

impl Costs {
    /// Prefixes are kept in the host tier where there are any and loading them is quicker than computing them again.
    fn judged(self, has_prefix_cache: bool) -> HostTierInfo {
        let Self { save, load, recompute } = self;
        let pays = load < recompute;
        if has_prefix_cache && !pays {
            log::warn!(
                "the host tier keeps no prefixes: loading a block from it takes {:.1} us, computing it again {:.1} us",
                load * 1e6,
                recompute * 1e6
            );
        }
        HostTierInfo { save, load, recompute, keeps_prefixes: has_prefix_cache && pays }
    }
}

/// The time through all layers: those before the last are whole, and never cost less than nothing, whatever was measured.
fn all_layers(layers: usize, last_layer: f64, two_layers: f64) -> f64 {
    last_layer + layers.saturating_sub(1) as f64 * (two_layers - last_layer).max(0.0)
}

/// The least of a few timings, for a time slice that others took is no cost of ours. Long runs, of which a slice is a small
/// part, are timed less often.
fn quickest(mut timing: impl FnMut() -> Result<f64, DeviceError>) -> Result<f64, DeviceError> {
    let (mut least, mut sum) = (f64::INFINITY, 0.0);
    for _ in 0..TIMINGS {
        let seconds = timing()?;
        (least, sum) = (seconds.min(least), sum + seconds);
        if sum >= TIMING_BUDGET.as_secs_f64() {
            break;
        }
    }
    Ok(least)
}

fn seconds(run: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let start = Instant::now();
    run()?;
    Ok(start.elapsed().as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The least of `timings`, and how many were taken.
    fn quickest_of(timings: &[f64]) -> (f64, usize) {
        let mut taken = 0;
        let next = || {
            taken += 1;
            Ok(timings[taken - 1])
        };
        (quickest(next).expect("no failure"), taken)
    }

    #[test]
    fn a_lost_time_slice_is_no_cost_and_long_runs_are_timed_once() {
        assert_eq!(quickest_of(&[0.030, 0.002, 0.004, 0.001, 0.003, 0.0]), (0.001, 5));
        assert_eq!(quickest_of(&[0.080, 0.090, 0.100, 0.0]), (0.080, 3));
        assert_eq!(quickest_of(&[2.0, 0.0]), (2.0, 1));
    }

    #[test]
    fn computing_again_costs_its_layers_and_never_less_than_one() {
        assert_eq!(all_layers(4, 1.0, 3.0), 7.0);
        assert_eq!(all_layers(1, 1.0, 1.5), 1.0);
        assert_eq!(all_layers(4, 1.0, 0.9), 1.0);
    }

    #[test]
    fn prefixes_are_kept_where_there_are_any_and_loading_is_quicker() {
        let kept = |load, recompute, has_prefix_cache| {
            Costs { save: 9.0, load, recompute }.judged(has_prefix_cache).keeps_prefixes
        };
        assert!(kept(1.0, 2.0, true));
        assert!(!kept(2.0, 2.0, true) && !kept(3.0, 2.0, true));
        assert!(!kept(1.0, 2.0, false), "there are none");
    }
}
