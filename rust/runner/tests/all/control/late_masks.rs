//! Grammars with late masks: they delay their own requests only, and outputs have the same bits.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

use penstock_engine::request::{Grammar, GrammarState};
use penstock_engine::{Consumer, Engine, Event, FinishReason, Port, Request};
use penstock_runner::{Faults, LaunchConfig};
use penstock_types::EngineConfig;

use super::device;
use super::rules::{Fault, Thirds};
use super::steps::{Row, Sequence, Steps, bits_of};
use crate::common::{TinyModel, request};

const TOKENS: usize = 24;

/// Lets masks be computed while it is open.
#[derive(Debug, Default)]
struct Gate {
    is_open: Mutex<bool>,
    changed: Condvar,
    /// Masks that are being computed or wait.
    num_masks: AtomicUsize,
}

impl Gate {
    fn set(&self, is_open: bool) {
        *self.is_open.lock().unwrap() = is_open;
        self.changed.notify_all();
    }

    fn pass(&self) {
        self.num_masks.fetch_add(1, Ordering::SeqCst);
        drop(self.changed.wait_while(self.is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
    }
}

/// A grammar with masks that wait at a gate.
#[derive(Debug)]
struct Gated(Thirds, Arc<Gate>);

struct GatedState(Box<dyn GrammarState>, Arc<Gate>);

impl Grammar for Gated {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        Ok(Box::new(GatedState(self.0.start()?, Arc::clone(&self.1))))
    }
}

impl GrammarState for GatedState {
    fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
        self.1.pass();
        self.0.mask(allowed)
    }

    fn accept(&mut self, token: u32) -> Result<(), String> {
        self.0.accept(token)
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) {
        self.0.forced(tokens);
    }

    fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
        Ok(Box::new(Self(self.0.fork()?, Arc::clone(&self.1))))
    }
}

fn constrained(number: usize, fault: Fault) -> Request {
    Request { grammar: Some(Arc::new(Thirds(fault))), ..request(number, 20, TOKENS) }
}

fn gated(number: usize, fault: Fault, gate: &Arc<Gate>) -> Request {
    let grammar = Arc::new(Gated(Thirds(fault), Arc::clone(gate)));
    Request { grammar: Some(grammar), ..request(number, 20, TOKENS) }
}

fn step(steps: &mut Steps, sequences: &mut [&mut Sequence]) {
    step_in_chunks(steps, usize::MAX, sequences);
}

fn step_in_chunks(steps: &mut Steps, chunk: usize, sequences: &mut [&mut Sequence]) {
    let rows = sequences.iter_mut().filter(|sequence| !sequence.is_done());
    let mut rows: Vec<_> = rows
        .map(|sequence| {
            let drafts = sequence.forced.clone();
            Row { sequence, chunk, drafts }
        })
        .collect();
    steps.step(&mut rows);
}

#[test]
fn row_with_a_late_mask_is_deferred_and_others_continue() {
    let mut steps = Steps::of_four_that_do_not_wait();
    let (expected, other) =
        (steps.run_plainly(constrained(10, Fault::Never)), steps.run_plainly(request(11, 20, TOKENS)));
    let gate = Arc::new(Gate::default());
    let mut late = Sequence::new(gated(10, Fault::Never, &gate), 1);
    let mut plain = Sequence::new(request(11, 20, TOKENS), 2);
    while !plain.is_done() {
        step(&mut steps, &mut [&mut late, &mut plain]);
    }
    assert_eq!((late.tokens.len(), late.num_deferred), (0, TOKENS));
    assert_eq!(bits_of(&plain), bits_of(&other));
    assert_eq!(gate.num_masks.load(Ordering::SeqCst), 1, "one mask is computed for all steps");
    gate.set(true);
    while !late.is_done() {
        step(&mut steps, &mut [&mut late]);
    }
    late.tokens.truncate(TOKENS);
    assert_eq!(bits_of(&late), bits_of(&expected));
}

#[test]
fn deferred_sequence_keeps_its_grammar_in_another_slot() {
    let mut steps = Steps::of_four_that_do_not_wait();
    let expected = steps.run_plainly(constrained(12, Fault::Never));
    let gate = Arc::new(Gate::default());
    let mut late = Sequence::new(gated(12, Fault::Never, &gate), 1);
    let mut plain = Sequence::new(request(13, 20, TOKENS), 0);
    // At once, and after a step in which it has no slot.
    for (slot, next) in [(1, 2), (2, 3), (3, 1)] {
        gate.set(false);
        step(&mut steps, &mut [&mut late, &mut plain]);
        step(&mut steps, &mut [&mut late, &mut plain]);
        let num_tokens = late.tokens.len();
        steps.freed.push(slot);
        if next != 3 {
            step(&mut steps, &mut [&mut plain]);
        }
        late.readmit(next);
        step(&mut steps, &mut [&mut late, &mut plain]);
        assert_eq!(late.tokens.len(), num_tokens, "the gate is closed");
        gate.set(true);
        while late.tokens.len() < num_tokens + 4 {
            step(&mut steps, &mut [&mut late]);
        }
    }
    while !late.is_done() {
        step(&mut steps, &mut [&mut late]);
    }
    late.tokens.truncate(TOKENS);
    assert_eq!(bits_of(&late), bits_of(&expected));
}

