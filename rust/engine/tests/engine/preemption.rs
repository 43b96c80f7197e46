//! Preemption and priorities, with fewer blocks than the requests need.

use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_engine::testing::BlockHasher;
use penstock_engine::{
    DEPTH, Event, FinishReason, Limits, PreemptionMode, PreemptionVictim, Rejection, Request,
};

use crate::harness::{Client, Harness, cached, caching, check_output, limits, read};
use crate::oracle::{expected_output, request};
use crate::random::Random;

fn with_priority(priority: i32, request: Request) -> Request {
    Request { priority, ..request }
}

/// Steps until a sequence has been preempted.
fn run_until_preempted(harness: &mut Harness) {
    let before = harness.stats().preemptions;
    while harness.stats().preemptions == before {
        assert!(harness.step());
    }
}

#[test]
fn the_newest_of_the_lowest_priority_is_preempted() {
    let mut harness = Harness::new(Limits { num_blocks: 10, ..limits() });
    let priorities = [0, 1, 1, 0].into_iter().zip(0..);
    let start = |(priority, seed)| harness.start(with_priority(priority, request(4, 13, seed)));
    let mut clients: Vec<_> = priorities.map(start).collect();
    run_until_preempted(&mut harness);
    assert_eq!((harness.stats().running, harness.stats().waiting), (3, 1));
    // Tokens in flight arrive.
    harness.step();
    clients.iter_mut().for_each(|client| drop(client.drain()));
    harness.step();
    let has_token = clients.iter_mut().map(|client| !read(client).0.is_empty());
    assert_eq!(has_token.collect::<Vec<_>>(), [true, true, false, true]);
    harness.run();
    assert!(harness.core.is_idle());
}

#[test]
fn a_sequence_with_its_last_token_in_flight_yields_first() {
    use PreemptionMode::{Interrupt, Recompute, Swap};
    for preemption_mode in [Recompute, Swap, Interrupt] {
        let mut harness =
            Harness::new(Limits { num_blocks: 4, host_blocks: 8, preemption_mode, ..caching() });
        // Each has two blocks when the first needs its third, and the last row of the second is in flight then.
        let mut clients = [(4, 6), (1, 5)].map(|(prompt, output)| harness.start(request(prompt, output, 0)));
        for _ in 0..4 {
            harness.step();
        }
        assert_eq!(harness.device.num_plans(), 1);
        harness.plan();
        assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
        harness.run();
        clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
        assert_eq!((harness.stats().preemptions, harness.device.num_copies), (0, (0, 0)));
    }
}

#[test]
fn paused_sequences_are_preempted_first() {
    // With ten blocks the sequences that are read preempt each other as well; twelve are enough for them.
    check_unread_is_preempted(PreemptionMode::Recompute, 10);
    check_unread_is_preempted(PreemptionMode::Interrupt, 12);
}

/// A sequence that is not read waits until it is, and then completes.
fn check_unread_is_preempted(preemption_mode: PreemptionMode, num_blocks: usize) {
    let mut harness = Harness::new(Limits { num_blocks, queue_capacity: 4, preemption_mode, ..limits() });
    let mut unread = harness.start(request(4, 13, 0));
    let mut reading: Vec<_> = (1..4).map(|seed| harness.start(request(4, 13, seed))).collect();
    let mut answers = vec![vec![]; 3];
    while harness.step() {
        for (client, tokens) in reading.iter_mut().zip(&mut answers) {
            tokens.extend(read(client).0);
        }
    }
    for (client, tokens) in reading.iter().zip(answers) {
        assert_eq!(tokens, expected_output(&client.request, &harness.limits).0);
    }
    assert!(harness.stats().preemptions > 0);
    assert_eq!(harness.stats().running + harness.stats().waiting, 1);
    let (mut tokens, mut last) = (vec![], None);
    while last.is_none() {
        let (more, finish) = read(&mut unread);
        tokens.extend(more);
        last = finish;
        harness.run();
    }
    assert_eq!((tokens, last.unwrap().reason), expected_output(&unread.request, &harness.limits));
}

