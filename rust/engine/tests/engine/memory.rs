//! Single behaviours of an engine that remembers prefixes and has less memory than it is asked for, each a sentence.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use penstock_engine::message::Message;
use penstock_engine::prefix::BlockHasher;
use penstock_engine::{CachedTokens, Event, FinishReason, Limits, OnExhaustion, Refusal, Request};

use crate::harness::{Client, Harness, check_answered, check_ended, limits, read};
use crate::oracle::{answer, request};

const TTL: Duration = Duration::from_secs(300);

fn caching() -> Limits {
    Limits { prefix_cache_ttl: Some(TTL), ..limits() }
}

fn urgent(priority: i32, request: Request) -> Request {
    Request { priority, ..request }
}

/// Runs a request to its end; what of it was cached.
fn cached(harness: &mut Harness, request: Request) -> CachedTokens {
    let mut client = harness.start(request);
    harness.run();
    let expected = answer(&client.request, &harness.limits);
    let (tokens, finish) = read(&mut client);
    let finish = finish.expect("it ends");
    assert_eq!((tokens, finish.reason), expected);
    finish.cached
}

/// As many tokens of device and host.
fn found(device: usize, host: usize) -> CachedTokens {
    CachedTokens { device, host }
}

/// Steps until somebody has been preempted.
fn run_until_preempted(harness: &mut Harness) {
    let before = harness.stats().preemptions;
    while harness.stats().preemptions == before {
        assert!(harness.step());
    }
}

#[test]
fn a_prompt_seen_before_is_computed_from_its_last_block_on() {
    let mut harness = Harness::new(caching());
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(0, 0));
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(20, 0));
    assert_eq!(cached(&mut harness, request(20, 4, 0)), found(16, 0), "the last token is always computed");
    let stats = harness.stats();
    assert_eq!((stats.prefix_query_tokens, stats.prefix_hit_tokens), (62, 36));
    assert_eq!((stats.prompt_tokens, stats.recomputed_tokens), (62 - 36, 0));
    assert_eq!(
        (stats.blocks_used, stats.blocks_cached),
        (0, 5 + 1),
        "a generated block and those of the prompt"
    );
}

#[test]
fn a_conversation_of_ten_turns_computes_only_what_is_new() {
    let limits = Limits { max_model_len: 1024, num_blocks: 256, max_num_batched_tokens: 512, ..caching() };
    let mut harness = Harness::new(limits);
    let mut prompt: Vec<u32> = vec![];
    let mut num_known = 0;
    for turn in 0..10 {
        prompt.extend(&request(30, 1, turn).prompt);
        let before = harness.stats().prompt_tokens;
        let mut client = harness.start(Request { prompt: prompt.clone(), ..request(1, 21, turn) });
        harness.run();
        let (tokens, finish) = read(&mut client);
        let block_size = harness.limits.block_size;
        let num_cached = num_known / block_size * block_size;
        assert_eq!(finish.unwrap().cached, found(num_cached, 0));
        assert_eq!(harness.stats().prompt_tokens - before, (prompt.len() - num_cached) as u64);
        prompt.extend(tokens.iter().map(|token| token.id));
        num_known = prompt.len() - 1; // the last generated token was not computed
    }
}

#[test]
fn requests_that_arrive_together_share_what_the_first_has_published() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 128, ..caching() });
    let same = || request(24, 6, 0);
    let mut clients: Vec<_> = (0..3).map(|_| harness.start(same())).collect();
    assert!(harness.step());
    assert_eq!(harness.stats().blocks_cached, 0, "all that is published is in use");
    while harness.stats().generation_tokens < 3 {
        assert!(harness.step());
    }
    assert!(harness.stats().blocks_used <= 6 + 3, "one copy of the prompt, and a block each to grow into");
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn who_gets_a_place_finds_all_that_the_step_before_has_computed() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, ..caching() });
    let mut ending = harness.start(request(4, 1, 0));
    let _sharing = harness.start(request(9, 8, 1));
    let mut waiting = harness.start(request(9, 1, 1));
    harness.plan();
    harness.complete();
    assert!(read(&mut ending).1.is_some(), "its row came before that of the one who shares");
    harness.run();
    assert_eq!(read(&mut waiting).1.unwrap().cached, found(8, 0));
}

