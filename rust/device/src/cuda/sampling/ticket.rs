//! Tickets: the results of launches on their way to the host.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};
use std::thread::{self, JoinHandle};

use bytemuck::{cast_slice, from_bytes};
use penstock_cuda::{Context, CudaError, Event, PinnedMemory};

use super::layout::{Entry, IS_TOKEN, NO_CANDIDATES, RawResult, Sizes, Top, flags};
use crate::backend::DeviceError;
use crate::cuda::{lost, start};
use crate::sample::{SampleOutcome, Sampled};

/// Page-locked memory of a launch: its inputs, and its results.
pub(super) struct LaunchBuffers {
    pub inputs: PinnedMemory,
    pub processed: PinnedMemory,
    pub results: PinnedMemory,
    /// Occurs when the results have come.
    pub done: Arc<Event>,
}

impl LaunchBuffers {
    fn new(context: &Arc<Context>, sizes: &Sizes) -> Result<Self, CudaError> {
        Ok(Self {
            inputs: PinnedMemory::new(context, sizes.input_bytes())?,
            processed: PinnedMemory::new(context, sizes.most_processed() * sizes.row_bytes())?,
            results: PinnedMemory::new(context, sizes.result_bytes())?,
            done: Arc::new(Event::new(context)?),
        })
    }
}

/// The buffers that no ticket has.
pub(super) struct BufferPool {
    context: Arc<Context>,
    sizes: Sizes,
    free: Mutex<Vec<LaunchBuffers>>,
}

impl BufferPool {
    /// Buffers for two steps in flight.
    pub fn new(context: &Arc<Context>, sizes: Sizes) -> Result<Arc<Self>, CudaError> {
        let free: Result<_, _> =
            (0..2 * (sizes.launches + 1)).map(|_| LaunchBuffers::new(context, &sizes)).collect();
        Ok(Arc::new(Self { context: Arc::clone(context), sizes, free: Mutex::new(free?) }))
    }

    /// Buffers that the device does not use. New ones if there are none: if many log probabilities divide a batch, or if
    /// tickets were dropped while their launches wait.
    pub fn take(&self) -> Result<LaunchBuffers, DeviceError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        for index in 0..free.len() {
            if free[index].done.query().map_err(lost)? {
                return Ok(free.swap_remove(index));
            }
        }
        drop(free);
        LaunchBuffers::new(&self.context, &self.sizes).map_err(|error| start(&error))
    }

    fn release(&self, buffers: LaunchBuffers) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(buffers);
    }
}

/// A part of a batch.
struct Launch {
    /// `None` after it was given back.
    buffers: Option<LaunchBuffers>,
    entries: Vec<Entry>,
}

/// The results of a `sample` call.
pub struct CudaTicket {
    launches: Vec<Launch>,
    pool: Arc<BufferPool>,
    waiter: Arc<Waiter>,
}

impl CudaTicket {
    pub(super) fn new(pool: &Arc<BufferPool>, waiter: &Arc<Waiter>) -> Self {
        Self { launches: Vec::new(), pool: Arc::clone(pool), waiter: Arc::clone(waiter) }
    }

    pub(super) fn push(&mut self, buffers: LaunchBuffers, entries: Vec<Entry>) {
        self.launches.push(Launch { buffers: Some(buffers), entries });
    }

    pub(in crate::cuda) fn poll(&self, waker: &Waker) -> Poll<()> {
        let last = self.launches.last().and_then(|launch| launch.buffers.as_ref());
        match last.map(|buffers| (buffers, buffers.done.query())) {
            // The launches end in order.
            Some((buffers, Ok(false))) if self.waiter.wake_after(&buffers.done, waker) => Poll::Pending,
            _ => Poll::Ready(()),
        }
    }

    pub(in crate::cuda) fn collect(mut self, out: &mut Vec<Sampled>) -> Result<(), DeviceError> {
        out.resize_with(self.launches.iter().map(|launch| launch.entries.len()).sum(), Sampled::default);
        let mut rest = &mut out[..];
        for Launch { buffers, entries } in &mut self.launches {
            let Some(buffers) = buffers else { continue };
            buffers.done.synchronize().map_err(lost)?;
            let (results, tops) = buffers.results.bytes().split_at(entries.len() * size_of::<RawResult>());
            let tops: &[Top] = cast_slice(&tops[..tops.len() / size_of::<Top>() * size_of::<Top>()]);
            let results = results.chunks_exact(size_of::<RawResult>()).map(from_bytes);
            let (now, later) = rest.split_at_mut(entries.len());
            for ((entry, result), out) in entries.iter().zip(results).zip(now) {
                read(entry, result, &tops[entry.first_top as usize..], out);
            }
            rest = later;
        }
        Ok(())
    }
}

impl Drop for CudaTicket {
    fn drop(&mut self) {
        for buffers in self.launches.iter_mut().filter_map(|launch| launch.buffers.take()) {
            self.pool.release(buffers);
        }
    }
}

/// Replaces `out` and reuses its memory.
fn read(entry: &Entry, result: &RawResult, tops: &[Top], out: &mut Sampled) {
    out.outcome = match result.outcome {
        IS_TOKEN => SampleOutcome::Token,
        NO_CANDIDATES => SampleOutcome::NoCandidates,
        _ => SampleOutcome::Rejected,
    };
    out.token = if out.outcome == SampleOutcome::Token { result.token } else { 0 };
    out.logprob = f32::NAN;
    out.top.clear();
    if out.outcome != SampleOutcome::Token || !entry.has(flags::HAS_LOGPROBS) {
        return;
    }
    let factor = if entry.has(flags::HAS_RAW_LOGPROBS) { 1.0 } else { entry.factor };
    let log_sum = result.sum.ln();
    let logprob = |score: f32| (f64::from((score - result.best) * factor) - log_sum) as f32;
    out.logprob = logprob(result.score);
    let tops = tops[..result.num_top as usize].iter().map(|top| (top.id, top.score + 0.0)); // zero has one sign
    out.top.extend(tops);
    out.top.sort_unstable_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    out.top.iter_mut().for_each(|(_, score)| *score = logprob(*score));
}

/// A thread that waits for events, in the order of the requests, and wakes.
pub(super) struct Waiter {
    requests: Option<Sender<(Arc<Event>, Waker)>>,
    thread: Option<JoinHandle<()>>,
}

impl Waiter {
    pub fn new(context: &Arc<Context>) -> Result<Arc<Self>, DeviceError> {
        let (requests, queue) = channel::<(Arc<Event>, Waker)>();
        let context = Arc::clone(context);
        let wait = move || {
            let _ = context.bind_thread(); // an error is that of the waits, too
            for (event, waker) in queue {
                let _ = event.synchronize(); // an error is `collect`'s, too
                waker.wake();
            }
        };
        let thread = thread::Builder::new()
            .name("penstock-cuda".to_owned())
            .spawn(wait)
            .map_err(|error| DeviceError::Start(error.to_string()))?;
        Ok(Arc::new(Self { requests: Some(requests), thread: Some(thread) }))
    }

    /// Wakes when an event occurs; `false` if the thread has ended.
    fn wake_after(&self, event: &Arc<Event>, waker: &Waker) -> bool {
        let request = (Arc::clone(event), waker.clone());
        self.requests.as_ref().is_some_and(|requests| requests.send(request).is_ok())
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
