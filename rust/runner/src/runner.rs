//! Carries out plans: owns the backend, the model, the KV cache, the workspace and what is known of each slot. It decides
//! nothing about who is computed when.

use std::ops::Range;

use penstock_device::{Backend, CacheSpec, DeviceError, MemoryUse, Sampled, StepInputs, StepSpec};
use penstock_engine::executor::{NewSequence, StepOutput, StepPlan};
use penstock_engine::request::{Token, TokenDetails};
use penstock_models::{Decoder, Workspace};
use penstock_types::BlockCopy;

use crate::guide::MaskThreads;
use crate::inputs;
use crate::outputs::{Kind, Output, Outputs};
use crate::slot::Slot;

/// Everything a step needs, in one place and on one thread.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    decoder: Decoder<B>,
    cache: B::Cache,
    workspace: Workspace<B>,
    spec: StepSpec,
    inputs: StepInputs,
    outputs: Outputs,
    /// What was chosen in a round.
    sampled: Vec<Sampled>,
    slots: Vec<Slot>,
    masks: MaskThreads,
    /// See [`crate::Options::failing_token`].
    pub(crate) failing_token: Option<u32>,
}

/// How far a step goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    /// All the way.
    AllLayers,
    /// Through so many layers, and the first tile of output rows through the head, for warming up.
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
        masks: MaskThreads,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: Workspace::new(&mut backend, decoder.config(), spec)?,
            cache: backend.allocate_cache(cache)?,
            inputs,
            outputs: Outputs::with_room(spec.tokens),
            sampled: Vec::with_capacity(spec.logits_rows),
            masks,
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

    /// Carries out a plan and writes its output.
    pub(crate) fn run(&mut self, plan: &StepPlan, output: &mut StepOutput) -> Result<(), DeviceError> {
        // Before anything can fail: the rows of a plan that was made already rely on it.
        self.seat(plan);
        if !plan.copies.is_empty() {
            self.copy(&mut plan.copies.iter().copied())?;
        }
        output.copies_done = true;
        self.compute(plan, output, Depth::AllLayers)
    }

    /// Makes copies between the cache and the host tier.
    pub(crate) fn copy(&mut self, copies: &mut dyn Iterator<Item = BlockCopy>) -> Result<(), DeviceError> {
        self.backend.copy_blocks(&mut self.cache, copies)
    }

    /// Has everybody leave and take the places that the plan says.
    pub(crate) fn seat(&mut self, plan: &StepPlan) {
        self.collect_masks(); // of a step that failed, if there are any
        for slot in &plan.freed_slots {
            self.slots[*slot as usize].vacate();
        }
        for NewSequence { slot, request, generated } in &plan.new_sequences {
            let generated = &plan.tokens[generated.start as usize..generated.end as usize];
            self.slots[*slot as usize].seat(request, generated, self.spec.vocabulary);
        }
    }

    /// Computes the rows of those who have their seats.
    pub(crate) fn compute(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        depth: Depth,
    ) -> Result<(), DeviceError> {
        let Self { backend, decoder, inputs, cache, workspace, .. } = self;
        inputs::build(decoder, plan, &self.slots, self.spec.block_size, inputs);
        self.outputs.find(plan, &self.slots, &mut inputs.output_rows);
        if let Some(token) = self.failing_token.filter(|token| inputs.tokens.contains(token)) {
            panic!("token {token} was to fail its step");
        }
        for slot in self.outputs.choosing() {
            start_mask(&mut self.masks, &mut self.slots, slot);
        }
        match depth {
            Depth::AllLayers => decoder.forward(backend, inputs, cache, workspace)?,
            Depth::Layers(count) => decoder.forward_through_some(count, backend, inputs, cache, workspace)?,
        }
        let num_tiles = if depth == Depth::AllLayers { usize::MAX } else { 1 };
        for tile in tiles(self.outputs.len(), self.spec.logits_rows).take(num_tiles) {
            self.run_tile(tile)?;
        }
        self.outputs.answer(plan, output, &mut self.slots, self.spec.vocabulary);
        Ok(())
    }

    /// The logits of some output rows, and what they tell.
    fn run_tile(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        self.decoder.logits(&mut self.backend, tile.clone(), &mut self.workspace)?;
        if let Some(slot) = self.outputs.begin(tile.clone(), &self.slots) {
            start_mask(&mut self.masks, &mut self.slots, slot);
        }
        while self.outputs.round().len() > 0 {
            self.run_round(tile.start)?;
            self.outputs.go_on(tile.clone(), &self.slots);
            for (_, output) in self.outputs.round() {
                start_mask(&mut self.masks, &mut self.slots, output.slot);
            }
        }
        self.add_details(tile)
    }

    /// Chooses the tokens of a round.
    fn run_round(&mut self, tile_start: usize) -> Result<(), DeviceError> {
        self.collect_masks();
        let Self { backend, workspace, outputs, sampled, slots, spec, .. } = self;
        let Workspace { logits, scratch, .. } = workspace;
        for (index, Output { slot, kind, .. }) in outputs.round() {
            if let Kind::Next { .. } = kind {
                let start = (index - tile_start) * spec.vocabulary;
                slots[slot].process(|row| backend.download(logits, start, row))?;
            }
        }
        outputs.drop_failed(slots);
        sampled.resize_with(outputs.round().len(), Sampled::default);
        let params = |place: usize| {
            let (index, Output { slot, kind, .. }) = outputs.in_round(place);
            let (slot, row) = (&slots[slot], index - tile_start);
            match kind {
                Kind::Prompt { given } => slot.prompt_params(row, given),
                Kind::Next { index, .. } => slot.params(row, index),
            }
        };
        backend.sample(spec.vocabulary, logits, &params, scratch, sampled)?;
        for (place, sampled) in sampled.iter_mut().enumerate() {
            let (index, Output { slot, kind, .. }) = outputs.in_round(place);
            if let Kind::Next { index, .. } = kind {
                if sampled.is_exhausted {
                    slots[slot].exhaust(index);
                    continue;
                }
                slots[slot].accept(sampled.token);
            }
            let top = std::mem::take(&mut sampled.top);
            let details =
                (!top.is_empty()).then(|| Box::new(TokenDetails { top, ..TokenDetails::default() }));
            outputs.tell(index, Token { id: sampled.token, logprob: sampled.logprob, details });
        }
        Ok(())
    }

    /// Raw logits and last hidden states of the rows of a tile, where they are asked for.
    fn add_details(&mut self, tile: Range<usize>) -> Result<(), DeviceError> {
        let Self { backend, decoder, workspace, outputs, slots, spec, .. } = self;
        let hidden_size = decoder.config().hidden_size;
        for (index, output, details) in outputs.told(tile.clone()) {
            let requested = &slots[output.slot].request().outputs;
            if output.is_within(requested.logits) {
                let logits = &mut details.get_or_insert_default().logits;
                logits.resize(spec.vocabulary, 0.0);
                backend.download(&workspace.logits, (index - tile.start) * spec.vocabulary, logits)?;
            }
            if output.is_within(requested.hidden_states) {
                let hidden_state = &mut details.get_or_insert_default().hidden_state;
                hidden_state.resize(hidden_size, 0.0);
                backend.download(&workspace.normed, index * hidden_size, hidden_state)?;
            }
        }
        Ok(())
    }

    fn collect_masks(&mut self) {
        let slots = &mut self.slots;
        self.masks.collect(|slot, guide| slots[slot].give_back_guide(guide));
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

/// Has the mask of a slot's next token worked out, where it is to keep within a grammar.
fn start_mask(masks: &mut MaskThreads, slots: &mut [Slot], slot: usize) {
    if let Some(guide) = slots[slot].take_guide() {
        masks.start(slot, guide);
    }
}
