//! Sampling on the device: the launches of the kernels of `cuda/sample*.cu`, for the steps of [`crate::sample`].
//!
//! The device has the tokens of a slot, how often each occurs, and its lists; the host has the numbers, and sends them with
//! every entry. So a batch is one copy to the device, two to eight launches, and one copy back. Only the kernels that an
//! entry of the batch needs are launched.
//!
//! All memory is taken when the slots are allocated: lists have fixed sizes.

mod layout;
mod slot;
mod ticket;

use std::ops::Range;
use std::sync::Arc;

use bytemuck::{bytes_of, cast_slice};
use penstock_cuda::{Argument, DevicePointer, Kernel, PinnedMemory};

use super::queue::Shape;
use super::upload::Staging;
use super::{Cuda, CudaBuffer, lost, start};
use crate::arena::Region;
use crate::backend::DeviceError;
use crate::sample::{SamplingBatch, SlotParams};
use crate::step::StepSpec;
use layout::{Admission, BLOCK_IDS, BatchArrays, Entry, NONE, RawResult, Sizes, SlotArrays, Top, flags};
use slot::{Lists, Slot};
pub use ticket::CudaTicket;
use ticket::{BufferPool, LaunchBuffers, Waiter};

/// Threads of a block of every kernel.
const THREADS: usize = 256;
/// Blocks among which the tokens of a sequence are divided.
const MOST_HISTORY_BLOCKS: usize = 32;
/// Page-locked buffers of admissions. If all are in use, an admission waits.
const MOST_ADMISSIONS: usize = 8;

/// The sampling state of each sequence.
pub struct CudaSlots {
    slots: Vec<Option<Slot>>,
    sizes: Sizes,
    arrays: BatchArrays,
    kernels: SamplingKernels,
    pool: Arc<BufferPool>,
    waiter: Arc<Waiter>,
    admissions: Vec<Staging>,
    next_admission: usize,
    _region: Region,
}

struct SamplingKernels {
    admit: Kernel,
    count: Kernel,
    process: Kernel,
    exclude: Kernel,
    maxima: Kernel,
    bounds: Kernel,
    weights: Kernel,
    finish: Kernel,
    commit: Kernel,
    logprobs: Kernel,
}

impl CudaSlots {
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.sizes.vocabulary
    }

    /// The tokens that were sampled last.
    pub(super) fn last_tokens(&self) -> DevicePointer {
        self.arrays.slots.last_tokens
    }

    pub(super) fn free(&mut self, slot: u32) {
        self.slots[slot as usize] = None;
    }
}

impl Cuda {
    pub(super) fn slots_size(&self, spec: &StepSpec) -> u64 {
        let (_, bytes) = Sizes::new(spec).divide(DevicePointer::NULL);
        self.memory.granted(bytes)
    }

    pub(super) fn new_slots(&mut self, spec: &StepSpec) -> Result<CudaSlots, DeviceError> {
        let sizes = Sizes::new(spec);
        let (_, bytes) = sizes.divide(DevicePointer::NULL);
        let region = self.memory.allocate_workspace(bytes, "workspace")?;
        let (arrays, _) = sizes.divide(self.memory.pointer(&region));
        let admissions = (0..MOST_ADMISSIONS.min(sizes.slots))
            .map(|_| Staging::new(&self.context, sizes.admission_bytes()))
            .collect::<Result<_, _>>();
        Ok(CudaSlots {
            slots: vec![None; sizes.slots],
            arrays,
            kernels: self.load_sampling()?,
            pool: BufferPool::new(&self.context, sizes).map_err(|error| start(&error))?,
            waiter: Waiter::new(&self.context)?,
            admissions: admissions.map_err(|error| start(&error))?,
            next_admission: 0,
            _region: region,
            sizes,
        })
    }

    fn load_sampling(&mut self) -> Result<SamplingKernels, DeviceError> {
        let mut load = |file, name| self.loader.kernel(file, "", name);
        Ok(SamplingKernels {
            admit: load("sample_slots.cu", "sample_admit")?,
            count: load("sample_slots.cu", "sample_count")?,
            process: load("sample_rows.cu", "sample_process")?,
            exclude: load("sample_rows.cu", "sample_exclude")?,
            maxima: load("sample_rows.cu", "sample_maxima")?,
            weights: load("sample_rows.cu", "sample_weights")?,
            bounds: load("sample.cu", "sample_bounds")?,
            finish: load("sample.cu", "sample_finish")?,
            commit: load("sample.cu", "sample_commit")?,
            logprobs: load("sample.cu", "sample_logprobs")?,
        })
    }

    /// Copies a range of page-locked memory, which does not change until the copy has ended.
    fn copy(
        &self,
        source: &PinnedMemory,
        range: Range<usize>,
        target: DevicePointer,
    ) -> Result<(), DeviceError> {
        if range.is_empty() {
            return Ok(());
        }
        // SAFETY: the target is an array with room for the bytes; the caller keeps the source.
        unsafe { self.queue.stream()?.upload(source, range, target) }.map_err(lost)
    }

