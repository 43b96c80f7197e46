//! The warm-up runs the kernels of a step before the first request, so that a device that cannot run them is an error
//! at load time, and measures the host tier.
//!
//! The steps are small, because the same kernels run for any number of rows (cuBLASLt is tried before): a row at the
//! end of the longest context, with attention divided among the threads and with sampling; and some rows of a prompt
//! with outputs. Each runs through one layer. The time is mostly that of reading the output head twice.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use penstock_device::{Backend, CacheSpec, DeviceError};
use penstock_engine::Request;
use penstock_engine::{NewSequence, Sample, ScheduledRow, StepOutput, StepPlan};
use penstock_types::{BlockCopy, BlockId, HostBlockId, RequestedOutputs, Sampling};

use crate::HostTierInfo;
use crate::runner::{Depth, Runner};

/// The number of prompt tokens of a step.
const PROMPT: usize = 2;
/// The number of blocks copied to measure the host tier.
const COPIES: usize = 8;
/// The most timings of a run, and the total time after which no further timing starts.
const TIMINGS: usize = 5;
const TIMING_BUDGET: Duration = Duration::from_millis(200);

/// The results of the warm-up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WarmUp {
    pub seconds: f64,
    pub host_tier: Option<HostTierInfo>,
}

/// The outputs of a step.
#[derive(Clone, Copy, PartialEq)]
enum StepKind {
    NoOutput,
    NextToken,
    /// Log probabilities of every position of the prompt.
    PromptLogprobs,
}

impl<B: Backend> Runner<B> {
    /// Runs small steps, and compares the host tier's copies with computing.
    pub(crate) fn warm_up(
        &mut self,
        cache: &CacheSpec,
        has_prefix_cache: bool,
    ) -> Result<WarmUp, DeviceError> {
        let start = Instant::now();
        let spec = *self.spec();
        self.run_through(1, &[(spec.positions - 1, 1)], StepKind::NextToken)?;
        self.run_through(1, &[(0, PROMPT.min(spec.tokens).min(spec.positions))], StepKind::PromptLogprobs)?;
        let costs = (cache.host_blocks > 0).then(|| self.benchmark_host_tier(cache)).transpose()?;
        let host_tier = costs.map(|costs| costs.decide(has_prefix_cache));
        Ok(WarmUp { seconds: start.elapsed().as_secs_f64(), host_tier })
    }

    /// Runs a step through a few layers, with the position of the first row and the number of rows of each sequence.
    /// All sequences use the same blocks, because there may be too few for all; their content is not read afterwards.
    fn run_through(
        &mut self,
        num_layers: usize,
        sequences: &[(usize, usize)],
        kind: StepKind,
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
                prompt_outputs: if kind == StepKind::PromptLogprobs { 0..*num_tokens as u32 } else { 0..0 },
                sample: (kind == StepKind::NextToken).then_some(Sample { index: 0 }),
                adapter: None,
            });
            plan.new_sequences.push(NewSequence {
                slot: slot as u32,
                request: Arc::clone(&request),
                choice: 0,
                generated: 0..0,
                lifetime: Weak::new(),
            });
        }
        let mut turn = self.turn();
        self.change_slots(&plan)?;
        let flight = self.compute(&plan, false, Depth::Layers(num_layers), &mut turn)?;
        self.finish(flight, &plan, &mut StepOutput::default())?;
        self.synchronize()
    }

    fn copy_and_wait(&mut self, copies: &mut dyn Iterator<Item = BlockCopy>) -> Result<(), DeviceError> {
        self.copy(copies)?;
        self.synchronize()
    }

    fn benchmark_host_tier(&mut self, cache: &CacheSpec) -> Result<Costs, DeviceError> {
        let copies = COPIES.min(cache.blocks).min(cache.host_blocks) as u32;
        let saves =
            || (0..copies).map(|block| BlockCopy::Save { from: BlockId(block), to: HostBlockId(block) });
        let loads =
            || (0..copies).map(|block| BlockCopy::Load { from: HostBlockId(block), to: BlockId(block) });
        self.copy(&mut saves().chain(loads()))?; // so that the system provides the pages
        let save = quickest(|| seconds(|| self.copy_and_wait(&mut saves())))? / f64::from(copies);
        let load = quickest(|| seconds(|| self.copy_and_wait(&mut loads())))? / f64::from(copies);
        let chunk = self.spec().tokens.min(self.spec().positions);
        // Without an output, the last layer ends after writing its keys and values. So the first run is only that part
        // of a layer, and the second has one whole layer more.
        let last_layer = quickest(|| seconds(|| self.run_through(1, &[(0, chunk)], StepKind::NoOutput)))?;
        let two_layers = quickest(|| seconds(|| self.run_through(2, &[(0, chunk)], StepKind::NoOutput)))?;
        let share = cache.block_size as f64 / chunk as f64;
        Ok(Costs { save, load, recompute: share * all_layers(cache.layers, last_layer, two_layers) })
    }
}

