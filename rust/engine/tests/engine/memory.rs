//! Single behaviours of an engine that has less memory than it is asked for, each a sentence.

use std::sync::atomic::{AtomicUsize, Ordering};

use penstock_engine::testing::BlockHasher;
use penstock_engine::{Event, FinishReason, Limits, PreemptionMode, Rejection, Request};

use crate::harness::{Client, Harness, cached, caching, check_answered, limits, read};
use crate::oracle::{answer, request};

fn urgent(priority: i32, request: Request) -> Request {
    Request { priority, ..request }
}

/// Steps until somebody has been preempted.
fn run_until_preempted(harness: &mut Harness) {
    let before = harness.stats().preemptions;
    while harness.stats().preemptions == before {
        assert!(harness.step());
    }
}

#[test]
fn the_newest_of_the_least_urgent_gives_way() {
    let mut harness = Harness::new(Limits { num_blocks: 10, ..limits() });
    let priorities = [0, 1, 1, 0].into_iter().zip(0..);
    let start = |(priority, seed)| harness.start(urgent(priority, request(4, 13, seed)));
    let mut clients: Vec<_> = priorities.map(start).collect();
    run_until_preempted(&mut harness);
    assert_eq!((harness.stats().running, harness.stats().waiting), (3, 1));
    // What is on its way arrives.
    harness.step();
    clients.iter_mut().for_each(|client| drop(client.drain()));
    harness.step();
    let has_token = clients.iter_mut().map(|client| !read(client).0.is_empty());
    assert_eq!(has_token.collect::<Vec<_>>(), [true, true, false, true]);
    harness.run();
    assert!(harness.core.is_idle());
}

#[test]
fn who_only_waits_for_its_last_token_gives_way_first_and_gets_it() {
    use PreemptionMode::{Interrupt, Recompute, Swap};
    for preemption_mode in [Recompute, Swap, Interrupt] {
        let mut harness =
            Harness::new(Limits { num_blocks: 4, host_blocks: 8, preemption_mode, ..caching() });
        // Each holds two blocks when the first needs its third, and then the second's last row is in flight.
        let mut clients = [(4, 6), (1, 5)].map(|(prompt, output)| harness.start(request(prompt, output, 0)));
        for _ in 0..4 {
            harness.step();
        }
        assert_eq!(harness.device.num_plans(), 1);
        harness.plan();
        assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
        harness.run();
        clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
        assert_eq!((harness.stats().preemptions, harness.device.num_copies), (0, (0, 0)));
    }
}

#[test]
fn who_does_not_read_gives_way_before_who_reads() {
    // In ten blocks those who read make way for each other as well; twelve are enough for them.
    check_sleeper_gives_way(PreemptionMode::Recompute, 10);
    check_sleeper_gives_way(PreemptionMode::Interrupt, 12);
}

/// Whoever does not read waits until it does, whatever happens to others, and is then answered as they are.
fn check_sleeper_gives_way(preemption_mode: PreemptionMode, num_blocks: usize) {
    let mut harness = Harness::new(Limits { num_blocks, queue_capacity: 4, preemption_mode, ..limits() });
    let mut sleeping = harness.start(request(4, 13, 0));
    let mut reading: Vec<_> = (1..4).map(|seed| harness.start(request(4, 13, seed))).collect();
    let mut answers = vec![vec![]; 3];
    while harness.step() {
        for (client, tokens) in reading.iter_mut().zip(&mut answers) {
            tokens.extend(read(client).0);
        }
    }
    for (client, tokens) in reading.iter().zip(answers) {
        assert_eq!(tokens, answer(&client.request, &harness.limits).0);
    }
    assert!(harness.stats().preemptions > 0);
    assert_eq!(harness.stats().running + harness.stats().waiting, 1);
    let (mut tokens, mut last) = (vec![], None);
    while last.is_none() {
        let (more, finish) = read(&mut sleeping);
        tokens.extend(more);
        last = finish;
        harness.run();
    }
    assert_eq!((tokens, last.unwrap().reason), answer(&sleeping.request, &harness.limits));
}

#[test]
fn consumers_may_be_read_one_after_the_other_in_any_order() {
    let mut harness = Harness::new(Limits { max_waiting: 100, queue_capacity: 2, ..caching() });
    let mut clients: Vec<_> = (0..30).map(|seed| harness.start(request(5, 12, seed))).collect();
    for client in clients.iter_mut().rev() {
        let mut tokens = vec![];
        while !client.is_ended() {
            harness.run();
            let (more, finish) = read(client);
            assert!(!more.is_empty() || finish.is_some(), "it waits for those that are not read");
            tokens.extend(more);
        }
        assert_eq!(tokens, answer(&client.request, &harness.limits).0);
    }
}

