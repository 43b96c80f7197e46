//! The handles of callers: [`Engine`] to start requests, [`Consumer`] to receive the events of one.
//!
//! Handles own no engine state. A method checks what can be checked on the caller's thread, sends a message to the
//! mailbox and returns. Events come through the result queue of the request.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::mem;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use penstock_types::{FieldError, PackedAdapter};

use crate::actor;
use crate::ending::Ending;
use crate::engine_core::EngineCore;
use crate::executor::Executor;
use crate::kv_events::{KvBatch, KvFeedReader, KvRead, kv_feed};
use crate::limits::Limits;
use crate::mailbox::{Completions, Letterbox, NotSent, mailbox};
use crate::message::{AdapterError, NewAdapter, Outbox, Start};
use crate::output_budget::{OutputBudget, Reservation};
use crate::port::{Port, RingOnDrop};
use crate::prefix_cache::BlockHasher;
use crate::process::Process;
use crate::request::{
    AdapterId, AdapterUse, CachedTokens, ClientId, Event, Overload, Request, RequestId, StopCause,
};
use crate::result_queue::{CancelCause, CancelFlag, Reader, result_queue};
use crate::sequence::SchedulingKey;
use crate::start_error::StartError;
use crate::stats::{SharedStats, Stats};

/// The events that a reader may leave unread, beside one for each block.
const MAX_UNREAD_KV_EVENTS: usize = 1 << 14;

/// The id of the next request, of whichever engine: a port and its listeners outlive an engine that sleeps.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// A running engine. Clones are handles of the same engine, which closes when the last of them is dropped.
///
/// In the child of a fork a handle is without effect: the engine's threads are in the parent. Its methods report
/// [`StopCause::Forked`] or do nothing, and dropping it touches nothing that the threads may have locked.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
    process: Process,
}

struct Inner {
    output_budget: Arc<OutputBudget>,
    limits: Limits,
    stats: Arc<SharedStats>,
    letterbox: Letterbox,
    ending: Arc<Ending>,
    /// Joins the engine thread when first forced.
    joined: LazyLock<(), Box<dyn FnOnce() + Send>>,
}