/// Seconds per block of all layers.
#[derive(Clone, Copy, Debug)]
struct Costs {
    save: f64,
    load: f64,
    recompute: f64,
}

impl Costs {
    /// Decides that the host tier keeps prefixes if there is a prefix cache and loading is faster than computing.
    fn decide(self, has_prefix_cache: bool) -> HostTierInfo {
        let Self { save, load, recompute } = self;
        let is_faster = load < recompute;
        if has_prefix_cache && !is_faster {
            log::warn!(
                "the host tier does not keep prefixes: loading a block takes {:.1} us, computing it {:.1} us",
                load * 1e6,
                recompute * 1e6
            );
        }
        HostTierInfo {
            save_seconds: save,
            load_seconds: load,
            recompute_seconds: recompute,
            keeps_prefixes: has_prefix_cache && is_faster,
        }
    }
}

/// The time of all layers: the last one is partial, the others are whole. A negative difference of the timings counts
/// as 0.
fn all_layers(layers: usize, last_layer: f64, two_layers: f64) -> f64 {
    last_layer + layers.saturating_sub(1) as f64 * (two_layers - last_layer).max(0.0)
}

/// The minimum of several timings, which excludes time slices of other processes. Long runs are timed less often.
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

    /// The minimum of `timings`, and the number of timings that were used.
    fn quickest_of(timings: &[f64]) -> (f64, usize) {
        let mut taken = 0;
        let next = || {
            taken += 1;
            Ok(timings[taken - 1])
        };
        (quickest(next).expect("no failure"), taken)
    }

    #[test]
    fn quickest_excludes_lost_time_slices_and_times_long_runs_once() {
        assert_eq!(quickest_of(&[0.030, 0.002, 0.004, 0.001, 0.003, 0.0]), (0.001, 5));
        assert_eq!(quickest_of(&[0.080, 0.090, 0.100, 0.0]), (0.080, 3));
        assert_eq!(quickest_of(&[2.0, 0.0]), (2.0, 1));
    }

    #[test]
    fn recompute_time_has_at_least_the_last_layer() {
        assert_eq!(all_layers(4, 1.0, 3.0), 7.0);
        assert_eq!(all_layers(1, 1.0, 1.5), 1.0);
        assert_eq!(all_layers(4, 1.0, 0.9), 1.0);
    }

    #[test]
    fn prefixes_are_kept_if_there_is_a_cache_and_loading_is_faster() {
        let kept = |load, recompute, has_prefix_cache| {
            Costs { save: 9.0, load, recompute }.decide(has_prefix_cache).keeps_prefixes
        };
        assert!(kept(1.0, 2.0, true));
        assert!(!kept(2.0, 2.0, true) && !kept(3.0, 2.0, true));
        assert!(!kept(1.0, 2.0, false), "no prefix cache");
    }
}
