//! An engine core with a fake device and consumers, driven step by step and with a simulated clock, as the actor and
//! the handles drive it.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, TryRecvError, bounded};
use penstock_engine::testing::BlockHasher;
use penstock_engine::testing::EngineCore;
use penstock_engine::testing::SharedStats;
use penstock_engine::testing::{CancelCause, CancelFlag, Reader, result_queue};
use penstock_engine::testing::{CancelSet, Gate};
use penstock_engine::testing::{KvFeedReader, kv_feed};
use penstock_engine::testing::{Message, NewAdapter, Outbox, SchedulingKey, Start};
use penstock_engine::{
    AdapterError, AdapterId, AdapterUse, CachedTokens, Event, Finish, FinishReason, Limits, Port, Request,
    RequestId, Stats, StepDone,
};
use penstock_types::Token;

use crate::device::Device;
use crate::oracle::{self, VOCABULARY, expected_output};

pub struct Harness {
    pub limits: Limits,
    pub core: EngineCore,
    pub device: Device,
    pub port: Port,
    pub now: Instant,
    cancel_set: Arc<CancelSet>,
    shared_stats: Arc<SharedStats>,
    num_started: u64,
}

/// The consumer of a request. It nudges through the flag of the cancel set alone, and dropping it does not cancel.
pub struct Client {
    /// The request as its choice sees it.
    pub request: Request,
    /// The request that the engine and the device have.
    pub shared: Weak<Request>,
    reader: Reader,
    flag: CancelFlag,
    key: SchedulingKey,
    cancel_set: Arc<CancelSet>,
}

pub fn limits() -> Limits {
    Limits { vocabulary_size: VOCABULARY as usize, ..Limits::small() }
}

/// With a prefix cache.
pub fn caching() -> Limits {
    Limits { prefix_cache_ttl: Some(Duration::from_secs(300)), ..limits() }
}

impl Harness {
    pub fn new(limits: Limits) -> Self {
        Self::with_hasher(limits, BlockHasher::new(1))
    }

    pub fn with_hasher(limits: Limits, hasher: BlockHasher) -> Self {
        limits.validate().unwrap();
        let (cancel_set, shared_stats) = (Arc::new(CancelSet::default()), Arc::new(SharedStats::default()));
        Self {
            core: EngineCore::new(
                limits.clone(),
                hasher,
                Arc::clone(&cancel_set),
                Arc::new(Gate::default()),
                Arc::clone(&shared_stats),
            ),
            device: Device::new(&limits),
            limits,
            port: Port::with_condvar(),
            now: Instant::now(),
            cancel_set,
            shared_stats,
            num_started: 0,
        }
    }

    pub fn shared_stats(&self) -> Arc<SharedStats> {
        Arc::clone(&self.shared_stats)
    }

    pub fn stats(&self) -> Stats {
        self.shared_stats.read()
    }

    /// Advances the clock.
    pub fn pass(&mut self, milliseconds: u64) {
        self.now += Duration::from_millis(milliseconds);
    }

    pub fn start(&mut self, request: Request) -> Client {
        let mut clients = self.start_choices(request, 1);
        clients.pop().unwrap()
    }

    /// Starts a request of several choices.
    pub fn start_choices(&mut self, request: Request, num_choices: u32) -> Vec<Client> {
        let (start, clients) = self.post(request, num_choices);
        self.handle(Message::Start(start));
        clients
    }

