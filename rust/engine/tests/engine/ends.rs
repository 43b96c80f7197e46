//! What ends a request besides its length: stop ids and stop sequences, and failures that are its own.

use std::collections::HashSet;

use penstock_engine::{FinishReason, Request};

use crate::device::ROW_FAILURE;
use crate::harness::{Harness, check_answered, check_ended, limits, read};
use crate::oracle::{VOCABULARY, answer, request};

fn ids(request: &Request) -> Vec<u32> {
    answer(request, &limits()).0.iter().map(|token| token.id).collect()
}

/// One in whose answer no token comes twice.
fn varied() -> Request {
    let is_varied = |request: &Request| ids(request).iter().collect::<HashSet<_>>().len() == 12;
    (0..).map(|seed| request(4, 12, seed)).find(is_varied).unwrap()
}

/// How many tokens it gets, and why no more.
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
fn an_output_ends_with_the_first_stop_sequence_that_it_ends_with() {
    let plain = varied();
    let ids = ids(&plain);
    let never = vec![ids[3], ids[5], ids[4]];
    let stop_token_sequences = vec![never.clone(), ids[4..7].to_vec(), ids[6..7].to_vec()];
    assert_eq!(end(Request { stop_token_sequences, ..plain.clone() }), (7, FinishReason::StopSequence(1)));
    assert_eq!(end(Request { stop_token_sequences: vec![never], ..plain }), (12, FinishReason::Length));
}

#[test]
fn a_stop_sequence_does_not_begin_in_the_prompt() {
    let plain = varied();
    let across = vec![plain.prompt[3], ids(&plain)[0]];
    assert_eq!(end(Request { stop_token_sequences: vec![across], ..plain }), (12, FinishReason::Length));
}

#[test]
fn a_stop_sequence_ends_nothing_below_min_tokens() {
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
fn a_stop_id_comes_before_a_stop_sequence_and_both_before_the_length() {
    let plain = Request { max_tokens: 6, ..varied() };
    let last = ids(&plain)[5];
    let request = Request { stop_token_sequences: vec![vec![last]], ..plain };
    assert_eq!(end(request.clone()), (6, FinishReason::StopSequence(0)));
    assert_eq!(end(Request { stop_token_ids: vec![last], ..request }), (6, FinishReason::Stop(last)));
}

#[test]
fn a_row_that_fails_ends_its_own_request_and_no_other() {
    let mut harness = Harness::new(limits());
    let mut clients = [0, 1].map(|seed| harness.start(request(6, 10, seed)));
    harness.step();
    assert_eq!(harness.device.num_plans(), 1, "a row of each follows");
    let mut done = harness.device.complete();
    done.output.rows[0].failure = Some(ROW_FAILURE.into());
    done.output.rows[0].num_tokens = 0;
    done.output.sampled.remove(0);
    harness.handle(penstock_engine::testing::Message::StepDone(done));
    check_ended(&mut clients[0], FinishReason::Failed(ROW_FAILURE.into()));
    harness.run();
    check_answered(&mut clients[1], &harness.limits);
    assert_eq!(harness.stats().blocks_used, 0);
}

#[test]
fn a_step_that_answers_with_an_id_that_the_model_does_not_know_has_failed() {
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