#[test]
fn a_prefix_expires_when_it_was_not_used_for_its_time() {
    let mut harness = Harness::new(caching());
    cached(&mut harness, request(21, 4, 0));
    harness.pass(299_000);
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(20, 0), "and used again just now");
    harness.pass(299_999);
    assert_eq!(harness.core.next_expiry(), Some(harness.now + Duration::from_millis(1)));
    harness.plan();
    assert_eq!(harness.stats().blocks_cached, 6);
    harness.pass(1);
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(0, 0));
    harness.pass(300_000);
    harness.plan();
    assert_eq!((harness.stats().blocks_cached, harness.core.next_expiry()), (0, None));
}

#[test]
fn prefixes_expire_while_the_device_is_busy() {
    let mut harness = Harness::new(caching());
    cached(&mut harness, request(21, 4, 0));
    let _running = harness.start(request(4, 20, 1));
    while !harness.plan().is_empty() {}
    harness.pass(300_000);
    harness.attend();
    assert_eq!((harness.stats().blocks_cached, harness.core.next_expiry()), (0, None));
}

#[test]
fn salts_never_share() {
    let mut harness = Harness::new(caching());
    let salted = |salt: Option<&str>| Request { cache_salt: salt.map(Arc::from), ..request(21, 4, 0) };
    for salt in [None, Some(""), Some("mine"), Some("yours")] {
        assert_eq!(cached(&mut harness, salted(salt)), found(0, 0));
        assert_eq!(cached(&mut harness, salted(salt)), found(20, 0));
    }
}

#[test]
fn who_does_not_want_the_cache_neither_takes_nor_leaves() {
    let mut harness = Harness::new(caching());
    let alone = || Request { prefix_cache: false, ..request(21, 4, 0) };
    assert_eq!(cached(&mut harness, alone()), found(0, 0));
    assert_eq!(harness.stats().blocks_cached, 0);
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(0, 0));
    assert_eq!(cached(&mut harness, alone()), found(0, 0));
    assert_eq!(harness.stats().prefix_query_tokens, 21);
}

#[test]
fn nothing_is_shared_from_the_shared_length_on() {
    let mut harness = Harness::new(Limits { max_shared_len: 18, ..caching() });
    cached(&mut harness, request(18, 20, 0));
    assert_eq!(harness.stats().blocks_cached, 4, "of sixteen tokens");
    assert_eq!(cached(&mut harness, request(18, 20, 0)), found(16, 0));
    assert_eq!(cached(&mut harness, request(19, 20, 0)), found(0, 0), "a longer prompt has other keys");
}

#[test]
fn a_flush_forgets_everything_at_once_but_what_is_in_use() {
    let mut harness = Harness::new(caching());
    cached(&mut harness, request(21, 4, 0));
    let mut running = harness.start(request(21, 10, 0));
    harness.step();
    harness.handle(Message::FlushPrefixCache);
    assert_eq!(harness.stats().blocks_cached, 0);
    let mut same = harness.start(request(21, 1, 0));
    harness.run();
    check_answered(&mut running, &harness.limits);
    let (_, finish) = read(&mut same);
    assert_eq!(finish.unwrap().cached, found(0, 0));
    assert_eq!(
        harness.stats().blocks_cached,
        5,
        "what was computed before the flush is not published after it"
    );
}

#[test]
fn what_was_computed_before_a_flush_is_not_published_after_a_swap_either() {
    let swapping = Limits { num_blocks: 6, host_blocks: 16, on_exhaustion: OnExhaustion::Swap, ..caching() };
    let mut harness = Harness::new(swapping);
    let _older = harness.start(request(4, 13, 0));
    let mut newer = harness.start(request(4, 13, 1));
    harness.step();
    harness.step();
    harness.handle(Message::FlushPrefixCache);
    harness.run();
    assert!(harness.stats().swaps > 0);
    let (tokens, _) = read(&mut newer);
    let mut prompt = newer.request.prompt.clone();
    prompt.extend(tokens.iter().map(|token| token.id));
    assert_eq!(prompt.len(), 4 + 13);
    assert_eq!(cached(&mut harness, Request { prompt, ..request(1, 1, 1) }), found(0, 0));
}

#[test]
fn what_has_no_room_in_the_cache_is_found_on_the_host() {
    let mut harness = Harness::new(Limits { num_blocks: 8, host_blocks: 16, ..caching() });
    cached(&mut harness, request(21, 4, 0));
    cached(&mut harness, request(25, 4, 1));
    assert!(harness.stats().host_blocks_used > 0);
    let again = cached(&mut harness, request(21, 4, 0));
    assert_eq!(again.device + again.host, 20);
    assert!(again.host >= 16, "{again:?}");
    assert_eq!(harness.stats().prefix_host_hit_tokens, again.host as u64);
    assert!(harness.device.num_copies.1 >= 4, "they were loaded");
    harness.pass(300_000);
    harness.plan();
    assert_eq!(
        (harness.stats().blocks_cached, harness.stats().host_blocks_used),
        (0, 0),
        "both tiers expire"
    );
}

