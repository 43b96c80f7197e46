//! The results that the host waits for before it launches the next step.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use penstock_device::DeviceError;
use penstock_device::cpu::Cpu;
use penstock_engine::{Consumer, Engine, Event, FinishReason, Port, Request};
use penstock_types::EngineConfig;
use penstock_types::Sampling;

use super::async_cpu::{AsyncCpu, Control};
use super::rules::{Fault, Thirds, pulled};
use super::steps::{Row, Sequence, Steps};
use crate::common::{TinyModel, request};

const TOKENS: usize = 60;

fn config() -> EngineConfig {
    EngineConfig { threads: Some(2), max_num_seqs: Some(4), prefix_cache: false, ..EngineConfig::default() }
}

fn engine() -> (Engine, Arc<Control>) {
    let (device, control) = AsyncCpu::new(2);
    (TinyModel::write().launch_on(device, &config().into()).unwrap().0, control)
}

/// Four requests with the longest outputs.
fn requests() -> Vec<Request> {
    (0..4).map(|number| request(number, 20, TOKENS)).collect()
}

/// Requests in progress, and the ids of each.
struct Running {
    port: Port,
    consumers: Vec<(Consumer, Vec<u32>)>,
    open: usize,
}

impl Running {
    fn start(engine: &Engine, requests: Vec<Request>) -> Self {
        let port = Port::with_condvar();
        let start = |request| (engine.start_request(request, &port).unwrap(), vec![]);
        let consumers: Vec<_> = requests.into_iter().map(start).collect();
        Self { open: consumers.len(), port, consumers }
    }

    /// Reads until `is_enough`.
    fn read(&mut self, is_enough: impl Fn(&Self) -> bool) {
        while !is_enough(self) {
            self.port.wait(None);
            self.port.clear();
            for (consumer, ids) in &mut self.consumers {
                while let Some(event) = consumer.pop() {
                    match event {
                        Event::Token(token) => ids.push(token.id),
                        Event::Finished(finish) => {
                            assert_eq!(finish.reason, FinishReason::Length);
                            self.open -= 1;
                        }
                        _ => {}
                    }
                }
            }
        }
    }

    fn read_to_end(mut self) -> Vec<Vec<u32>> {
        self.read(|running| running.open == 0);
        self.consumers.into_iter().map(|(_, ids)| ids).collect()
    }
}

/// Number of steps and of batches that were submitted while the device was held in the middle of the requests and the
/// host had time to submit more. The requests then run to their ends.
fn submitted_ahead(requests: Vec<Request>) -> (usize, usize, Vec<Vec<u32>>) {
    let (engine, control) = engine();
    let mut running = Running::start(&engine, requests);
    running.read(|running| running.consumers.iter().all(|(_, ids)| ids.len() > 5));
    control.hold();
    // The device thread may be publishing tokens right now; then the counts settle.
    let counts = || {
        let published = control.num_published.load(SeqCst);
        (control.num_steps.load(SeqCst), control.num_submitted.load(SeqCst), published)
    };
    let (mut last, mut since) = (counts(), Instant::now());
    while since.elapsed() < Duration::from_millis(300) {
        let now = counts();
        if now != last {
            (last, since) = (now, Instant::now());
        }
        std::thread::yield_now();
    }
    let (steps, submitted, published) = last;
    // The warm-up has a batch for each of its steps, so both counts differ by the steps in flight.
    let result = (steps - published, submitted - published);
    control.release();
    (result.0, result.1, running.read_to_end())
}

fn on_cpu(requests: Vec<Request>) -> Vec<Vec<u32>> {
    let engine = TinyModel::write().launch_on(Cpu::new(2).unwrap(), &config().into()).unwrap().0;
    Running::start(&engine, requests).read_to_end()
}

#[test]
fn warm_up_of_large_steps_computes_few_rows() {
    let (device, control) = AsyncCpu::new(2);
    let config = EngineConfig { max_num_seqs: Some(64), max_num_batched_tokens: Some(512), ..config() };
    TinyModel::write().launch_on(device, &config.into()).unwrap();
    let rows = control.num_rows.load(SeqCst);
    assert!((1..50).contains(&rows), "{rows} rows in all matrix products");
}

