//! The feed of one reader: a slot for the batch that it has not read yet.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crossbeam_channel::{Receiver, Sender, bounded};

use super::batch::KvBatch;
use crate::port::Bell;

/// A larger batch, such as one of a whole tree, is not kept for its memory.
const MAX_SPARE_EVENTS: usize = 4096;

/// The contents of the slot.
enum Unread {
    Batch(KvBatch),
    Lost,
}

struct Shared {
    /// Only the writer fills the slot, after it has emptied it, so it is never full then. Both sides only try.
    slot: (Sender<Unread>, Receiver<Unread>),
    /// Memory of a batch that was read.
    spare: (Sender<KvBatch>, Receiver<KvBatch>),
    is_ended: AtomicBool,
}

/// The engine's end.
pub struct KvFeedWriter {
    shared: Arc<Shared>,
    bell: Bell,
    /// Events that may be unread.
    capacity: usize,
}

/// The reader's end.
pub struct KvFeedReader {
    shared: Arc<Shared>,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub enum KvRead<T> {
    Read(T),
    /// There is no new event. The bell rings when there is one.
    Empty,
    /// There were too many events. The feed has ended, and the reader needs another one.
    Lost,
    /// The engine has stopped, and all its blocks are gone.
    Ended,
}

/// A feed with room for `capacity` unread events, whose reader is woken by `bell`.
pub fn kv_feed(capacity: usize, bell: Bell) -> (KvFeedWriter, KvFeedReader) {
    let (slot, spare) = (bounded(1), bounded(1));
    let shared = Arc::new(Shared { slot, spare, is_ended: AtomicBool::new(false) });
    (KvFeedWriter { shared: Arc::clone(&shared), bell, capacity }, KvFeedReader { shared })
}

impl KvFeedWriter {
    /// Hands over the events of `batch`, and rings. False if the writer has to be dropped: the reader is gone, or has
    /// lost events.
    pub(crate) fn push(&self, batch: &KvBatch) -> bool {
        if Arc::strong_count(&self.shared) == 1 {
            return false;
        }
        let Shared { slot, spare, .. } = &*self.shared;
        let unread = match slot.1.try_recv() {
            Ok(Unread::Batch(unread)) => Some(unread),
            Ok(Unread::Lost) => return false,
            Err(_) => None,
        };
        let mut unread = unread.or_else(|| spare.1.try_recv().ok()).unwrap_or_default();
        unread.append(batch);
        let fits = unread.events.len() <= self.capacity;
        let _ = slot.0.try_send(if fits { Unread::Batch(unread) } else { Unread::Lost }); // it is empty
        self.bell.ring();
        fits
    }
}

impl Drop for KvFeedWriter {
    fn drop(&mut self) {
        // Release: a reader that sees the end finds the last batch, or that it has lost events.
        self.shared.is_ended.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl KvFeedReader {
    /// Reads the events since the last call with `read`. To be called after the bell was cleared; never blocks.
    pub fn read<T>(&self, read: impl FnOnce(&KvBatch) -> T) -> KvRead<T> {
        let Shared { slot, spare, is_ended } = &*self.shared;
        let is_ended = is_ended.load(Ordering::Acquire); // before the slot: see the drop of the writer
        match slot.1.try_recv() {
            Ok(Unread::Batch(mut batch)) => {
                let result = read(&batch);
                if batch.events.capacity() <= MAX_SPARE_EVENTS {
                    batch.clear();
                    let _ = spare.0.try_send(batch); // another one may be there
                }
                KvRead::Read(result)
            }
            Ok(Unread::Lost) => KvRead::Lost,
            Err(_) if is_ended => KvRead::Ended,
            Err(_) => KvRead::Empty,
        }
    }
}
