//! The distribution of steps and slots, ends, pauses and cancels.

use std::time::Duration;

use penstock_engine::testing::Message;
use penstock_engine::{CachedTokens, Event, Finish, FinishReason, Limits, Rejection, Request, StopCause};

use crate::harness::{Client, Harness, check_ended, check_output, limits, read};
use crate::oracle::{expected_output, request};

/// A request that stops at token `at`, counted from 0.
fn stopping(num_prompt: usize, at: u32, max_tokens: usize) -> Request {
    (0..)
        .map(|seed| {
            let mut request = request(num_prompt, max_tokens, seed);
            request.stop_token_ids = vec![expected_output(&request, &limits()).0[at as usize].id];
            request
        })
        .find(|request| expected_output(request, &limits()).0.len() == at as usize + 1)
        .unwrap()
}

#[test]
fn outputs_are_independent_of_other_requests() {
    let mut harness = Harness::new(limits());
    let mut clients: Vec<_> =
        (0..8).map(|seed| harness.start(request(1 + 6 * seed as usize, 3 + seed as usize, seed))).collect();
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    assert!(harness.core.is_idle());
    assert_eq!((harness.stats().blocks_used, harness.stats().blocks_reserved), (0, 0));
    assert_eq!(harness.stats().generation_tokens, (3..11).sum::<u64>());
    assert_eq!(harness.stats().prompt_tokens, (0..8).map(|n| 1 + 6 * n).sum::<u64>());
}

#[test]
fn max_tokens_is_exact_and_its_last_token_is_not_computed() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(3, 5, 0));
    let mut num_computed = 0;
    loop {
        let scheduled: u32 = std::iter::from_fn(|| Some(harness.plan()).filter(|plan| !plan.is_empty()))
            .flatten()
            .map(|(_, num_tokens)| num_tokens)
            .sum();
        num_computed += scheduled;
        if harness.device.num_plans() == 0 {
            break;
        }
        harness.complete();
    }
    assert_eq!(num_computed, 3 + 5 - 1, "the last token is not computed");
    assert_eq!(read(&mut client).0.len(), 5);
}

#[test]
fn max_model_len_ends_a_request() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(60, 100, 0));
    harness.run();
    let (tokens, last) = read(&mut client);
    assert_eq!((tokens.len(), last.unwrap().reason), (4, FinishReason::Length));
}

#[test]
fn a_stop_token_is_the_last_and_the_next_row_is_discarded() {
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
    // Its slot and blocks are reused while that row runs.
    let mut next = harness.start(request(9, 4, 1));
    harness.run();
    check_output(&mut next, &harness.limits);
    assert_eq!(harness.stats().generation_tokens, 3 + 4);
}

/// Reads nothing until the end, so that the whole output can be compared.
fn check_ahead(client: &mut Client, harness: &Harness) {
    if harness.stats().running == 0 {
        check_output(client, &harness.limits);
    }
}

#[test]
fn no_stop_token_is_sampled_below_min_tokens() {
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
fn decodes_advance_every_step_beside_a_long_prompt() {
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
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let mut harness = Harness::new(limits());
    let _long = harness.start(request(60, 4, 0));
    assert_eq!(harness.plan(), [(0, 16)]);
    let _middle = harness.start(request(20, 4, 1));
    let _short = harness.start(request(5, 4, 2));
    assert_eq!(harness.plan(), [(0, 8), (1, 3), (2, 5)], "half for the first, the rest shortest first");
    harness.complete();
    assert_eq!(harness.plan(), [(0, 8), (1, 7), (2, 1)]);
}

#[test]
fn a_long_prompt_uses_the_budget_that_short_ones_leave() {
    let mut harness = Harness::new(limits());
    let _long = harness.start(request(60, 4, 0));
    let _short = harness.start(request(3, 4, 1));
    assert_eq!(harness.plan(), [(0, 13), (1, 3)]);
}

#[test]
fn prompts_have_chunks_of_at_most_max_prefill_chunk_tokens() {
    let mut harness = Harness::new(Limits { max_prefill_chunk: 4, ..limits() });
    let mut long = harness.start(request(10, 4, 0));
    assert_eq!(harness.plan(), [(0, 4)]);
    let _others: Vec<_> = (1..=3).map(|seed| harness.start(request(7, 4, seed))).collect();
    assert_eq!(harness.plan(), [(0, 4), (1, 4), (2, 4), (3, 4)], "all of the budget");
    harness.complete();
    assert_eq!(harness.plan(), [(0, 2), (1, 3), (2, 3), (3, 3)]);
    harness.run();
    long.drain();
    assert!(long.is_ended());
}

#[test]
fn short_prompts_do_not_starve_a_long_one() {
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
    // It gets at least half of the 16 tokens of a step.
    assert!(num_steps <= 48 / 8 + 1, "{num_steps} steps");
}

#[test]
fn a_request_waiting_for_blocks_is_not_overtaken() {
    let mut harness = Harness::new(Limits { num_blocks: 10, ..limits() });
    let mut first = harness.start(request(20, 5, 0)); // 6 of 10 blocks
    let mut large = harness.start(request(20, 5, 1)); // 6 more are not free
    let mut small = harness.start(request(2, 2, 2)); // 1 would be
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 2));
    while harness.stats().waiting == 2 {
        assert!(harness.stats().running <= 1);
        assert!(harness.step());
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 0), "both are admitted at once");
    harness.run();
    [&mut first, &mut large, &mut small].into_iter().for_each(|client| check_output(client, &limits()));
}

