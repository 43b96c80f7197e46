//! [`Profile`]: time and work of each operation of a device.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
};
use std::time::Instant;

pub(crate) const FLOAT: u64 = size_of::<f32>() as u64;

/// The measured operations, in the order of a step.
#[derive(Clone, Copy)]
pub(crate) enum Operation {
    CopyBlocks,
    LoadAdapter,
    AdmitSlot,
    Upload,
    Embed,
    RmsNorm,
    Linear,
    AddAdapters,
    RopeWriteKv,
    Attention,
    SiluMul,
    Gather,
    Sample,
    Download,
}

const NAMES: [&str; 14] = [
    "copy_blocks",
    "load_adapter",
    "admit_slot",
    "upload",
    "embed",
    "rms_norm",
    "linear",
    "add_adapters",
    "rope_write_kv",
    "attention",
    "silu_mul",
    "gather",
    "sample",
    "download",
];

/// Time and work of each operation since the backend was made. Can be read at any time, from any thread.
#[derive(Debug, Default)]
pub struct Profile {
    counters: [Counter; NAMES.len()],
}

#[derive(Debug)]
struct Counter {
    calls: AtomicU64,
    nanoseconds: AtomicU64,
    /// The maximum before the first call.
    shortest: AtomicU64,
    longest: AtomicU64,
    bytes: AtomicU64,
    flops: AtomicU64,
}

impl Default for Counter {
    fn default() -> Self {
        let zero = || AtomicU64::new(0);
        let shortest = AtomicU64::new(u64::MAX);
        Self { calls: zero(), nanoseconds: zero(), shortest, longest: zero(), bytes: zero(), flops: zero() }
    }
}

/// The totals of one operation.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileRow {
    /// The operation's name.
    pub operation: String,
    /// Number of calls.
    pub calls: u64,
    /// Time in all calls.
    pub seconds: f64,
    /// Time in the shortest call.
    pub min_seconds: f64,
    /// Time in the longest call.
    pub max_seconds: f64,
    /// Bytes of memory that the calls had to read and write.
    pub bytes: u64,
    /// Floating-point operations of matrix products and attention; `None` for other operations.
    pub flops: Option<u64>,
}

impl Profile {
    /// The totals of each operation that was called, in the order of a step.
    pub fn rows(&self) -> Vec<ProfileRow> {
        let seconds = |nanoseconds: &AtomicU64| nanoseconds.load(Relaxed) as f64 * 1e-9;
        // `calls` is read first: the other numbers are at least those of these calls.
        let row = |(operation, counter): (&&'static str, &Counter)| ProfileRow {
            operation: (*operation).to_owned(),
            calls: counter.calls.load(Acquire),
            seconds: seconds(&counter.nanoseconds),
            min_seconds: seconds(&counter.shortest),
            max_seconds: seconds(&counter.longest),
            bytes: counter.bytes.load(Relaxed),
            flops: Some(counter.flops.load(Relaxed)).filter(|flops| *flops > 0),
        };
        NAMES.iter().zip(&self.counters).map(row).filter(|row| row.calls > 0).collect()
    }

    /// Sets all totals to zero.
    pub fn reset(&self) {
        for Counter { calls, nanoseconds, shortest, longest, bytes, flops } in &self.counters {
            [calls, nanoseconds, longest, bytes, flops]
                .into_iter()
                .for_each(|counter| counter.store(0, Relaxed));
            shortest.store(u64::MAX, Relaxed);
        }
    }

    pub(crate) fn add(&self, operation: Operation, started: Instant, work: Work) {
        let counter = &self.counters[operation as usize];
        let nanoseconds = u64::try_from(started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        counter.nanoseconds.fetch_add(nanoseconds, Relaxed);
        counter.shortest.fetch_min(nanoseconds, Relaxed);
        counter.longest.fetch_max(nanoseconds, Relaxed);
        counter.bytes.fetch_add(work.bytes, Relaxed);
        counter.flops.fetch_add(work.flops, Relaxed);
        counter.calls.fetch_add(1, Release); // publishes the numbers of this call
    }
}

/// The work of one call.
#[derive(Clone, Copy, Default)]
pub(crate) struct Work {
    pub bytes: u64,
    pub flops: u64,
}

pub(crate) fn bytes(bytes: u64) -> Work {
    Work { bytes, flops: 0 }
}

pub(crate) fn floats(count: usize) -> Work {
    bytes(count as u64 * FLOAT)
}