    /// A start that is in the mailbox, and the clients of its choices.
    pub fn post(&mut self, request: Request, num_choices: u32) -> (Start, Vec<Client>) {
        self.limits.check_choices(&request, num_choices).unwrap();
        let (id, request) = (RequestId(self.num_started + 1), Arc::new(request));
        self.num_started += u64::from(num_choices);
        let choice = |choice| {
            let (writer, reader) = result_queue(self.limits.result_capacity(&request, choice));
            let (flag, cancel_set) = (reader.cancel_flag(), Arc::clone(&self.cancel_set));
            let (own, shared) = (request.of_choice(choice), Arc::downgrade(&request));
            let key = SchedulingKey { priority: request.priority, id: RequestId(id.0 + u64::from(choice)) };
            let outbox = Outbox::new(RequestId(id.0 + u64::from(choice)), writer, self.port.bell());
            (outbox, Client { request: own, shared, reader, flag, key, cancel_set })
        };
        let (outboxes, clients) = (0..num_choices).map(choice).unzip();
        (Start { id, request, outboxes }, clients)
    }

    /// Registers an adapter that takes `bytes` on the device.
    pub fn load_adapter(&mut self, id: u64, bytes: u64) -> Result<Arc<AdapterUse>, AdapterError> {
        let usage = Arc::default();
        let adapter = NewAdapter {
            id: AdapterId(id),
            name: adapter_name(id),
            weights: oracle::weights(id),
            bytes,
            usage: Arc::clone(&usage),
            replaces: None,
        };
        self.register_adapter(adapter).map(|()| usage)
    }

    /// Registers an adapter of one byte in the place of another one.
    pub fn replace_adapter(&mut self, former: u64, id: u64) -> Result<(), AdapterError> {
        let (weights, usage, replaces) = (oracle::weights(id), Arc::default(), Some(AdapterId(former)));
        let (id, name) = (AdapterId(id), adapter_name(former));
        self.register_adapter(NewAdapter { id, name, weights, bytes: 1, usage, replaces })
    }

    pub fn register_adapter(&mut self, adapter: NewAdapter) -> Result<(), AdapterError> {
        let (answer, answered) = bounded(1);
        self.handle(Message::LoadAdapter(adapter, answer));
        answered.try_recv().expect("it is answered at once")
    }

    /// Removes an adapter. Returns the end of the removal.
    pub fn unload_adapter(&mut self, id: u64, reason: Option<&str>) -> Removal {
        let (done, removal) = bounded(0);
        self.handle(Message::UnloadAdapter(AdapterId(id), reason.map(str::to_owned), Box::new(done)));
        Removal(removal)
    }

    pub fn hold_adapter(&mut self, id: u64) {
        self.handle(Message::HoldAdapter(AdapterId(id)));
    }

    pub fn release_adapter(&mut self, id: u64) {
        self.handle(Message::ReleaseAdapter(AdapterId(id)));
    }

    /// Adds a reader of KV events that may leave `capacity` of them unread.
    pub fn read_kv_events(&mut self, capacity: usize) -> KvFeedReader {
        let (writer, reader) = kv_feed(capacity, self.port.bell());
        self.handle(Message::ReadKvEvents(writer));
        reader
    }

    pub fn handle(&mut self, message: Message) {
        self.core.handle(message, self.now);
        self.core.check_integrity();
    }

    pub fn attend(&mut self) {
        self.core.attend(self.now);
        self.core.check_integrity();
    }

    /// Plans and submits one step. Returns its (slot, tokens) in the order of slots.
    pub fn plan(&mut self) -> Vec<(u32, u32)> {
        self.attend();
        let plan = self.core.plan(self.now);
        self.core.check_integrity();
        let Some((plan, output)) = plan else { return vec![] };
        let mut scheduled: Vec<_> = plan.rows.iter().map(|row| (row.slot, row.num_tokens)).collect();
        scheduled.sort_unstable();
        self.device.submit(plan, output);
        scheduled
    }

    pub fn complete(&mut self) {
        let done = self.device.complete();
        self.handle(Message::StepDone(done));
    }

    /// Fails the oldest step. Returns the number of its copies.
    pub fn fail(&mut self, text: &str) -> usize {
        let done = self.device.fail(text);
        self.deliver(done)
    }

    /// Loses the device in the oldest step.
    pub fn lose_device(&mut self, text: &str) {
        let done = self.device.lose(text);
        self.deliver(done);
    }