#[test]
fn a_host_tier_that_is_no_place_for_prefixes_gets_none() {
    let mut harness =
        Harness::new(Limits { num_blocks: 8, host_blocks: 16, host_prefixes: false, ..caching() });
    cached(&mut harness, request(21, 4, 0));
    cached(&mut harness, request(25, 4, 1));
    assert_eq!((harness.stats().host_blocks_used, harness.device.num_copies), (0, (0, 0)));
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
    use OnExhaustion::{Interrupt, Recompute, Swap};
    for on_exhaustion in [Recompute, Swap, Interrupt] {
        let mut harness = Harness::new(Limits { num_blocks: 4, host_blocks: 8, on_exhaustion, ..caching() });
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
    check_sleeper_gives_way(OnExhaustion::Recompute, 10);
    check_sleeper_gives_way(OnExhaustion::Interrupt, 12);
}

/// Whoever does not read waits until it does, whatever happens to others, and is then answered as they are.
fn check_sleeper_gives_way(on_exhaustion: OnExhaustion, num_blocks: usize) {
    let mut harness = Harness::new(Limits { num_blocks, queue_capacity: 4, on_exhaustion, ..limits() });
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
    assert_eq!(refused, [Event::Refused(Refusal::Overloaded { waiting: 1, limit: 1 })]);
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
    assert_eq!(refused, [Event::Refused(Refusal::Overloaded { waiting: 2, limit: 1 })]);
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
    assert_eq!(refused, [Event::Refused(Refusal::Overloaded { waiting: 2, limit: 1 })]);
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

/// A prefix of 32,768 tokens, most of it on the host, in an engine with nothing to do.
fn with_long_prefix() -> Harness {
    let limits = Limits {
        max_model_len: 40_000,
        max_num_seqs: 21,
        max_num_batched_tokens: 512,
        max_waiting: 200,
        block_size: 16,
        num_blocks: 2_400,
        host_blocks: 4_000,
        queue_capacity: 256,
        ..caching()
    };
    let mut harness = Harness::new(limits);
    cached(&mut harness, request(32_768, 1, 99));
    cached(&mut harness, request(32_000, 1, 98));
    assert!(harness.stats().host_blocks_used > 1_600);
    harness
}

#[test]
fn every_stream_advances_in_every_step_while_a_very_long_prefix_is_loaded() {
    let mut harness = with_long_prefix();
    let mut streams: Vec<_> = (0..20).map(|seed| harness.start(request(3, 200, seed))).collect();
    harness.step();
    harness.step();
    streams.iter_mut().for_each(|client| drop(client.drain()));
    let before = harness.stats().prompt_tokens;
    let mut long = harness.start(request(32_768, 1, 99));
    let mut num_steps = 0;
    while !long.is_ended() {
        assert!(harness.step());
        assert!(streams.iter_mut().all(|client| read(client).0.len() == 1));
        if let (tokens, Some(finish)) = read(&mut long) {
            assert_eq!(tokens, answer(&long.request, &harness.limits).0);
            let CachedTokens { device, host } = finish.cached;
            assert!(host > 1_600 * 16 && device + host == 32_768 - 16, "{device} and {host}");
        }
        num_steps += 1;
    }
    assert_eq!(harness.stats().prompt_tokens - before, 16);
    // Of the places given, and a block for each stream to grow into.
    assert!(harness.device.most_copies <= 256 + 20, "{} copies in a step", harness.device.most_copies);
    assert!(num_steps <= 2_048 / 128 + 4, "{num_steps} steps");
}

#[test]
fn a_very_long_prefix_is_loaded_at_once_where_nobody_waits_for_it() {
    let mut harness = with_long_prefix();
    let before = harness.stats().steps;
    assert!(cached(&mut harness, request(32_768, 1, 99)).host > 1_600 * 16);
    assert_eq!(harness.stats().steps - before, 1);
}

#[test]
fn requests_that_come_and_go_between_two_plans_do_not_pile_up_copies() {
    let mut harness = with_long_prefix();
    let _stream = harness.start(request(3, 200, 0));
    harness.plan();
    harness.plan();
    for _ in 0..10 {
        for seed in [98, 99] {
            harness.start(request(32_000, 1, seed)).cancel();
            harness.attend();
        }
    }
    harness.run();
    assert!(harness.device.most_copies <= 256 + 20, "{} copies in a step", harness.device.most_copies);
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
fn run_crowd(on_exhaustion: OnExhaustion, host_blocks: usize) -> (usize, Harness) {
    let limits = Limits {
        max_num_seqs: 16,
        max_num_batched_tokens: 64,
        max_waiting: 64,
        num_blocks: 4 * 16,
        on_exhaustion,
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
    let (num_interrupted, harness) = run_crowd(OnExhaustion::Recompute, 0);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, 0));
    assert!(stats.recomputed_tokens > 0);
}

#[test]
fn a_crowd_is_answered_in_little_memory_by_saving_blocks() {
    let (num_interrupted, harness) = run_crowd(OnExhaustion::Swap, 256);
    let stats = harness.stats();
    assert_eq!((num_interrupted, stats.swaps), (0, stats.preemptions));
    assert_eq!(stats.recomputed_tokens, 0, "whatever was saved is not computed again");
    let (num_saved, num_loaded) = harness.device.num_copies;
    assert!(num_saved >= stats.swaps && num_saved == num_loaded);
}

#[test]
fn where_the_host_is_full_blocks_are_computed_again() {
    let (_, harness) = run_crowd(OnExhaustion::Swap, 6);
    let stats = harness.stats();
    assert!(stats.swaps > 0 && stats.swaps < stats.preemptions && stats.recomputed_tokens > 0);
}

#[test]
fn in_a_crowd_some_are_interrupted_where_that_was_asked_for() {
    let (num_interrupted, harness) = run_crowd(OnExhaustion::Interrupt, 0);
    assert!(num_interrupted > 0);
    assert_eq!(harness.stats().preemptions, num_interrupted as u64);
}

/// In a step of four tokens, two requests of one token and the copies for a third; a fourth waits for a place.
fn load_beside_others() -> (Harness, Vec<Client>, Client, Client) {
    let limits =
        Limits { max_num_seqs: 3, num_blocks: 12, host_blocks: 16, max_num_batched_tokens: 4, ..caching() };
    let mut harness = Harness::new(limits);
    cached(&mut harness, request(13, 1, 0));
    cached(&mut harness, request(45, 1, 1));
    let hit: Vec<_> = (5..7).map(|seed| harness.start(request(2, 4, seed))).collect();
    let loading = harness.start(request(19, 4, 0));
    let waiting = harness.start(request(19, 4, 0));
    (harness, hit, loading, waiting)
}

#[test]
fn a_step_that_fails_with_copies_in_it_hurts_nobody_who_was_not_in_it() {
    let (mut harness, mut hit, mut loading, mut waiting) = load_beside_others();
    assert_eq!(harness.plan().len(), 2, "the budget is spent before the one that loads");
    assert!(harness.fail("out of order") > 0);
    hit.iter_mut().for_each(|client| check_ended(client, FinishReason::Failed("out of order".into())));
    assert_eq!(harness.stats().blocks_cached + harness.stats().host_blocks_used, 0, "all may be spoilt");
    assert_eq!(harness.stats().preemptions, 0, "who starts over has made way for nobody");
    harness.run();
    check_answered(&mut loading, &harness.limits);
    let (tokens, finish) = read(&mut waiting);
    assert_eq!(tokens, answer(&waiting.request, &harness.limits).0);
    assert_eq!(finish.unwrap().cached, found(0, 0), "it got its place when the cache was empty");
}

#[test]
fn a_step_that_fails_after_its_copies_costs_nobody_else_a_prefix() {
    let (mut harness, mut hit, mut loading, mut waiting) = load_beside_others();
    harness.plan();
    let (restarted, kept) = (harness.stats().preemptions, harness.stats().host_blocks_used);
    assert!(harness.fail_after_copies("out of order") > 0);
    hit.iter_mut().for_each(|client| check_ended(client, FinishReason::Failed("out of order".into())));
    assert_eq!((harness.stats().preemptions, harness.stats().host_blocks_used), (restarted, kept));
    harness.run();
    let loaded = harness.stats().prefix_host_hit_tokens;
    assert_eq!((loaded, harness.stats().recomputed_tokens), (12, 0));
    check_answered(&mut loading, &harness.limits);
    assert!(read(&mut waiting).1.unwrap().cached.device >= 12, "shared with the one that loads");
}