/// The reason why an engine did not start.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A limit is out of range.
    #[error(transparent)]
    Limits(#[from] FieldError),
    /// The operating system did not start the thread.
    #[error("the engine thread did not start: {0}")]
    Thread(#[from] std::io::Error),
}

impl Engine {
    /// Starts the engine thread. `make_executor` is called on this thread, with the channel for completed steps; the
    /// executor then moves to the engine thread and is dropped there.
    pub fn start(
        limits: Limits,
        make_executor: impl FnOnce(Completions) -> Box<dyn Executor>,
    ) -> Result<Self, EngineError> {
        limits.validate()?;
        let (mailbox, letterbox, completions) = mailbox(&limits);
        let stats = Arc::new(SharedStats::default());
        let hasher = BlockHasher::new(random_key());
        let gate = Arc::clone(letterbox.gate());
        let core = EngineCore::new(limits.clone(), hasher, letterbox.cancel_set(), gate, Arc::clone(&stats));
        let ending = Arc::new(Ending::default());
        let thread = actor::spawn(core, mailbox, make_executor(completions), Arc::clone(&ending))?;
        let join = move || {
            // The thread catches its own panics, so there is no error.
            let _ = thread.join();
        };
        let joined = LazyLock::new(Box::new(join) as Box<dyn FnOnce() + Send>);
        let output_budget = OutputBudget::new(limits.max_output_bytes);
        let inner = Arc::new(Inner { output_budget, limits, stats, letterbox, ending, joined });
        Ok(Self { inner, process: Process::current() })
    }

    /// A handle that behaves as in the child of a fork.
    #[cfg(any(test, feature = "testing"))]
    pub fn in_child(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), process: self.process.in_child() }
    }

    /// The limits that the engine was started with.
    pub fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// A snapshot of its counters, gauges and histograms.
    pub fn stats(&self) -> Stats {
        self.inner.stats.read()
    }

    /// The time since the latest progress of the steps in flight, at `now`: since the last step finished, or since the
    /// oldest began if nothing was in flight before. `None` if no step is in flight.
    pub fn step_age(&self, now: Instant) -> Option<Duration> {
        self.inner.stats.step_age(now)
    }

    /// Counts a request that the caller refused because the engine [is overloaded](Self::overload).
    pub fn count_rejection(&self) {
        self.inner.stats.count_rejection();
    }

    /// Whether requests can still be started.
    pub fn is_running(&self) -> bool {
        self.process.is_current() && self.inner.letterbox.gate().is_open()
    }

    /// The process that has the engine's threads.
    pub fn process(&self) -> Process {
        self.process
    }

    /// The reason why no more requests can be started.
    pub fn stop_cause(&self) -> Option<StopCause> {
        let gate = self.inner.letterbox.gate();
        self.process.check().err().or_else(|| (!gate.is_open()).then(|| gate.cause()))
    }

    /// The bound for which a request of a client would be rejected now, unless it is the most urgent. For callers that
    /// prepare requests at some cost. A client without open requests is never refused by it.
    pub fn overload(&self, client: Option<ClientId>) -> Option<Overload> {
        self.inner.stats.overload(client)
    }

    /// Starts a request; never blocks. The first event of the consumer, on `port`, says whether it was admitted.
    pub fn start_request(
        &self,
        request: impl Into<Arc<Request>>,
        port: &Port,
    ) -> Result<Consumer, StartError> {
        let mut consumers = self.start_choices(request, 1, port)?;
        Ok(consumers.pop().expect("a request has a consumer; this is a bug"))
    }

    /// Starts several choices of a request, which share it: see [`Request::choice_seed`] and
    /// [`Request::choice_outputs`] for what differs. They are admitted or rejected together, count once against
    /// `max_waiting`, and the first computes the prompt for all if its blocks may be shared. They end independently.
    /// The ids of the consumers are consecutive.
    pub fn start_choices(
        &self,
        request: impl Into<Arc<Request>>,
        num_choices: u32,
        port: &Port,
    ) -> Result<Vec<Consumer>, StartError> {
        let (inner, request) = (&*self.inner, request.into());
        inner.limits.check_choices(&request, num_choices)?;
        if let Some(cause) = self.stop_cause() {
            return Err(StartError::Stopped(cause));
        }
        if num_choices == 0 {
            return Ok(Vec::new());
        }
        let reservation = self.reserve_output(request.client, request.output_bytes)?;
        // Relaxed: ids need only be distinct.
        let first = NEXT_ID.fetch_add(u64::from(num_choices), Ordering::Relaxed);
        let (mut outboxes, mut readers) = (Vec::new(), Vec::new());
        for choice in 0..num_choices {
            let id = RequestId(first + u64::from(choice));
            let (writer, reader) = result_queue(inner.limits.result_capacity(&request, choice));
            outboxes.push(Outbox::new(id, writer, port.bell()));
            readers.push((id, reader));
        }
        let priority = request.priority;
        inner.letterbox.start(Start { id: RequestId(first), request, outboxes }).map_err(|not_sent| {
            match not_sent {
                NotSent::Full => {
                    inner.stats.count_rejection();
                    StartError::Overloaded
                }
                NotSent::Stopped(cause) => StartError::Stopped(cause),
            }
        })?;
        let consumer = |(id, reader): (RequestId, Reader)| {
            let (cancelled, letterbox) = (reader.cancel_flag(), inner.letterbox.clone());
            let key = SchedulingKey { priority, id };
            let reservation = reservation.clone();
            Consumer { key, reader, cancelled, letterbox, process: self.process, reservation }
        };
        Ok(readers.into_iter().map(consumer).collect())
    }

    /// Reserves a part of `max_output_bytes` until the returned value is dropped, for work whose requests have no
    /// `output_bytes` of their own; `None` for 0 bytes.
    pub fn reserve_output(
        &self,
        client: Option<ClientId>,
        bytes: usize,
    ) -> Result<Option<Arc<Reservation>>, StartError> {
        let reserved = self.inner.output_budget.reserve(client, bytes);
        reserved.inspect_err(|_| self.inner.stats.count_rejection())
    }

    /// Empties the prefix cache, for instance because the weights have changed: requests started after this returns
    /// reuse nothing that was computed before. With a salt, only requests with this salt are affected. Running requests
    /// keep their blocks. Waits for room in a full mailbox.
    pub fn reset_prefix_cache(&self, salt: Option<&str>) {
        if self.process.is_current() {
            self.inner.letterbox.reset_prefix_cache(salt.map(Arc::from));
        }
    }

    /// A stream of the KV events, whose reader listens on `port`. Waits for room in a full mailbox. Fails without a
    /// prefix cache.
    pub fn kv_events(&self, port: &Port) -> Result<KvEvents, FieldError> {
        if self.inner.limits.prefix_cache_ttl.is_none() {
            return Err(FieldError::new(
                "prefix_cache_ttl",
                "none",
                "a time, because KV events need a prefix cache",
            ));
        }
        let Limits { num_blocks, host_blocks, block_size, .. } = self.inner.limits;
        let (letterbox, process) = (self.inner.letterbox.clone(), self.process);
        let capacity = num_blocks + host_blocks + MAX_UNREAD_KV_EVENTS;
        let (writer, reader) = kv_feed(capacity, port.bell());
        if process.is_current() {
            letterbox.read_kv_events(writer);
        }
        Ok(KvEvents { reader, block_size, capacity, port: port.clone(), letterbox, process })
    }

    /// Registers an adapter that takes `bytes` on the device, at most `Limits::adapter_bytes`, and returns its id,
    /// which requests name. It is loaded by the first step that needs it.
    pub fn load_adapter(
        &self,
        name: &str,
        weights: Arc<PackedAdapter>,
        bytes: u64,
    ) -> Result<(AdapterId, Arc<AdapterUse>), AdapterError> {
        self.register_adapter(name, weights, bytes, None)
    }

    /// Registers an adapter as `load_adapter` does. `former` no longer counts towards the limit, and takes requests
    /// until it is unloaded, which is left to the caller.
    pub fn replace_adapter(
        &self,
        former: AdapterId,
        name: &str,
        weights: Arc<PackedAdapter>,
        bytes: u64,
    ) -> Result<(AdapterId, Arc<AdapterUse>), AdapterError> {
        self.register_adapter(name, weights, bytes, Some(former))
    }

    fn register_adapter(
        &self,
        name: &str,
        weights: Arc<PackedAdapter>,
        bytes: u64,
        replaces: Option<AdapterId>,
    ) -> Result<(AdapterId, Arc<AdapterUse>), AdapterError> {
        self.process.check().map_err(AdapterError::Stopped)?;
        // Relaxed: ids need only be distinct.
        let id = AdapterId(NEXT_ID.fetch_add(1, Ordering::Relaxed));
        let usage = Arc::default();
        let usage_there = Arc::clone(&usage);
        let adapter = NewAdapter { id, name: name.into(), weights, bytes, usage: usage_there, replaces };
        self.inner.letterbox.load_adapter(adapter)?;
        Ok((id, usage))
    }

    /// Removes an adapter: requests with it that are started after this returns are rejected, unless a [`Hold`] keeps
    /// it. Those that are open end as failed, for this reason, and holds of it end, or without a reason they continue.
    /// Rings the bell of `port` when the last has ended. May be called again while requests are open, with a reason
    /// too.
    pub fn unload_adapter(&self, id: AdapterId, reason: Option<String>, port: Option<&Port>) {
        let removed = Box::new(port.map(|port| RingOnDrop(port.bell())));
        if self.process.is_current() {
            self.inner.letterbox.unload_adapter(id, reason, removed);
        }
    }

    /// Tells the engine to stop once every request that was started before has ended and no [`Hold`] is left, and does
    /// not wait for it. It still takes requests until then: the caller decides which. Waits for room in a full mailbox.
    pub fn drain(&self) {
        if self.process.is_current() {
            self.inner.letterbox.drain();
        }
    }

    /// Keeps a drained engine running, and an adapter loaded, until the returned value is dropped, for work that starts
    /// requests one after another. An adapter that was removed before is not kept. May wait for room in a full mailbox,
    /// as may the drop of the value.
    pub fn hold(&self, adapter: Option<AdapterId>) -> Hold {
        let letterbox = self.inner.letterbox.clone();
        letterbox.gate().hold();
        if let Some(adapter) = adapter.filter(|_| self.process.is_current()) {
            letterbox.hold_adapter(adapter);
        }
        Hold { letterbox, process: self.process, adapter }
    }

    /// Tells the engine to end every open request as cancelled and to stop, and does not wait for it.
    pub fn close(&self) {
        if self.process.is_current() {
            self.inner.close();
        }
    }

    /// Rings the bell of `port` once the engine thread has ended, or at once if it has. Then `shutdown` does not wait.
    pub fn ring_at_end(&self, port: &Port) {
        if self.process.is_current() {
            self.inner.ending.notify(port.bell());
        }
    }

    /// Closes the engine, and returns once the engine thread has ended and the executor is dropped. May be called any
    /// number of times, from several threads at once; every call returns after the end.
    pub fn shutdown(&self) {
        self.close();
        if self.process.is_current() {
            LazyLock::force(&self.inner.joined);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // One reference more than there are handles: the channel and the thread's handle are never dropped.
            mem::forget(Arc::clone(&self.inner));
        }
    }
}

