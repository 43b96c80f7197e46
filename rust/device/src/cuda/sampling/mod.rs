//! Sampling on the device: the launches of the kernels of `cuda/sample*.cu`, for the steps of [`crate::seam::sample`].
//!
//! The device has the tokens of a slot, how often each occurs, and its lists; the host has the numbers, and sends them
//! with every entry. So a batch is one copy to the device, two to eight launches, and one copy back. Only the kernels
//! that an entry of the batch needs are launched.
//!
//! All memory is taken when the slots are allocated: lists have fixed sizes.

mod entry;
mod layout;
mod slot;
mod ticket;

use std::sync::Arc;
use std::task::{Poll, Waker};

use bytemuck::{bytes_of, cast_slice};
use penstock_cuda::{Argument, DevicePointer, Kernel};

use super::pinned::HostMemory;
use super::queue::{Queue, Shape};
use super::upload::Staging;
use super::{Cuda, CudaBuffer, lost};
use crate::arena::Region;
use crate::error::DeviceError;
use crate::seam::{Sample, Sampled, SamplingBatch, SlotParams, StepSpec};
use entry::{Entry, flags};
use layout::{Admission, BLOCK_IDS, BatchArrays, NONE, RawResult, Sizes, Top};
use slot::{Lists, Slot};
pub use ticket::CudaTicket;
use ticket::{BufferPool, PartBuffers, Waiter};

/// Threads of a block of every kernel.
const THREADS: usize = 256;
/// Blocks among which the tokens of a sequence are divided.
const MOST_HISTORY_BLOCKS: usize = 32;
/// Buffers of admissions: for those of a plan, and of the two steps in flight.
const ADMISSION_BUFFERS: usize = 3;
/// Buffers of processed logits, which a launch has only with logits processors.
const PROCESSED_BUFFERS: usize = 2;

/// The sampling state of each sequence.
pub struct CudaSlots {
    slots: Vec<Option<Slot>>,
    sizes: Sizes,
    arrays: BatchArrays,
    kernels: SamplingKernels,
    pool: Arc<BufferPool>,
    waiter: Arc<Waiter>,
    admissions: Admissions,
    processed: [Staging; PROCESSED_BUFFERS],
    _region: Region,
}

/// The lists of admissions on their way to the device, one behind the other.
struct Admissions {
    buffers: [Staging; ADMISSION_BUFFERS],
    current: usize,
    /// The end of the lists in the current buffer.
    end: usize,
}

impl Admissions {
    fn new(host: &HostMemory, sizes: &Sizes) -> Result<Self, DeviceError> {
        let buffer = || Staging::new(host, "a buffer of admissions", Self::buffer_bytes(sizes));
        Ok(Self { buffers: [buffer()?, buffer()?, buffer()?], current: 0, end: 0 })
    }

    /// Bytes of a buffer: all lists of a request, and the stop tokens of requests in all slots.
    fn buffer_bytes(sizes: &Sizes) -> usize {
        let stops = sizes.slots.saturating_mul(sizes.words).saturating_mul(size_of::<u32>());
        sizes.admission_bytes().max(stops)
    }

    /// Copies the lists of an admission. Waits if it needs a buffer that earlier ones of the same plan have filled.
    fn upload(&mut self, queue: &Queue, lists: &[(&[u8], DevicePointer)]) -> Result<(), DeviceError> {
        let bytes: usize = lists.iter().map(|(bytes, _)| bytes.len()).sum();
        if bytes == 0 {
            return Ok(());
        }
        if self.buffers[self.current].memory.len() - self.end < bytes {
            (self.current, self.end) = ((self.current + 1) % ADMISSION_BUFFERS, 0);
            self.buffers[self.current].wait()?;
        }
        let buffer = &mut self.buffers[self.current];
        for (bytes, target) in lists {
            let range = self.end..self.end + bytes.len();
            self.end = range.end;
            buffer.memory.bytes_mut()[range.clone()].copy_from_slice(bytes);
            queue.upload(&buffer.memory, range, *target)?;
        }
        buffer.keep(queue)
    }
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

    /// Bytes of the slots on the device.
    pub(super) fn bytes(step: &StepSpec) -> usize {
        Sizes::new(step).divide(DevicePointer::NULL).1
    }

    /// Bytes of the page-locked buffers of sampling.
    pub(super) fn host_bytes(step: &StepSpec) -> usize {
        let sizes = Sizes::new(step);
        [
            BufferPool::bytes(&sizes),
            Admissions::buffer_bytes(&sizes).saturating_mul(ADMISSION_BUFFERS),
            sizes.processed_bytes().saturating_mul(PROCESSED_BUFFERS),
        ]
        .into_iter()
        .fold(0, usize::saturating_add)
    }
}

impl Sample for Cuda {
    type Slots = CudaSlots;
    type Ticket = CudaTicket;

    fn allocate_slots(&mut self, step: &StepSpec) -> Result<CudaSlots, DeviceError> {
        let sizes = Sizes::new(step);
        let (_, bytes) = sizes.divide(DevicePointer::NULL);
        let region = self.memory.allocate_workspace(bytes, "workspace")?;
        let (arrays, _) = sizes.divide(self.memory.pointer(&region));
        let kernels = self.load_sampling()?;
        let processed =
            || Staging::new(&self.pinned, "a buffer of processed logits", sizes.processed_bytes());
        Ok(CudaSlots {
            slots: vec![None; sizes.slots],
            arrays,
            kernels,
            pool: BufferPool::new(&self.pinned, sizes)?,
            waiter: Waiter::new(&self.context)?,
            admissions: Admissions::new(&self.pinned, &sizes)?,
            processed: [processed()?, processed()?],
            _region: region,
            sizes,
        })
    }

