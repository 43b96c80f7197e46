//! The mailbox of the engine thread: a bounded channel, the [`CancelSet`] and the [`Gate`].
//!
//! A full mailbox rejects starts. It never loses a cancel: a consumer that raises a flag in a result queue also adds
//! its sequence to the cancel set and then tries to send a nudge. If the mailbox is full no nudge is needed, because
//! the engine is about to take a message out of it and looks at the flag of the set after every message it takes.
//!
//! A start is not lost either: the channel would keep a message that is sent while the engine ends, so the engine
//! closes the gate before it empties the mailbox for the last time, and a sender looks at the gate after sending.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TrySendError, bounded, unbounded};

use crate::executor::StepDone;
use crate::kv_events::KvFeedWriter;
use crate::limits::Limits;
use crate::message::{AdapterError, Message, NewAdapter, Start};
use crate::request::{AdapterId, Rejection, StopCause};
use crate::sequence::SchedulingKey;
use crate::sync::{AtomicBool, AtomicUsize, Ordering, fence};

/// The bounds of the mailbox's size, which otherwise follows the number of requests that may be open.
const CAPACITY: std::ops::RangeInclusive<usize> = 64..=65_536;

/// The sequences that their consumers have cancelled, or for which they have made room in a full result queue. A flag
/// tells whether there are some: an iteration without them reads the flag only.
pub struct CancelSet {
    raised: AtomicBool,
    /// Not bounded by its capacity: one key for the cancel of a request, and one per pause, for room in its queue.
    keys: (Sender<SchedulingKey>, Receiver<SchedulingKey>),
}

impl Default for CancelSet {
    /// An empty set, whose flag is not raised.
    fn default() -> Self {
        Self { raised: AtomicBool::new(false), keys: unbounded() }
    }
}

impl CancelSet {
    /// Adds a sequence. To be called after the sequence's flag is set and before the nudge is tried.
    pub fn raise_for(&self, key: SchedulingKey) {
        let _ = self.keys.0.send(key); // never disconnected: `self` has both ends
        self.raise();
    }

    /// Removes a sequence. To be called after `take`, until there is none.
    pub fn next(&self) -> Option<SchedulingKey> {
        self.keys.1.try_recv().ok()
    }

    /// Sets the flag. To be called before the nudge is tried.
    pub fn raise(&self) {
        // Release: an engine that sees this flag sees the sequence's flag.
        self.raised.store(true, Ordering::Release);
        // Here: set the flag, fence, look whether the mailbox is full. In `take`: take a message, fence, look at the
        // flag. The side whose fence is second sees what the other did: if the mailbox was full here, the engine sees
        // the flag after taking the next message.
        fence(Ordering::SeqCst);
    }

    /// Whether the flag was set since the last call. To be called after messages were taken.
    pub fn take(&self) -> bool {
        fence(Ordering::SeqCst); // see `raise`
        // A load first keeps the cache line shared while the flag is clear. Acquire pairs with `raise`.
        self.raised.load(Ordering::Relaxed) && self.raised.swap(false, Ordering::Acquire)
    }
}

/// Whether the engine takes requests, and if not, why.
pub struct Gate {
    is_open: AtomicBool,
    /// The reason why it is closed, which is set before it closes.
    cause: OnceLock<StopCause>,
    /// The number of [`Hold`](crate::Hold)s.
    num_holds: AtomicUsize,
}

impl Default for Gate {
    /// An open gate.
    fn default() -> Self {
        Self { is_open: AtomicBool::new(true), cause: OnceLock::new(), num_holds: AtomicUsize::new(0) }
    }
}

impl Gate {
    /// Whether the gate was open a moment ago; it may close at any time.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire) // pairs with the release in `close`: the cause is set
    }

    /// The reason why it is closed.
    pub fn cause(&self) -> StopCause {
        self.cause.get().cloned().expect("a gate closes with a cause; this is a bug")
    }

    /// Closes it permanently. True for the first call, whose cause is kept. Afterwards the mailbox contains every
    /// message whose sender was not told that it came too late.
    pub fn close(&self, cause: StopCause) -> bool {
        let _ = self.cause.set(cause); // the first cause stays
        // Release: a thread that sees the gate closed sees the cause. The rest is ordered by the fence.
        let was_open = self.is_open.swap(false, Ordering::Release);
        // Here: close the gate, fence, empty the mailbox. In `is_open_after_sending`: send, fence, look at the gate.
        // The side whose fence is second sees what the other did: the engine finds the message or the sender the closed
        // gate.
        fence(Ordering::SeqCst);
        was_open
    }

    pub fn hold(&self) {
        self.num_holds.fetch_add(1, Ordering::Relaxed); // carries no data
    }

    /// Ends a hold. The caller sends a nudge afterwards.
    pub fn release(&self) {
        self.num_holds.fetch_sub(1, Ordering::Relaxed); // the nudge's message orders it before `is_held`
    }

    /// Whether a drained engine must not stop yet.
    pub fn is_held(&self) -> bool {
        self.num_holds.load(Ordering::Relaxed) > 0
    }

    /// Whether the engine will take out a message that was sent before this call.
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

/// The clients' end: starts, nudges, shutdown.
#[derive(Clone)]
pub(crate) struct Letterbox {
    messages: Sender<Message>,
    cancel_set: Arc<CancelSet>,
    gate: Arc<Gate>,
}

/// The executor's end. Clones are equivalent.
#[derive(Clone)]
pub struct Completions {
    messages: Sender<Message>,
}

