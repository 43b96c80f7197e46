//! Plans for a model without an engine, with any drafts.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use penstock_device::DeviceError;
use penstock_engine::{
    Limits, NewSequence, PromptPosition, Request, Sample, ScheduledRow, StepOutput, StepPlan,
};
use penstock_runner::{BareRunner, Faults, LaunchConfig};
use penstock_types::EngineConfig;
use penstock_types::Token;
use penstock_types::{BlockCopy, BlockId, HostBlockId};

use super::{Device, device};
use crate::common::{LONGEST, TinyModel};

/// One sequence and its slot.
pub struct Sequence {
    pub request: Arc<Request>,
    lifetime: Arc<()>,
    slot: u32,
    is_admitted: bool,
    num_computed: usize,
    /// Its outputs so far.
    pub positions: Vec<PromptPosition>,
    pub tokens: Vec<Token>,
    /// The forced tokens of its last step.
    pub forced: Vec<u32>,
    pub failure: Option<String>,
    /// The number of its rows that were deferred.
    pub num_deferred: usize,
}

impl Sequence {
    pub fn new(request: Request, slot: u32) -> Self {
        let (positions, tokens, forced) = (vec![], vec![], vec![]);
        let request = Arc::new(request);
        Self {
            request,
            lifetime: Arc::new(()),
            slot,
            is_admitted: false,
            num_computed: 0,
            positions,
            tokens,
            forced,
            failure: None,
            num_deferred: 0,
        }
    }

    /// Like a sequence that was preempted.
    pub fn readmit(&mut self, slot: u32) {
        (self.slot, self.is_admitted, self.num_computed) = (slot, false, 0);
    }

    pub fn ids(&self) -> Vec<u32> {
        self.tokens.iter().map(|token| token.id).collect()
    }

    pub fn is_done(&self) -> bool {
        let has_outputs = self.request.max_tokens > 0 || self.num_computed == self.request.prompt.len();
        self.failure.is_some() || has_outputs && self.tokens.len() >= self.request.max_tokens
    }
}

/// The row of a sequence in a step.
pub struct Row<'a> {
    pub sequence: &'a mut Sequence,
    /// Maximum number of tokens that are computed, without drafts.
    pub chunk: usize,
    pub drafts: Vec<u32>,
}

pub struct Steps {
    runner: BareRunner<Device>,
    limits: Limits,
    /// The freed slots of the next plan.
    pub freed: Vec<u32>,
}

impl Steps {
    pub fn new(options: EngineConfig) -> Self {
        Self::open(device(2), options, Duration::MAX)
    }

    fn open(device: Device, options: EngineConfig, mask_wait: Duration) -> Self {
        let faults = Faults { mask_wait: Some(mask_wait), ..Faults::default() };
        let config = LaunchConfig { faults, ..options.into() };
        let (runner, limits) = TinyModel::write().open_on(device, &config).unwrap();
        Self { runner, limits, freed: vec![] }
    }

    /// A model with four slots and tiles of 32 rows.
    pub fn of_four() -> Self {
        Self::of_four_on(device(2))
    }

    pub fn of_four_on(device: Device) -> Self {
        Self::open(device, four_slots(), Duration::MAX)
    }

    /// The same, with steps that do not wait for masks.
    pub fn of_four_that_do_not_wait() -> Self {
        Self::open(device(2), four_slots(), Duration::ZERO)
    }

    /// Refuses memory for the details of a row from this number of values on.
    pub fn refuse_details(&mut self, num_values: usize) {
        self.runner.refuse_details(num_values);
    }

