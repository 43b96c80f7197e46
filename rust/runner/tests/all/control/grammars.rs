//! Grammars: masks, forced tokens and failures.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_engine::Request;
use penstock_engine::request::{Grammar, GrammarState};
use penstock_types::Sampling;

use super::rules::{Fault, Thirds, matches_thirds, with_everything};
use super::steps::{Row, Sequence, Steps, bits_of};
use crate::common::request;

fn constrained(number: usize, fault: Fault) -> Request {
    Request { grammar: Some(Arc::new(Thirds(fault))), ..request(number, 20, 24) }
}

#[test]
fn output_matches_grammar_and_forced_drafts_are_accepted() {
    let mut steps = Steps::of_four();
    let plain = steps.run_plainly(constrained(10, Fault::Never));
    assert!(matches_thirds(&plain.ids()) && !matches_thirds(&steps.run_plainly(request(10, 20, 24)).ids()));
    let mut num_steps = 0;
    let forced = steps.run(constrained(10, Fault::Never), 16, |sequence| {
        num_steps += 1;
        sequence.forced.clone()
    });
    assert_eq!(bits_of(&forced), bits_of(&plain));
    // One for the first chunk of the prompt, then one for each token but every fourth, which is forced.
    assert_eq!(num_steps, 1 + 25 - 24 / 4);
}

#[test]
fn readmitted_sequence_continues_its_grammar() {
    let mut steps = Steps::of_four();
    let plain = steps.run_plainly(constrained(11, Fault::Never));
    let mut moved = Sequence::new(constrained(11, Fault::Never), 1);
    for slot in [3, 0, 2, 1] {
        for _ in 0..6 {
            steps.step(&mut [Row { sequence: &mut moved, chunk: usize::MAX, drafts: vec![] }]);
        }
        moved.readmit(slot);
    }
    assert_eq!(bits_of(&moved), bits_of(&plain));
}

/// Counts its starts.
#[derive(Debug)]
struct Counted(Thirds, AtomicUsize);

impl Grammar for Counted {
    fn start(&self) -> Result<Box<dyn GrammarState>, String> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.start()
    }
}

#[test]
fn grammar_of_a_preempted_sequence_is_not_started_again() {
    let mut steps = Steps::of_four();
    let plain = steps.run_plainly(constrained(11, Fault::Never));
    let counted = Arc::new(Counted(Thirds(Fault::Never), AtomicUsize::new(0)));
    let request = Request { grammar: Some(counted.clone()), ..request(11, 20, 24) };
    let mut moved = Sequence::new(request, 1);
    for (slot, next) in [(1, 3), (3, 0), (0, 2), (2, 2)] {
        for _ in 0..6 {
            steps.step(&mut [Row { sequence: &mut moved, chunk: usize::MAX, drafts: vec![] }]);
        }
        steps.freed.push(slot);
        moved.readmit(next);
    }
    assert_eq!(bits_of(&moved), bits_of(&plain));
    assert_eq!(counted.1.load(Ordering::Relaxed), 1);
}

#[test]
fn failing_grammar_ends_only_its_request_and_frees_its_slot() {
    let mut steps = Steps::of_four();
    let neighbour = || Request { stop_token_ids: vec![], ..with_everything(12, 20, 24) };
    let (alone, constrained_alone) =
        (steps.run_plainly(neighbour()), steps.run_plainly(constrained(13, Fault::Never)));
    for (fault, num_tokens, failure) in [
        (Fault::Start, 0, "the grammar failed: no start"),
        (Fault::StartPanics, 0, "the grammar panicked: start panics"),
        (Fault::Mask(0), 0, "the grammar failed: no mask"),
        (Fault::Mask(5), 5, "the grammar failed: no mask"),
        (Fault::MaskPanics(6), 6, "the grammar panicked: mask panics"),
        (Fault::Nothing(6), 6, "no token is left to sample: the grammar excludes every token"),
        (Fault::Accept(4), 5, "the grammar failed: not accepted"),
        (Fault::ForcedPanics(9), 9, "the grammar panicked: forced panics"),
    ] {
        for num_drafts in [0, 8] {
            let mut failing = Sequence::new(constrained(13, fault), 0);
            let mut constrained = Sequence::new(constrained(13, Fault::Never), 1);
            let mut other = Sequence::new(neighbour(), 2);
            for _ in 0..24 {
                let row = |sequence, drafts| Row { sequence, chunk: usize::MAX, drafts };
                let output = constrained_alone.ids();
                let drafts = output[failing.tokens.len()..].iter().take(num_drafts).copied().collect();
                steps.step(&mut [
                    row(&mut failing, drafts),
                    row(&mut constrained, vec![]),
                    row(&mut other, vec![]),
                ]);
            }
            assert_eq!(failing.failure.as_deref(), Some(failure), "{fault:?} with {num_drafts} drafts");
            assert_eq!(
                failing.ids(),
                constrained_alone.ids()[..num_tokens],
                "{fault:?} with {num_drafts} drafts"
            );
            assert_eq!(bits_of(&constrained), bits_of(&constrained_alone));
            assert_eq!(bits_of(&other), bits_of(&alone));
            // The next request in the slot has no trace of it.
            assert_eq!(bits_of(&steps.run_plainly(neighbour())), bits_of(&alone));
        }
    }
}

#[test]
fn row_planned_before_a_failure_returns_the_failure() {
    let mut steps = Steps::of_four();
    for fault in [Fault::Start, Fault::Mask(0)] {
        let failed = steps.run_plainly(constrained(14, fault));
        assert!(failed.failure.is_some());
        assert_eq!(steps.step_behind(&failed), failed.failure, "it is returned again");
    }
}

#[test]
fn no_candidates_error_lists_every_filter_in_use() {
    let sampling = Sampling {
        allowed_token_ids: Some(vec![3]),
        bad_token_ids: vec![3],
        no_repeat_ngram_size: 5,
        ..Sampling::default()
    };
    let failed = Steps::of_four().run_plainly(Request { sampling, ..request(15, 20, 4) });
    assert_eq!(
        failed.failure.as_deref(),
        Some(
            "no token is left to sample: no_repeat_ngram_size, bad_token_ids, allowed_token_ids exclude every token"
        )
    );
}
