//! The one way into the engine thread: a bounded channel, and beside it two flags that cannot fill up.
//!
//! A full mailbox refuses starts. It never loses a cancel: whoever raises a flag in a result queue also raises
//! attention, then tries to send a nudge; if the mailbox is full no nudge is needed, because the engine is about to
//! take a message out of it and looks at the flag after every message it takes.
//!
//! Nor does it swallow a start: the channel would keep what is sent in the moment in which the engine ends, so the engine
//! closes the gate before it empties the mailbox for the last time, and a sender looks at the gate after sending.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded};

use crate::executor::StepDone;
use crate::limits::Limits;
use crate::message::{Message, Start};
use crate::request::{Rejection, StopCause};
use crate::sync::{AtomicBool, Ordering, fence};

/// The bounds between which a mailbox's size follows the number of requests that could be taken.
const CAPACITY: std::ops::RangeInclusive<usize> = 64..=65_536;

/// "Some sequence has a flag for you", in one bit for the whole engine: a turn in which nothing happened looks at one
/// flag, not at one per sequence.
#[derive(Default)]
pub struct Attention {
    raised: AtomicBool,
}

impl Attention {
    /// To be called after a sequence's flag is set and before the nudge is tried.
    pub fn raise(&self) {
        // Release: the engine that sees attention raised sees the sequence's flag.
        self.raised.store(true, Ordering::Release);
        // Here: flag, fence, look at the mailbox (full?). In `take`: mailbox emptied by one, fence, look at the flag.
        // The side whose fence is second sees what the other did: if we found the mailbox full, the engine sees the
        // flag after taking the next message.
        fence(Ordering::SeqCst);
    }

    /// Whether attention was raised since the last call. To be called after messages were taken.
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst); // see `raise`
        // A load first keeps the cache line shared while nothing happens. Acquire pairs with `raise`.
        self.raised.load(Ordering::Relaxed) && self.raised.swap(false, Ordering::Acquire)
    }
}

/// Whether the engine takes requests, and if not, why.
pub struct Gate {
    is_open: AtomicBool,
    /// Set before the gate closes.
    cause: OnceLock<StopCause>,
}

impl Default for Gate {
    /// Open.
    fn default() -> Self {
        Self { is_open: AtomicBool::new(true), cause: OnceLock::new() }
    }
}

impl Gate {
    /// Whether it is worth while to send. A hint only.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire) // pairs with the release in `close`: the cause is set
    }

    /// Why it is closed.
    pub fn cause(&self) -> StopCause {
        self.cause.get().cloned().expect("a gate closes with a cause; this is a bug")
    }

    /// Closes it, for ever; true for the first call, whose cause is kept. What was sent before, and not reported as too
    /// late to its sender, is in the mailbox afterwards.
    pub fn close(&self, cause: StopCause) -> bool {
        let _ = self.cause.set(cause); // the first cause stays
        // Release: whoever sees the gate closed sees the cause. The rest is ordered by the fence.
        let was_open = self.is_open.swap(false, Ordering::Release);
        // Here: gate, fence, look into the mailbox. In `is_open_after_sending`: mailbox, fence, look at the gate. The
        // side whose fence is second sees what the other did: the engine finds the message or the sender the gate shut.
        fence(Ordering::SeqCst);
        was_open
    }

    /// To be asked after sending: if true, somebody will take the message out.
    pub fn is_open_after_sending(&self) -> bool {
        fence(Ordering::SeqCst); // see `close`
        self.is_open.load(Ordering::Acquire) // see `is_open`
    }
}

/// The receiving end, owned by the engine thread.
pub(crate) struct Mailbox {
    messages: Receiver<Message>,
    gate: Arc<Gate>,
}

/// The end of clients: starts, nudges, shutdown.
#[derive(Clone)]
pub(crate) struct Letterbox {
    messages: Sender<Message>,
    attention: Arc<Attention>,
    gate: Arc<Gate>,
}

/// The end of the executor. Clones are the same.
#[derive(Clone)]
pub struct Completions {
    messages: Sender<Message>,
}

/// Why a start was not taken.
pub(crate) enum NotSent {
    Full,
    Stopped(StopCause),
}

/// A mailbox sized for everything `limits` could take in at once.
pub(crate) fn mailbox(limits: &Limits) -> (Mailbox, Letterbox, Completions) {
    let requests = limits.max_waiting.saturating_add(limits.max_num_seqs);
    let (sender, messages) = bounded(requests.clamp(*CAPACITY.start(), *CAPACITY.end()));
    let attention = Arc::new(Attention::default());
    let gate = Arc::new(Gate::default());
    let letterbox = Letterbox { messages: sender.clone(), attention, gate: Arc::clone(&gate) };
    (Mailbox { messages, gate }, letterbox, Completions { messages: sender })
}

impl Mailbox {
    /// The engine's only wait point: for a message, or until `deadline`. When nobody is left who could send, that is a
    /// shutdown.
    pub(crate) fn wait(&self, deadline: Option<Instant>) -> Option<Message> {
        let Some(deadline) = deadline else {
            return Some(self.messages.recv().unwrap_or(Message::Shutdown));
        };
        match self.messages.recv_deadline(deadline) {
            Ok(message) => Some(message),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Message::Shutdown),
        }
    }

    /// What else has arrived, at most a mailbox full: a flood of starts must not keep the engine from its steps.
    pub(crate) fn drain(&self) -> impl Iterator<Item = Message> {
        self.messages.try_iter().take(self.messages.len())
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }
}

impl Drop for Mailbox {
    /// Refuses the starts that are left.
    fn drop(&mut self) {
        self.gate.close(StopCause::Closed);
        for message in self.messages.try_iter() {
            let Message::Start(starts) = message else { continue };
            for Start { outbox, .. } in starts {
                let bell = outbox.bell().clone();
                outbox.refuse(Rejection::Stopped(self.gate.cause()));
                bell.ring();
            }
        }
    }
}

impl Letterbox {
    pub(crate) fn start(&self, starts: Vec<Start>) -> Result<(), NotSent> {
        self.messages.try_send(Message::Start(starts)).map_err(|error| match error {
            TrySendError::Full(_) => NotSent::Full,
            TrySendError::Disconnected(_) => NotSent::Stopped(self.gate.cause()),
        })?;
        if self.gate.is_open_after_sending() { Ok(()) } else { Err(NotSent::Stopped(self.gate.cause())) }
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Makes the engine look at every sequence's flags. Never blocks.
    pub(crate) fn nudge(&self) {
        self.attention.raise();
        // Full: the engine is about to look. Disconnected: there is no engine to look.
        let _ = self.messages.try_send(Message::Nudge);
    }

    /// May wait for a place in the mailbox, which the engine thread frees without needing anybody.
    pub(crate) fn shutdown(&self) {
        let _ = self.messages.send(Message::Shutdown); // an error says that it has stopped already
    }

    /// As `shutdown`, it may wait for a place.
    pub(crate) fn reset_prefix_cache(&self) {
        let _ = self.messages.send(Message::ResetPrefixCache); // without an engine there is nothing to flush
    }

    pub(crate) fn attention(&self) -> Arc<Attention> {
        Arc::clone(&self.attention)
    }
}

impl Completions {
    /// Answers the oldest unanswered plan. Waits for a place if the mailbox is full of starts, which the engine thread
    /// frees without needing the executor; if the engine is gone, the answer is dropped.
    pub fn send(&self, done: StepDone) {
        let _ = self.messages.send(Message::StepDone(done));
    }
}
