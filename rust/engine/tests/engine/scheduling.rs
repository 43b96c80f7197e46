//! Single behaviours of the core, each a sentence.

use std::time::Duration;

use penstock_engine::testing::Message;
use penstock_engine::{CachedTokens, Event, Finish, FinishReason, Limits, Rejection, Request, StopCause};

use crate::harness::{Client, Harness, check_answered, check_ended, limits, read};
use crate::oracle::{answer, request};

/// A request that stops at its token `at`, counted from 0.
fn stopping(num_prompt: usize, at: u32, max_tokens: usize) -> Request {
    (0..)
        .map(|seed| {
            let mut request = request(num_prompt, max_tokens, seed);
            request.stop_token_ids = vec![answer(&request, &limits()).0[at as usize].id];
            request
        })
        .find(|request| answer(request, &limits()).0.len() == at as usize + 1)
        .unwrap()
}

#[test]
fn requests_of_all_lengths_are_answered_as_if_alone() {
    let mut harness = Harness::new(limits());
    let mut clients: Vec<_> =
        (0..8).map(|seed| harness.start(request(1 + 6 * seed as usize, 3 + seed as usize, seed))).collect();
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
    assert!(harness.core.is_idle());
    assert_eq!((harness.stats().blocks_used, harness.stats().blocks_reserved), (0, 0));
    assert_eq!(harness.stats().generation_tokens, (3..11).sum::<u64>());
    assert_eq!(harness.stats().prompt_tokens, (0..8).map(|n| 1 + 6 * n).sum::<u64>());
}

#[test]
fn max_tokens_is_exact_and_costs_nothing_extra() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(3, 5, 0));
    let mut num_computed = 0;
    loop {
        let granted: u32 = std::iter::from_fn(|| Some(harness.plan()).filter(|plan| !plan.is_empty()))
            .flatten()
            .map(|(_, num_tokens)| num_tokens)
            .sum();
        num_computed += granted;
        if harness.device.num_plans() == 0 {
            break;
        }
        harness.complete();
    }
    assert_eq!(num_computed, 3 + 5 - 1, "the last token is not computed");
    assert_eq!(read(&mut client).0.len(), 5);
}

#[test]
fn the_model_length_ends_a_request() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(60, 100, 0));
    harness.run();
    let (tokens, last) = read(&mut client);
    assert_eq!((tokens.len(), last.unwrap().reason), (4, FinishReason::Length));
}

#[test]
fn a_stop_token_is_the_last_token_and_the_row_computed_ahead_is_discarded() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(stopping(4, 2, 20));
    while !client.is_ended() {
        harness.plan();
        harness.plan();
        harness.complete();
        check_ahead(&mut client, &harness);
    }
    assert_eq!(harness.device.num_plans(), 1, "a row for a fourth token is in flight");
    assert_eq!(harness.stats().blocks_used, 0);
    // Its slot and blocks go to somebody else while that row runs.
    let mut next = harness.start(request(9, 4, 1));
    harness.run();
    check_answered(&mut next, &harness.limits);
    assert_eq!(harness.stats().generation_tokens, 3 + 4);
}

/// Reads nothing until the end has come, so that the answer can be compared whole.
fn check_ahead(client: &mut Client, harness: &Harness) {
    if harness.stats().running == 0 {
        check_answered(client, &harness.limits);
    }
}

#[test]
fn min_tokens_keeps_stops_from_being_chosen() {
    let mut harness = Harness::new(limits());
    let mut wanted = stopping(4, 2, 20);
    wanted.min_tokens = 6;
    let mut client = harness.start(wanted);
    harness.run();
    let (tokens, _) = read(&mut client);
    assert!(tokens.len() >= 6);
    assert!(tokens[..6].iter().all(|token| !client.request.stop_token_ids.contains(&token.id)));
}

#[test]
fn streams_advance_in_every_step_while_a_long_prompt_is_computed() {
    let mut harness = Harness::new(limits());
    let _streams: Vec<_> = (0..3).map(|seed| harness.start(request(1, 60, seed))).collect();
    assert_eq!(harness.plan(), [(0, 1), (1, 1), (2, 1)]);
    let _long = harness.start(request(50, 4, 9));
    let chunks = [13, 13, 13, 11].map(|chunk| [(0, 1), (1, 1), (2, 1), (3, chunk)]);
    for chunk in chunks {
        assert_eq!(harness.plan(), chunk);
        harness.complete();
    }
}