#[test]
fn next_step_is_launched_before_any_token_of_the_step_before() {
    let (steps, batches, ids) = submitted_ahead(requests());
    assert_eq!((steps, batches), (2, 2), "forward pass and sampling of two steps");
    assert_eq!(ids, on_cpu(requests()));
}

#[test]
fn grammars_and_processors_delay_only_the_next_sampling() {
    let with_grammar = || {
        let mut requests = requests();
        // A step with drafts would delay the next step too.
        requests[1].grammar = Some(Arc::new(Thirds(Fault::NoneForced)));
        requests
    };
    let with_processor = || {
        let mut requests = requests();
        requests[2].processors = vec![pulled(0.05)];
        requests
    };
    let (steps, batches, ids) = submitted_ahead(with_grammar());
    assert_eq!((steps, batches), (2, 1), "two forward passes; sampling waits for the mask");
    assert_eq!(ids, on_cpu(with_grammar()));
    let (steps, batches, ids) = submitted_ahead(with_processor());
    let waits_for_tokens_or_logits = matches!((steps, batches), (2, 1) | (1, 0));
    assert!(waits_for_tokens_or_logits, "{steps} forward passes, {batches} batches");
    assert_eq!(ids, on_cpu(with_processor()));
}

#[test]
fn prompt_chunk_is_in_flight_until_the_device_has_computed_it() {
    let (device, control) = AsyncCpu::new(2);
    let config = EngineConfig { max_num_batched_tokens: Some(16), ..config() };
    let engine = TinyModel::write().launch_on(device, &config.into()).unwrap().0;
    control.hold();
    let before = control.num_steps.load(SeqCst);
    let running = Running::start(&engine, vec![request(1, 200, 4)]);
    let started = Instant::now();
    while started.elapsed() < Duration::from_millis(300) {
        std::thread::yield_now();
    }
    let num_steps = control.num_steps.load(SeqCst) - before;
    control.release();
    assert_eq!(num_steps, 2, "of 13 steps, all but the last without a token");
    assert_eq!(running.read_to_end(), on_cpu(vec![request(1, 200, 4)]));
}

#[test]
fn slots_beside_a_slot_that_fails_are_admitted() {
    let (device, control) = AsyncCpu::new(2);
    let mut steps = Steps::of_four_on(device);
    let mut sequences = [0, 1].map(|slot| Sequence::new(request(slot as usize, 20, 8), slot));
    fn rows(sequences: &mut [Sequence]) -> Vec<Row<'_>> {
        sequences.iter_mut().map(|sequence| Row { sequence, chunk: usize::MAX, drafts: vec![] }).collect()
    }
    control.fail_admission();
    let error = steps.try_step(&mut rows(&mut sequences)).unwrap_err();
    assert_eq!(error, DeviceError::InvalidStep("no admission".into()));
    // As in a plan that was made before the failure was known.
    steps.step(&mut rows(&mut sequences[1..]));
    assert_eq!(sequences[1].ids(), Steps::of_four().run_plainly(request(1, 20, 1)).ids());
}

#[test]
fn lost_device_ends_every_request_with_its_message() {
    let (engine, control) = engine();
    let mut running = Running::start(&engine, requests());
    running.read(|running| running.consumers.iter().all(|(_, ids)| ids.len() > 5));
    control.lose("the device fell off the bus");
    let mut reasons = vec![];
    while reasons.len() < 4 {
        running.port.wait(None);
        running.port.clear();
        for (consumer, _) in &mut running.consumers {
            while let Some(event) = consumer.pop() {
                if let Event::Finished(finish) = event {
                    reasons.push(format!("{:?}", finish.reason));
                }
            }
        }
    }
    assert!(reasons.iter().all(|reason| reason.contains("the device fell off the bus")), "{reasons:?}");
    let refused = engine.start_request(Request::new(vec![1], 4, Sampling::default()), &running.port);
    let mut consumer = match refused {
        Err(error) => return assert!(error.to_string().contains("the device fell off the bus"), "{error}"),
        Ok(consumer) => consumer,
    };
    running.port.wait(None);
    let event = format!("{:?}", consumer.pop());
    assert!(event.contains("the device fell off the bus"), "{event}");
}
