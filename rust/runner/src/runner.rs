//! Runs plans: owns the backend, the model, the KV cache, the workspace and the slots. What is computed when is decided
//! by the engine.
//!
//! A step has two halves. [`Runner::launch`] submits everything the device needs for it and does not wait for the
//! tokens of earlier steps; [`Runner::finish`] waits for its tokens and does the host's part. If sampling needs the
//! host (a grammar's mask, processors) and an earlier step is not finished, only the forward pass is launched, and
//! [`Runner::resume`] submits the rest once it is.

use std::ops::Range;
use std::task::{Poll, Waker};
use std::time::Instant;

use penstock_device::{
    AdapterSpec, Backend, CacheSpec, DeviceError, MemoryUse, Sampled, SamplingBatch, SamplingEntry,
};
use penstock_device::{StepInputs, StepSpec};
use penstock_engine::{AdapterChange, DEPTH, NewSequence, StepOutput, StepPlan};
use penstock_models::{Decoder, Workspace};
use penstock_types::BlockCopy;

use crate::backend::{Turn, Turns};
use crate::flight::Flight;
use crate::grammar::KeptGrammars;
use crate::inputs;
use crate::logits_rows::{Kind, LogitsRow, LogitsRows, allocate_details};
#[cfg(feature = "testing")]
use crate::masks::MaskLimits;
use crate::masks::{MaskJob, MaskThreads};
use crate::slot::{HostInputs, HostSlot, slot_params};

/// Tickets of a step: the logits of many rows are computed in tiles, each with a ticket. The results of the oldest are
/// awaited before there are more, because each has buffers of the device.
const MOST_TICKETS: usize = 2;

/// The state that steps need. One thread owns it.
pub(crate) struct Runner<B: Backend> {
    backend: B,
    /// `None` if the device needs no turns.
    turns: Option<Turns>,
    decoder: Decoder<B>,
    cache: B::Cache,
    workspace: Workspace<B>,
    spec: StepSpec,
    inputs: StepInputs,
    batch: SamplingBatch,
    /// The results of one batch.
    sampled: Vec<Sampled>,
    slots: Vec<HostSlot>,
    masks: MaskThreads,
    kept_grammars: KeptGrammars,
    /// The buffers of finished steps.
    spare_flights: Vec<Flight<B>>,
    #[cfg(feature = "testing")]
    pub(crate) faults: crate::Faults,
}

/// The number of layers that a step computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Depth {
    AllLayers,
    /// Some layers, for the warm-up.
    Layers(usize),
}

impl<B: Backend> Runner<B> {
    /// Allocates for steps as large as `spec`, for which `inputs` has room; nothing grows afterwards.
    pub(crate) fn new(
        (mut backend, turns): (B, Option<Turns>),
        decoder: Decoder<B>,
        (cache, adapters): (&CacheSpec, Option<&AdapterSpec>),
        spec: &StepSpec,
        inputs: StepInputs,
        masks: MaskThreads,
    ) -> Result<Self, DeviceError> {
        Ok(Self {
            workspace: Workspace::new(&mut backend, decoder.config(), spec, adapters)?,
            cache: backend.allocate_cache(cache)?,
            inputs,
            batch: SamplingBatch::with_capacity(spec.logits_rows),
            sampled: Vec::with_capacity(spec.logits_rows),
            masks,
            kept_grammars: KeptGrammars::default(),
            slots: (0..spec.sequences).map(|_| HostSlot::default()).collect(),
            spare_flights: (0..DEPTH).map(|_| Flight::with_room(spec.tokens)).collect(),
            spec: *spec,
            #[cfg(feature = "testing")]
            faults: crate::Faults::default(),
            backend,
            turns,
            decoder,
        })
    }

    /// The largest step.
    pub(crate) fn spec(&self) -> &StepSpec {
        &self.spec
    }

    /// Sets the failures of a test.
    #[cfg(feature = "testing")]
    pub(crate) fn set_faults(&mut self, faults: crate::Faults) {
        self.faults = faults;
        if let Some(wait) = faults.mask_wait {
            self.masks.set_limits(MaskLimits::waiting(wait));
        }
    }

    /// Prepares the calling thread, which makes all later calls.
    pub(crate) fn bind_thread(&mut self) {
        self.backend.bind_thread();
    }

