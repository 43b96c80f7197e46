//! The whole engine with real threads: many consumers on a port, lost consumers, dying executors, races to the end.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};
use penstock_engine::{
    Completions, Consumer, Engine, Event, Executor, FinishReason, Limits, Port, PreemptionMode, Rejection,
    Request, StartError, StepDone, StepError, StepOutput, StepPlan, StopCause, Token,
};

use crate::device::Device;
use crate::harness::Harness;
use crate::oracle::{VOCABULARY, answer, request};

/// Longer than anything here takes, on however busy a machine: a wait that fails has lost its wake-up.
const PATIENCE: Duration = Duration::from_secs(120);

fn limits() -> Limits {
    Limits {
        max_model_len: 128,
        max_num_seqs: 32,
        max_num_batched_tokens: 128,
        max_waiting: 1_000,
        block_size: 16,
        num_blocks: 200,
        vocabulary_size: VOCABULARY as usize,
        queue_capacity: 64,
        prefix_cache_ttl: None,
        max_shared_len: usize::MAX,
        preemption_mode: PreemptionMode::Recompute,
        host_blocks: 0,
        host_prefixes: true,
        num_speculative_tokens: 0,
    }
}

type Step = (Box<StepPlan>, Box<StepOutput>);

/// The fake device on a thread of its own.
struct Worker {
    steps: Option<Sender<Step>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// `before` runs ahead of every step.
    fn start(
        limits: &Limits,
        completions: Completions,
        mut before: impl FnMut() + Send + 'static,
    ) -> Box<dyn Executor> {
        let (steps, received) = unbounded::<Step>();
        let mut device = Device::new(limits);
        let work = move || {
            for (plan, output) in received {
                before();
                device.submit(plan, output);
                completions.send(device.complete());
            }
        };
        Box::new(Self { steps: Some(steps), thread: Some(thread::spawn(work)) })
    }
}

impl Executor for Worker {
    fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
        self.steps.as_ref().unwrap().send((plan, output)).unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.steps = None;
        self.thread.take().unwrap().join().unwrap();
    }
}

fn engine(limits: Limits) -> Engine {
    Engine::start(limits.clone(), |completions| Worker::start(&limits, completions, || {})).unwrap()
}

/// An engine whose steps wait for a message each; dropping the sender lets them all go.
fn gated_engine(limits: Limits) -> (Engine, Sender<()>) {
    let (gate, opened) = unbounded::<()>();
    let wait = move || {
        let _ = opened.recv();
    };
    let engine = Engine::start(limits.clone(), |completions| Worker::start(&limits, completions, wait));
    (engine.unwrap(), gate)
}

fn requests(count: u64) -> Vec<Arc<Request>> {
    (0..count).map(|seed| Arc::new(request(1 + seed as usize % 60, 1 + seed as usize % 40, seed))).collect()
}

/// What a consumer has received.
struct RowOutput {
    request: Arc<Request>,
    consumer: Consumer,
    tokens: Vec<Token>,
    reason: Option<FinishReason>,
    refusal: Option<Rejection>,
}

impl RowOutput {
    fn start(engine: &Engine, request: &Arc<Request>, port: &Port) -> Self {
        let consumer = engine.start_request(Arc::clone(request), port).unwrap();
        Self { request: Arc::clone(request), consumer, tokens: vec![], reason: None, refusal: None }
    }

    fn drain(&mut self) {
        while let Some(event) = self.consumer.pop() {
            match event {
                Event::Admitted | Event::Prompt(_) => {}
                Event::Token(token) => self.tokens.push(token),
                Event::Finished(finish) => self.reason = Some(finish.reason),
                Event::Rejected(refusal) => self.refusal = Some(refusal),
            }
        }
    }

    /// Sleeps and reads in the lawful order until the end.
    fn read_to_end(&mut self, port: &Port) {
        loop {
            port.clear();
            self.drain();
            if self.consumer.is_ended() {
                return;
            }
            assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
        }
    }

    fn has_ended_with(&self, cause: &StopCause) -> bool {
        self.reason == Some(FinishReason::EngineStopped(cause.clone()))
            || self.refusal == Some(Rejection::Stopped(cause.clone()))
    }

    fn check(&self, limits: &Limits) {
        let (tokens, reason) = answer(&self.request, limits);
        assert_eq!(self.tokens, tokens);
        assert_eq!(self.reason, Some(reason));
    }
}

#[track_caller]
fn eventually(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "it never came true");
        thread::yield_now();
    }
}