    pub(super) fn admit(
        &mut self,
        slots: &mut CudaSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        let number = slot as usize;
        let lists = Lists::new(params, &slots.sizes)?;
        slots.slots[number] = Some(Slot::new(params, &lists));
        self.upload_lists(slots, number, &lists)?;
        let last = params.generated.last().or_else(|| params.prompt.last());
        let admission = Admission {
            slot,
            last_token: last.copied().unwrap_or_default(),
            length: lists.history.len() as u32,
            generated: params.generated.len() as u32,
            is_counted: lists.is_counted.into(),
        };
        let arguments = [(&slots.arrays.slots).into(), (&admission).into()];
        let launch = |kernel, count: usize| {
            let blocks = count.div_ceil(BLOCK_IDS);
            self.queue.launch(kernel, Shape::new(blocks, THREADS), &arguments)
        };
        if !lists.is_counted {
            return launch(&slots.kernels.admit, 1);
        }
        launch(&slots.kernels.admit, slots.sizes.vocabulary)?;
        launch(&slots.kernels.count, lists.history.len())
    }

    fn upload_lists(&self, slots: &mut CudaSlots, slot: usize, lists: &Lists) -> Result<(), DeviceError> {
        let arrays: &SlotArrays = &slots.arrays.slots;
        let lists: [(&[u8], DevicePointer); 5] = [
            (cast_slice(&lists.allowed), arrays.allowed(slot)),
            (cast_slice(&lists.stops), arrays.stops(slot)),
            (cast_slice(&lists.biases), arrays.biases(slot)),
            (cast_slice(&lists.sequences), arrays.sequences(slot)),
            (cast_slice(&lists.history), arrays.history(slot)),
        ];
        if lists.iter().all(|(bytes, _)| bytes.is_empty()) {
            return Ok(());
        }
        let count = slots.admissions.len();
        let buffer = &mut slots.admissions[slots.next_admission];
        slots.next_admission = (slots.next_admission + 1) % count;
        buffer.wait()?;
        let mut end = 0;
        for (bytes, target) in lists {
            let range = end..end + bytes.len();
            buffer.memory.bytes_mut()[range.clone()].copy_from_slice(bytes);
            self.copy(&buffer.memory, range.clone(), target)?;
            end = range.end;
        }
        buffer.keep(&self.queue)
    }

    pub(super) fn sample_batch(
        &mut self,
        logits: &CudaBuffer,
        batch: &SamplingBatch,
        slots: &mut CudaSlots,
    ) -> Result<CudaTicket, DeviceError> {
        self.queue.submit()?; // events must not be queried during a capture
        let mut ticket = CudaTicket::new(&slots.pool, &slots.waiter);
        let mut arrays = slots.arrays;
        arrays.logits = self.memory.pointer(&logits.0);
        if batch.is_empty() {
            // It is complete after the earlier calls, too.
            let buffers = slots.pool.take()?;
            self.queue.stream()?.record(&buffers.done).map_err(lost)?;
            ticket.push(buffers, Vec::new());
        }
        let mut start = 0;
        while start < batch.len() {
            let mut buffers = slots.pool.take()?;
            let entries = fill(slots, batch, start, &mut buffers)?;
            start += entries.len();
            let launched = self.launch_part(slots, arrays, &entries, &mut buffers);
            ticket.push(buffers, entries); // also after an error: the device may use the buffers
            launched?;
        }
        Ok(ticket)
    }

    /// Samples entries, the inputs of which are in the buffers.
    fn launch_part(
        &self,
        slots: &CudaSlots,
        mut arrays: BatchArrays,
        entries: &[Entry],
        buffers: &mut LaunchBuffers,
    ) -> Result<(), DeviceError> {
        let (count, row_bytes) = (entries.len(), slots.sizes.row_bytes());
        let num_masks = entries.iter().filter(|entry| entry.mask != NONE).count();
        let entry_bytes = size_of_val(entries);
        let input_bytes = entry_bytes + num_masks * slots.sizes.words * size_of::<u32>();
        self.copy(&buffers.inputs, 0..input_bytes, arrays.entries)?;
        let processed = entries.iter().filter(|entry| entry.processed != NONE);
        for (number, entry) in processed.enumerate() {
            let target = arrays.scores.offset(entry.processed as usize * row_bytes);
            self.copy(&buffers.processed, number * row_bytes..(number + 1) * row_bytes, target)?;
        }
        arrays.masks = arrays.entries.offset(entry_bytes);
        arrays.tops = arrays.results.offset(count * size_of::<RawResult>());
        self.launch_kernels(&slots.kernels, &slots.sizes, &arrays, entries)?;
        let num_top: usize = entries.iter().map(|entry| entry.num_top as usize).sum();
        let bytes = count * size_of::<RawResult>() + num_top * size_of::<Top>();
        self.queue.download(arrays.results, &mut buffers.results, bytes)?;
        self.queue.stream()?.record(&buffers.done).map_err(lost)
    }