    /// Waits for the device, if engines take turns on it.
    pub(crate) fn turn(&self) -> Option<Turn> {
        self.turns.as_ref().map(Turns::take)
    }

    /// Use of the backend's memory.
    pub(crate) fn memory(&self) -> MemoryUse {
        self.backend.memory()
    }

    /// Launches a step. `is_behind` says that an earlier step is not finished; it must have been sampled.
    pub(crate) fn launch(
        &mut self,
        plan: &StepPlan,
        output: &mut StepOutput,
        is_behind: bool,
    ) -> Result<Flight<B>, DeviceError> {
        let mut turn = self.turn();
        // First, because the rows of the next plan rely on it even if this one fails.
        self.change_adapters(plan)?;
        output.adapters_changed = true;
        self.change_slots(plan)?;
        if !plan.copies.is_empty() {
            self.copy(&mut plan.copies.iter().copied())?;
        }
        output.copies_done = true;
        self.compute(plan, is_behind, Depth::AllLayers, &mut turn)
    }

    /// Submits what is left of a step whose launch has failed, so that later calls do not belong to it.
    pub(crate) fn end_failed_step(&mut self) -> Result<(), DeviceError> {
        self.backend.flush()
    }

    /// Loads and unloads adapters.
    fn change_adapters(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let Self { backend, workspace, .. } = self;
        for change in &plan.adapter_changes {
            let adapters = workspace.adapters.as_mut().expect("the engine has adapters; this is a bug");
            match change {
                AdapterChange::Load { number, weights } => {
                    backend.load_adapter(adapters, *number, weights)?
                }
                AdapterChange::Unload { number } => backend.unload_adapter(adapters, *number)?,
            }
        }
        Ok(())
    }

    /// Makes copies between the cache and the host tier.
    pub(crate) fn copy(&mut self, copies: &mut dyn Iterator<Item = BlockCopy>) -> Result<(), DeviceError> {
        self.backend.copy_blocks(&mut self.cache, copies)
    }

    /// Waits until everything that was launched is complete.
    pub(crate) fn synchronize(&mut self) -> Result<(), DeviceError> {
        self.backend.synchronize()
    }

    /// Frees and admits the slots of a plan. If the device fails for a slot, the host's state and the other slots are
    /// right all the same; returns the first error.
    pub(crate) fn change_slots(&mut self, plan: &StepPlan) -> Result<(), DeviceError> {
        let generated =
            |new: &NewSequence| &plan.tokens[new.generated.start as usize..new.generated.end as usize];
        let new_slots = plan.new_sequences.iter().map(|new| new.slot);
        for slot in plan.freed_slots.iter().copied().chain(new_slots) {
            self.slots[slot as usize].free(&mut self.kept_grammars);
        }
        for new in &plan.new_sequences {
            let is_away = self.masks.has_job_of(&new.lifetime);
            let slot = &mut self.slots[new.slot as usize];
            slot.admit(new, generated(new), self.spec.vocabulary, &mut self.kept_grammars, is_away);
        }
        self.kept_grammars.trim(self.slots.len());
        let Self { backend, workspace, .. } = self;
        let mut changed = Ok(());
        for &slot in &plan.freed_slots {
            let freed = backend.free_slot(&mut workspace.slots, slot);
            changed = changed.and(freed);
        }
        for new in &plan.new_sequences {
            let params = slot_params(&new.request, new.choice, generated(new));
            let admitted = backend.admit_slot(&mut workspace.slots, new.slot, &params);
            changed = changed.and(admitted);
        }
        changed
    }

    /// Submits the rows of a plan, as far as they do not wait for the host. The caller has a turn, which is given up
    /// while processors run.
    pub(crate) fn compute(
        &mut self,
        plan: &StepPlan,
        is_behind: bool,
        depth: Depth,
        turn: &mut Option<Turn>,
    ) -> Result<Flight<B>, DeviceError> {
        // A panic in a step loses its flight.
        let mut flight = self.spare_flights.pop().unwrap_or_else(|| Flight::with_room(self.spec.tokens));
        flight.launched = Instant::now();
        match self.submit(plan, is_behind, depth, turn, &mut flight) {
            Ok(()) => Ok(flight),
            Err(error) => {
                self.recycle(flight);
                Err(error)
            }
        }
    }