#[test]
fn answers_to_one_prompt_are_started_as_one() {
    let port = Port::with_condvar();
    let engine = engine(Limits { prefix_cache_ttl: Some(Duration::from_secs(300)), ..limits() });
    let choices: Vec<_> = (0..8).map(|seed| Arc::new(request(30, 6, seed))).collect();
    let invalid = vec![Arc::clone(&choices[0]), Arc::new(request(0, 6, 0))];
    assert!(matches!(engine.start_choices(invalid, &port), Err(StartError::Invalid(_))));
    let consumers = engine.start_choices(choices.clone(), &port).unwrap();
    let answers = consumers.into_iter().zip(choices).map(|(consumer, request)| RowOutput {
        request,
        consumer,
        tokens: vec![],
        reason: None,
        refusal: None,
    });
    for mut answer in answers {
        answer.read_to_end(&port);
        answer.check(engine.limits());
    }
    assert_eq!(engine.stats().requests_finished, 8);
    assert!(engine.start_choices(vec![], &port).unwrap().is_empty());
}

#[test]
fn two_hundred_and_fifty_six_consumers_share_one_port() {
    for port in [Port::with_eventfd().unwrap(), Port::with_condvar()] {
        let engine = engine(limits());
        let mut open: VecDeque<_> =
            requests(256).iter().map(|request| RowOutput::start(&engine, request, &port)).collect();
        while !open.is_empty() {
            assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
            port.clear();
            open.iter_mut().for_each(RowOutput::drain);
            open.retain(|answer| {
                if answer.consumer.is_ended() {
                    answer.check(engine.limits());
                }
                !answer.consumer.is_ended()
            });
        }
        let stats = engine.stats();
        assert_eq!(
            (stats.running, stats.waiting, stats.blocks_used, stats.requests_finished),
            (0, 0, 0, 256)
        );
    }
}