    fn admit_slot(
        &mut self,
        slots: &mut CudaSlots,
        slot: u32,
        params: &SlotParams<'_>,
    ) -> Result<(), DeviceError> {
        self.queue.end_step()?;
        let number = slot as usize;
        let lists = Lists::new(params, &slots.sizes)?;
        slots.slots[number] = Some(Slot::new(params, &lists));
        let arrays = &slots.arrays.slots;
        let uploads = [
            (cast_slice(&lists.allowed), arrays.allowed(number)),
            (cast_slice(&lists.stops), arrays.stops(number)),
            (cast_slice(&lists.biases), arrays.biases(number)),
            (cast_slice(&lists.sequences), arrays.sequences(number)),
            (cast_slice(&lists.history), arrays.history(number)),
        ];
        slots.admissions.upload(&self.queue, &uploads)?;
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

    fn free_slot(&mut self, slots: &mut CudaSlots, slot: u32) -> Result<(), DeviceError> {
        slots.slots[slot as usize] = None;
        Ok(())
    }

    fn sample(
        &mut self,
        logits: &CudaBuffer,
        batch: &SamplingBatch,
        slots: &mut CudaSlots,
        _scratch: &mut Region,
    ) -> Result<CudaTicket, DeviceError> {
        let ticket = self.sample_batch(logits, batch, slots);
        let ended = self.queue.end_step();
        let ticket = ticket?; // the first error
        ended.map(|()| ticket)
    }

    fn poll(&mut self, ticket: &mut CudaTicket, waker: &Waker) -> Poll<()> {
        ticket.poll(waker)
    }

    fn collect(&mut self, ticket: CudaTicket, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        ticket.collect(out)
    }
}

impl Cuda {
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

    /// Launches the sampling of a batch, in as many parts as its buffers make necessary.
    fn sample_batch(
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
            let mut buffers = ticket.buffers(&self.queue)?;
            buffers.entries.clear();
            let recorded = self.queue.stream()?.record(&buffers.done).map_err(lost);
            ticket.push(buffers);
            return recorded.map(|()| ticket);
        }
        let mut start = 0;
        while start < batch.len() {
            let mut buffers = ticket.buffers(&self.queue)?;
            let launched = self.launch_part(slots, arrays, (batch, start), &mut buffers);
            start += buffers.entries.len();
            ticket.push(buffers); // also after an error: the device may use the buffers
            launched?;
        }
        Ok(ticket)
    }

    /// Samples entries from number `start` on, as many as there is room for.
    fn launch_part(
        &self,
        slots: &mut CudaSlots,
        mut arrays: BatchArrays,
        (batch, start): (&SamplingBatch, usize),
        buffers: &mut PartBuffers,
    ) -> Result<(), DeviceError> {
        let input_bytes = fill(slots, batch, start, buffers)?;
        self.queue.upload(&buffers.inputs, 0..input_bytes, arrays.entries)?;
        if !buffers.processed.is_empty() {
            self.upload_processed(slots, batch, &buffers.processed, arrays.scores)?;
        }
        let entries = &buffers.entries[..];
        let count = entries.len();
        arrays.masks = arrays.entries.offset(size_of_val(entries));
        arrays.tops = arrays.results.offset(count * size_of::<RawResult>());
        self.launch_kernels(&slots.kernels, &slots.sizes, &arrays, entries)?;
        let num_top: usize = entries.iter().map(|entry| entry.num_top as usize).sum();
        let bytes = count * size_of::<RawResult>() + num_top * size_of::<Top>();
        self.queue.download(arrays.results, &mut buffers.results, bytes)?;
        self.queue.stream()?.record(&buffers.done).map_err(lost)
    }

    /// Copies processed logits to the scores of their entries.
    fn upload_processed(
        &self,
        slots: &mut CudaSlots,
        batch: &SamplingBatch,
        processed: &[(u32, u32)],
        scores: DevicePointer,
    ) -> Result<(), DeviceError> {
        let row_bytes = slots.sizes.row_bytes();
        slots.processed.rotate_left(1);
        let [buffer, ..] = &mut slots.processed;
        self.queue.wait(buffer.unused())?;
        for (row, (entry, number)) in processed.iter().enumerate() {
            let range = row * row_bytes..(row + 1) * row_bytes;
            let values = batch.processed(*number, slots.sizes.vocabulary);
            buffer.memory.bytes_mut()[range.clone()].copy_from_slice(cast_slice(values));
            self.queue.upload(&buffer.memory, range, scores.offset(*entry as usize * row_bytes))?;
        }
        buffer.keep(&self.queue)
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

/// Writes the inputs of entries from number `start` on, as many as there is room for, and returns their bytes.
fn fill(
    slots: &CudaSlots,
    batch: &SamplingBatch,
    start: usize,
    buffers: &mut PartBuffers,
) -> Result<usize, DeviceError> {
    let sizes = &slots.sizes;
    let PartBuffers { inputs, entries, masks, processed: all_processed, .. } = buffers;
    entries.clear();
    masks.clear();
    all_processed.clear();
    let (mut first_top, mut first) = (0, 0);
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
            && (processed.is_none() || all_processed.len() < sizes.most_processed());
        if !has_room {
            break;
        }
        made.first_top = first_top as u32;
        first_top += made.num_top as usize;
        masks.extend(mask);
        all_processed.extend(processed.map(|processed| (number as u32, processed)));
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
        inputs.bytes_mut()[end..][..bytes.len()].copy_from_slice(bytes);
        end += bytes.len();
    };
    entries.iter().for_each(|entry| write(bytes_of(entry)));
    masks.iter().for_each(|mask| write(cast_slice(batch.mask(*mask, sizes.words))));
    Ok(end)
}
