//! Tickets: the results of launches on their way to the host.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};

use bytemuck::{cast_slice, from_bytes};
use penstock_cuda::{Context, Event, PinnedMemory};
use penstock_types::Token;

use super::entry::{Entry, flags};
use super::layout::{IS_TOKEN, NO_CANDIDATES, RawResult, Sizes, Top};
use crate::cuda::pinned::{Counted, HostMemory};
use crate::cuda::queue::Queue;
use crate::cuda::{lost, start};
use crate::error::DeviceError;
use crate::seam::Sampled;

/// Tickets that are kept: two steps in flight, each with one, or with two if it has outputs of prompts.
const TICKETS: usize = 4;
/// Parts of a batch that are in flight at once. Only one with more entries, or log probabilities, than a launch has
/// room for is divided.
const PARTS: usize = 2;
/// Tickets that wait to be complete. There are two steps in flight.
const MOST_REQUESTS: usize = 16;

/// The buffers of a part of a batch.
pub(super) struct PartBuffers {
    pub inputs: Counted<PinnedMemory>,
    pub results: Counted<PinnedMemory>,
    /// Occurs when the results have come.
    pub done: Arc<Event>,
    /// The entries of the part. The other lists are of use only until it is launched: the masks in the order of their
    /// numbers, and the processed logits, by the entry and by their number in the batch.
    pub entries: Vec<Entry>,
    pub masks: Vec<u32>,
    pub processed: Vec<(u32, u32)>,
}

impl PartBuffers {
    fn new(host: &HostMemory, sizes: &Sizes) -> Result<Self, DeviceError> {
        Ok(Self {
            inputs: host.zeroed("a buffer of sampling", sizes.input_bytes())?,
            results: host.zeroed("a buffer of sampling", sizes.result_bytes())?,
            done: Arc::new(Event::new(&host.context).map_err(start)?),
            entries: Vec::with_capacity(sizes.entries),
            masks: Vec::with_capacity(sizes.entries),
            processed: Vec::with_capacity(sizes.most_processed()),
        })
    }

    /// Writes the results into the first of `out`, and returns the others.
    fn read<'a>(&self, out: &'a mut [Sampled]) -> &'a mut [Sampled] {
        let (results, tops) = self.results.bytes().split_at(self.entries.len() * size_of::<RawResult>());
        let tops: &[Top] = cast_slice(&tops[..tops.len() / size_of::<Top>() * size_of::<Top>()]);
        let results = results.chunks_exact(size_of::<RawResult>()).map(from_bytes);
        let (out, later) = out.split_at_mut(self.entries.len());
        for ((entry, result), out) in self.entries.iter().zip(results).zip(out) {
            *out = read(entry, result, &tops[entry.first_top as usize..]);
        }
        later
    }
}

/// The buffers that no ticket has.
pub(super) struct BufferPool {
    host: HostMemory,
    sizes: Sizes,
    free: Mutex<VecDeque<PartBuffers>>,
}

impl BufferPool {
    /// Buffers for a part of each ticket.
    pub fn new(host: &HostMemory, sizes: Sizes) -> Result<Arc<Self>, DeviceError> {
        let free: Result<_, _> = (0..TICKETS).map(|_| PartBuffers::new(host, &sizes)).collect();
        Ok(Arc::new(Self { host: host.clone(), sizes, free: Mutex::new(free?) }))
    }

    /// Page-locked bytes of a pool.
    pub fn bytes(sizes: &Sizes) -> usize {
        sizes.input_bytes().saturating_add(sizes.result_bytes()).saturating_mul(TICKETS)
    }

    /// Buffers that the device does not use. Those of a ticket that was dropped may have to be waited for. New ones
    /// only if batches are divided: at most `PARTS` for each ticket.
    fn take(&self, queue: &Queue) -> Result<PartBuffers, DeviceError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..free.len() {
            if free[index].done.query().map_err(lost)? {
                return Ok(free.remove(index).expect("the index is below the length"));
            }
        }
        if let Some(oldest) = free.front() {
            queue.wait(&oldest.done)?;
        }
        match free.pop_front() {
            Some(oldest) => Ok(oldest),
            None => PartBuffers::new(&self.host, &self.sizes),
        }
    }

    /// The buffers are used again last.
    fn release(&self, buffers: PartBuffers) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push_back(buffers);
    }
}

/// The results of a `sample` call.
pub struct CudaTicket {
    /// The results of the first parts. Later parts use their buffers.
    read: Vec<Sampled>,
    /// The other parts, in order.
    parts: [Option<PartBuffers>; PARTS],
    /// The waker that the waiter has.
    asked: Option<Waker>,
    pool: Arc<BufferPool>,
    waiter: Arc<Waiter>,
}

impl CudaTicket {
    pub(super) fn new(pool: &Arc<BufferPool>, waiter: &Arc<Waiter>) -> Self {
        Self {
            read: Vec::new(),
            parts: [const { None }; PARTS],
            asked: None,
            pool: Arc::clone(pool),
            waiter: Arc::clone(waiter),
        }
    }