#[test]
fn a_full_waiting_queue_rejects_with_its_numbers() {
    let mut harness = Harness::new(Limits { max_waiting: 1, ..limits() });
    let mut clients: Vec<_> = (0..5).map(|seed| harness.start(request(4, 4, seed))).collect();
    let mut rejected = harness.start(request(4, 4, 5));
    assert_eq!(rejected.drain(), [Event::Rejected(Rejection::Overloaded { waiting: 1, limit: 1 })]);
    assert!(rejected.is_ended());
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn max_waiting_0_admits_while_slots_are_free() {
    let mut harness = Harness::new(Limits { max_waiting: 0, ..limits() });
    let mut clients: Vec<_> = (0..4).map(|seed| harness.start(request(4, 4, seed))).collect();
    let rejected = harness.start(request(4, 4, 9)).drain();
    assert_eq!(rejected, [Event::Rejected(Rejection::Overloaded { waiting: 0, limit: 0 })]);
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn a_failed_step_ends_only_its_requests() {
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
    assert_eq!(harness.stats().running, 1, "the next plan admits it");
    harness.run();
    check_output(&mut waiting, &harness.limits);
}

#[test]
fn a_step_with_too_few_tokens_fails() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(request(4, 8, 0));
    harness.plan();
    let mut done = harness.device.complete();
    done.output.sampled.clear();
    harness.handle(Message::StepDone(done));
    check_ended(&mut client, FinishReason::Failed("the step returned 0 tokens; its rows count 1".into()));
}

#[test]
fn an_unread_consumer_pauses_only_its_sequence() {
    let mut harness = Harness::new(Limits { queue_capacity: 4, ..limits() });
    let mut silent = harness.start(request(4, 20, 0));
    let mut reading = harness.start(request(4, 20, 1));
    let mut tokens = vec![];
    while harness.step() {
        tokens.extend(read(&mut reading).0);
    }
    assert_eq!(tokens, expected_output(&reading.request, &harness.limits).0);
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
    assert_eq!(answered, expected_output(&silent.request, &harness.limits).0);
    assert_eq!(harness.stats().paused, 0);
}

#[test]
fn a_queue_of_one_event_carries_a_whole_output() {
    let mut harness = Harness::new(Limits { queue_capacity: 1, ..limits() });
    let mut client = harness.start(request(4, 6, 0));
    let mut events = vec![];
    while !client.is_ended() {
        harness.run();
        let event = client.pop().expect("each event read makes room for the next");
        events.push(event);
    }
    assert_eq!(events.len(), 1 + 6 + 1);
}

#[test]
fn a_cancel_frees_within_one_step_in_every_state() {
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
fn a_cancel_before_the_start_is_not_lost() {
    let mut harness = Harness::new(limits());
    let (start, mut clients) = harness.post(request(4, 20, 0), 1);
    let client = &mut clients[0];
    client.cancel();
    harness.attend(); // clears the flag of the cancel set while the start is in the mailbox
    harness.handle(Message::Start(start));
    harness.attend();
    check_ended(client, FinishReason::Cancelled);
    assert!(harness.core.is_idle());
}

#[test]
fn times_count_from_arrival() {
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
fn shutdown_ends_all_requests_and_rejects_new_ones() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    let mut clients: Vec<_> = (0..3).map(|seed| harness.start(request(4, 20, seed))).collect();
    harness.plan();
    harness.handle(Message::Shutdown);
    for client in &mut clients {
        check_ended(client, FinishReason::Cancelled);
    }
    harness.complete();
    assert!(harness.plan().is_empty());
    let (start, mut clients) = harness.post(request(4, 20, 9), 1);
    let late = &mut clients[0];
    harness.handle(Message::Start(start));
    assert_eq!(late.drain(), [Event::Rejected(Rejection::Stopped(StopCause::Closed))]);
    harness.handle(Message::Shutdown);
    assert!(harness.core.is_stopped() && harness.core.is_idle());
}

#[test]
fn an_iteration_with_events_rings_once() {
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