    fn launch_kernels(
        &self,
        kernels: &SamplingKernels,
        sizes: &Sizes,
        arrays: &BatchArrays,
        entries: &[Entry],
    ) -> Result<(), DeviceError> {
        let count = entries.len();
        let any = |is_set: fn(&Entry) -> bool| entries.iter().any(is_set);
        let launch = |kernel: &Kernel, blocks: [usize; 3]| {
            self.queue.launch(kernel, Shape::of(blocks, THREADS), &[arrays.into()])
        };
        let divided = [sizes.row_blocks(), count, 1];
        if any(|entry| entry.has(flags::IS_PROCESSED)) {
            launch(&kernels.process, divided)?;
        }
        if any(|entry| entry.no_repeat_ngram_size > 0 || entry.num_sequences > 0) {
            let blocks = sizes.positions.div_ceil(THREADS).clamp(1, MOST_HISTORY_BLOCKS);
            launch(&kernels.exclude, [blocks, count, 1])?;
        }
        launch(&kernels.maxima, divided)?;
        if any(|entry| entry.is_drawn() && (entry.top_k > 0 || entry.top_n_sigma > 0.0)) {
            launch(&kernels.bounds, [count, 1, 1])?;
        }
        if any(|entry| entry.is_drawn() || entry.has(flags::HAS_LOGPROBS)) {
            launch(&kernels.weights, divided)?;
        }
        launch(&kernels.finish, [count, 1, 1])?;
        if any(|entry| entry.length > 1) {
            let number = count as i32;
            let arguments: [Argument<'_>; 2] = [arrays.into(), (&number).into()];
            let shape = Shape::new(count.div_ceil(THREADS), THREADS);
            self.queue.launch(&kernels.commit, shape, &arguments)?;
        }
        if any(|entry| entry.has(flags::HAS_LOGPROBS)) {
            launch(&kernels.logprobs, [count, 1, 1])?;
        }
        Ok(())
    }
}

/// Writes the inputs of entries from number `start` on, as many as there is room for.
fn fill(
    slots: &CudaSlots,
    batch: &SamplingBatch,
    start: usize,
    buffers: &mut LaunchBuffers,
) -> Result<Vec<Entry>, DeviceError> {
    let sizes = &slots.sizes;
    let mut entries: Vec<Entry> = Vec::with_capacity(sizes.entries.min(batch.len() - start));
    let (mut masks, mut num_processed, mut first_top, mut first) = (Vec::new(), 0, 0, 0);
    for entry in (start..batch.len()).map(|index| batch.entry(index)) {
        let number = entries.len();
        let slot = slots.slots.get(entry.slot as usize).and_then(Option::as_ref);
        let slot = slot.ok_or_else(|| DeviceError::InvalidStep("a slot is not admitted".to_owned()))?;
        let is_given = entry.given.is_some();
        let mask = entry.mask.filter(|_| !is_given);
        let processed = entry.processed.filter(|_| !is_given);
        let numbers = (mask.map(|_| masks.len() as u32), processed.map(|_| number as u32));
        let mut made = slot.entry(&entry, numbers.0, numbers.1);
        made.num_top = made.num_top.min(sizes.vocabulary as u32);
        let has_room = number < sizes.entries
            && first_top + made.num_top as usize <= sizes.tops
            && (processed.is_none() || num_processed < sizes.most_processed());
        if !has_room {
            break;
        }
        made.first_top = first_top as u32;
        first_top += made.num_top as usize;
        masks.extend(mask);
        if let Some(processed) = processed {
            let row = sizes.row_bytes() * num_processed;
            let values = batch.processed(processed, sizes.vocabulary);
            buffers.processed.bytes_mut()[row..][..sizes.row_bytes()].copy_from_slice(cast_slice(values));
            num_processed += 1;
        }
        if !is_given {
            let follows = entries.last().is_some_and(|last| last.slot == made.slot && last.given == NONE);
            first = if follows { first } else { number };
            made.position = (number - first) as u32;
            entries.push(made);
            entries[first].length += 1;
        } else {
            entries.push(made);
        }
    }
    let mut end = 0;
    let mut write = |bytes: &[u8]| {
        buffers.inputs.bytes_mut()[end..][..bytes.len()].copy_from_slice(bytes);
        end += bytes.len();
    };
    entries.iter().for_each(|entry| write(bytes_of(entry)));
    masks.iter().for_each(|mask| write(cast_slice(batch.mask(*mask, sizes.words))));
    Ok(entries)
}
