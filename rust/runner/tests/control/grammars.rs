//! Grammars: what they allow, what they force, and what becomes of those that fail.

use std::sync::Arc;

use penstock_engine::Request;
use penstock_types::Sampling;

use crate::common::request;
use crate::rules::{Thirds, Trouble, keeps_to_thirds, with_everything};
use crate::steps::{Row, Sequence, Steps, told};

fn guided(number: usize, trouble: Trouble) -> Request {
    Request { grammar: Some(Arc::new(Thirds(trouble))), ..request(number, 20, 24) }
}

#[test]
fn output_keeps_to_its_grammar_and_what_is_forced_is_confirmed() {
    let mut steps = Steps::of_four();
    let plain = steps.run_plainly(guided(10, Trouble::Never));
    assert!(keeps_to_thirds(&plain.ids()) && !keeps_to_thirds(&steps.run_plainly(request(10, 20, 24)).ids()));
    let mut num_steps = 0;
    let forced = steps.run(guided(10, Trouble::Never), 16, |sequence| {
        num_steps += 1;
        sequence.forced.clone()
    });
    assert_eq!(told(&forced), told(&plain));
    // One for the beginning of the prompt, then one for each token up to the one behind the last, but for each fourth.
    assert_eq!(num_steps, 1 + 25 - 24 / 4);
}

#[test]
fn a_sequence_that_comes_back_stands_in_its_grammar_where_it_stood() {
    let mut steps = Steps::of_four();
    let plain = steps.run_plainly(guided(11, Trouble::Never));
    let mut moved = Sequence::new(guided(11, Trouble::Never), 1);
    for slot in [3, 0, 2, 1] {
        for _ in 0..6 {
            steps.step(&mut [Row { sequence: &mut moved, chunk: usize::MAX, drafts: vec![] }]);
        }
        moved.reseat(slot);
    }
    assert_eq!(told(&moved), told(&plain));
}

#[test]
fn a_grammar_that_fails_ends_its_request_alone_and_its_place_is_as_good_as_new() {
    let mut steps = Steps::of_four();
    let neighbour = || Request { stop_token_ids: vec![], ..with_everything(12, 20, 24) };
    let (alone, guided_alone) =
        (steps.run_plainly(neighbour()), steps.run_plainly(guided(13, Trouble::Never)));
    for (trouble, num_tokens, failure) in [
        (Trouble::Start, 0, "the grammar failed: it cannot start"),
        (Trouble::StartPanics, 0, "the grammar panicked: it cannot even fail"),
        (Trouble::Mask(0), 0, "the grammar failed: it is lost"),
        (Trouble::Mask(5), 5, "the grammar failed: it is lost"),
        (Trouble::MaskPanics(6), 6, "the grammar panicked: it is beside itself"),
        (Trouble::Nothing(6), 6, "no token is left to choose from: the grammar excludes all of them"),
        (Trouble::Accept(4), 5, "the grammar failed: it does not want that"),
        (Trouble::ForcedPanics(9), 9, "the grammar panicked: it is forced"),
    ] {
        for num_drafts in [0, 8] {
            let mut failing = Sequence::new(guided(13, trouble), 0);
            let mut guided = Sequence::new(guided(13, Trouble::Never), 1);
            let mut other = Sequence::new(neighbour(), 2);
            for _ in 0..24 {
                let row = |sequence, drafts| Row { sequence, chunk: usize::MAX, drafts };
                let output = guided_alone.ids();
                let drafts = output[failing.tokens.len()..].iter().take(num_drafts).copied().collect();
                steps.step(&mut [
                    row(&mut failing, drafts),
                    row(&mut guided, vec![]),
                    row(&mut other, vec![]),
                ]);
            }
            assert_eq!(failing.failure.as_deref(), Some(failure), "{trouble:?} with {num_drafts} drafts");
            assert_eq!(
                failing.ids(),
                guided_alone.ids()[..num_tokens],
                "{trouble:?} with {num_drafts} drafts"
            );
            assert_eq!(told(&guided), told(&guided_alone));
            assert_eq!(told(&other), told(&alone));
            // Who comes next into the place finds nothing of it.
            assert_eq!(told(&steps.run_plainly(neighbour())), told(&alone));
        }
    }
}

#[test]
fn a_row_behind_a_failure_does_no_harm() {
    let mut steps = Steps::of_four();
    for trouble in [Trouble::Start, Trouble::Mask(0)] {
        let failed = steps.run_plainly(guided(14, trouble));
        assert!(failed.failure.is_some());
        assert_eq!(steps.step_behind(&failed), failed.failure, "it is told again");
    }
}

#[test]
fn where_nothing_is_left_to_choose_from_it_is_said_what_is_on() {
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
            "no token is left to choose from: no_repeat_ngram_size, bad_token_ids, allowed_token_ids exclude all of them"
        )
    );
}