#[test]
fn a_more_urgent_arrival_takes_a_place() {
    for lacking in [Limits { max_num_seqs: 2, ..limits() }, Limits { num_blocks: 16, ..limits() }] {
        let mut harness = Harness::new(Limits { max_num_batched_tokens: 64, ..lacking });
        let mut clients: Vec<_> = (0..2).map(|seed| harness.start(request(28, 4, seed))).collect();
        harness.step();
        let mut equal = harness.start(request(28, 4, 2));
        assert_eq!((harness.stats().waiting, harness.stats().preemptions), (1, 0), "an equal one waits");
        let mut urgent = harness.start(urgent(-1, request(28, 4, 3)));
        assert_eq!((harness.stats().waiting, harness.stats().preemptions), (2, 1));
        harness.run();
        check_answered(&mut urgent, &harness.limits);
        clients.iter_mut().chain([&mut equal]).for_each(|client| check_answered(client, &harness.limits));
    }
}

#[test]
fn nobody_who_was_admitted_is_dropped_for_a_more_urgent_arrival() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..limits() });
    let mut admitted = [-1, 0].map(|priority| harness.start(urgent(priority, request(4, 4, 0))));
    let refused = harness.start(urgent(-1, request(4, 4, 1))).drain();
    assert_eq!(refused, [Event::Rejected(Rejection::Overloaded { waiting: 1, limit: 1 })]);
    harness.run();
    admitted.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn an_urgent_arrival_preempts_nobody_in_vain() {
    let mut harness = Harness::new(Limits { num_blocks: 16, max_num_batched_tokens: 64, ..limits() });
    let _same = harness.start(urgent(-1, request(36, 4, 0)));
    let _less = harness.start(request(8, 4, 1));
    let _large = harness.start(urgent(-1, request(40, 4, 2)));
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 1));
    assert_eq!(harness.stats().preemptions, 0, "what the less urgent has would not be enough");
}

#[test]
fn who_cannot_fit_is_not_looked_up() {
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
fn who_lost_a_place_does_not_count_among_those_who_may_wait() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..limits() });
    let mut clients = vec![harness.start(urgent(1, request(4, 4, 0)))];
    clients.push(harness.start(request(4, 4, 1)));
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1), "the first has made way");
    clients.push(harness.start(request(4, 4, 2)));
    assert_eq!(harness.stats().waiting, 2);
    let refused = harness.start(request(4, 4, 3)).drain();
    assert_eq!(refused, [Event::Rejected(Rejection::Overloaded { waiting: 2, limit: 1 })]);
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn requests_that_nobody_reads_do_not_pile_up() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, queue_capacity: 1, ..limits() });
    let mut clients = vec![];
    for seed in 0..3 {
        clients.push(harness.start(request(4, 4, seed)));
        while harness.step() {}
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 2), "each made way for the next");
    let refused = harness.start(request(4, 4, 3)).drain();
    assert_eq!(refused, [Event::Rejected(Rejection::Overloaded { waiting: 2, limit: 1 })]);
    for client in &mut clients {
        for _ in 0..20 {
            client.drain();
            harness.step();
        }
        assert!(client.is_ended(), "read, it goes on to its end");
    }
}

#[test]
fn who_lost_a_place_is_not_overtaken_for_ever() {
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
fn every_stream_advances_in_every_step_while_a_very_long_prompt_is_computed() {
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
fn a_short_prompt_is_not_starved_by_long_ones() {
    let limits = Limits { max_model_len: 4_096, max_num_batched_tokens: 64, num_blocks: 4_096, ..caching() };
    let mut harness = Harness::new(limits);
    let _long: Vec<_> = (0..3).map(|seed| harness.start(request(2_000, 4, seed))).collect();
    harness.step();
    let mut short = harness.start(request(20, 1, 9));
    for _ in 0..2 + 1 {
        harness.step();
    }
    check_answered(&mut short, &harness.limits);
}

/// Sixty-four requests on memory for about four of them: those that were interrupted, and what the engine counted.
fn run_crowd(preemption_mode: PreemptionMode, host_blocks: usize) -> (usize, Harness) {
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
        let (expected, reason) = answer(&client.request, &harness.limits);
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
fn a_crowd_is_answered_in_little_memory_by_computing_again() {
    let (num_interrupted, harness) = run_crowd(PreemptionMode::Recompute, 0);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, 0));
    assert!(stats.recomputed_tokens > 0);
}

#[test]
fn a_crowd_is_answered_in_little_memory_by_saving_blocks() {
    let (num_interrupted, harness) = run_crowd(PreemptionMode::Swap, 256);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, stats.preemptions));
    assert_eq!(stats.recomputed_tokens, 0, "whatever was saved is not computed again");
    let (num_saved, num_loaded) = harness.device.num_copies;
    assert!(num_saved >= stats.swaps && num_saved == num_loaded);
}

#[test]
fn where_the_host_is_full_blocks_are_computed_again() {
    let (_, harness) = run_crowd(PreemptionMode::Swap, 6);
    let stats = harness.stats();
    assert!(stats.swaps > 0 && stats.swaps < stats.preemptions && stats.recomputed_tokens > 0);
}

#[test]
fn in_a_crowd_some_are_interrupted_where_that_was_asked_for() {
    let (num_interrupted, harness) = run_crowd(PreemptionMode::Interrupt, 0);
    assert!(num_interrupted > 0);
    assert_eq!(harness.stats().preemptions, num_interrupted as u64);
}