    /// Takes back the buffers of a step that is finished or has failed. Its remaining tickets are dropped.
    pub(crate) fn recycle(&mut self, mut flight: Flight<B>) {
        flight.clear();
        self.spare_flights.push(flight);
    }

    fn submit(
        &mut self,
        plan: &StepPlan,
        is_behind: bool,
        depth: Depth,
        turn: &mut Option<Turn>,
        flight: &mut Flight<B>,
    ) -> Result<(), DeviceError> {
        inputs::build(&self.decoder, plan, self.spec.block_size, &mut self.inputs);
        flight.rows.find(plan, &self.slots, &mut self.inputs.output_rows);
        let depends_on_host = plan.rows.iter().any(|row| {
            row.follows_sample && row.sample.is_some() && self.slots[row.slot as usize].needs_host()
        });
        let must_wait = is_behind && depends_on_host;
        if !must_wait {
            self.start_masks(&flight.rows);
        }
        self.read_embeddings(&mut flight.rows)?;
        let Self { backend, decoder, inputs, cache, workspace, .. } = self;
        match depth {
            Depth::AllLayers => decoder.forward(backend, inputs, cache, workspace)?,
            Depth::Layers(count) => decoder.forward_through_some(count, backend, inputs, cache, workspace)?,
        }
        #[cfg(feature = "testing")]
        self.fail_chosen(plan)?;
        if !must_wait {
            self.sample(flight, turn)?;
        }
        self.backend.flush()
    }

    /// Submits the sampling of a step whose earlier steps are finished now.
    pub(crate) fn resume(&mut self, flight: &mut Flight<B>) -> Result<(), DeviceError> {
        let mut turn = self.turn();
        self.start_masks(&flight.rows);
        self.sample(flight, &mut turn)
    }

    /// Ready if [`finish`](Self::finish) does not wait for the device. Otherwise `waker` is woken when it may have
    /// become so.
    pub(crate) fn poll(&mut self, flight: &mut Flight<B>, waker: &Waker) -> Poll<()> {
        // Tickets complete in order.
        flight.tickets.last_mut().map_or(Poll::Ready(()), |ticket| self.backend.poll(ticket, waker))
    }

    /// Waits for the tokens of a step and writes its output. Steps are finished in the order in which they were
    /// launched.
    pub(crate) fn finish(
        &mut self,
        mut flight: Flight<B>,
        plan: &StepPlan,
        output: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let collected = self.collect(&mut flight);
        if collected.is_ok() {
            let limits = self.masks.limits();
            flight.rows.finish(plan, output, &mut self.slots, self.spec.vocabulary, limits);
        }
        self.recycle(flight);
        collected
    }

    /// Waits for the tokens that were submitted, and records them.
    fn collect(&mut self, flight: &mut Flight<B>) -> Result<(), DeviceError> {
        self.collect_all_but(0, flight)
    }

    /// Collects the results of all tickets of a step except the last `count`.
    fn collect_all_but(&mut self, count: usize, flight: &mut Flight<B>) -> Result<(), DeviceError> {
        let first = flight.tickets.len().saturating_sub(count);
        for ticket in flight.tickets.drain(..first) {
            self.backend.collect(ticket, &mut self.sampled)?;
            flight.rows.record(&mut self.sampled);
        }
        Ok(())
    }

    /// Panics or loses the device in a step that [`Faults`](crate::Faults) names.
    #[cfg(feature = "testing")]
    fn fail_chosen(&self, plan: &StepPlan) -> Result<(), DeviceError> {
        let follows = |token: u32| {
            let is_last = |slot: u32| self.slots[slot as usize].last_token() == Some(token);
            plan.rows.iter().any(|row| row.follows_sample && is_last(row.slot))
        };
        let is_computed = |token: &u32| follows(*token) || self.inputs.tokens.contains(token);
        if let Some(token) = self.faults.token.filter(is_computed) {
            panic!("token {token} was to fail its step");
        }
        let begins_row = |position: &u32| plan.rows.iter().any(|row| row.start == *position);
        if let Some(position) = self.faults.position.filter(begins_row) {
            panic!("position {position} was to fail its step");
        }
        match self.faults.losing_token.filter(is_computed) {
            Some(token) => Err(DeviceError::Lost(format!("token {token} was to lose the device"))),
            None => Ok(()),
        }
    }

