//! When a place is taken and left.

use std::sync::Arc;

use crate::rules::with_everything;
use crate::steps::{Row, Sequence, Steps};

fn whole(sequence: &mut Sequence) -> Row<'_> {
    Row { sequence, chunk: usize::MAX, drafts: vec![] }
}

#[test]
fn a_slot_that_was_left_holds_on_to_nothing() {
    let mut steps = Steps::of_four();
    let mut sequences = [0, 1].map(|slot| Sequence::new(with_everything(slot as usize, 20, 8), slot));
    steps.step(&mut sequences.each_mut().map(whole));
    let held = sequences.each_ref().map(|sequence| Arc::strong_count(&sequence.request));
    assert!(held.iter().all(|count| *count > 1));
    steps.vacated = vec![0];
    steps.step(&mut [whole(&mut sequences[1])]);
    let held = sequences.each_ref().map(|sequence| Arc::strong_count(&sequence.request));
    assert_eq!(held[0], 1, "nothing of the request is left");
    assert!(held[1] > 1, "its neighbour stays");
}

#[test]
fn a_place_is_taken_though_the_copies_of_its_step_fail() {
    let mut steps = Steps::of_four();
    let mut sequence = Sequence::new(with_everything(3, 20, 8), 2);
    steps.fail(&mut sequence);
    // As where the next plan was made already: it says nothing of the seat again.
    steps.step(&mut [whole(&mut sequence)]);
    assert_eq!((sequence.tokens.len(), &sequence.failure), (1, &None));
}