    /// One step, in which each sequence has at most one row.
    pub fn step(&mut self, rows: &mut [Row<'_>]) {
        self.try_step(rows).unwrap();
    }

    /// One step, which may fail.
    pub fn try_step(&mut self, rows: &mut [Row<'_>]) -> Result<(), DeviceError> {
        let plan = self.plan(rows);
        let mut output = StepOutput::default();
        self.runner.run(&plan, &mut output)?;
        apply(rows, plan, output);
        Ok(())
    }

    /// Two steps of different sequences, the second of which is launched before the first is finished. It frees
    /// `freed`.
    pub fn step_overlapped(&mut self, first: &mut [Row<'_>], second: &mut [Row<'_>]) {
        let freed = std::mem::take(&mut self.freed);
        let first_plan = self.plan(first);
        self.freed = freed;
        let second_plan = self.plan(second);
        let mut outputs = [StepOutput::default(), StepOutput::default()];
        self.runner.run_overlapped([&first_plan, &second_plan], outputs.each_mut()).unwrap();
        let [first_output, second_output] = outputs;
        apply(first, first_plan, first_output);
        apply(second, second_plan, second_output);
    }

    fn plan(&mut self, rows: &mut [Row<'_>]) -> StepPlan {
        let mut plan = StepPlan { freed_slots: std::mem::take(&mut self.freed), ..StepPlan::default() };
        for Row { sequence, chunk, drafts } in rows {
            self.push(&mut plan, sequence, *chunk, drafts);
        }
        plan
    }

    /// A step of one row that fails after the changes of adapters, because there is no host tier for its copy.
    pub fn fail(&mut self, sequence: &mut Sequence) {
        let copies = vec![BlockCopy::Save { from: BlockId(0), to: HostBlockId(0) }];
        let mut plan = StepPlan { copies, ..StepPlan::default() };
        self.push(&mut plan, sequence, usize::MAX, &[]);
        let mut output = StepOutput::default();
        let run = || self.runner.run(&plan, &mut output);
        assert!(catch_unwind(AssertUnwindSafe(run)).is_err(), "there is no host tier");
        assert!(output.adapters_changed && !output.copies_done);
    }

    fn push(&self, plan: &mut StepPlan, sequence: &mut Sequence, chunk: usize, drafts: &[u32]) {
        let Sequence { request, slot, .. } = sequence;
        let slot = *slot;
        if !std::mem::replace(&mut sequence.is_admitted, true) {
            let start = plan.tokens.len() as u32;
            plan.tokens.extend(sequence.tokens.iter().map(|token| token.id));
            let generated = start..plan.tokens.len() as u32;
            let lifetime = Arc::downgrade(&sequence.lifetime);
            let request = Arc::clone(request);
            plan.new_sequences.push(NewSequence { slot, request, choice: 0, generated, lifetime });
        }
        let (start, prompt_len) = (sequence.num_computed, request.prompt.len());
        let generated = sequence.tokens.iter().map(|token| token.id);
        let pending = request.prompt.iter().copied().chain(generated).skip(start).collect::<Vec<u32>>();
        let num_undrafted = pending.len().min(chunk);
        let chooses = num_undrafted == pending.len() && request.max_tokens > 0;
        let drafts = if chooses { drafts } else { &[] };
        let first_token = plan.tokens.len() as u32;
        plan.tokens.extend(pending[..num_undrafted].iter().chain(drafts));
        let num_tokens = plan.tokens.len() as u32 - first_token;
        let first_block = plan.blocks.len() as u32;
        let last = (start + num_tokens as usize).div_ceil(self.limits.block_size) as u32;
        let blocks_each = (LONGEST / self.limits.block_size) as u32;
        plan.blocks.extend((0..last).map(|block| BlockId(slot * blocks_each + block)));
        let prompt_outputs_end = if !request.outputs.has_prompt() {
            0
        } else if request.max_tokens == 0 {
            prompt_len
        } else {
            prompt_len - 1
        };
        let reported_end = (start + num_undrafted).min(prompt_outputs_end).max(start) as u32;
        plan.rows.push(ScheduledRow {
            slot,
            start: start as u32,
            prompt_len: prompt_len as u32,
            num_tokens,
            tokens: first_token..plan.tokens.len() as u32,
            follows_sample: false,
            blocks: first_block..plan.blocks.len() as u32,
            num_drafts: drafts.len() as u32,
            prompt_outputs: start as u32..reported_end,
            sample: chooses.then_some(Sample { index: sequence.tokens.len() as u32 }),
            adapter: None,
        });
    }

    /// Runs a request alone, in chunks, to its end. `drafts` is called before each step.
    pub fn run(
        &mut self,
        request: Request,
        chunk: usize,
        mut drafts: impl FnMut(&Sequence) -> Vec<u32>,
    ) -> Sequence {
        let mut sequence = Sequence::new(request, 0);
        while !sequence.is_done() {
            let drafts = drafts(&sequence);
            self.step(&mut [Row { sequence: &mut sequence, chunk, drafts }]);
        }
        sequence.tokens.truncate(sequence.request.max_tokens);
        sequence
    }

    /// Runs a request alone, without drafts.
    pub fn run_plainly(&mut self, request: Request) -> Sequence {
        self.run(request, usize::MAX, |_| vec![])
    }

    /// One step of a row that follows the token sampled last for its slot. Returns the row's failure.
    pub fn step_behind(&mut self, sequence: &Sequence) -> Option<String> {
        let mut plan = StepPlan::default();
        let start = sequence.request.prompt.len() as u32;
        plan.blocks.extend((0..=start / self.limits.block_size as u32).map(BlockId));
        plan.rows.push(ScheduledRow {
            slot: sequence.slot,
            start,
            prompt_len: start,
            num_tokens: 1,
            tokens: 0..0,
            follows_sample: true,
            blocks: 0..plan.blocks.len() as u32,
            num_drafts: 0,
            prompt_outputs: 0..0,
            sample: Some(Sample { index: 1 }),
            adapter: None,
        });
        let mut output = StepOutput::default();
        self.runner.run(&plan, &mut output).unwrap();
        output.rows.remove(0).failure
    }
}

fn four_slots() -> EngineConfig {
    EngineConfig { threads: Some(2), max_num_seqs: Some(4), ..EngineConfig::default() }
}

/// Appends the output of a step to its sequences.
fn apply(rows: &mut [Row<'_>], plan: StepPlan, output: StepOutput) {
    let (mut sampled, mut positions) = (output.sampled.into_iter(), output.positions.into_iter());
    for ((Row { sequence, .. }, row), scheduled) in rows.iter_mut().zip(output.rows).zip(plan.rows) {
        let (num_tokens, num_positions) = (row.num_tokens as usize, row.num_positions as usize);
        sequence.tokens.extend(sampled.by_ref().take(num_tokens));
        sequence.positions.extend(positions.by_ref().take(num_positions));
        sequence.forced = output.forced[row.forced.start as usize..row.forced.end as usize].to_vec();
        match row.failure {
            Some(failure) => {
                assert_eq!((num_tokens, num_positions), (0, 0));
                sequence.failure.get_or_insert(failure);
            }
            None => {
                let num_undrafted = (scheduled.num_tokens - scheduled.num_drafts) as usize;
                sequence.num_computed += num_undrafted + num_tokens.saturating_sub(1);
                sequence.num_computed -= usize::from(row.is_deferred); // its last token is computed again
                sequence.num_deferred += usize::from(row.is_deferred);
                assert_eq!(num_positions, scheduled.prompt_outputs.len());
                assert_eq!(num_tokens > 0, scheduled.sample.is_some() && !row.is_deferred);
            }
        }
    }
    assert!(sampled.next().is_none() && positions.next().is_none());
}

/// All outputs as text, so that a NaN equals itself.
pub fn bits_of(sequence: &Sequence) -> String {
    format!("{:?} {:?} {:?}", sequence.positions, sequence.tokens, sequence.failure)
}