    /// Starts computing the masks of the slots that sample a token.
    fn start_masks(&mut self, rows: &LogitsRows) {
        for (slot, follows_sample, drafts) in rows.sampled_slots() {
            if let Some(grammar) = self.slots[slot].take_grammar(follows_sample, drafts) {
                let client = self.slots[slot].request().client;
                self.masks.start(MaskJob { slot, client, grammar });
            }
        }
    }

    /// Returns the grammars with masks to their slots, and defers the rows of a step that wait for others.
    fn collect_masks(&mut self, flight: &mut Flight<B>) {
        let Self { masks, slots, kept_grammars, .. } = self;
        let needs_one = flight.rows.all_sample(|slot| slots[slot].awaits_masks());
        masks.collect(flight.launched, needs_one, |MaskJob { slot, grammar, .. }| {
            // Its sequence may have another slot meanwhile, or none.
            let is_there = slots[slot].waits_for(&grammar);
            let found =
                if is_there { Some(slot) } else { slots.iter().position(|slot| slot.waits_for(&grammar)) };
            match found {
                Some(slot) => slots[slot].return_grammar(grammar),
                None => kept_grammars.keep(grammar),
            }
        });
        flight.rows.defer_late(slots);
    }

    /// Submits the head and the sampling of a step, tile by tile.
    fn sample(&mut self, flight: &mut Flight<B>, turn: &mut Option<Turn>) -> Result<(), DeviceError> {
        self.collect_masks(flight);
        let mut start = 0;
        while let Some((tile, has_logits)) = flight.rows.tile(start, self.spec.logits_rows, &self.slots) {
            start = tile.end;
            if has_logits {
                self.decoder.logits(&mut self.backend, tile.clone(), &mut self.workspace)?;
            }
            if self.has_processors(tile.clone(), &flight.rows) {
                *turn = None; // they may wait for another engine
            }
            self.build_batch(tile.clone(), &mut flight.rows)?;
            if turn.is_none() {
                *turn = self.turn();
            }
            self.collect_all_but(MOST_TICKETS - 1, flight)?;
            let Self { backend, batch, workspace, .. } = self;
            if !batch.is_empty() {
                let Workspace { logits, slots, scratch, .. } = workspace;
                flight.tickets.push(backend.sample(logits, batch, slots, scratch)?);
            }
            if self.has_details(tile.clone(), &flight.rows) {
                // The logits are overwritten by the next tile, so details are read now.
                self.collect(flight)?;
                self.read_details(tile, &mut flight.rows)?;
            }
        }
        if flight.tickets.is_empty() {
            let Self { backend, batch, workspace: Workspace { logits, slots, scratch, .. }, .. } = self;
            batch.clear();
            flight.tickets.push(backend.sample(logits, batch, slots, scratch)?);
        }
        flight.rows.note_failures(&self.slots);
        flight.is_sampled = true;
        Ok(())
    }

    /// Fills the batch with the entries of a tile.
    fn build_batch(&mut self, tile: Range<usize>, rows: &mut LogitsRows) -> Result<(), DeviceError> {
        let Self { backend, workspace, batch, slots, spec, .. } = self;
        batch.clear();
        for index in tile.clone() {
            let LogitsRow { slot, kind, .. } = rows.row(index);
            let row = (index - tile.start) as u32;
            let plain = SamplingEntry {
                row,
                slot: slot as u32,
                index: 0,
                draft: None,
                given: None,
                mask: None,
                processed: None,
            };
            match kind {
                Kind::Prompt { given: None } => continue,
                Kind::Prompt { given } => batch.push(SamplingEntry { given, ..plain }),
                Kind::Sample { .. } if rows.is_deferred(index) => continue,
                Kind::Sample { index, position, draft } => {
                    let start = row as usize * spec.vocabulary;
                    let read = |out: &mut [f32]| backend.download(&workspace.logits, start, out);
                    let host = slots[slot].prepare(position as usize, draft, spec.vocabulary, batch, read)?;
                    if slots[slot].has_processors() {
                        backend.bind_thread(); // they may have used the device by another library
                    }
                    let Some(HostInputs { mask, processed }) = host else { continue };
                    batch.push(SamplingEntry { index, draft, mask, processed, ..plain });
                }
            }
            rows.push_entry(index);
        }
        Ok(())
    }