    /// Fails the oldest step after its copies are made. Returns their number.
    pub fn fail_after_copies(&mut self, text: &str) -> usize {
        let done = self.device.fail_after_copies(text);
        self.deliver(done)
    }

    /// Fails the oldest step after its changes of adapters and before its copies. Returns the number of its copies.
    pub fn fail_after_adapters(&mut self, text: &str) -> usize {
        let done = self.device.fail_after_adapters(text);
        self.deliver(done)
    }

    fn deliver(&mut self, done: StepDone) -> usize {
        let num_copies = done.plan.copies.len();
        self.handle(Message::StepDone(done));
        num_copies
    }

    /// Fills the pipeline and completes the oldest step, as the actor does with a slow device. False if there was
    /// nothing to do.
    pub fn step(&mut self) -> bool {
        while !self.plan().is_empty() {}
        if self.device.num_plans() == 0 {
            return false;
        }
        self.complete();
        true
    }

    /// Steps until nothing can be computed.
    pub fn run(&mut self) {
        while self.step() {}
    }
}

/// The removal of an adapter.
pub struct Removal(Receiver<()>);

impl Removal {
    /// Whether the last request with the adapter has ended.
    pub fn is_done(&self) -> bool {
        self.0.try_recv() == Err(TryRecvError::Disconnected)
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.handle(Message::Shutdown);
        }
    }
}

impl Client {
    pub fn pop(&mut self) -> Option<Event> {
        let event = self.reader.pop();
        if event.is_some() && self.reader.must_nudge() {
            self.cancel_set.raise_for(self.key);
        }
        event
    }

    pub fn drain(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.pop()).collect()
    }

    pub fn has_slots(&self) -> bool {
        self.reader.has_slots()
    }

    pub fn is_ended(&self) -> bool {
        self.reader.is_ended()
    }

    pub fn cancel(&self) {
        self.cancel_for(CancelCause::Unwanted);
    }

    pub fn cancel_for(&self, cause: CancelCause) {
        if self.flag.set(cause) {
            self.cancel_set.raise_for(self.key);
        }
    }
}

/// The name of the adapter that is loaded under this id.
pub fn adapter_name(id: u64) -> Arc<str> {
    format!("adapter {id}").into()
}

/// Reads all events: the tokens, and the end if it has come.
pub fn read(client: &mut Client) -> (Vec<Token>, Option<Finish>) {
    let (mut tokens, mut last) = (vec![], None);
    for event in client.drain() {
        match event {
            Event::Admitted | Event::Prompt(_) => {}
            Event::Token(token) => tokens.push(token),
            Event::Finished(finish) => last = Some(finish),
            Event::Rejected(refusal) => panic!("rejected: {refusal:?}"),
        }
    }
    (tokens, last)
}

/// Checks that the whole output is the expected one.
#[track_caller]
pub fn check_output(client: &mut Client, limits: &Limits) {
    let (tokens, last) = read(client);
    let (expected, reason) = expected_output(&client.request, limits);
    assert_eq!(tokens, expected);
    assert_eq!(last.map(|finish| finish.reason), Some(reason));
}

/// Checks that it has ended for this reason.
#[track_caller]
pub fn check_ended(client: &mut Client, reason: FinishReason) {
    assert_eq!(read(client).1.expect("the request has not ended").reason, reason);
}

/// Runs a request to its end. Returns its cached tokens.
pub fn cached(harness: &mut Harness, request: Request) -> CachedTokens {
    let mut client = harness.start(request);
    harness.run();
    let expected = expected_output(&client.request, &harness.limits);
    let (tokens, finish) = read(&mut client);
    let finish = finish.expect("the request has ended");
    assert_eq!((tokens, finish.reason), expected);
    finish.cached
}

/// Cached tokens by tier.
pub fn found(device: usize, host: usize) -> CachedTokens {
    CachedTokens { device, host }
}
