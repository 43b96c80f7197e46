//! [`Uploader`]: large tables on their way to the device, through two page-locked buffers: while one is copied, the
//! other is filled by several threads.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;

use penstock_cuda::{DevicePointer, Event, PinnedMemory};

use super::pinned::{Counted, HostMemory};
use super::queue::Queue;
use super::{lost, start};
use crate::error::DeviceError;

/// Bytes of a buffer. Large enough that a copy takes longer than its call and the start of the threads.
const BUFFER_BYTES: usize = 16 << 20;
/// Threads that fill a buffer.
const MAX_THREADS: usize = 16;

/// A page-locked buffer, and the event after which it may be changed.
pub(super) struct Staging {
    pub memory: Counted<PinnedMemory>,
    unused: Event,
}

impl Staging {
    pub fn new(host: &HostMemory, what: &'static str, bytes: usize) -> Result<Self, DeviceError> {
        let unused = Event::new(&host.context).map_err(start)?;
        Ok(Self { memory: host.zeroed(what, bytes)?, unused })
    }

    /// Waits until the device has read it. In a ring of enough buffers, it has.
    pub fn wait(&self) -> Result<(), DeviceError> {
        match self.unused.query() {
            Ok(true) => Ok(()),
            Ok(false) => self.unused.synchronize().map_err(lost),
            Err(error) => Err(lost(error)),
        }
    }

    /// The event after which the device does not read it any more.
    pub fn unused(&self) -> &Event {
        &self.unused
    }

    /// Copies the first `bytes` to the device.
    pub fn upload(&self, queue: &Queue, bytes: usize, target: DevicePointer) -> Result<(), DeviceError> {
        queue.upload(&self.memory, 0..bytes, target)?;
        self.keep(queue)
    }

    /// Keeps it as it is until everything so far is complete.
    pub fn keep(&self, queue: &Queue) -> Result<(), DeviceError> {
        queue.stream()?.record(&self.unused).map_err(lost)
    }
}

/// Buffers for uploads of any size. For loading; a step has its own.
pub(super) struct Uploader {
    host: HostMemory,
    /// Empty until they are used.
    buffers: Vec<Staging>,
    next: usize,
    pub threads: usize,
}

impl Uploader {
    /// Bytes of the buffers.
    pub const BYTES: usize = 2 * BUFFER_BYTES;

    pub fn new(host: &HostMemory, threads: usize) -> Self {
        Self { host: host.clone(), buffers: Vec::new(), next: 0, threads: threads.min(MAX_THREADS) }
    }

    /// With its buffers, for uploads between steps.
    pub fn ready(host: &HostMemory, threads: usize) -> Result<Self, DeviceError> {
        let mut uploader = Self::new(host, threads);
        for _ in 0..2 {
            uploader.buffer(BUFFER_BYTES)?;
        }
        Ok(uploader)
    }

    /// Releases the buffers. They come back when they are used.
    pub fn release(&mut self) -> Result<(), DeviceError> {
        self.buffers.iter().try_for_each(Staging::wait)?;
        self.buffers.clear();
        Ok(())
    }

    /// Copies a table of `rows` rows to `target`. `fill` writes a range of rows; it is called from several threads,
    /// with ranges that begin at multiples of `unit` rows.
    pub fn upload(
        &mut self,
        queue: &Queue,
        target: DevicePointer,
        (rows, row_bytes): (usize, usize),
        unit: usize,
        fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
    ) -> Result<(), DeviceError> {
        let unit_bytes = unit * row_bytes;
        let step = unit * (BUFFER_BYTES / unit_bytes.max(1)).max(1);
        for first in (0..rows).step_by(step.max(1)) {
            let rows = first..rows.min(first + step);
            let bytes = rows.len() * row_bytes;
            let threads = self.threads;
            let buffer = self.buffer(bytes)?;
            buffer.wait()?;
            fill_parallel(threads, rows.clone(), unit, &mut buffer.memory.bytes_mut()[..bytes], fill);
            buffer.upload(queue, bytes, target.offset(rows.start * row_bytes))?;
        }
        Ok(())
    }

    /// The next buffer, with room for at least `bytes`.
    fn buffer(&mut self, bytes: usize) -> Result<&mut Staging, DeviceError> {
        let index = self.next;
        self.next = (index + 1) % 2;
        let has_room = |buffer: &Staging| buffer.memory.len() >= bytes;
        if !self.buffers.get(index).is_some_and(has_room) {
            let buffer = Staging::new(&self.host, "a buffer of uploads", bytes.max(BUFFER_BYTES))?;
            if index < self.buffers.len() {
                self.buffers[index].wait()?;
                self.buffers[index] = buffer;
            } else {
                self.buffers.push(buffer);
                self.next = self.buffers.len() % 2;
                return Ok(self.buffers.last_mut().expect("it was pushed"));
            }
        }
        Ok(&mut self.buffers[index])
    }
}

/// Divides the rows among threads.
fn fill_parallel(
    threads: usize,
    rows: Range<usize>,
    unit: usize,
    out: &mut [u8],
    fill: &(dyn Fn(Range<usize>, &mut [u8]) + Sync),
) {
    /// Bytes below which another thread is not worth its start.
    const LEAST_BYTES: usize = 1 << 18;
    let row_bytes = out.len() / rows.len().max(1);
    let threads = threads.min(out.len().div_ceil(LEAST_BYTES)).max(1);
    let each = rows.len().div_ceil(threads).next_multiple_of(unit);
    if threads == 1 {
        return fill(rows, out);
    }
    let starts = rows.clone().step_by(each);
    let parts: Vec<_> = starts.zip(out.chunks_mut(each * row_bytes)).map(Some).map(Mutex::new).collect();
    let next = AtomicUsize::new(0);
    run_in_threads(threads, &|| {
        // The counter only divides the work.
        while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
            let part = part.lock().unwrap_or_else(PoisonError::into_inner).take();
            let (first, out) = part.expect("each part is taken once");
            fill(first..rows.end.min(first + each), out);
        }
    });
}

/// Runs in the calling thread and in others, which are fewer than asked for if the system starts no more.
pub(super) fn run_in_threads(threads: usize, run: &(dyn Fn() + Sync)) {
    thread::scope(|scope| {
        let mut others = 1..threads;
        while others.next().is_some() && thread::Builder::new().spawn_scoped(scope, run).is_ok() {}
        run();
    });
}
