//! Drafts: what they bring, what they may take, and that nobody else notices.

use std::sync::Arc;

use penstock_engine::{FinishReason, Limits, PreemptionMode, Request};

use crate::harness::{Client, Harness, caching, check_answered, limits, read};
use crate::oracle::{Rails, answer, request};

fn speculating() -> Limits {
    Limits { num_speculative_tokens: 8, max_num_batched_tokens: 32, ..limits() }
}

/// One whose tokens mostly go round in a circle, so that look-ups find something.
fn repetitive(num_prompt: usize, max_tokens: usize) -> Request {
    request(num_prompt, max_tokens, 3)
}

fn guided(request: Request) -> Request {
    Request { grammar: Some(Arc::new(Rails)), ..request }
}

/// How many steps it takes.
fn num_steps(limits: Limits, request: Request) -> u64 {
    let mut harness = Harness::new(limits);
    let mut client = harness.start(request);
    harness.run();
    check_answered(&mut client, &harness.limits);
    harness.stats().steps
}

#[test]
fn what_repeats_itself_takes_fewer_steps_and_gives_the_same_answer() {
    let plain = num_steps(limits(), repetitive(4, 56));
    let drafted = num_steps(speculating(), repetitive(4, 56));
    assert_eq!(plain, 56);
    assert!(drafted <= 36, "{drafted} steps");
}

#[test]
fn what_does_not_repeat_itself_is_hardly_drafted() {
    let mut harness = Harness::new(speculating());
    let mut client = harness.start(request(4, 56, 1));
    harness.run();
    check_answered(&mut client, &harness.limits);
    let stats = harness.stats();
    assert!(stats.drafted_tokens <= 30, "{stats:?}");
}

#[test]
fn what_a_grammar_forces_is_drafted_whether_or_not_anybody_guesses() {
    for limits in [limits(), speculating()] {
        let mut harness = Harness::new(limits);
        let mut client = harness.start(guided(request(4, 56, 1)));
        harness.run();
        check_answered(&mut client, &harness.limits);
        let stats = harness.stats();
        assert!(stats.accepted_tokens > 20 && stats.steps < 36, "{stats:?}");
        assert!(harness.device.num_refused > 0, "grammars may be wrong");
    }
}

#[test]
fn while_somebody_drafts_plans_are_made_one_at_a_time() {
    let mut harness = Harness::new(speculating());
    let mut clients = [repetitive(4, 40), request(4, 20, 1)].map(|request| harness.start(request));
    harness.plan();
    harness.plan();
    assert_eq!(harness.device.num_plans(), 2, "nobody has a token to go on from");
    harness.complete();
    harness.complete();
    let mut num_alone = 0;
    while harness.stats().running > 0 {
        if harness.plan().iter().any(|(_, num_tokens)| *num_tokens > 1) {
            assert!(harness.plan().is_empty(), "all go together");
            num_alone += 1;
        }
        harness.complete();
    }
    assert!(num_alone > 3, "{num_alone}");
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn who_has_nothing_to_draft_is_planned_ahead_as_if_nobody_drafted() {
    let mut harness = Harness::new(speculating());
    // No token comes twice, so nothing is found.
    let mut client = harness.start(request(4, 40, 1));
    let mut num_alone = 0;
    harness.plan();
    while harness.stats().running > 0 {
        num_alone += usize::from(harness.plan().is_empty());
        harness.complete();
    }
    check_answered(&mut client, &harness.limits);
    assert!(num_alone <= 4, "{num_alone} of 40 steps had no other behind them");
}

#[test]
fn drafts_get_the_budget_that_is_left_over() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 8, ..speculating() });
    let mut drafting = harness.start(repetitive(4, 50));
    while harness.stats().accepted_tokens < 8 {
        harness.step();
    }
    let mut arriving = harness.start(request(30, 4, 1));
    let mut most = 0;
    loop {
        let granted = harness.plan();
        let num_tokens: u32 = granted.iter().map(|(_, num_tokens)| num_tokens).sum();
        assert!(num_tokens <= 8);
        let is_whole_prompt_done = !read(&mut arriving).0.is_empty();
        if is_whole_prompt_done {
            break;
        }
        let of_prompt = granted.iter().find(|(slot, _)| *slot == 1).map_or(0, |(_, num_tokens)| *num_tokens);
        most = most.max(of_prompt);
        harness.complete();
    }
    assert_eq!(most, 7, "the prompt has all but the stream's own token");
    harness.run();
    check_answered(&mut drafting, &harness.limits);
}

#[test]
fn the_blocks_of_refused_drafts_go_back_at_once() {
    let mut harness = Harness::new(Limits { block_size: 2, ..speculating() });
    let mut client = harness.start(repetitive(4, 50));
    let (mut num_tokens, mut most) = (4, 0);
    loop {
        harness.plan();
        if harness.device.num_plans() == 0 {
            break;
        }
        most = most.max(harness.stats().blocks_used - num_tokens / 2);
        harness.complete();
        num_tokens += read_some(&mut client) as u64;
        let stats = harness.stats();
        if stats.running > 0 {
            // The last token is not computed yet.
            assert_eq!(stats.blocks_used, (num_tokens - 1).div_ceil(2));
        }
    }
    assert!(most >= 4 && harness.device.num_refused > 0, "drafts have blocks meanwhile: {most}");
}

fn read_some(client: &mut Client) -> usize {
    read(client).0.len()
}

