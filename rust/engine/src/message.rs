//! Every message the engine thread can receive. A variant carries exactly what it needs.
//!
//! There is no cancel among them, nor a request for statistics: a cancel is a flag in the request's queue (it must
//! survive a full mailbox), and statistics are read from atomics without asking.

use std::sync::Arc;

use crate::executor::StepDone;
use crate::port::Bell;
use crate::request::{Finish, Rejection, Request, RequestId};
use crate::result_queue::Writer;

/// See the variants.
pub enum Message {
    /// Requests, checked against the limits: one; or several for the same prompt, admitted or refused together, of which
    /// the first computes it.
    Start(Vec<Start>),
    /// A flag was raised beside the mailbox (a cancel, or room in a full result queue): look at the sequences.
    Nudge,
    /// The executor answers the oldest plan in flight.
    StepDone(StepDone),
    /// Forget all prefixes; what is in use is not affected, nor found by anybody else any more.
    ResetPrefixCache,
    /// End every request and stop.
    Shutdown,
}

/// A new request.
pub struct Start {
    /// Its name.
    pub id: RequestId,
    /// What it asks for.
    pub request: Arc<Request>,
    /// Where its events go.
    pub outbox: Outbox,
}

/// The engine's end of a result queue together with the bell of the port that listens to it. Whoever drops it without
/// a last word, dead engine or discarded message, wakes the consumer to find out.
pub struct Outbox {
    writer: Option<Writer>,
    bell: Bell,
}

impl Outbox {
    /// Pairs the two.
    pub fn new(writer: Writer, bell: Bell) -> Self {
        Self { writer: Some(writer), bell }
    }

    /// The bell of the listening port.
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// The queue. Pushing does not ring.
    pub fn writer(&mut self) -> &mut Writer {
        self.writer.as_mut().expect("an outbox keeps its queue until its last word; this is a bug")
    }

    /// Whether the consumer wants no more.
    pub fn is_cancelled(&self) -> bool {
        self.writer.as_ref().is_some_and(Writer::is_cancelled)
    }

    /// Turns the request away, as its only event. Does not ring.
    pub fn refuse(mut self, refusal: Rejection) {
        self.writer.take().expect("refused once; this is a bug").refuse(refusal);
    }

    /// Ends the request. Does not ring.
    pub fn finish(mut self, finish: Finish) {
        self.writer.take().expect("finished once; this is a bug").finish(finish);
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take() {
            drop(writer); // closes: push, then ring
            self.bell.ring();
        }
    }
}