#[test]
fn a_short_prompt_does_not_queue_behind_a_long_one() {
    let mut harness = Harness::new(limits());
    let _long = harness.start(request(60, 4, 0));
    assert_eq!(harness.plan(), [(0, 16)]);
    let _middle = harness.start(request(20, 4, 1));
    let _short = harness.start(request(5, 4, 2));
    assert_eq!(harness.plan(), [(0, 8), (1, 3), (2, 5)], "half for the first, then the shortest");
    harness.complete();
    assert_eq!(harness.plan(), [(0, 8), (1, 7), (2, 1)]);
}

#[test]
fn what_short_prompts_leave_goes_to_the_long_one() {
    let mut harness = Harness::new(limits());
    let _long = harness.start(request(60, 4, 0));
    let _short = harness.start(request(3, 4, 1));
    assert_eq!(harness.plan(), [(0, 13), (1, 3)]);
}

#[test]
fn a_long_prompt_is_not_starved_by_a_stream_of_short_ones() {
    let mut harness = Harness::new(limits());
    let mut long = harness.start(request(48, 1, 0));
    let mut shorts = vec![];
    let mut num_steps = 0;
    while !long.is_ended() {
        while harness.stats().waiting == 0 {
            shorts.push(harness.start(request(8, 1, 1)));
        }
        assert!(harness.step());
        num_steps += 1;
        long.drain();
    }
    // Half of 16 tokens a step at least.
    assert!(num_steps <= 48 / 8 + 1, "{num_steps} steps");
}

#[test]
fn nobody_overtakes_who_waits_for_blocks() {
    let mut harness = Harness::new(Limits { num_blocks: 10, ..limits() });
    let mut first = harness.start(request(20, 5, 0)); // 6 of 10 blocks
    let mut large = harness.start(request(20, 5, 1)); // 6 more are not free
    let mut small = harness.start(request(2, 2, 2)); // 1 would be
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 2));
    while harness.stats().waiting == 2 {
        assert!(harness.stats().running <= 1);
        assert!(harness.step());
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 0), "both get places in one turn");
    harness.run();
    [&mut first, &mut large, &mut small].into_iter().for_each(|client| check_answered(client, &limits()));
}

#[test]
fn who_finds_no_place_to_wait_is_refused_with_the_numbers() {
    let mut harness = Harness::new(Limits { max_waiting: 1, ..limits() });
    let mut clients: Vec<_> = (0..5).map(|seed| harness.start(request(4, 4, seed))).collect();
    let mut refused = harness.start(request(4, 4, 5));
    assert_eq!(refused.drain(), [Event::Rejected(Rejection::Overloaded { waiting: 1, limit: 1 })]);
    assert!(refused.is_ended());
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn without_a_place_to_wait_a_free_place_to_run_is_enough() {
    let mut harness = Harness::new(Limits { max_waiting: 0, ..limits() });
    let mut clients: Vec<_> = (0..4).map(|seed| harness.start(request(4, 4, seed))).collect();
    let refused = harness.start(request(4, 4, 9)).drain();
    assert_eq!(refused, [Event::Rejected(Rejection::Overloaded { waiting: 0, limit: 0 })]);
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn a_failed_step_ends_its_requests_and_no_others() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, ..limits() });
    let mut hit: Vec<_> = (0..2).map(|seed| harness.start(request(4, 8, seed))).collect();
    let mut waiting = harness.start(request(4, 8, 2));
    harness.plan();
    harness.plan();
    assert_eq!(harness.device.num_plans(), 2, "rows of both are also in the next plan");
    harness.fail("the device is on fire");
    for client in &mut hit {
        check_ended(client, FinishReason::Failed("the device is on fire".into()));
    }
    assert_eq!((harness.stats().running, harness.stats().blocks_used), (0, 0));
    harness.plan();
    assert_eq!(harness.stats().running, 1, "a place is taken by the next plan");
    harness.run();
    check_answered(&mut waiting, &harness.limits);
}

#[test]
fn a_step_that_samples_too_few_tokens_has_failed() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(4, 8, 0));
    harness.plan();
    let mut done = harness.device.complete();
    done.output.sampled.clear();
    harness.handle(Message::StepDone(done));
    check_ended(&mut client, FinishReason::Failed("the step returned 0 tokens; its rows count 1".into()));
}

#[test]
fn a_consumer_that_does_not_read_pauses_its_sequence_alone() {
    let mut harness = Harness::new(Limits { queue_capacity: 4, ..limits() });
    let mut silent = harness.start(request(4, 20, 0));
    let mut reading = harness.start(request(4, 20, 1));
    let mut tokens = vec![];
    while harness.step() {
        tokens.extend(read(&mut reading).0);
    }
    assert_eq!(tokens, answer(&reading.request, &harness.limits).0);
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 1));
    assert!(harness.plan().is_empty());

    let (mut answered, mut last) = (vec![], None);
    while last.is_none() {
        let (tokens, finish) = read(&mut silent);
        assert!(!tokens.is_empty(), "reading resumes it");
        answered.extend(tokens);
        last = finish;
        harness.run();
    }
    assert_eq!(answered, answer(&silent.request, &harness.limits).0);
    assert_eq!(harness.stats().paused, 0);
}

