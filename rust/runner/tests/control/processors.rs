//! Processors of logits, which come before everything else, and what becomes of those that fail.

use std::sync::Arc;

use penstock_engine::{LogitsProcessor, Request};
use penstock_types::Sampling;

use crate::common::{VOCABULARY, request};
use crate::rules::{Drawn, drawn, with_everything};
use crate::steps::{Row, Sequence, Steps, told};

fn greedy(processors: Vec<Arc<dyn LogitsProcessor>>) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Request { processors, sampling, ..request(16, 20, 8) }
}

#[test]
fn processors_are_called_one_after_the_other_with_all_that_came_before() {
    let mut steps = Steps::of_four();
    // One pulls so hard that nothing else counts: each token is the sum of those before it.
    let output = steps.run_plainly(greedy(vec![drawn(1.0), drawn(1e4)]));
    let mut sum: u32 = output.request.prompt.iter().sum();
    for id in output.ids() {
        assert_eq!(id, sum % VOCABULARY as u32);
        sum += id;
    }
    // What one gives with, the next takes away.
    let plain = steps.run_plainly(greedy(vec![]));
    assert_eq!(steps.run_plainly(greedy(vec![drawn(64.0), drawn(-64.0)])).ids(), plain.ids());
}

#[test]
fn a_processor_that_fails_ends_its_request_alone() {
    let mut steps = Steps::of_four();
    let neighbour = || Request { stop_token_ids: vec![], ..with_everything(17, 20, 10) };
    let (alone, whole) = (steps.run_plainly(neighbour()), steps.run_plainly(greedy(vec![drawn(0.5)])));
    for (fails_at, panics_at, failure) in [
        (0, usize::MAX, "the logits processor failed: enough"),
        (3, usize::MAX, "the logits processor failed: enough"),
        (usize::MAX, 3, "the logits processor panicked: no more"),
    ] {
        for num_drafts in [0, 6] {
            let processor = Arc::new(Drawn { strength: 0.5, fails_at, panics_at });
            let (mut failing, mut other) =
                (Sequence::new(greedy(vec![processor]), 3), Sequence::new(neighbour(), 1));
            for _ in 0..10 {
                let drafts = whole.ids()[failing.tokens.len()..].iter().take(num_drafts).copied().collect();
                let row = |sequence, drafts| Row { sequence, chunk: usize::MAX, drafts };
                steps.step(&mut [row(&mut failing, drafts), row(&mut other, vec![])]);
            }
            assert_eq!(failing.failure.as_deref(), Some(failure));
            assert_eq!(failing.ids(), whole.ids()[..fails_at.min(panics_at)], "{num_drafts} drafts");
            assert_eq!(told(&other), told(&alone));
        }
    }
}
