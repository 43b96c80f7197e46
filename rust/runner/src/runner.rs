//! The device thread: owns the backend, the model, the KV cache and the workspace, and computes plans in the order they
//! come. It decides nothing. A failure inside a step, a panic too, is that step's result; the thread goes on.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock_device::{
    Backend, BlockCopy, CacheSpec, DeviceError, Logprobs, MemoryUse, SampleParams, Sampled, StepInputs,
    StepSpec,
};
use penstock_engine::Completions;
use penstock_engine::executor::{self, Answer, DEPTH, Executor, Seat, StepDone, StepPlan, Work};
use penstock_engine::request::{Request, Token};
use penstock_models::{Decoder, Workspace};

use crate::inputs;

/// A place of a sequence, as long as it has it.
#[derive(Default)]
pub(crate) struct Slot {
    /// What the sequence is generated for.
    request: Option<Arc<Request>>,
    /// Its tokens so far.
    pub(crate) generated: Vec<u32>,
}

/// Everything a step needs, in one place and on one thread.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    cache: B::Cache,
    workspace: Workspace<B>,
    spec: StepSpec,
    inputs: StepInputs,
    /// Rows of the plan that sample, and what they sampled.
    rows: Vec<usize>,
    sampled: Vec<Sampled>,
    /// Whose each slot is.
    slots: Vec<Slot>,
    /// See [`crate::Options::failing_token`].
    pub(crate) failing_token: Option<u32>,
}

/// How far a step goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// All the way.
    AllLayers,
    /// Through so many layers and the head, for warming up.
    Layers(usize),
}

impl<B: Backend> Runner<B> {
    /// Allocates for steps as large as `spec`, for which `inputs` has room; nothing grows afterwards.
    pub(crate) fn new(
        mut backend: B,
        decoder: Decoder<B>,
        cache: &CacheSpec,
        spec: &StepSpec,
        inputs: StepInputs,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: Workspace::new(&mut backend, decoder.config(), spec)?,
            cache: backend.allocate_cache(cache)?,
            inputs,
            rows: Vec::with_capacity(spec.sequences),
            sampled: Vec::with_capacity(spec.sequences),
            slots: (0..spec.sequences).map(|_| Slot::default()).collect(),
            spec: *spec,
            failing_token: None,
            backend,
            decoder,
        })
    }

    /// The largest step.
    pub(crate) fn spec(&self) -> &StepSpec {
        &self.spec
    }

    /// What the backend's memory holds.
    pub(crate) fn memory(&self) -> MemoryUse {
        self.backend.memory()
    }

    /// Carries out a plan and writes its tokens into it.
    pub(crate) fn run(&mut self, plan: &mut StepPlan) -> Result<(), DeviceError> {
        if !plan.copies.is_empty() {
            self.copy(&mut plan.copies.iter().map(block_copy))?;
        }
        plan.copied = true;
        self.compute(plan, Depth::AllLayers)
    }

    /// Makes copies between the cache and the host tier.
    pub(crate) fn copy(&mut self, copies: &mut dyn Iterator<Item = BlockCopy>) -> Result<(), DeviceError> {
        self.backend.copy_blocks(&mut self.cache, copies)
    }

    pub(crate) fn compute(&mut self, plan: &mut StepPlan, depth: Depth) -> Result<(), DeviceError> {
        self.seat(plan);
        let Self { backend, decoder, inputs, cache, workspace, .. } = self;
        inputs::build(decoder, plan, &self.slots, self.spec.block_size, inputs);
        if let Some(token) = self.failing_token.filter(|token| inputs.tokens.contains(token)) {
            panic!("token {token} was to fail its step");
        }
        match depth {
            Depth::AllLayers => decoder.forward(backend, inputs, cache, workspace)?,
            Depth::Layers(count) => {
                decoder.forward_through_some(count, backend, inputs, cache, workspace)?;
            }
        }
        let Self { rows, sampled, slots, .. } = self;
        rows.clear();
        rows.extend((0..plan.work.len()).filter(|row| plan.work[*row].sample.is_some()));
        sampled.resize(rows.len(), Sampled::default());
        let params = |row: usize| {
            let work = &plan.work[rows[row]];
            SampleParams { row: row as u32, ..sample_params(work, &slots[work.slot as usize]) }
        };
        self.decoder.logits(&mut self.backend, 0..rows.len(), &mut self.workspace)?;
        let Workspace { logits, scratch, .. } = &mut self.workspace;
        self.backend.sample(self.spec.vocabulary, logits, &params, scratch, sampled)?;
        for (row, sampled) in rows.iter().zip(&*sampled) {
            slots[plan.work[*row].slot as usize].generated.push(sampled.token);
            plan.sampled.push(Token::new(sampled.token, sampled.logprob));
        }
        let num_tokens = |work: &Work| u32::from(work.sample.is_some());
        let answers =
            plan.work.iter().map(|work| Answer { num_tokens: num_tokens(work), ..Answer::default() });
        plan.answers.extend(answers);
        Ok(())
    }

    /// Slots that begin anew.
    fn seat(&mut self, plan: &StepPlan) {
        for Seat { slot, request, generated } in &plan.seats {
            let slot = &mut self.slots[*slot as usize];
            slot.request = Some(Arc::clone(request));
            slot.generated.clear();
            slot.generated.extend_from_slice(&plan.tokens[generated.start as usize..generated.end as usize]);
        }
    }

    /// Logits of every row of `tokens` as one sequence computed in chunks of `chunk`, row after row: for tests.
    pub(crate) fn logits(&mut self, tokens: &[u32], chunk: usize) -> Result<Vec<f32>, DeviceError> {
        let vocabulary = self.spec.vocabulary;
        let mut logits = vec![0.0; tokens.len() * vocabulary];
        let num_blocks = tokens.len().div_ceil(self.spec.block_size);
        let chunks = tokens.chunks(chunk).zip(logits.chunks_mut(chunk * vocabulary));
        for (index, (part, out)) in chunks.enumerate() {
            let start = index * chunk;
            self.inputs.clear();
            self.inputs.blocks.extend(0..num_blocks as u32);
            let ids = part.iter().copied();
            self.decoder.push_sequence(
                &mut self.inputs,
                ids,
                start,
                tokens.len(),
                num_blocks,
                self.spec.block_size,
            );
            self.inputs.output_rows.extend(0..part.len() as u32);
            self.decoder.forward(&mut self.backend, &self.inputs, &mut self.cache, &mut self.workspace)?;
            for (tile, out) in tiles(part.len(), self.spec.logits_rows)
                .zip(out.chunks_mut(self.spec.logits_rows * vocabulary))
            {
                self.decoder.logits(&mut self.backend, tile, &mut self.workspace)?;
                self.backend.download(&self.workspace.logits, 0, out)?;
            }
        }
        Ok(logits)
    }
}