impl Inner {
    fn close(&self) {
        if self.letterbox.gate().close(StopCause::Closed) {
            self.letterbox.shutdown();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Engine").field("is_running", &self.is_running()).finish_non_exhaustive()
    }
}

/// The key of an engine's block hashes, from the system's source of randomness.
fn random_key() -> u128 {
    let state = RandomState::new();
    u128::from(state.hash_one(0)) | u128::from(state.hash_one(1)) << 64
}

/// See [`Engine::hold`].
pub struct Hold {
    letterbox: Letterbox,
    process: Process,
    adapter: Option<AdapterId>,
}

impl Hold {
    /// The adapter that is kept.
    pub fn adapter(&self) -> Option<AdapterId> {
        self.adapter
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if self.process.is_current() {
            if let Some(adapter) = self.adapter {
                self.letterbox.release_adapter(adapter);
            }
            self.letterbox.gate().release();
            self.letterbox.wake();
        }
    }
}

/// See [`Engine::kv_events`]. The first event is [`KvEvent::Cleared`], followed by the blocks in the prefix cache.
///
/// [`KvEvent::Cleared`]: crate::KvEvent::Cleared
pub struct KvEvents {
    reader: KvFeedReader,
    block_size: usize,
    capacity: usize,
    port: Port,
    letterbox: Letterbox,
    process: Process,
}

impl KvEvents {
    /// Reads the events since the last call with `read`, if there are some. To be called after the port was cleared.
    /// If more than about `MAX_UNREAD_KV_EVENTS` were unread, they are lost, and the events begin again; then it
    /// waits for room in a full mailbox.
    pub fn read<T>(&mut self, read: impl FnOnce(&KvBatch) -> T) -> Result<KvRead<T>, StopCause> {
        self.process.check()?;
        let result = self.reader.read(read);
        if matches!(result, KvRead::Lost) {
            self.restart();
        }
        Ok(result)
    }

