//! Support for tests with real threads: the fake device on its own thread, and consumers that wait.

use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam_channel::{Sender, unbounded};
use penstock_engine::{
    Completions, Consumer, Engine, Event, Executor, FinishReason, Limits, Port, Rejection, Request,
    StepOutput, StepPlan, StopCause,
};
use penstock_types::Token;

use crate::device::Device;
use crate::oracle::{VOCABULARY, expected_output, request};

/// Longer than any wait here takes on a busy machine: a wait that fails has lost its wake-up.
pub const PATIENCE: Duration = Duration::from_secs(120);

pub fn limits() -> Limits {
    Limits {
        max_model_len: 128,
        max_num_seqs: 32,
        max_num_batched_tokens: 128,
        max_waiting: 1_000,
        max_unfinished: 10_000,
        max_paused: 1_000,
        block_size: 16,
        num_blocks: 200,
        vocabulary_size: VOCABULARY as usize,
        ..Limits::small()
    }
}

pub type Step = (Box<StepPlan>, Box<StepOutput>);

/// The fake device on a thread of its own.
pub struct Worker {
    steps: Option<Sender<Step>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// `before` is called before every step.
    pub fn start(
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

pub fn engine(limits: Limits) -> Engine {
    penstock_engine::check_when_idle();
    Engine::start(limits.clone(), |completions| Worker::start(&limits, completions, || {})).unwrap()
}

/// An engine whose steps each wait for a message. Dropping the sender releases them.
pub fn gated_engine(limits: Limits) -> (Engine, Sender<()>) {
    let (gate, opened) = unbounded::<()>();
    let wait = move || {
        let _ = opened.recv();
    };
    penstock_engine::check_when_idle();
    let engine = Engine::start(limits.clone(), |completions| Worker::start(&limits, completions, wait));
    (engine.unwrap(), gate)
}

pub fn requests(count: u64) -> Vec<Arc<Request>> {
    (0..count).map(|seed| Arc::new(request(1 + seed as usize % 60, 1 + seed as usize % 40, seed))).collect()
}

/// The events that a consumer has received.
pub struct Received {
    pub request: Arc<Request>,
    pub consumer: Consumer,
    pub tokens: Vec<Token>,
    pub reason: Option<FinishReason>,
    pub rejection: Option<Rejection>,
}

impl Received {
    pub fn new(request: Arc<Request>, consumer: Consumer) -> Self {
        Self { request, consumer, tokens: vec![], reason: None, rejection: None }
    }

    pub fn start(engine: &Engine, request: &Arc<Request>, port: &Port) -> Self {
        Self::new(Arc::clone(request), engine.start_request(Arc::clone(request), port).unwrap())
    }

    pub fn drain(&mut self) {
        while let Some(event) = self.consumer.pop() {
            match event {
                Event::Admitted | Event::Prompt(_) => {}
                Event::Token(token) => self.tokens.push(token),
                Event::Finished(finish) => self.reason = Some(finish.reason),
                Event::Rejected(rejection) => self.rejection = Some(rejection),
            }
        }
    }

    /// Waits and reads, in the required order, until the end.
    pub fn read_to_end(&mut self, port: &Port) {
        loop {
            port.clear();
            self.drain();
            if self.consumer.is_ended() {
                return;
            }
            assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
        }
    }

    pub fn has_ended_with(&self, cause: &StopCause) -> bool {
        self.reason == Some(FinishReason::EngineStopped(cause.clone()))
            || self.rejection == Some(Rejection::Stopped(cause.clone()))
    }

    pub fn check(&self, limits: &Limits) {
        let (tokens, reason) = expected_output(&self.request, limits);
        assert_eq!(self.tokens, tokens);
        assert_eq!(self.reason, Some(reason));
    }
}

#[track_caller]
pub fn eventually(mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "the condition never became true");
        thread::yield_now();
    }
}