/// The reason why a start was not sent.
pub(crate) enum NotSent {
    Full,
    Stopped(StopCause),
}

/// A mailbox with room for as many requests as `limits` let be open.
pub(crate) fn mailbox(limits: &Limits) -> (Mailbox, Letterbox, Completions) {
    let requests = limits.max_waiting.saturating_add(limits.max_num_seqs);
    let (sender, messages) = bounded(requests.clamp(*CAPACITY.start(), *CAPACITY.end()));
    let cancel_set = Arc::new(CancelSet::default());
    let gate = Arc::new(Gate::default());
    let letterbox = Letterbox { messages: sender.clone(), cancel_set, gate: Arc::clone(&gate) };
    (Mailbox { messages, gate }, letterbox, Completions { messages: sender })
}

impl Mailbox {
    /// Waits for a message, or until `deadline`. Without any sender left, that is a shutdown.
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

    /// The messages that have arrived, at most as many as there are now: a flood of starts must not delay the next
    /// step.
    pub(crate) fn drain(&self) -> impl Iterator<Item = Message> {
        self.messages.try_iter().take(self.messages.len())
    }

    pub(crate) fn gate(&self) -> &Gate {
        &self.gate
    }
}

impl Drop for Mailbox {
    /// Rejects the starts that are left.
    fn drop(&mut self) {
        self.gate.close(StopCause::Closed);
        for message in self.messages.try_iter() {
            let Message::Start(Start { outboxes, .. }) = message else { continue };
            for outbox in outboxes {
                let bell = outbox.bell().clone();
                let listed = outbox.reject(Rejection::Stopped(self.gate.cause()));
                bell.list(&mut Vec::from_iter(listed));
                bell.ring();
            }
        }
    }
}

impl Letterbox {
    pub(crate) fn start(&self, start: Start) -> Result<(), NotSent> {
        self.messages.try_send(Message::Start(start)).map_err(|error| match error {
            TrySendError::Full(_) => NotSent::Full,
            TrySendError::Disconnected(_) => NotSent::Stopped(self.gate.cause()),
        })?;
        if self.gate.is_open_after_sending() { Ok(()) } else { Err(NotSent::Stopped(self.gate.cause())) }
    }

    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.gate
    }

    /// Makes the engine look at the flags of a sequence. Never blocks.
    pub(crate) fn nudge(&self, key: SchedulingKey) {
        self.cancel_set.raise_for(key);
        // Full: the engine is about to look. Disconnected: there is no engine.
        let _ = self.messages.try_send(Message::Nudge);
    }

    /// Makes the engine look at its gate. Never blocks.
    pub(crate) fn wake(&self) {
        self.cancel_set.raise();
        let _ = self.messages.try_send(Message::Nudge); // as in `nudge`
    }

    /// Stops the engine, whose gate has been closed. Never blocks.
    pub(crate) fn shutdown(&self) {
        self.cancel_set.raise();
        // Full: the engine is about to see that the gate is closed. Disconnected: it has stopped already.
        let _ = self.messages.try_send(Message::Shutdown);
    }

    /// May wait for room in the mailbox, which the engine thread makes without waiting for anything.
    pub(crate) fn reset_prefix_cache(&self, salt: Option<Arc<str>>) {
        let _ = self.messages.send(Message::ResetPrefixCache(salt)); // without an engine there is nothing to reset
    }

    /// Adds a reader of KV events. May wait, as `reset_prefix_cache`.
    pub(crate) fn read_kv_events(&self, writer: KvFeedWriter) {
        let _ = self.messages.send(Message::ReadKvEvents(writer)); // without an engine, the feed ends
    }

    /// Registers an adapter. May wait, as `reset_prefix_cache`.
    pub(crate) fn load_adapter(&self, adapter: NewAdapter) -> Result<(), AdapterError> {
        let (answer, answered) = bounded(1);
        // Without an engine, the message and its sender are dropped.
        let _ = self.messages.send(Message::LoadAdapter(adapter, answer));
        answered.recv().unwrap_or_else(|_| Err(AdapterError::Stopped(self.gate.cause())))
    }

    /// Removes an adapter; `done` is dropped when its last request has ended. May wait, as `reset_prefix_cache`.
    pub(crate) fn unload_adapter(&self, id: AdapterId, reason: Option<String>, done: Box<dyn Send>) {
        let _ = self.messages.send(Message::UnloadAdapter(id, reason, done));
    }

    /// Keeps an adapter until `release_adapter`. May wait, as `reset_prefix_cache`.
    pub(crate) fn hold_adapter(&self, id: AdapterId) {
        let _ = self.messages.send(Message::HoldAdapter(id));
    }

    /// Ends a hold of an adapter. May wait, as `reset_prefix_cache`.
    pub(crate) fn release_adapter(&self, id: AdapterId) {
        let _ = self.messages.send(Message::ReleaseAdapter(id));
    }

    /// Stops the engine once it is drained. Comes after every start that was sent before. May wait, as
    /// `reset_prefix_cache`.
    pub(crate) fn drain(&self) {
        let _ = self.messages.send(Message::Drain);
    }

    pub(crate) fn cancel_set(&self) -> Arc<CancelSet> {
        Arc::clone(&self.cancel_set)
    }
}

impl Completions {
    /// Returns the oldest step in flight. Waits for room if the mailbox is full of starts, which the engine thread
    /// makes without waiting for the executor. If the engine is gone, the step is dropped.
    pub fn send(&self, done: StepDone) {
        let _ = self.messages.send(Message::StepDone(done));
    }
}