    /// Drops what was not read. The events begin again as those of a new stream. Waits for room in a full mailbox.
    pub fn restart(&mut self) {
        if self.process.is_current() {
            let (writer, reader) = kv_feed(self.capacity, self.port.bell());
            self.letterbox.read_kv_events(writer);
            self.reader = reader;
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }
}

/// The receiving end of one request. Dropping it before its last event cancels the request.
pub struct Consumer {
    key: SchedulingKey,
    reader: Reader,
    cancelled: CancelFlag,
    letterbox: Letterbox,
    process: Process,
    /// The memory for requested outputs, which stays reserved until the last event is popped.
    reservation: Option<Arc<Reservation>>,
}

impl Consumer {
    /// The id of the request.
    pub fn id(&self) -> RequestId {
        self.key.id
    }

    /// The next event, if there is one; never blocks. The last event is `Rejected` or `Finished` and always comes, even
    /// if the engine crashes.
    pub fn pop(&mut self) -> Option<Event> {
        let event = self.reader.pop();
        if event.is_some() && self.reader.must_nudge() && self.process.is_current() {
            self.letterbox.nudge(self.key);
        }
        if self.reader.is_ended() {
            self.reservation = None;
        }
        event
    }

    /// A consumer that behaves as in the child of a fork.
    #[cfg(any(test, feature = "testing"))]
    pub fn in_child(mut self) -> Self {
        self.process = self.process.in_child();
        self
    }

    /// To be called when a port's list contained the id, before popping everything: see [`Port::take_listed`].
    pub fn unlist(&self) {
        self.reader.unlist();
    }

    /// The prompt tokens that the prefix cache had, once a token or prompt positions have been popped; zero before.
    pub fn cached(&self) -> CachedTokens {
        self.reader.cached()
    }

    /// Whether the last event has been popped.
    pub fn is_ended(&self) -> bool {
        self.reader.is_ended()
    }

    /// Cancels the request; never blocks, and has no effect when repeated or in the child of a fork. Events continue
    /// until `Finished`.
    pub fn cancel(&self) {
        self.cancel_for(CancelCause::Unwanted);
    }

    /// Ends the request because its output has a stop string; like [`cancel`](Self::cancel), but counted as a stop.
    pub fn stop(&self) {
        self.cancel_for(CancelCause::StopString);
    }

    fn cancel_for(&self, cause: CancelCause) {
        if self.process.is_current() && self.cancelled.set(cause) {
            self.letterbox.nudge(self.key);
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
        formatter.debug_struct("Consumer").field("id", &self.key.id).finish_non_exhaustive()
    }
}
