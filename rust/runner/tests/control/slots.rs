//! Slots that are freed and admitted.

use std::sync::Arc;

use crate::rules::with_everything;
use crate::steps::{Row, Sequence, Steps};

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
fn slot_is_admitted_though_the_copies_of_its_step_fail() {
    let mut steps = Steps::of_four();
    let mut sequence = Sequence::new(with_everything(3, 20, 8), 2);
    steps.fail(&mut sequence);
    // Like a next plan that was made already: it does not admit the slot again.
    steps.step(&mut [whole(&mut sequence)]);
    assert_eq!((sequence.tokens.len(), &sequence.failure), (1, &None));
}