#[test]
fn consumers_may_be_read_in_any_order() {
    let mut harness = Harness::new(Limits { max_waiting: 100, queue_capacity: 2, ..caching() });
    let mut clients: Vec<_> = (0..30).map(|seed| harness.start(request(5, 12, seed))).collect();
    for client in clients.iter_mut().rev() {
        let mut tokens = vec![];
        while !client.is_ended() {
            harness.run();
            let (more, finish) = read(client);
            assert!(!more.is_empty() || finish.is_some(), "it waits for consumers that are not read");
            tokens.extend(more);
        }
        assert_eq!(tokens, expected_output(&client.request, &harness.limits).0);
    }
}

#[test]
fn a_request_of_higher_priority_preempts() {
    for lacking in [Limits { max_num_seqs: 2, ..limits() }, Limits { num_blocks: 16, ..limits() }] {
        let mut harness = Harness::new(Limits { max_num_batched_tokens: 64, ..lacking });
        let mut clients: Vec<_> = (0..2).map(|seed| harness.start(request(28, 4, seed))).collect();
        harness.step();
        let mut equal = harness.start(request(28, 4, 2));
        assert_eq!(
            (harness.stats().waiting, harness.stats().preemptions),
            (1, 0),
            "one of equal priority waits"
        );
        let mut high = harness.start(with_priority(-1, request(28, 4, 3)));
        assert_eq!((harness.stats().waiting, harness.stats().preemptions), (2, 1));
        harness.run();
        check_output(&mut high, &harness.limits);
        clients.iter_mut().chain([&mut equal]).for_each(|client| check_output(client, &harness.limits));
    }
}

#[test]
fn admitted_requests_are_not_dropped_for_higher_priority() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..limits() });
    let mut admitted = [-1, 0].map(|priority| harness.start(with_priority(priority, request(4, 4, 0))));
    let rejected = harness.start(with_priority(-1, request(4, 4, 1))).drain();
    assert_eq!(rejected, [Event::Rejected(Rejection::Overloaded { waiting: 1, limit: 1 })]);
    harness.run();
    admitted.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn no_preemption_if_it_frees_too_few_blocks() {
    let mut harness = Harness::new(Limits { num_blocks: 16, max_num_batched_tokens: 64, ..limits() });
    let _same = harness.start(with_priority(-1, request(36, 4, 0)));
    let _less = harness.start(request(8, 4, 1));
    let _large = harness.start(with_priority(-1, request(40, 4, 2)));
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 1));
    assert_eq!(harness.stats().preemptions, 0, "the blocks of the lower priority are not enough");
}

#[test]
fn no_prefix_lookup_if_blocks_cannot_suffice() {
    static NUM_HASHED: AtomicUsize = AtomicUsize::new(0);
    let hasher = BlockHasher::with_function(0, |_, parent, tokens| {
        NUM_HASHED.fetch_add(1, Ordering::Relaxed);
        tokens.iter().fold(parent, |sum, token| sum * 31 + u128::from(*token))
    });
    let mut harness = Harness::with_hasher(Limits { num_blocks: 16, ..caching() }, hasher);
    cached(&mut harness, request(5, 1, 0));
    let _running = harness.start(request(8, 20, 1));
    let before = NUM_HASHED.load(Ordering::Relaxed);
    let _waiting = harness.start(request(61, 1, 0));
    assert_eq!((harness.stats().waiting, NUM_HASHED.load(Ordering::Relaxed)), (1, before));
}

#[test]
fn preempted_requests_do_not_count_against_max_waiting() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..limits() });
    let mut clients = vec![harness.start(with_priority(1, request(4, 4, 0)))];
    clients.push(harness.start(request(4, 4, 1)));
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1), "the first was preempted");
    clients.push(harness.start(request(4, 4, 2)));
    assert_eq!(harness.stats().waiting, 2);
    let rejected = harness.start(request(4, 4, 3)).drain();
    assert_eq!(rejected, [Event::Rejected(Rejection::TooManyPreempted { waiting: 2, limit: 2 })]);
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn a_preempted_request_is_not_starved() {
    let mut harness = Harness::new(Limits { num_blocks: 9, max_waiting: 4, ..limits() });
    let _first = harness.start(request(4, 16, 0));
    let mut second = harness.start(request(4, 16, 1));
    run_until_preempted(&mut harness);
    let (mut others, mut num_steps) = (vec![], 0);
    while !second.is_ended() {
        while harness.stats().waiting < 4 {
            others.push(harness.start(request(4, 16, others.len() as u64)));
        }
        assert!(harness.step());
        second.drain();
        num_steps += 1;
    }
    assert!(num_steps <= 2 * (4 + 16) + 4, "{num_steps} steps");
}

