//! Logits processors: their order and failures.

use std::sync::Arc;

use penstock_engine::{LogitsProcessor, Request};
use penstock_types::Sampling;

use super::rules::{PullToSum, pulled, with_everything};
use super::steps::{Row, Sequence, Steps, bits_of};
use crate::common::{VOCABULARY, request};

fn greedy(processors: Vec<Arc<dyn LogitsProcessor>>) -> Request {
    let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    Request { processors, sampling, ..request(16, 20, 8) }
}

#[test]
fn processors_are_called_in_order_with_the_history() {
    let mut steps = Steps::of_four();
    // One pulls so hard that each token is the sum of those before it.
    let output = steps.run_plainly(greedy(vec![pulled(1.0), pulled(1e4)]));
    let mut sum: u32 = output.request.prompt.iter().sum();
    for id in output.ids() {
        assert_eq!(id, sum % VOCABULARY as u32);
        sum += id;
    }
    // Two that cancel each other.
    let plain = steps.run_plainly(greedy(vec![]));
    assert_eq!(steps.run_plainly(greedy(vec![pulled(64.0), pulled(-64.0)])).ids(), plain.ids());
}

#[test]
fn failing_processor_ends_only_its_request() {
    let mut steps = Steps::of_four();
    let neighbour = || Request { stop_token_ids: vec![], ..with_everything(17, 20, 10) };
    let (alone, whole) = (steps.run_plainly(neighbour()), steps.run_plainly(greedy(vec![pulled(0.5)])));
    for (fails_at, panics_at, failure) in [
        (0, usize::MAX, "the logits processor failed: it fails"),
        (3, usize::MAX, "the logits processor failed: it fails"),
        (usize::MAX, 3, "the logits processor panicked: it panics"),
    ] {
        for num_drafts in [0, 6] {
            let processor = Arc::new(PullToSum { strength: 0.5, fails_at, panics_at });
            let (mut failing, mut other) =
                (Sequence::new(greedy(vec![processor]), 3), Sequence::new(neighbour(), 1));
            for _ in 0..10 {
                let drafts = whole.ids()[failing.tokens.len()..].iter().take(num_drafts).copied().collect();
                let row = |sequence, drafts| Row { sequence, chunk: usize::MAX, drafts };
                steps.step(&mut [row(&mut failing, drafts), row(&mut other, vec![])]);
            }
            assert_eq!(failing.failure.as_deref(), Some(failure));
            assert_eq!(failing.ids(), whole.ids()[..fails_at.min(panics_at)], "{num_drafts} drafts");
            assert_eq!(bits_of(&other), bits_of(&alone));
        }
    }
}