    /// Buffers for the next part: those of the oldest one, after its results have come, if the ticket has as many as it
    /// may.
    pub(super) fn buffers(&mut self, queue: &Queue) -> Result<PartBuffers, DeviceError> {
        if self.parts.iter().any(Option::is_none) {
            return self.pool.take(queue);
        }
        let oldest = self.parts[0].as_ref().expect("all parts are there");
        queue.wait(&oldest.done)?;
        let first = self.read.len();
        self.read.resize_with(first + oldest.entries.len(), Sampled::default);
        oldest.read(&mut self.read[first..]);
        self.parts.rotate_left(1);
        Ok(self.parts[PARTS - 1].take().expect("the oldest part is the last now"))
    }

    /// Adds a part. The device may use its buffers, also after an error.
    pub(super) fn push(&mut self, buffers: PartBuffers) {
        let place = self.parts.iter_mut().find(|part| part.is_none());
        *place.expect("a place for each part that took buffers; this is a bug") = Some(buffers);
    }

    pub(in crate::cuda) fn poll(&mut self, waker: &Waker) -> Poll<()> {
        // The parts end in order.
        let Some(last) = self.parts.iter().flatten().next_back() else { return Poll::Ready(()) };
        if !matches!(last.done.query(), Ok(false)) || self.waiter.has_failed.load(Ordering::Acquire) {
            return Poll::Ready(()); // `collect` waits, or returns the error
        }
        if self.asked.as_ref().is_some_and(|asked| asked.will_wake(waker)) {
            return Poll::Pending;
        }
        if !self.waiter.wake_after(&last.done, waker) {
            return Poll::Ready(());
        }
        self.asked = Some(waker.clone());
        Poll::Pending
    }

    pub(in crate::cuda) fn collect(mut self, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        let (first, parts) = (self.read.len(), self.parts.iter().flatten());
        let rest: usize = parts.clone().map(|part| part.entries.len()).sum();
        out.resize_with(first + rest, Sampled::default);
        out.iter_mut().zip(self.read.drain(..)).for_each(|(out, read)| *out = read);
        let mut rest = &mut out[first..];
        for part in self.parts.iter().flatten() {
            part.done.synchronize().map_err(lost)?;
            rest = part.read(rest);
        }
        Ok(())
    }
}

impl Drop for CudaTicket {
    fn drop(&mut self) {
        for buffers in self.parts.iter_mut().filter_map(Option::take) {
            self.pool.release(buffers);
        }
    }
}

fn read(entry: &Entry, result: &RawResult, tops: &[Top]) -> Sampled {
    match result.outcome {
        IS_TOKEN => {}
        NO_CANDIDATES => return Sampled::NoCandidates,
        _ => return Sampled::Rejected,
    }
    if !entry.has(flags::HAS_LOGPROBS) {
        return Sampled::Token(Token::new(result.token, f32::NAN));
    }
    let factor = if entry.has(flags::HAS_RAW_LOGPROBS) { 1.0 } else { entry.factor };
    let log_sum = result.sum.ln();
    let logprob = |score: f32| (f64::from((score - result.best) * factor) - log_sum) as f32;
    let tops = tops[..result.num_top as usize].iter();
    let mut top: Vec<_> = tops.map(|top| (top.id, top.score + 0.0)).collect(); // zero has one sign
    top.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    top.iter_mut().for_each(|(_, score)| *score = logprob(*score));
    Sampled::with_top(result.token, logprob(result.score), top)
}

/// A thread that waits for events, in the order of the requests, and wakes.
pub(super) struct Waiter {
    requests: Option<SyncSender<(Arc<Event>, Waker)>>,
    thread: Option<JoinHandle<()>>,
    /// A wait has failed: a ticket may have been woken before its event.
    has_failed: Arc<AtomicBool>,
}

impl Waiter {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, DeviceError> {
        let (requests, queue) = sync_channel::<(Arc<Event>, Waker)>(MOST_REQUESTS);
        let context = Arc::clone(context);
        let has_failed = Arc::new(AtomicBool::new(false));
        let failed = Arc::clone(&has_failed);
        let wait = move || {
            let _ = context.bind_thread(); // an error is that of the waits, too
            for (event, waker) in queue {
                if event.synchronize().is_err() {
                    failed.store(true, Ordering::Release);
                }
                waker.wake();
            }
        };
        let thread = thread::Builder::new()
            .name("penstock-cuda".to_owned())
            .spawn(wait)
            .map_err(|error| DeviceError::Start(error.to_string()))?;
        Ok(Arc::new(Self { requests: Some(requests), thread: Some(thread), has_failed }))
    }

    /// Wakes when an event occurs; `false` if there are too many requests, or the thread has ended.
    fn wake_after(&self, event: &Arc<Event>, waker: &Waker) -> bool {
        let request = (Arc::clone(event), waker.clone());
        self.requests.as_ref().is_some_and(|requests| requests.try_send(request).is_ok())
    }
}

impl Drop for Waiter {
    /// The thread has no event any more when the context is closed.
    fn drop(&mut self) {
        drop(self.requests.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
