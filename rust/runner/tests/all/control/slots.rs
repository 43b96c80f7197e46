//! Slots that are freed and admitted.

use std::sync::Arc;

use penstock_engine::Request;
use penstock_types::{RequestedOutputs, Sampling};

use super::rules::{Fault, PullToSum, Thirds, with_everything};
use super::steps::{Row, Sequence, Steps};
use crate::common::request;

fn whole(sequence: &mut Sequence) -> Row<'_> {
    Row { sequence, chunk: usize::MAX, drafts: vec![] }
}

#[test]
fn freed_slot_drops_its_request() {
    let mut steps = Steps::of_four();
    let mut sequences = [0, 1].map(|slot| Sequence::new(with_everything(slot as usize, 20, 8), slot));
    steps.step(&mut sequences.each_mut().map(whole));
    let held = sequences.each_ref().map(|sequence| Arc::strong_count(&sequence.request));
    assert!(held.iter().all(|count| *count > 1));
    steps.freed = vec![0];
    steps.step(&mut [whole(&mut sequences[1])]);
    let held = sequences.each_ref().map(|sequence| Arc::strong_count(&sequence.request));
    assert_eq!(held[0], 1, "nothing of the request is left");
    assert!(held[1] > 1, "its neighbour stays");
}

#[test]
fn failure_is_returned_by_a_row_whose_slot_was_admitted_again() {
    let failing = |request| Request {
        outputs: RequestedOutputs { prompt_logprobs: Some(1), ..<_>::default() },
        ..request
    };
    let grammar = |fault| failing(Request { grammar: Some(Arc::new(Thirds(fault))), ..request(1, 20, 8) });
    let processor = Arc::new(PullToSum { strength: 0.5, fails_at: 0, panics_at: usize::MAX });
    let excluded = Sampling { allowed_token_ids: Some(vec![]), ..Sampling::default() };
    for (request, failure) in [
        (grammar(Fault::Start), "the grammar failed: no start"),
        (grammar(Fault::Mask(0)), "the grammar failed: no mask"),
        (grammar(Fault::Nothing(0)), "no token is left to sample: the grammar excludes every token"),
        (
            failing(Request { processors: vec![processor], ..request(1, 20, 8) }),
            "the logits processor failed: it fails",
        ),
        (
            failing(Request { sampling: excluded, ..request(1, 20, 8) }),
            "no token is left to sample: allowed_token_ids excludes every token",
        ),
    ] {
        let mut steps = Steps::of_four();
        let [mut failing, mut next] =
            [request, with_everything(2, 20, 8)].map(|request| Sequence::new(request, 3));
        steps.freed = vec![3];
        steps.step_overlapped(&mut [whole(&mut failing)], &mut [whole(&mut next)]);
        assert_eq!(failing.failure.as_deref(), Some(failure));
        assert_eq!((next.tokens.len(), &next.failure), (1, &None));
    }
}

#[test]
fn slot_is_admitted_though_the_copies_of_its_step_fail() {
    let mut steps = Steps::of_four();
    let mut sequence = Sequence::new(with_everything(3, 20, 8), 2);
    steps.fail(&mut sequence);
    // Like a next plan that was made already: it does not admit the slot again.
    steps.step(&mut [whole(&mut sequence)]);
    assert_eq!((sequence.tokens.len(), &sequence.failure), (1, &None));
}