/// The output rows, as many at a time as have their logits at once.
fn tiles(num_outputs: usize, logits_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..num_outputs).step_by(logits_rows).map(move |start| start..num_outputs.min(start + logits_rows))
}

/// A copy as the device knows it.
fn block_copy(copy: &executor::BlockCopy) -> BlockCopy {
    match *copy {
        executor::BlockCopy::Save { from, to } => BlockCopy::Save { from: from.0, to: to.0 },
        executor::BlockCopy::Load { from, to } => BlockCopy::Load { from: from.0, to: to.0 },
    }
}

fn sample_params<'a>(work: &Work, slot: &'a Slot) -> SampleParams<'a> {
    let request = slot.request.as_ref().expect("a row has a seat; this is a bug");
    let sampling = &request.sampling;
    let index = work.sample.expect("only rows that sample were collected; this is a bug").index;
    SampleParams {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        seed: sampling.seed,
        index,
        logprobs: request.reports.logprobs.map(|top| Logprobs { top, processed: false }),
        suppressed: if (index as usize) < request.min_tokens { &request.stop_token_ids } else { &[] },
        ..SampleParams::greedy()
    }
}

/// The engine's side of the device thread. Dropping it ends the thread once its plans are computed, and waits for that.
pub(crate) struct DeviceThread {
    plans: Option<Sender<Box<StepPlan>>>,
    completions: Sender<Completions>,
    thread: Option<thread::JoinHandle<()>>,
}

impl DeviceThread {
    /// Starts the thread, which first waits to be connected.
    pub(crate) fn spawn<B: Backend>(runner: Runner<B>) -> std::io::Result<Self> {
        let (plans, incoming) = bounded(DEPTH);
        let (completions, connection) = bounded(1);
        let thread = thread::Builder::new()
            .name("penstock-device".to_owned())
            .spawn(move || serve(runner, &incoming, &connection))?;
        Ok(Self { plans: Some(plans), completions, thread: Some(thread) })
    }

    /// Says where answers go.
    pub(crate) fn connect(self, completions: Completions) -> Self {
        self.completions.send(completions).expect("the device thread waits to be connected; this is a bug");
        self
    }
}

impl Executor for DeviceThread {
    fn submit(&mut self, plan: Box<StepPlan>) {
        let plans = self.plans.as_ref().expect("the channel is open until the drop");
        plans.send(plan).expect("the device thread ends only when its channel is closed; this is a bug");
    }
}

impl Drop for DeviceThread {
    fn drop(&mut self) {
        drop(self.plans.take());
        if let Some(thread) = self.thread.take() {
            // A panic there has already been reported as a step's result.
            let _ = thread.join();
        }
    }
}

fn serve<B: Backend>(
    mut runner: Runner<B>,
    incoming: &Receiver<Box<StepPlan>>,
    connection: &Receiver<Completions>,
) {
    let mut completions = None;
    for mut plan in incoming {
        let outcome = catch_unwind(AssertUnwindSafe(|| runner.run(&mut plan)));
        let result = match outcome {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(panic) => Err(format!("a defect in the step: {}", panic_text(panic.as_ref()))),
        };
        // Connected before the first plan can be submitted, so this waits for nothing.
        if completions.is_none() {
            completions = connection.recv().ok();
        }
        if let Some(completions) = &completions {
            completions.send(StepDone { plan, result });
        }
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no message)")
}

#[cfg(test)]
mod tests {
    use penstock_engine::{BlockId, HostBlockId};

    use super::*;

    #[test]
    fn copies_keep_their_direction() {
        let save = executor::BlockCopy::Save { from: BlockId(3), to: HostBlockId(7) };
        let load = executor::BlockCopy::Load { from: HostBlockId(7), to: BlockId(3) };
        assert_eq!(block_copy(&save), BlockCopy::Save { from: 3, to: 7 });
        assert_eq!(block_copy(&load), BlockCopy::Load { from: 7, to: 3 });
    }
}