#[test]
fn decodes_advance_every_step_beside_a_very_long_prompt() {
    let limits = Limits {
        max_model_len: 40_000,
        max_num_seqs: 21,
        max_num_batched_tokens: 512,
        block_size: 16,
        num_blocks: 4_000,
        queue_capacity: 256,
        ..caching()
    };
    let mut harness = Harness::new(limits);
    let mut streams: Vec<_> = (0..20).map(|seed| harness.start(request(3, 200, seed))).collect();
    harness.step();
    harness.step();
    streams.iter_mut().for_each(|client| drop(client.drain()));
    let mut long = harness.start(request(32_768, 1, 99));
    let mut num_steps = 0;
    while !long.is_ended() {
        let before = harness.stats().prompt_tokens;
        assert!(harness.step());
        let num_prompt = harness.stats().prompt_tokens - before;
        assert!(num_prompt <= 512 - 20 && streams.iter_mut().all(|client| read(client).0.len() == 1));
        long.drain();
        num_steps += 1;
    }
    assert!(num_steps <= 32_768 / (512 - 20) + 4, "{num_steps} steps");
}

#[test]
fn long_prompts_do_not_starve_a_short_one() {
    let limits = Limits { max_model_len: 4_096, max_num_batched_tokens: 64, num_blocks: 4_096, ..caching() };
    let mut harness = Harness::new(limits);
    let _long: Vec<_> = (0..3).map(|seed| harness.start(request(2_000, 4, seed))).collect();
    harness.step();
    let mut short = harness.start(request(20, 1, 9));
    for _ in 0..2 + 1 {
        harness.step();
    }
    check_output(&mut short, &harness.limits);
}

/// Runs 64 requests on blocks for about four of them. Returns the number of interrupted ones.
fn run_overcommitted(preemption_mode: PreemptionMode, host_blocks: usize) -> (usize, Harness) {
    let limits = Limits {
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        max_waiting: 64,
        num_blocks: 4 * 16,
        preemption_mode,
        host_blocks,
        ..limits()
    };
    let mut harness = Harness::new(limits);
    let sizes = (0..64u64).map(|seed| (1 + 7 * seed as usize % 30, 10 + 5 * seed as usize % 24, seed));
    let mut clients: Vec<Client> =
        sizes.map(|(prompt, output, seed)| harness.start(request(prompt, output, seed))).collect();
    harness.run();
    let mut num_interrupted = 0;
    for client in &mut clients {
        let (expected, reason) = expected_output(&client.request, &harness.limits);
        let (tokens, finish) = read(client);
        if finish.as_ref().is_some_and(|finish| finish.reason == FinishReason::Interrupted) {
            assert!(expected.starts_with(&tokens) && tokens.len() < expected.len());
            num_interrupted += 1;
        } else {
            assert_eq!((tokens, finish.map(|finish| finish.reason)), (expected, Some(reason)));
        }
    }
    let stats = harness.stats();
    assert!(harness.core.is_idle() && stats.preemptions > 0);
    assert_eq!((stats.blocks_used, stats.blocks_reserved, stats.host_blocks_used), (0, 0, 0));
    (num_interrupted, harness)
}

#[test]
fn overcommit_completes_by_recomputation() {
    let (num_interrupted, harness) = run_overcommitted(PreemptionMode::Recompute, 0);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, 0));
    assert!(stats.recomputed_tokens > 0);
}

#[test]
fn overcommit_completes_by_swapping() {
    let (num_interrupted, harness) = run_overcommitted(PreemptionMode::Swap, 256);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, stats.preemptions));
    assert_eq!(stats.recomputed_tokens, 0, "swapped blocks are not computed again");
    let (num_saved, num_loaded) = harness.device.num_copies;
    assert!(num_saved >= stats.swaps && num_saved == num_loaded);
}