#[test]
fn a_queue_of_one_event_still_carries_a_whole_answer() {
    let mut harness = Harness::new(Limits { queue_capacity: 1, ..limits() });
    let mut client = harness.start(request(4, 6, 0));
    let mut events = vec![];
    while !client.is_ended() {
        harness.run();
        let event = client.pop().expect("every event read makes room for the next");
        events.push(event);
    }
    assert_eq!(events.len(), 1 + 6 + 1);
}

#[test]
fn a_cancel_frees_within_one_step_whatever_the_sequence_does() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, queue_capacity: 2, ..limits() });
    let mut paused = harness.start(request(4, 20, 0));
    let mut running = harness.start(request(4, 20, 1));
    let mut waiting = harness.start(request(4, 20, 2));
    while harness.stats().paused == 0 {
        harness.step();
        running.drain();
    }
    harness.plan();
    assert!(harness.device.num_plans() > 0, "rows are in flight");
    for client in [&mut paused, &mut running, &mut waiting] {
        client.cancel();
        harness.attend();
        check_ended(client, FinishReason::Cancelled);
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (0, 0));
    assert_eq!((harness.stats().blocks_used, harness.stats().blocks_reserved), (0, 0));
}

#[test]
fn a_waiting_request_can_be_cancelled() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    let _running = harness.start(request(4, 20, 0));
    let mut waiting: Vec<_> = (1..4).map(|seed| harness.start(request(4, 20, seed))).collect();
    waiting[1].cancel();
    harness.attend();
    check_ended(&mut waiting[1], FinishReason::Cancelled);
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 2));
    assert!(!waiting[0].is_ended() && !waiting[2].is_ended());
}

#[test]
fn a_cancel_that_overtakes_its_start_is_not_lost() {
    let mut harness = Harness::new(limits());
    let (start, mut client) = harness.post(request(4, 20, 0));
    client.cancel();
    harness.attend(); // takes the attention while the start is still in the mailbox
    harness.handle(Message::Start(vec![start]));
    harness.attend();
    check_ended(&mut client, FinishReason::Cancelled);
    assert!(harness.core.is_idle());
}

#[test]
fn times_count_from_the_arrival() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    let mut first = harness.start(request(4, 2, 0));
    let mut second = harness.start(request(4, 2, 1));
    harness.pass(10);
    harness.plan();
    harness.pass(20);
    harness.complete();
    harness.plan();
    harness.pass(30);
    harness.complete();
    let milliseconds = Duration::from_millis;
    assert_eq!(
        read(&mut first).1,
        Some(Finish {
            reason: FinishReason::Length,
            cached: CachedTokens::default(),
            queued: milliseconds(10),
            first_token: Some(milliseconds(30)),
            total: milliseconds(60),
        })
    );
    second.cancel();
    harness.pass(5);
    harness.attend();
    let finish = read(&mut second).1.unwrap();
    assert_eq!((finish.queued, finish.first_token, finish.total), (Duration::ZERO, None, milliseconds(65)));
}

#[test]
fn a_shutdown_ends_everything_and_refuses_what_comes_later() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    let mut clients: Vec<_> = (0..3).map(|seed| harness.start(request(4, 20, seed))).collect();
    harness.plan();
    harness.handle(Message::Shutdown);
    for client in &mut clients {
        check_ended(client, FinishReason::Cancelled);
    }
    harness.complete();
    assert!(harness.plan().is_empty());
    let (start, mut late) = harness.post(request(4, 20, 9));
    harness.handle(Message::Start(vec![start]));
    assert_eq!(late.drain(), [Event::Rejected(Rejection::Stopped(StopCause::Closed))]);
    harness.handle(Message::Shutdown);
    assert!(harness.core.is_stopped() && harness.core.is_idle());
}

#[test]
fn every_turn_that_pushed_something_rings_once() {
    let mut harness = Harness::new(limits());
    let is_rung = |harness: &mut Harness| {
        harness.core.ring();
        let is_rung = harness.port.wait(Some(Duration::ZERO));
        harness.port.clear();
        is_rung
    };
    let _client = harness.start(request(20, 2, 0));
    assert!(is_rung(&mut harness), "admitted");
    harness.plan();
    harness.complete();
    assert!(!is_rung(&mut harness), "a chunk without a token");
    harness.plan();
    harness.complete();
    assert!(is_rung(&mut harness), "a token");
}