    /// Whether processors run for a row of the tile.
    fn has_processors(&self, mut tile: Range<usize>, rows: &LogitsRows) -> bool {
        tile.any(|index| {
            let row = rows.row(index);
            let is_sampled = matches!(row.kind, Kind::Sample { .. }) && !rows.is_deferred(index);
            is_sampled && self.slots[row.slot].has_processors()
        })
    }

    /// Whether a row of the tile reports logits or hidden states.
    fn has_details(&self, mut tile: Range<usize>, rows: &LogitsRows) -> bool {
        tile.any(|index| {
            let row = rows.row(index);
            let requested = self.slots[row.slot].outputs();
            row.is_within(requested.logits) || row.is_within(requested.hidden_states)
        })
    }

    /// Reads the embeddings of the rows that report them. A request fails if the system has no memory for them.
    fn read_embeddings(&mut self, rows: &mut LogitsRows) -> Result<(), DeviceError> {
        let refused = self.refused_values();
        let Self { backend, decoder, inputs, cache, workspace, slots, .. } = self;
        let hidden_size = decoder.config().hidden_size;
        let mut is_computed = false;
        for index in 0..rows.len() {
            let row = rows.row(index);
            let slot = &mut slots[row.slot];
            if !row.is_within(slot.outputs().embeddings) || slot.failure().is_some() {
                continue;
            }
            if !std::mem::replace(&mut is_computed, true) {
                decoder.embeddings(backend, inputs, cache, workspace)?;
            }
            let mut embedding = Vec::new();
            match allocate_details(&mut embedding, hidden_size, refused) {
                Ok(()) => {
                    backend.download(&workspace.hidden_states, index * hidden_size, &mut embedding)?;
                    rows.push_embedding(index, embedding);
                }
                Err(failure) => slot.fail(failure),
            }
        }
        Ok(())
    }

    /// The number of values from which on memory for the details of a row is refused.
    fn refused_values(&self) -> usize {
        #[cfg(feature = "testing")]
        return self.faults.refused_details.unwrap_or(usize::MAX);
        #[cfg(not(feature = "testing"))]
        return usize::MAX;
    }

    /// Reads the raw logits and the last hidden states of the rows of a tile that report them. A request fails if the
    /// system has no memory for them.
    fn read_details(&mut self, tile: Range<usize>, rows: &mut LogitsRows) -> Result<(), DeviceError> {
        let refused = self.refused_values();
        let Self { backend, decoder, workspace, slots, spec, .. } = self;
        let hidden_size = decoder.config().hidden_size;
        let reports = |index| slots[rows.row(index).slot].outputs().hidden_states;
        if tile.clone().any(|index| rows.row(index).is_within(reports(index))) {
            decoder.hidden_states(backend, tile.end, workspace)?;
        }
        for (index, row, details) in rows.details(tile.clone()) {
            let slot = &mut slots[row.slot];
            let requested = *slot.outputs();
            if slot.failure().is_some() {
                continue;
            }
            if row.is_within(requested.logits) {
                let logits = &mut details.get_or_insert_default().logits;
                match allocate_details(logits, spec.vocabulary, refused) {
                    Ok(()) => {
                        let start = (index - tile.start) * spec.vocabulary;
                        backend.download(&workspace.logits, start, logits)?;
                    }
                    Err(failure) => slot.fail(failure),
                }
            }
            if row.is_within(requested.hidden_states) {
                let hidden_state = &mut details.get_or_insert_default().hidden_state;
                match allocate_details(hidden_state, hidden_size, refused) {
                    Ok(()) => {
                        backend.download(&workspace.hidden_states, index * hidden_size, hidden_state)?
                    }
                    Err(failure) => slot.fail(failure),
                }
            }
        }
        Ok(())
    }

    /// Logits of every row of `tokens` as one sequence, computed in chunks of `chunk`, row after row: for tests.
    #[cfg(feature = "testing")]
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

/// The ranges of output rows whose logits are computed at once.
#[cfg(feature = "testing")]
fn tiles(num_outputs: usize, logits_rows: usize) -> impl Iterator<Item = Range<usize>> {
    (0..num_outputs).step_by(logits_rows).map(move |start| start..num_outputs.min(start + logits_rows))
}
