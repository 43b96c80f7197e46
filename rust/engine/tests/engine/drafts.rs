//! Draft tokens: what they gain, which resources they use, and that other requests are not affected.

use std::sync::Arc;

use penstock_engine::{FinishReason, Limits, LogitsProcessor, PreemptionMode, Request};

use crate::harness::{Client, Harness, caching, check_output, limits, read};
use crate::oracle::{Rails, expected_output, request};

fn speculating() -> Limits {
    Limits { num_speculative_tokens: 8, max_num_batched_tokens: 32, ..limits() }
}

/// A request whose output mostly repeats itself, so that lookups find something.
fn repetitive(num_prompt: usize, max_tokens: usize) -> Request {
    request(num_prompt, max_tokens, 3)
}

fn guided(request: Request) -> Request {
    Request { grammar: Some(Arc::new(Rails)), ..request }
}

/// Leaves the logits as they are.
#[derive(Debug)]
struct Unchanged;

impl LogitsProcessor for Unchanged {
    fn process(&self, _: &[u32], _: &[u32], _: &mut [f32]) -> Result<(), String> {
        Ok(())
    }
}

/// The number of steps of a request.
fn num_steps(limits: Limits, request: Request) -> u64 {
    let mut harness = Harness::new(limits);
    let mut client = harness.start(request);
    harness.run();
    check_output(&mut client, &harness.limits);
    harness.stats().steps
}

#[test]
fn repetitive_output_takes_fewer_steps() {
    let plain = num_steps(limits(), repetitive(4, 56));
    let drafted = num_steps(speculating(), repetitive(4, 56));
    assert_eq!(plain, 56);
    assert!(drafted <= 36, "{drafted} steps");
}

#[test]
fn output_without_repetitions_is_hardly_drafted() {
    let mut harness = Harness::new(speculating());
    let mut client = harness.start(request(4, 56, 1));
    harness.run();
    check_output(&mut client, &harness.limits);
    let stats = harness.stats();
    assert!(stats.drafted_tokens <= 30, "{stats:?}");
}

#[test]
fn forced_tokens_are_drafted_without_speculation_too() {
    for limits in [limits(), speculating()] {
        let mut harness = Harness::new(limits);
        let mut client = harness.start(guided(request(4, 56, 1)));
        harness.run();
        check_output(&mut client, &harness.limits);
        let stats = harness.stats();
        assert!(stats.accepted_tokens > 20 && stats.steps < 36, "{stats:?}");
        assert!(harness.device.num_rejected_drafts > 0, "forced tokens may be wrong");
    }
}

#[test]
fn request_with_logits_processors_has_no_drafts() {
    for request in [repetitive(4, 56), guided(repetitive(4, 56))] {
        let mut harness = Harness::new(speculating());
        let mut client = harness.start(Request { processors: vec![Arc::new(Unchanged)], ..request });
        harness.run();
        check_output(&mut client, &harness.limits);
        assert_eq!((harness.stats().drafted_tokens, harness.stats().steps), (0, 56));
    }
}

#[test]
fn one_step_is_in_flight_while_a_sequence_drafts() {
    let mut harness = Harness::new(speculating());
    let mut clients = [repetitive(4, 40), request(4, 20, 1)].map(|request| harness.start(request));
    harness.plan();
    harness.plan();
    assert_eq!(harness.device.num_plans(), 2, "no token is known to draft from");
    harness.complete();
    harness.complete();
    let mut num_alone = 0;
    while harness.stats().running > 0 {
        if harness.plan().iter().any(|(_, num_tokens)| *num_tokens > 1) {
            assert!(harness.plan().is_empty(), "no second step is in flight");
            num_alone += 1;
        }
        harness.complete();
    }
    assert!(num_alone > 3, "{num_alone}");
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn two_steps_are_in_flight_without_drafts() {
    let mut harness = Harness::new(speculating());
    // No token repeats, so no lookup succeeds.
    let mut client = harness.start(request(4, 40, 1));
    let mut num_alone = 0;
    harness.plan();
    while harness.stats().running > 0 {
        num_alone += usize::from(harness.plan().is_empty());
        harness.complete();
    }
    check_output(&mut client, &harness.limits);
    assert!(num_alone <= 4, "{num_alone} of 40 steps were alone in flight");
}

#[test]
fn drafts_use_only_the_remaining_budget() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 8, ..speculating() });
    let mut drafting = harness.start(repetitive(4, 50));
    while harness.stats().accepted_tokens < 8 {
        harness.step();
    }
    let mut arriving = harness.start(request(30, 4, 1));
    let mut most = 0;
    loop {
        let scheduled = harness.plan();
        let num_tokens: u32 = scheduled.iter().map(|(_, num_tokens)| num_tokens).sum();
        assert!(num_tokens <= 8);
        let is_whole_prompt_done = !read(&mut arriving).0.is_empty();
        if is_whole_prompt_done {
            break;
        }
        let of_prompt =
            scheduled.iter().find(|(slot, _)| *slot == 1).map_or(0, |(_, num_tokens)| *num_tokens);
        most = most.max(of_prompt);
        harness.complete();
    }
    assert_eq!(most, 7, "the prompt gets all but the decode's own token");
    harness.run();
    check_output(&mut drafting, &harness.limits);
}