#[test]
fn nobody_loses_a_place_for_a_draft() {
    let preemptions = |num_speculative_tokens| {
        let mut harness = Harness::new(Limits { num_blocks: 9, num_speculative_tokens, ..speculating() });
        let mut clients = [repetitive(4, 13), repetitive(5, 12)].map(|request| harness.start(request));
        harness.run();
        clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
        (harness.stats().preemptions, harness.stats().accepted_tokens > 0)
    };
    assert_eq!(preemptions(0), (0, false));
    assert_eq!(preemptions(8), (0, true));
}

#[test]
fn who_loses_its_place_with_drafts_in_flight_has_those_that_were_right() {
    for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let limits = Limits {
            max_num_seqs: 1,
            max_waiting: 2,
            host_blocks: 32,
            preemption_mode,
            num_speculative_tokens: 8,
            max_num_batched_tokens: 32,
            ..caching()
        };
        let mut harness = Harness::new(limits);
        let mut client = harness.start(Request { priority: 1, ..repetitive(4, 50) });
        let accepted = loop {
            let granted = harness.plan();
            let (before, num_drafts) = (harness.stats().accepted_tokens, granted[0].1 - 1);
            if before > 0 && num_drafts > 3 {
                let mut urgent = harness.start(request(5, 3, 1));
                assert_eq!((harness.stats().preemptions, harness.stats().waiting), (1, 1));
                harness.complete();
                let accepted = harness.stats().accepted_tokens - before;
                harness.run();
                check_answered(&mut urgent, &harness.limits);
                break accepted;
            }
            harness.complete();
        };
        assert!(accepted > 0);
        check_answered(&mut client, &harness.limits);
    }
}

#[test]
fn a_stop_among_confirmed_drafts_is_the_end_and_nothing_follows() {
    let plain = repetitive(4, 50);
    let ids: Vec<u32> = answer(&plain, &limits()).0.iter().map(|token| token.id).collect();
    let mut num_cut = 0;
    for end in 8..40 {
        let stop_token_sequences = vec![ids[end - 7..end].to_vec()];
        let (tokens, reason) = answer(
            &Request { stop_token_sequences: stop_token_sequences.clone(), ..plain.clone() },
            &limits(),
        );
        assert!(matches!(reason, FinishReason::StopSequence(0)));
        let mut harness = Harness::new(speculating());
        let mut client = harness.start(Request { stop_token_sequences, ..plain.clone() });
        harness.run();
        check_answered(&mut client, &harness.limits);
        let stats = harness.stats();
        assert_eq!(stats.generation_tokens, tokens.len() as u64, "what follows does not count");
        num_cut += usize::from(stats.accepted_tokens > 0);
    }
    assert!(num_cut > 10);
}

#[test]
fn drafts_stay_within_the_room_of_a_queue_and_the_length_of_a_request() {
    for (queue_capacity, max_tokens) in [(1, 20), (2, 30), (3, 50), (64, 5), (64, 100)] {
        let mut harness = Harness::new(Limits { queue_capacity, ..speculating() });
        let mut client = harness.start(repetitive(4, max_tokens));
        let mut tokens = vec![];
        let reason = loop {
            harness.run();
            let (some, finish) = read(&mut client);
            tokens.extend(some);
            if let Some(finish) = finish {
                break finish.reason;
            }
        };
        assert_eq!((tokens, reason), answer(&client.request, &harness.limits));
    }
}

#[test]
fn only_what_was_confirmed_is_left_in_the_prefix_cache() {
    let mut harness = Harness::new(Limits { num_speculative_tokens: 8, block_size: 2, ..caching() });
    let mut first = harness.start(repetitive(4, 40));
    harness.run();
    let (tokens, _) = read(&mut first);
    assert!(harness.device.num_refused > 0);
    let prompt: Vec<u32> = first.request.prompt.iter().copied().chain(tokens.iter().map(|t| t.id)).collect();
    let mut second = harness.start(Request { prompt: prompt.into(), ..request(4, 8, 1) });
    harness.run();
    check_answered(&mut second, &harness.limits);
    assert_eq!(harness.stats().prefix_hit_tokens, 42, "all but the token that was never computed");
}

#[test]
fn nobody_waits_to_draft_where_prompts_leave_no_room_for_it() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 4, ..speculating() });
    let mut drafting = harness.start(repetitive(4, 50));
    while harness.stats().accepted_tokens < 8 {
        harness.step();
    }
    let mut arriving = harness.start(request(50, 4, 1));
    let mut num_overlapped = 0;
    for _ in 0..12 {
        harness.plan();
        harness.plan();
        num_overlapped += usize::from(harness.device.num_plans() == 2);
        harness.complete();
    }
    assert!(num_overlapped >= 10, "{num_overlapped} of 12");
    harness.run();
    check_answered(&mut drafting, &harness.limits);
    check_answered(&mut arriving, &harness.limits);
}

#[test]
fn no_prefix_is_forgotten_for_a_draft() {
    let limits = Limits { num_blocks: 24, block_size: 1, max_num_batched_tokens: 32, ..caching() };
    let plain = request(4, 20, 2);
    let ids: Vec<u32> = answer(&plain, &limits).0.iter().map(|token| token.id).collect();
    let plain = Request { stop_token_sequences: vec![ids[..8].to_vec()], ..plain };
    for drafting in [plain.clone(), guided(plain)] {
        let mut harness = Harness::new(limits.clone());
        let first = || request(12, 1, 1);
        // Twelve blocks are kept and twelve are free, of which the other needs eleven.
        let clients = [first(), drafting, first()].map(|request| {
            let client = harness.start(request);
            harness.run();
            client
        });
        clients.into_iter().for_each(|mut client| check_answered(&mut client, &harness.limits));
        assert_eq!(harness.stats().prefix_hit_tokens, 11);
    }
}