#[test]
fn swap_falls_back_to_recomputation_if_the_host_is_full() {
    let (_, harness) = run_overcommitted(PreemptionMode::Swap, 6);
    let stats = harness.stats();
    assert!(stats.swaps > 0 && stats.swaps < stats.preemptions && stats.recomputed_tokens > 0);
}

/// Limits under which running requests of random lengths interrupt each other.
fn interrupting(num_blocks: usize) -> Limits {
    Limits {
        max_num_seqs: 8,
        max_num_batched_tokens: 256,
        num_blocks,
        preemption_mode: PreemptionMode::Interrupt,
        preemption_victim: PreemptionVictim::Longest,
        ..limits()
    }
}

#[test]
fn the_longest_of_the_lowest_priority_is_interrupted() {
    let mut harness = Harness::new(interrupting(18));
    // The second and the fourth are the longest of the lowest priority, and the fourth is the newer of them.
    let requests = [(0, 24), (1, 12), (1, 8), (1, 12)].into_iter().zip(0..);
    let start = |((priority, prompt), seed)| with_priority(priority, request(prompt, 20, seed));
    let mut clients: Vec<_> = requests.map(|each| harness.start(start(each))).collect();
    run_until_preempted(&mut harness);
    let mut reason = |index: usize| read(&mut clients[index]).1.map(|finish| finish.reason);
    assert_eq!((reason(1), reason(3)), (None, Some(FinishReason::Interrupted)));
    harness.run();
    assert_eq!((reason(0), reason(1)), (Some(FinishReason::Length), Some(FinishReason::Interrupted)));
    assert_eq!(reason(2), Some(FinishReason::Length));
    assert_eq!(harness.stats().preemptions, 2);
}

#[test]
fn no_running_sequence_is_longer_than_the_interrupted_one() {
    let mut num_interrupted = 0;
    for seed in 0..200 {
        let mut random = Random(seed);
        let mut harness = Harness::new(interrupting(random.between(28, 40)));
        let requests = (0..8).map(|seed| {
            let (prompt, output) = (random.between(1, 8), random.between(8, 48));
            with_priority(random.below(2) as i32, request(prompt, output, seed))
        });
        let mut clients: Vec<_> = requests.map(|request| harness.start(request)).collect();
        let mut tokens: Vec<_> = clients.iter().map(|client| client.request.prompt.len()).collect();
        let mut is_open = [true; 8];
        assert_eq!(harness.stats().waiting, 0);
        loop {
            let num_planned = harness.plan().len();
            // All were read before this plan, so an end without a token is an interruption by it.
            let mut interrupted = vec![];
            for (index, client) in clients.iter_mut().enumerate() {
                if read(client).1.is_some_and(|finish| finish.reason == FinishReason::Interrupted) {
                    is_open[index] = false;
                    interrupted.push((client.request.priority, tokens[index], index));
                }
            }
            for (index, client) in clients.iter().enumerate().filter(|(index, _)| is_open[*index]) {
                let num_left = client.request.prompt.len() + client.request.max_tokens - tokens[index];
                let key = (client.request.priority, tokens[index], index);
                // The last tokens may be in flight: such a sequence yields without an interruption.
                assert!(num_left <= DEPTH || interrupted.iter().all(|victim| *victim > key));
            }
            num_interrupted += interrupted.len();
            if num_planned == 0 && harness.device.num_plans() == 0 {
                break;
            }
            harness.complete();
            for (index, client) in clients.iter_mut().enumerate() {
                let (new, finish) = read(client);
                tokens[index] += new.len();
                is_open[index] &= finish.is_none();
            }
        }
        assert_eq!((is_open, harness.stats().blocks_used), ([false; 8], 0));
    }
    assert!(num_interrupted > 100);
}

#[test]
fn overcommit_interrupts_in_interrupt_mode() {
    let (num_interrupted, harness) = run_overcommitted(PreemptionMode::Interrupt, 0);
    assert!(num_interrupted > 0);
    assert_eq!(harness.stats().preemptions, num_interrupted as u64);
}