#[test]
fn blocks_of_rejected_drafts_are_freed_at_once() {
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
    assert!(most >= 4 && harness.device.num_rejected_drafts > 0, "drafts use blocks: {most}");
}

fn read_some(client: &mut Client) -> usize {
    read(client).0.len()
}

#[test]
fn drafts_cause_no_preemption() {
    let preemptions = |num_speculative_tokens| {
        let mut harness = Harness::new(Limits { num_blocks: 9, num_speculative_tokens, ..speculating() });
        let mut clients = [repetitive(4, 13), repetitive(5, 12)].map(|request| harness.start(request));
        harness.run();
        clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
        (harness.stats().preemptions, harness.stats().accepted_tokens > 0)
    };
    assert_eq!(preemptions(0), (0, false));
    assert_eq!(preemptions(8), (0, true));
}

#[test]
fn accepted_drafts_survive_preemption() {
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
            let scheduled = harness.plan();
            let (before, num_drafts) = (harness.stats().accepted_tokens, scheduled[0].1 - 1);
            if before > 0 && num_drafts > 3 {
                let mut urgent = harness.start(request(5, 3, 1));
                assert_eq!((harness.stats().preemptions, harness.stats().waiting), (1, 1));
                harness.complete();
                let accepted = harness.stats().accepted_tokens - before;
                harness.run();
                check_output(&mut urgent, &harness.limits);
                break accepted;
            }
            harness.complete();
        };
        assert!(accepted > 0);
        check_output(&mut client, &harness.limits);
    }
}

#[test]
fn a_stop_among_accepted_drafts_ends_the_request() {
    let plain = repetitive(4, 50);
    let ids: Vec<u32> = expected_output(&plain, &limits()).0.iter().map(|token| token.id).collect();
    let mut num_cut = 0;
    for end in 8..40 {
        let stop_token_sequences = vec![ids[end - 7..end].to_vec()];
        let (tokens, reason) = expected_output(
            &Request { stop_token_sequences: stop_token_sequences.clone(), ..plain.clone() },
            &limits(),
        );
        assert!(matches!(reason, FinishReason::StopSequence(0)));
        let mut harness = Harness::new(speculating());
        let mut client = harness.start(Request { stop_token_sequences, ..plain.clone() });
        harness.run();
        check_output(&mut client, &harness.limits);
        let stats = harness.stats();
        assert_eq!(stats.generation_tokens, tokens.len() as u64, "later drafts do not count");
        num_cut += usize::from(stats.accepted_tokens > 0);
    }
    assert!(num_cut > 10);
}

#[test]
fn drafts_respect_queue_room_and_max_tokens() {
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
        assert_eq!((tokens, reason), expected_output(&client.request, &harness.limits));
    }
}

#[test]
fn only_accepted_drafts_enter_the_prefix_cache() {
    let mut harness = Harness::new(Limits { num_speculative_tokens: 8, block_size: 2, ..caching() });
    let mut first = harness.start(repetitive(4, 40));
    harness.run();
    let (tokens, _) = read(&mut first);
    assert!(harness.device.num_rejected_drafts > 0);
    let prompt: Vec<u32> = first.request.prompt.iter().copied().chain(tokens.iter().map(|t| t.id)).collect();
    let mut second = harness.start(Request { prompt: prompt.into(), ..request(4, 8, 1) });
    harness.run();
    check_output(&mut second, &harness.limits);
    assert_eq!(harness.stats().prefix_hit_tokens, 42, "all but the last token, which was not computed");
}

#[test]
fn two_steps_are_in_flight_if_prompts_use_the_budget() {
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
    check_output(&mut drafting, &harness.limits);
    check_output(&mut arriving, &harness.limits);
}

#[test]
fn drafts_evict_no_prefix() {
    let limits = Limits { num_blocks: 24, block_size: 1, max_num_batched_tokens: 32, ..caching() };
    let plain = request(4, 20, 2);
    let ids: Vec<u32> = expected_output(&plain, &limits).0.iter().map(|token| token.id).collect();
    let plain = Request { stop_token_sequences: vec![ids[..8].to_vec()], ..plain };
    for drafting in [plain.clone(), guided(plain)] {
        let mut harness = Harness::new(limits.clone());
        let first = || request(12, 1, 1);
        // Twelve blocks are cached and twelve are free, of which the second request needs eleven.
        let clients = [first(), drafting, first()].map(|request| {
            let client = harness.start(request);
            harness.run();
            client
        });
        clients.into_iter().for_each(|mut client| check_output(&mut client, &harness.limits));
        assert_eq!(harness.stats().prefix_hit_tokens, 11);
    }
}
