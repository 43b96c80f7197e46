//! What the outside holds: [`Engine`] to start requests, [`Consumer`] to receive one's events.
//!
//! Nothing here owns engine state. A method checks what can be checked on the caller's thread, drops a message into
//! the mailbox and returns; answers come through the result queue of the request.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use penstock_types::FieldError;

use crate::actor;
use crate::core::Core;
use crate::executor::Executor;
use crate::limits::{InvalidRequest, Limits};
use crate::mailbox::{Completions, Letterbox, NotSent, mailbox};
use crate::message::{Outbox, Start};
use crate::port::Port;
use crate::prefix::BlockHasher;
use crate::request::{Event, Request, RequestId, StopCause};
use crate::result_queue::{CancelFlag, Reader, result_queue};
use crate::stats::{SharedStats, Stats};

/// A running engine. Clones are the same engine; it shuts down when told to or when the last clone is dropped.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    limits: Limits,
    stats: Arc<SharedStats>,
    letterbox: Letterbox,
    next_id: AtomicU64,
    /// Joins the engine thread when first looked at; whoever comes meanwhile waits for it.
    joined: LazyLock<(), Box<dyn FnOnce() + Send>>,
}

/// Why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A size makes no sense.
    #[error(transparent)]
    Limits(#[from] FieldError),
    /// The system gave no thread.
    #[error("the engine thread did not start: {0}")]
    Thread(#[from] std::io::Error),
}

/// Why a request was not even handed to the engine. An engine that takes the message may still refuse the request,
/// by [`Event::Rejected`].
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum StartError {
    /// It could never run here.
    #[error(transparent)]
    Invalid(#[from] InvalidRequest),
    /// More requests arrive than the engine can take note of.
    #[error("the engine is overloaded: its mailbox is full; try again later")]
    Overloaded,
    /// The engine has stopped.
    #[error("{0}")]
    Stopped(StopCause),
}

impl Engine {
    /// Starts the engine thread. `make_executor` is called here, on the caller's thread, with the way its answers
    /// take; the executor then moves to the engine thread and is dropped there.
    pub fn start(
        limits: Limits,
        make_executor: impl FnOnce(Completions) -> Box<dyn Executor>,
    ) -> Result<Self, EngineError> {
        limits.validate()?;
        let (mailbox, letterbox, completions) = mailbox(&limits);
        let stats = Arc::new(SharedStats::default());
        let hasher = BlockHasher::new(random_key());
        let gate = Arc::clone(letterbox.gate());
        let core = Core::new(limits.clone(), hasher, letterbox.attention(), gate, Arc::clone(&stats));
        let thread = actor::spawn(core, mailbox, make_executor(completions))?;
        let join = move || {
            // The thread catches its own panics, so there is no error to look at.
            let _ = thread.join();
        };
        let joined = LazyLock::new(Box::new(join) as Box<dyn FnOnce() + Send>);
        let next_id = AtomicU64::new(1);
        Ok(Self { inner: Arc::new(Inner { limits, stats, letterbox, next_id, joined }) })
    }

    /// The sizes it was started with.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// What it is doing, without asking it.
    pub fn stats(&self) -> Stats {
        self.inner.stats.read()
    }

    /// Whether requests can still be started.
    pub fn is_running(&self) -> bool {
        self.inner.letterbox.gate().is_open()
    }

    /// Why no requests can be started any more.
    pub fn stop_cause(&self) -> Option<StopCause> {
        (!self.is_running()).then(|| self.inner.letterbox.gate().cause())
    }

    /// Hands a request over; never blocks. `Ok` means that the consumer will receive events on `port`, the first of
    /// which says whether it was admitted.
    pub fn start_request(
        &self,
        request: impl Into<Arc<Request>>,
        port: &Port,
    ) -> Result<Consumer, StartError> {
        let mut consumers = self.start_choices(vec![request.into()], port)?;
        Ok(consumers.pop().expect("a request has a consumer; this is a bug"))
    }

    /// Hands several requests for answers to the same prompt over, as one: they are admitted or refused together, take one
    /// place among those that wait, and the first computes the prompt for all where its blocks may be shared. Whoever
    /// goes first, all others live on.
    pub fn start_choices(
        &self,
        requests: Vec<Arc<Request>>,
        port: &Port,
    ) -> Result<Vec<Consumer>, StartError> {
        let inner = &*self.inner;
        requests.iter().try_for_each(|request| inner.limits.check(request))?;
        if !self.is_running() {
            return Err(StartError::Stopped(inner.letterbox.gate().cause()));
        }
        let (mut starts, mut readers) = (Vec::new(), Vec::new());
        for request in requests {
            // Relaxed: only the number matters, and no two callers get the same.
            let id = RequestId(inner.next_id.fetch_add(1, Ordering::Relaxed));
            let (writer, reader) = result_queue(inner.limits.result_capacity(&request));
            starts.push(Start { id, request, outbox: Outbox::new(writer, port.bell()) });
            readers.push((id, reader));
        }
        inner.letterbox.start(starts).map_err(|not_sent| match not_sent {
            NotSent::Full => StartError::Overloaded,
            NotSent::Stopped(cause) => StartError::Stopped(cause),
        })?;
        let consumer = |(id, reader): (RequestId, Reader)| {
            let (cancelled, letterbox) = (reader.cancel_flag(), inner.letterbox.clone());
            Consumer { id, reader, cancelled, letterbox }
        };
        Ok(readers.into_iter().map(consumer).collect())
    }

    /// Makes the prefix cache forget everything, for instance because the weights have changed: no request that is
    /// started after this returns uses what was computed before. Running requests keep their blocks to their ends.
    /// Waits for a place in a full mailbox.
    pub fn reset_prefix_cache(&self) {
        self.inner.letterbox.reset_prefix_cache();
    }

    /// Ends every open request as cancelled and returns when the engine thread is gone, the executor dropped. May be
    /// called any number of times, from several threads at once; every call returns after the end.
    pub fn shutdown(&self) {
        self.inner.shutdown();
    }
}

impl Inner {
    fn shutdown(&self) {
        if self.letterbox.gate().close(StopCause::Closed) {
            self.letterbox.shutdown();
        }
        LazyLock::force(&self.joined);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Engine").field("is_running", &self.is_running()).finish_non_exhaustive()
    }
}

/// The key under which one engine hashes its prefixes, from the system's source of randomness.
fn random_key() -> u128 {
    let state = RandomState::new();
    u128::from(state.hash_one(0)) | u128::from(state.hash_one(1)) << 64
}

/// The receiving end of one request. Dropping it before its last event cancels the request.
pub struct Consumer {
    id: RequestId,
    reader: Reader,
    cancelled: CancelFlag,
    letterbox: Letterbox,
}

impl Consumer {
    /// The request's name.
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next event, if there is one; never blocks. The last is a `Refused` or a `Finished`, and always comes: if the
    /// engine died, it is made up here.
    pub fn pop(&mut self) -> Option<Event> {
        let event = self.reader.pop();
        if event.is_some() && self.reader.must_nudge() {
            self.letterbox.nudge();
        }
        event
    }

    /// Whether the last event has been popped.
    pub fn is_ended(&self) -> bool {
        self.reader.is_ended()
    }

    /// Asks for the end; never blocks, and asking again is nothing. Events go on until `Finished`.
    pub fn cancel(&self) {
        if self.cancelled.set() {
            self.letterbox.nudge();
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        if !self.reader.is_ended() {
            self.cancel();
        }
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Consumer").field("id", &self.id).finish_non_exhaustive()
    }
}