#[test]
fn chunks_of_a_prompt_are_computed_while_its_mask_is_late() {
    let mut steps = Steps::of_four_that_do_not_wait();
    let expected = steps.run_plainly(constrained(16, Fault::Never));
    let gate = Arc::new(Gate::default());
    let mut late = Sequence::new(gated(16, Fault::Never, &gate), 1);
    let mut plain = Sequence::new(request(17, 20, TOKENS), 0);
    step(&mut steps, &mut [&mut late, &mut plain]);
    steps.freed.push(1);
    late.readmit(2);
    step_in_chunks(&mut steps, 8, &mut [&mut late, &mut plain]);
    step_in_chunks(&mut steps, 8, &mut [&mut late, &mut plain]);
    gate.set(true);
    while !late.is_done() {
        step_in_chunks(&mut steps, 8, &mut [&mut late]);
    }
    late.tokens.truncate(TOKENS);
    assert_eq!(bits_of(&late), bits_of(&expected));
}

#[test]
fn late_failure_of_a_grammar_ends_its_request() {
    for (fault, num_tokens) in [(Fault::Mask(0), 0), (Fault::Mask(5), 5), (Fault::Accept(4), 5)] {
        let mut steps = Steps::of_four_that_do_not_wait();
        let gate = Arc::new(Gate::default());
        let mut late = Sequence::new(gated(14, fault, &gate), 1);
        let mut plain = Sequence::new(request(15, 20, TOKENS), 2);
        step(&mut steps, &mut [&mut late, &mut plain]);
        assert_eq!((late.num_deferred, &late.failure), (1, &None));
        gate.set(true);
        while late.failure.is_none() {
            step(&mut steps, &mut [&mut late]);
        }
        assert_eq!(late.tokens.len(), num_tokens, "{fault:?}");
    }
}

fn engine(mask_wait: Duration) -> Engine {
    let options = EngineConfig { threads: Some(2), max_num_seqs: Some(8), ..EngineConfig::default() };
    let faults = Faults { mask_wait: Some(mask_wait), ..Faults::default() };
    let config = LaunchConfig { faults, ..options.into() };
    TinyModel::write().launch_on(device(2), &config).unwrap().0
}

/// The ids of each request; `on_end` is called with the index of each that ends.
fn run(engine: &Engine, requests: Vec<Request>, mut on_end: impl FnMut(usize)) -> Vec<Vec<u32>> {
    let port = Port::with_condvar();
    let start = |request| (engine.start_request(request, &port).unwrap(), vec![]);
    let mut consumers: Vec<(Consumer, Vec<u32>)> = requests.into_iter().map(start).collect();
    let mut open = consumers.len();
    while open > 0 {
        port.wait(None);
        port.clear();
        for (index, (consumer, ids)) in consumers.iter_mut().enumerate() {
            while let Some(event) = consumer.pop() {
                match event {
                    Event::Token(token) => ids.push(token.id),
                    Event::Finished(finish) => {
                        assert_eq!(finish.reason, FinishReason::Length);
                        open -= 1;
                        on_end(index);
                    }
                    _ => {}
                }
            }
        }
    }
    consumers.into_iter().map(|(_, ids)| ids).collect()
}

#[test]
fn requests_end_while_the_grammars_of_others_never_return_masks() {
    // Without forced tokens, so that steps follow others in flight.
    for fault in [Fault::Never, Fault::NoneForced] {
        let requests = |gate: Option<&Arc<Gate>>| {
            let grammar = |number| match gate {
                Some(gate) if number < 3 => gated(number, fault, gate),
                _ => constrained(number, fault),
            };
            (0..8)
                .map(|number| if number < 6 { grammar(number) } else { request(number, 20, TOKENS) })
                .collect()
        };
        let expected = run(&engine(Duration::MAX), requests(None), |_| {});
        let (gate, mut num_ended) = (Arc::new(Gate::default()), 0);
        let ids = run(&engine(Duration::ZERO), requests(Some(&gate)), |index| {
            num_ended += 1;
            assert!(index >= 3 || num_ended > 2, "the gate opens after two have ended");
            // The mask thread waits at the gate, so other grammars wait, too.
            gate.set(num_ended >= 2);
        });
        assert_eq!(ids, expected, "{fault:?}");
    }
}