#[test]
fn blocking_threads_with_tiny_queues_get_whole_answers() {
    let engine = engine(Limits { queue_capacity: 2, ..limits() });
    let threads: Vec<_> = requests(64)
        .into_iter()
        .map(|request| {
            let engine = engine.clone();
            thread::spawn(move || {
                let port = Port::with_condvar();
                let mut answer = RowOutput::start(&engine, &request, &port);
                answer.read_to_end(&port);
                answer.check(engine.limits());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn who_has_seen_the_end_finds_his_blocks_free() {
    // Many end in one step while somebody stares at the first of them, without waiting for the bell.
    let limits = Limits { max_num_seqs: 64, max_num_batched_tokens: 64, num_blocks: 64, ..limits() };
    let mut harness = Harness::new(limits);
    for _ in 0..500 {
        let mut first = harness.start(request(1, 1, 0));
        let _others: Vec<_> = (1..64).map(|seed| harness.start(request(1, 1, seed))).collect();
        let (shared_stats, ready) = (harness.shared_stats(), Barrier::new(2));
        harness.plan();
        thread::scope(|scope| {
            scope.spawn(|| {
                ready.wait();
                while !first.is_ended() {
                    first.pop();
                }
                let stats = shared_stats.read();
                assert_eq!((stats.running, stats.blocks_used, stats.blocks_reserved), (0, 0, 0));
            });
            ready.wait();
            harness.complete();
        });
    }
}

#[test]
fn lost_consumers_free_everything() {
    let engine = engine(Limits { queue_capacity: 4, ..limits() });
    let port = Port::with_condvar();
    for request in requests(300) {
        drop(RowOutput::start(&engine, &request, &port));
    }
    eventually(|| {
        let stats = engine.stats();
        (stats.running, stats.waiting, stats.blocks_used, stats.requests_admitted) == (0, 0, 0, 300)
    });
    let mut alive = RowOutput::start(&engine, &requests(9)[8], &port);
    alive.read_to_end(&port);
    alive.check(engine.limits());
}

#[test]
fn a_full_mailbox_refuses_starts_but_loses_no_cancel() {
    // The engine thread stands still inside `submit` until the gate opens.
    struct Standing {
        entered: Sender<()>,
        gate: Receiver<()>,
    }
    impl Executor for Standing {
        fn submit(&mut self, _: Box<StepPlan>, _: Box<StepOutput>) {
            let _ = self.entered.send(());
            let _ = self.gate.recv();
        }
    }
    let (entered, has_entered) = unbounded();
    let (opener, gate) = unbounded::<()>();
    let limits = Limits { max_waiting: 8, ..limits() };
    let engine = Engine::start(limits, |_| Box::new(Standing { entered, gate })).unwrap();
    let port = Port::with_condvar();
    let request = &requests(9)[8];
    let mut first = RowOutput::start(&engine, request, &port);
    has_entered.recv().unwrap();
    let mut posted = vec![];
    let error = loop {
        match engine.start_request(Arc::clone(request), &port) {
            Ok(consumer) => posted.push(consumer),
            Err(error) => break error,
        }
    };
    assert_eq!(error, StartError::Overloaded);
    first.consumer.cancel();
    posted[0].cancel();
    drop(opener);
    first.read_to_end(&port);
    assert_eq!(first.reason, Some(FinishReason::Cancelled));
    eventually(|| std::iter::from_fn(|| posted[0].pop()).count() > 0 && posted[0].is_ended());
}

#[test]
fn an_executor_that_panics_in_submit_stops_the_engine_and_nobody_hangs() {
    struct Panicking {
        num_left: usize,
        worker: Box<dyn Executor>,
    }
    impl Executor for Panicking {
        fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
            self.num_left = self.num_left.checked_sub(1).expect("a panic on purpose");
            self.worker.submit(plan, output);
        }
    }
    let engine = Engine::start(limits(), |completions| {
        Box::new(Panicking { num_left: 5, worker: Worker::start(&limits(), completions, || {}) })
    })
    .unwrap();
    let port = Port::with_condvar();
    let request = Arc::new(request(20, 100, 0));
    let mut answers: Vec<_> = (0..100)
        .map_while(|_| engine.start_request(Arc::clone(&request), &port).ok())
        .map(|consumer| RowOutput {
            request: Arc::clone(&request),
            consumer,
            tokens: vec![],
            reason: None,
            refusal: None,
        })
        .collect();
    for answer in &mut answers {
        answer.read_to_end(&port);
        // A request that was still in the mailbox was never admitted; all others were open.
        assert!(answer.has_ended_with(&StopCause::Crashed));
    }
    assert_eq!(answers[0].reason, Some(FinishReason::EngineStopped(StopCause::Crashed)));
    assert_eq!(engine.stop_cause(), Some(StopCause::Crashed));
    let error = engine.start_request(request, &port).unwrap_err();
    assert_eq!(error, StartError::Stopped(StopCause::Crashed));
    engine.shutdown();
}

#[test]
fn a_lost_device_ends_every_request_with_its_message() {
    // Every step but the first loses the device.
    struct Losing {
        device: Device,
        completions: Completions,
    }
    impl Executor for Losing {
        fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
            let is_first = plan.step == 1;
            self.device.submit(plan, output);
            let done = self.device.complete();
            let result = if is_first { Ok(()) } else { Err(StepError::DeviceLost("bus error".into())) };
            self.completions.send(StepDone { result, ..done });
        }
    }
    let device = Device::new(&limits());
    let engine = Engine::start(limits(), |completions| Box::new(Losing { device, completions })).unwrap();
    let (port, request) = (Port::with_condvar(), Arc::new(request(20, 100, 0)));
    let started = (0..100).map_while(|_| engine.start_request(Arc::clone(&request), &port).ok());
    let consumers: Vec<_> = started.collect();
    let lost = StopCause::DeviceLost("bus error".into());
    for consumer in consumers {
        let (request, tokens, reason, refusal) = (Arc::clone(&request), vec![], None, None);
        let mut answer = RowOutput { request, consumer, tokens, reason, refusal };
        answer.read_to_end(&port);
        assert!(answer.has_ended_with(&lost), "{:?} {:?}", answer.reason, answer.refusal);
        assert_eq!(engine.stop_cause().as_ref(), Some(&lost), "an ended request sees a stopped engine");
    }
    let error = engine.start_request(request, &port).unwrap_err();
    assert_eq!(error.to_string(), "the device was lost: bus error; create a new engine");
    engine.shutdown();
    assert_eq!(engine.stop_cause(), Some(lost), "the first cause stays");
}

#[test]
fn a_start_left_in_the_mailbox_of_a_dead_engine_is_answered() {
    struct Doomed {
        entered: Sender<()>,
        gate: Receiver<()>,
    }
    impl Executor for Doomed {
        fn submit(&mut self, _: Box<StepPlan>, _: Box<StepOutput>) {
            let _ = self.entered.send(());
            let _ = self.gate.recv();
            panic!("a panic on purpose");
        }
    }
    let (entered, has_entered) = unbounded();
    let (opener, gate) = unbounded::<()>();
    let engine = Engine::start(limits(), |_| Box::new(Doomed { entered, gate })).unwrap();
    let request = &requests(9)[8];
    let ports = [Port::with_condvar(), Port::with_condvar()];
    let mut open = RowOutput::start(&engine, request, &ports[0]);
    has_entered.recv().unwrap();
    let mut left = RowOutput::start(&engine, request, &ports[1]);
    drop(opener);
    open.read_to_end(&ports[0]);
    assert_eq!(open.reason, Some(FinishReason::EngineStopped(StopCause::Crashed)));
    assert!(ports[1].wait(Some(PATIENCE)), "its port was not rung");
    left.read_to_end(&ports[1]);
    assert_eq!(left.refusal, Some(Rejection::Stopped(StopCause::Crashed)));
}

#[test]
fn a_shutdown_cancels_what_is_open_and_can_be_called_from_everywhere() {
    let (engine, gate) = gated_engine(limits());
    let port = Port::with_condvar();
    let mut answers: Vec<_> =
        requests(100).iter().map(|request| RowOutput::start(&engine, request, &port)).collect();
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let engine = engine.clone();
            thread::spawn(move || engine.shutdown())
        })
        .collect();
    for answer in &mut answers {
        answer.read_to_end(&port);
        assert_eq!(answer.reason, Some(FinishReason::Cancelled));
    }
    drop(gate); // the executor's drop waits for its thread
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    engine.shutdown();
    assert!(!engine.is_running());
    let error = engine.start_request(request(1, 1, 0), &port).unwrap_err();
    assert_eq!(error, StartError::Stopped(StopCause::Closed));
}

#[test]
fn dropping_the_last_handle_ends_the_requests() {
    let (engine, gate) = gated_engine(limits());
    let port = Port::with_condvar();
    let mut answer = RowOutput::start(&engine, &requests(9)[8], &port);
    let other = engine.clone();
    drop(engine);
    assert!(other.is_running());
    drop(gate);
    drop(other);
    answer.read_to_end(&port);
    assert!(answer.reason.is_some());
}

#[test]
fn requests_that_race_with_a_shutdown_all_end() {
    for round in 0..20 {
        let engine = engine(limits());
        let starters: Vec<_> = (0..4)
            .map(|_| {
                let engine = engine.clone();
                thread::spawn(move || {
                    let port = Port::with_condvar();
                    for request in requests(200) {
                        match engine.start_request(Arc::clone(&request), &port) {
                            Ok(consumer) => {
                                let (tokens, reason, refusal) = (vec![], None, None);
                                RowOutput { request, consumer, tokens, reason, refusal }.read_to_end(&port);
                            }
                            Err(StartError::Stopped(_)) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        eventually(|| engine.stats().requests_finished >= round);
        engine.shutdown();
        starters.into_iter().for_each(|starter| starter.join().unwrap());
    }
}

#[test]
fn an_engine_does_not_start_with_impossible_sizes() {
    let error = Engine::start(Limits { num_blocks: 0, ..limits() }, |_| unreachable!()).unwrap_err();
    assert_eq!(error.to_string(), "num_blocks=0 is not allowed: it must be at least 1");
}

#[test]
fn a_request_that_can_never_run_is_refused_on_the_spot() {
    let engine = engine(Limits { num_blocks: 2, ..limits() });
    let error = engine.start_request(request(30, 40, 0), &Port::with_condvar()).unwrap_err();
    assert_eq!(error.to_string(), "prompt of 30 tokens and max_tokens=40 need 5 KV blocks; the cache has 2");
}

/// An engine that has answered one request, and remembers it for `ttl`.
fn remembering_engine(ttl: Duration) -> Engine {
    let engine = engine(Limits { prefix_cache_ttl: Some(ttl), ..limits() });
    let port = Port::with_condvar();
    let mut answer = RowOutput::start(&engine, &Arc::new(request(40, 2, 0)), &port);
    answer.read_to_end(&port);
    answer.check(engine.limits());
    engine
}

#[test]
fn prefixes_expire_though_nobody_asks_for_anything() {
    let engine = remembering_engine(Duration::from_millis(20));
    eventually(|| engine.stats().blocks_cached == 0);
}

#[test]
fn a_flush_empties_the_cache_of_a_running_engine_and_is_nothing_to_a_stopped_one() {
    let engine = remembering_engine(PATIENCE);
    assert!(engine.stats().blocks_cached > 0);
    engine.reset_prefix_cache();
    eventually(|| engine.stats().blocks_cached == 0);
    engine.shutdown();
    engine.reset_prefix_cache();
}
