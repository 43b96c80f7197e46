//! The messages that the engine thread receives.
//!
//! A cancel is not a message but a flag in the request's queue, since it must survive a full mailbox; and statistics
//! are read from atomics.

use std::sync::Arc;

use crossbeam_channel::Sender;
use penstock_types::PackedAdapter;

use crate::executor::StepDone;
use crate::kv_events::KvFeedWriter;
use crate::port::Bell;
use crate::request::{AdapterId, AdapterUse, Finish, Rejection, Request, RequestId, StopCause};
use crate::result_queue::{CancelCause, Writer};

pub enum Message {
    /// A request that passed the check of the limits. Its choices are admitted or rejected together, and the first
    /// computes the prompt.
    Start(Start),
    /// A flag was raised beside the mailbox (a cancel, or room in a full result queue): look at the sequences.
    Nudge,
    /// The oldest step in flight is done.
    StepDone(StepDone),
    /// Register an adapter; the answer says whether there was room.
    LoadAdapter(NewAdapter, Sender<Result<(), AdapterError>>),
    /// Keep an adapter until as many `ReleaseAdapter` have come, also if it is unloaded.
    HoldAdapter(AdapterId),
    /// End one `HoldAdapter`.
    ReleaseAdapter(AdapterId),
    /// Take no more requests with an adapter, unless it is held; with a reason, end the open ones for it and ignore
    /// what holds it. The value is dropped when it is neither used nor held. An adapter can be unloaded again while its
    /// requests are open.
    UnloadAdapter(AdapterId, Option<String>, Box<dyn Send>),
    /// Remove the blocks of this salt from the prefix cache, or all blocks. Running requests keep their blocks, which
    /// are no longer shared.
    ResetPrefixCache(Option<Arc<str>>),
    /// Add a reader of KV events.
    ReadKvEvents(KvFeedWriter),
    /// Stop as soon as no request is open and no [`Hold`](crate::Hold) is left.
    Drain,
    /// End every request and stop.
    Shutdown,
}

/// An adapter to be registered.
pub struct NewAdapter {
    pub id: AdapterId,
    /// Its name in KV events.
    pub name: Arc<str>,
    pub weights: Arc<PackedAdapter>,
    /// Bytes that it takes on the device.
    pub bytes: u64,
    pub usage: Arc<AdapterUse>,
    /// The adapter that is unloaded once this one is registered.
    pub replaces: Option<AdapterId>,
}

/// The reason why an adapter was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    /// As many adapters are loaded as the limit allows, or twice as many with the unloaded ones that have open
    /// requests.
    #[error(
        "{loaded} adapters are loaded, and {closing} unloaded ones have open requests; max_cpu_adapters is {limit}"
    )]
    TooMany {
        /// The adapters that take requests.
        loaded: usize,
        /// The adapters that were unloaded or replaced, and have open requests.
        closing: usize,
        /// The most adapters that take requests; see `Limits::max_registered_adapters`.
        limit: usize,
    },
    /// The adapters in host memory leave no room.
    #[error("it takes {bytes} bytes, and those in memory take {registered} of max_cpu_adapter_bytes={limit}")]
    TooManyBytes {
        /// The bytes of the adapter.
        bytes: u64,
        /// The bytes of the adapters in host memory, those included that were unloaded and have open requests.
        registered: u64,
        /// The most bytes; see `Limits::max_registered_bytes`.
        limit: u64,
    },
    /// The engine has stopped.
    #[error("{0}")]
    Stopped(StopCause),
}

/// A new request. Everything but the ids and the outboxes is shared by its choices.
pub struct Start {
    /// The id of the first choice. The ids of the others follow it.
    pub id: RequestId,
    pub request: Arc<Request>,
    /// The receiver of each choice's events; at least one.
    pub outboxes: Vec<Outbox>,
}

/// The engine's end of a result queue, with the bell of the port that listens to it. If it is dropped before the last
/// event, because the engine crashed or the message was discarded, the consumer is woken and finds the queue closed.
pub struct Outbox {
    id: RequestId,
    writer: Option<Writer>,
    bell: Bell,
}

impl Outbox {
    /// An outbox of the choice `id` for `writer`, whose reader listens to `bell`.
    pub fn new(id: RequestId, writer: Writer, bell: Bell) -> Self {
        Self { id, writer: Some(writer), bell }
    }

    /// The bell of the listening port.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// The result queue.
    pub fn queue(&self) -> &Writer {
        self.writer.as_ref().expect("an outbox keeps its queue until the last event; this is a bug")
    }

    /// The result queue. Pushing does not ring.
    pub fn queue_mut(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("an outbox keeps its queue until the last event; this is a bug")
    }

    /// Whether the consumer has cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.cancel_cause().is_some()
    }

    /// The cause for which the consumer has cancelled.
    pub fn cancel_cause(&self) -> Option<CancelCause> {
        self.writer.as_ref().and_then(Writer::cancel_cause)
    }

    /// The id, if it must be added to the port's list because events were pushed. To be called after pushing.
    #[must_use]
    pub fn list(&self) -> Option<RequestId> {
        self.queue().list().then_some(self.id)
    }

    /// Rejects the request, as its only event. Does not ring. Returns as `list` does.
    #[must_use]
    pub fn reject(mut self, rejection: Rejection) -> Option<RequestId> {
        let writer = self.writer.take().expect("rejected once; this is a bug");
        writer.reject(rejection).then_some(self.id)
    }

    /// Ends the request. Does not ring. Returns as `list` does.
    #[must_use]
    pub fn finish(mut self, finish: Finish) -> Option<RequestId> {
        let writer = self.writer.take().expect("finished once; this is a bug");
        writer.finish(finish).then_some(self.id)
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if let Some(mut writer) = self.writer.take() {
            writer.close();
            self.bell.list(&mut Vec::from_iter(writer.list().then_some(self.id)));
            self.bell.ring();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::port::Port;
    use crate::result_queue::result_queue;

    #[test]
    fn dropped_outbox_lists_its_request_and_rings() {
        let port = Port::with_condvar();
        let (writer, mut reader) = result_queue(1);
        drop(Outbox::new(RequestId(3), writer, port.bell()));
        assert!(port.wait(Some(Duration::ZERO)));
        let mut ids = Vec::new();
        port.take_listed(&mut ids);
        assert_eq!(ids, [RequestId(3)]);
        assert!(reader.pop().is_some(), "the end");
    }

    #[test]
    fn request_is_listed_once_until_it_is_unlisted() {
        let port = Port::with_condvar();
        let (writer, reader) = result_queue(4);
        let mut outbox = Outbox::new(RequestId(3), writer, port.bell());
        outbox.queue_mut().admit();
        assert_eq!([outbox.list(), outbox.list()], [Some(RequestId(3)), None]);
        reader.unlist();
        assert_eq!(outbox.list(), Some(RequestId(3)));
    }
}
