//! The ends of a request besides its length: stop ids, stop sequences, and failures.

use std::collections::HashSet;

use penstock_engine::{FinishReason, Request};

use crate::device::ROW_FAILURE;
use crate::harness::{Harness, check_ended, check_output, limits, read};
use crate::oracle::{VOCABULARY, expected_output, request};

fn ids(request: &Request) -> Vec<u32> {
    expected_output(request, &limits()).0.iter().map(|token| token.id).collect()
}

/// A request whose output repeats no token.
fn varied() -> Request {
    let is_varied = |request: &Request| ids(request).iter().collect::<HashSet<_>>().len() == 12;
    (0..).map(|seed| request(4, 12, seed)).find(is_varied).unwrap()
}

/// The number of its tokens, and its finish reason.
#[track_caller]
fn end(request: Request) -> (usize, FinishReason) {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request);
    harness.run();
    assert!(harness.core.is_idle());
    let (tokens, finish) = read(&mut client);
    (tokens.len(), finish.expect("it ends").reason)
}

#[test]
fn the_first_matching_stop_sequence_is_reported() {
    let plain = varied();
    let ids = ids(&plain);
    let never = vec![ids[3], ids[5], ids[4]];
    let stop_token_sequences = vec![never.clone(), ids[4..7].to_vec(), ids[6..7].to_vec()];
    assert_eq!(end(Request { stop_token_sequences, ..plain.clone() }), (7, FinishReason::StopSequence(1)));
    assert_eq!(end(Request { stop_token_sequences: vec![never], ..plain }), (12, FinishReason::Length));
}

#[test]
fn stop_sequences_do_not_match_prompt_tokens() {
    let plain = varied();
    let across = vec![plain.prompt[3], ids(&plain)[0]];
    assert_eq!(end(Request { stop_token_sequences: vec![across], ..plain }), (12, FinishReason::Length));
}

#[test]
fn stop_sequences_are_ignored_below_min_tokens() {
    let plain = varied();
    let ids = ids(&plain);
    let stop_token_sequences = vec![ids[4..6].to_vec()];
    for (min_tokens, expected) in [(6, 6), (7, 12)] {
        let request =
            Request { stop_token_sequences: stop_token_sequences.clone(), min_tokens, ..plain.clone() };
        assert_eq!(end(request).0, expected, "min_tokens={min_tokens}");
    }
}

#[test]
fn stop_ids_precede_stop_sequences_and_both_the_length() {
    let plain = Request { max_tokens: 6, ..varied() };
    let last = ids(&plain)[5];
    let request = Request { stop_token_sequences: vec![vec![last]], ..plain };
    assert_eq!(end(request.clone()), (6, FinishReason::StopSequence(0)));
    assert_eq!(end(Request { stop_token_ids: vec![last], ..request }), (6, FinishReason::Stop(last)));
}

#[test]
fn a_failed_row_ends_only_its_request() {
    let mut harness = Harness::new(limits());
    let mut clients = [0, 1].map(|seed| harness.start(request(6, 10, seed)));
    harness.step();
    assert_eq!(harness.device.num_plans(), 1, "with a row of each request");
    let mut done = harness.device.complete();
    done.output.rows[0].failure = Some(ROW_FAILURE.into());
    done.output.rows[0].num_tokens = 0;
    done.output.sampled.remove(0);
    harness.handle(penstock_engine::testing::Message::StepDone(done));
    check_ended(&mut clients[0], FinishReason::Failed(ROW_FAILURE.into()));
    harness.run();
    check_output(&mut clients[1], &harness.limits);
    assert_eq!(harness.stats().blocks_used, 0);
}

#[test]
fn a_step_with_an_unknown_token_id_fails() {
    for is_forced in [false, true] {
        let mut harness = Harness::new(limits());
        let mut client = harness.start(request(6, 10, 0));
        harness.step();
        let mut done = harness.device.complete();
        match is_forced {
            true => {
                done.output.forced.push(VOCABULARY);
                done.output.rows[0].forced = 0..1;
            }
            false => done.output.sampled[0].id = VOCABULARY,
        }
        harness.handle(penstock_engine::testing::Message::StepDone(done));
        let text = "the step returned token id 24; the vocabulary has 24 ids";
        check_ended(&mut client, FinishReason::Failed(text.into()));
        harness.run();
    }
}
