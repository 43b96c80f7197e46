//! Checksums of the weights: one for each chunk of the file, so that several threads compare them. They are compared
//! before the weights are used.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicUsize, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use crate::error::CheckpointError;
use crate::mapped::MappedFile;

/// Bytes of a chunk; the last one may be shorter.
pub(super) const CHUNK: usize = 4 << 20;
pub(super) const DAMAGED: &str = "the file is damaged; convert the model again";

/// Computes the checksums of a file while the file is written.
#[derive(Default)]
pub(super) struct Checksums {
    done: Vec<u64>,
    chunk: Xxh3,
    /// Bytes of the chunk so far.
    len: usize,
}

impl Checksums {
    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (now, rest) = bytes.split_at(bytes.len().min(CHUNK - self.len));
            self.chunk.update(now);
            self.len += now.len();
            bytes = rest;
            if self.len == CHUNK {
                self.end_chunk();
            }
        }
    }

    fn end_chunk(&mut self) {
        self.done.push(self.chunk.digest());
        self.chunk.reset();
        self.len = 0;
    }

    pub(super) fn finish(mut self) -> Vec<u64> {
        if self.len > 0 {
            self.end_chunk();
        }
        self.done
    }
}

/// Compares a file with its checksums on `threads` threads. A chunk that differs is an error that names its bytes.
/// `proceed` is called between chunks of this thread; `Break` ends the comparison.
pub(super) fn verify(
    file: &MappedFile,
    checksums: &[u64],
    threads: usize,
    proceed: &mut dyn FnMut() -> ControlFlow<()>,
) -> Result<ControlFlow<()>, CheckpointError> {
    let bytes = file.bytes();
    let count = bytes.len().div_ceil(CHUNK);
    if checksums.len() != count {
        let problem = format!("{} checksums; the file has {count} chunks", checksums.len());
        return Err(CheckpointError::malformed(file.path(), "checksum", problem));
    }
    let (next, damaged) = (AtomicUsize::new(0), AtomicUsize::new(usize::MAX));
    // Compares the next chunk; false at the end.
    let compare_next = || {
        let chunk = next.fetch_add(1, Ordering::Relaxed);
        if chunk >= count || damaged.load(Ordering::Relaxed) != usize::MAX {
            return false;
        }
        let range = chunk * CHUNK..bytes.len().min((chunk + 1) * CHUNK);
        file.populate(range.clone());
        if xxh3_64(&bytes[range]) != checksums[chunk] {
            damaged.fetch_min(chunk, Ordering::Relaxed);
        }
        true
    };
    let mut flow = ControlFlow::Continue(());
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            // If a thread cannot start, the other threads compare its chunks.
            let _ = std::thread::Builder::new()
                .name("penstock verify".into())
                .spawn_scoped(scope, || while compare_next() {});
        }
        while flow.is_continue() && compare_next() {
            flow = proceed();
        }
        if flow.is_break() {
            next.store(count, Ordering::Relaxed);
        }
    });
    match damaged.into_inner() {
        usize::MAX => Ok(flow),
        chunk => {
            let bytes = chunk * CHUNK..bytes.len().min((chunk + 1) * CHUNK);
            Err(CheckpointError::malformed(file.path(), format!("checksum of bytes {bytes:?}"), DAMAGED))
        }
    }
}
