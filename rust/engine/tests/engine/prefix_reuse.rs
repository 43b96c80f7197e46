//! The reuse of prefixes in the KV cache and on the host.

use std::sync::Arc;
use std::time::Duration;

use penstock_engine::testing::Message;
use penstock_engine::{CachedTokens, FinishReason, Limits, PreemptionMode, Request};

use crate::harness::{Client, Harness, cached, caching, check_ended, check_output, found, read};
use crate::oracle::{expected_output, request};

#[test]
fn a_repeated_prompt_is_computed_from_its_last_block() {
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
        "those of the prompt and a generated block"
    );
}

#[test]
fn a_conversation_computes_only_its_new_tokens() {
    let limits = Limits { max_model_len: 1024, num_blocks: 256, max_num_batched_tokens: 512, ..caching() };
    let mut harness = Harness::new(limits);
    let mut prompt: Vec<u32> = vec![];
    let mut num_known = 0;
    for round in 0..10 {
        prompt.extend(&*request(30, 1, round).prompt);
        let before = harness.stats().prompt_tokens;
        let mut client = harness.start(Request { prompt: prompt.clone().into(), ..request(1, 21, round) });
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
fn simultaneous_requests_share_published_blocks() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 128, ..caching() });
    let same = || request(24, 6, 0);
    let mut clients: Vec<_> = (0..3).map(|_| harness.start(same())).collect();
    assert!(harness.step());
    assert_eq!(harness.stats().blocks_cached, 0, "all that is published is in use");
    while harness.stats().generation_tokens < 3 {
        assert!(harness.step());
    }
    assert!(harness.stats().blocks_used <= 6 + 3, "one copy of the prompt, and one block per request");
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

/// Requests with a common beginning of `num_common` tokens and 5 tokens of their own, in this order.
fn with_common_beginning(harness: &mut Harness, num_requests: u64, num_common: usize) -> Vec<Client> {
    let common = request(num_common, 4, 0).prompt;
    let requests = (1..=num_requests).map(|seed| {
        let own = request(5, 4, seed);
        Request { prompt: [&*common, &*own.prompt].concat().into(), ..own }
    });
    requests.map(|request| harness.start(request)).collect()
}

#[test]
fn requests_that_arrive_together_compute_a_prompt_once() {
    for (num_common, budget) in [(20, 64), (20, 8), (48, 16)] {
        let limits = Limits { max_num_seqs: 6, max_num_batched_tokens: budget, num_blocks: 200, ..caching() };
        let mut harness = Harness::new(limits);
        let mut clients = with_common_beginning(&mut harness, 6, num_common);
        harness.run();
        let stats = harness.stats();
        assert_eq!(stats.prompt_tokens, (num_common + 6 * 5) as u64, "{num_common} and {budget}");
        assert_eq!((stats.prefix_hit_tokens, stats.recomputed_tokens), (5 * num_common as u64, 0));
        for (index, client) in clients.iter_mut().enumerate() {
            let (tokens, finish) = read(client);
            assert_eq!(tokens, expected_output(&client.request, &harness.limits).0);
            let num_found = if index == 0 { 0 } else { num_common };
            assert_eq!(finish.unwrap().cached, found(num_found, 0), "request {index}");
        }
    }
}

#[test]
fn requests_with_a_short_common_beginning_do_not_wait() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 64, ..caching() });
    let _clients = with_common_beginning(&mut harness, 3, 4);
    assert_eq!(harness.plan(), [(0, 9), (1, 9), (2, 9)]);
}

#[test]
fn requests_with_other_salts_do_not_wait() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 64, ..caching() });
    let salted = |salt: &str| Request { cache_salt: Some(salt.into()), ..request(21, 4, 0) };
    let _clients = ["mine", "yours"].map(|salt| harness.start(salted(salt)));
    assert_eq!(harness.plan(), [(0, 21), (1, 21)]);
}

#[test]
fn a_request_computes_what_the_one_before_it_does_not() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 64, ..caching() });
    let mut clients = with_common_beginning(&mut harness, 2, 20);
    assert_eq!(harness.plan(), [(0, 25)], "the second waits");
    clients[0].cancel();
    assert_eq!(harness.plan(), [(1, 25)]);
    harness.run();
    check_ended(&mut clients[0], FinishReason::Cancelled);
    check_output(&mut clients[1], &harness.limits);
    assert_eq!(harness.stats().prefix_hit_tokens, 0);
}

#[test]
fn an_urgent_request_follows_the_one_that_computes_its_prompt() {
    let mut harness = Harness::new(Limits { max_num_batched_tokens: 16, ..caching() });
    let mut slow = harness.start(request(60, 4, 0));
    harness.plan();
    let mut urgent = harness.start(Request { priority: -1, ..request(60, 4, 0) });
    let (mut num_steps, mut tokens) = (0, vec![]);
    loop {
        assert!(harness.step());
        num_steps += 1;
        let (new, finish) = read(&mut urgent);
        tokens.extend(new);
        if finish.is_some() {
            break;
        }
    }
    // Alone, it takes 4 steps for its prompt and 3 for its other tokens; two are in flight when it arrives.
    assert!(num_steps <= 4 + 3 + 2, "{num_steps} steps");
    assert_eq!(tokens, expected_output(&urgent.request, &harness.limits).0);
    harness.run();
    check_output(&mut slow, &harness.limits);
    assert_eq!(harness.stats().prompt_tokens, 60 + 4, "the last block of a prompt is never found");
}

#[test]
fn an_admitted_request_finds_all_blocks_of_the_last_step() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, ..caching() });
    let mut ending = harness.start(request(4, 1, 0));
    let _sharing = harness.start(request(9, 8, 1));
    let mut waiting = harness.start(request(9, 1, 1));
    harness.plan();
    harness.complete();
    assert!(read(&mut ending).1.is_some(), "its row came before that of the sharing request");
    harness.run();
    assert_eq!(read(&mut waiting).1.unwrap().cached, found(8, 0));
}

#[test]
fn unused_prefixes_expire_after_the_ttl() {
    let mut harness = Harness::new(caching());
    cached(&mut harness, request(21, 4, 0));
    harness.pass(299_000);
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(20, 0), "and now just used");
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
fn requests_with_different_salts_share_no_blocks() {
    let mut harness = Harness::new(caching());
    let salted = |salt: Option<&str>| Request { cache_salt: salt.map(Arc::from), ..request(21, 4, 0) };
    for salt in [None, Some(""), Some("mine"), Some("yours")] {
        assert_eq!(cached(&mut harness, salted(salt)), found(0, 0));
        assert_eq!(cached(&mut harness, salted(salt)), found(20, 0));
    }
}

#[test]
fn prefix_cache_false_neither_reads_nor_writes() {
    let mut harness = Harness::new(caching());
    let alone = || Request { prefix_cache: false, ..request(21, 4, 0) };
    assert_eq!(cached(&mut harness, alone()), found(0, 0));
    assert_eq!(harness.stats().blocks_cached, 0);
    assert_eq!(cached(&mut harness, request(21, 4, 0)), found(0, 0));
    assert_eq!(cached(&mut harness, alone()), found(0, 0));
    assert_eq!(harness.stats().prefix_query_tokens, 21);
}

#[test]
fn nothing_is_shared_beyond_max_shared_len() {
    let mut harness = Harness::new(Limits { max_shared_len: 18, ..caching() });
    cached(&mut harness, request(18, 20, 0));
    assert_eq!(harness.stats().blocks_cached, 4, "of sixteen tokens");
    assert_eq!(cached(&mut harness, request(18, 20, 0)), found(16, 0));
    assert_eq!(cached(&mut harness, request(19, 20, 0)), found(0, 0), "longer prompts have other keys");
}

#[test]
fn reset_removes_all_unused_blocks_at_once() {
    let mut harness = Harness::new(caching());
    cached(&mut harness, request(21, 4, 0));
    let mut running = harness.start(request(21, 10, 0));
    harness.step();
    harness.handle(Message::ResetPrefixCache(None));
    assert_eq!(harness.stats().blocks_cached, 0);
    let mut same = harness.start(request(21, 1, 0));
    harness.run();
    check_output(&mut running, &harness.limits);
    let (_, finish) = read(&mut same);
    assert_eq!(finish.unwrap().cached, found(0, 0));
    assert_eq!(
        harness.stats().blocks_cached,
        5,
        "blocks computed before the reset are not published after it"
    );
}

fn salted(salt: Option<&str>, request: Request) -> Request {
    Request { cache_salt: salt.map(Into::into), ..request }
}

#[test]
fn reset_of_a_salt_removes_its_blocks_only() {
    let mut harness = Harness::new(caching());
    for salt in [None, Some("a"), Some("b")] {
        cached(&mut harness, salted(salt, request(21, 4, 0)));
        cached(&mut harness, salted(salt, request(30, 1, 0)));
    }
    let num_cached = harness.stats().blocks_cached;
    let mut running = harness.start(salted(Some("a"), request(21, 10, 0)));
    harness.step();
    harness.handle(Message::ResetPrefixCache(Some("a".into())));
    harness.handle(Message::ResetPrefixCache(Some("unknown".into())));
    let mut same = harness.start(salted(Some("a"), request(21, 1, 0)));
    harness.run();
    check_output(&mut running, &harness.limits);
    let (_, finish) = read(&mut same);
    assert_eq!(finish.unwrap().cached, found(0, 0), "nothing computed before the reset is found");
    for salt in [None, Some("b")] {
        assert_eq!(cached(&mut harness, salted(salt, request(21, 4, 0))), found(20, 0));
    }
    harness.handle(Message::ResetPrefixCache(Some("a".into())));
    assert_eq!(harness.stats().blocks_cached, num_cached / 3 * 2);
}

#[test]
fn swapped_sequence_resumes_after_a_reset_of_its_salt() {
    let swapping =
        Limits { num_blocks: 6, host_blocks: 16, preemption_mode: PreemptionMode::Swap, ..caching() };
    let mut harness = Harness::new(swapping);
    let mut older = harness.start(salted(Some("a"), request(4, 13, 0)));
    let mut newer = harness.start(salted(Some("a"), request(4, 13, 1)));
    while harness.stats().swaps == 0 {
        harness.step();
    }
    harness.handle(Message::ResetPrefixCache(Some("a".into())));
    harness.run();
    check_output(&mut older, &harness.limits);
    check_output(&mut newer, &harness.limits);
}

#[test]
fn blocks_swapped_before_a_reset_are_not_published() {
    let swapping =
        Limits { num_blocks: 6, host_blocks: 16, preemption_mode: PreemptionMode::Swap, ..caching() };
    let mut harness = Harness::new(swapping);
    let _older = harness.start(request(4, 13, 0));
    let mut newer = harness.start(request(4, 13, 1));
    harness.step();
    harness.step();
    harness.handle(Message::ResetPrefixCache(None));
    harness.run();
    assert!(harness.stats().swaps > 0);
    let (tokens, _) = read(&mut newer);
    let mut prompt = newer.request.prompt.to_vec();
    prompt.extend(tokens.iter().map(|token| token.id));
    assert_eq!(prompt.len(), 4 + 13);
    assert_eq!(cached(&mut harness, Request { prompt: prompt.into(), ..request(1, 1, 1) }), found(0, 0));
}

#[test]
fn evicted_prefixes_are_found_on_the_host() {
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
fn host_prefixes_false_saves_no_prefixes() {
    let mut harness =
        Harness::new(Limits { num_blocks: 8, host_blocks: 16, host_prefixes: false, ..caching() });
    cached(&mut harness, request(21, 4, 0));
    cached(&mut harness, request(25, 4, 1));
    assert_eq!((harness.stats().host_blocks_used, harness.device.num_copies), (0, (0, 0)));
}

/// An idle engine with a cached prefix of 32,768 tokens, most of it on the host.
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
fn decodes_advance_every_step_beside_a_very_long_load() {
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
            assert_eq!(tokens, expected_output(&long.request, &harness.limits).0);
            let CachedTokens { device, host } = finish.cached;
            assert!(host > 1_600 * 16 && device + host == 32_768 - 16, "{device} and {host}");
        }
        num_steps += 1;
    }
    assert_eq!(harness.stats().prompt_tokens - before, 16);
    // Those of the admitted sequence, and one evicted block per decode.
    assert!(harness.device.most_copies <= 256 + 20, "{} copies in a step", harness.device.most_copies);
    assert!(num_steps <= 2_048 / 128 + 4, "{num_steps} steps");
}

#[test]
fn a_very_long_prefix_is_loaded_at_once_if_idle() {
    let mut harness = with_long_prefix();
    let before = harness.stats().steps;
    assert!(cached(&mut harness, request(32_768, 1, 99)).host > 1_600 * 16);
    assert_eq!(harness.stats().steps - before, 1);
}

#[test]
fn copies_between_two_plans_are_bounded() {
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

/// A step of four tokens with two requests of one token and the copies for a third; a fourth request waits.
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
fn a_step_failing_before_its_copies_ends_only_its_requests() {
    let (mut harness, mut hit, mut loading, mut waiting) = load_beside_others();
    assert_eq!(harness.plan().len(), 2, "the budget is used before the request that loads");
    assert!(harness.fail("out of order") > 0);
    hit.iter_mut().for_each(|client| check_ended(client, FinishReason::Failed("out of order".into())));
    assert_eq!(
        harness.stats().blocks_cached + harness.stats().host_blocks_used,
        0,
        "all blocks may be corrupt"
    );
    assert_eq!(harness.stats().preemptions, 0, "starting over is no preemption");
    harness.run();
    check_output(&mut loading, &harness.limits);
    let (tokens, finish) = read(&mut waiting);
    assert_eq!(tokens, expected_output(&waiting.request, &harness.limits).0);
    assert_eq!(finish.unwrap().cached, found(0, 0), "it was admitted with an empty cache");
}

#[test]
fn a_step_failing_after_its_copies_keeps_the_prefixes() {
    let (mut harness, mut hit, mut loading, mut waiting) = load_beside_others();
    harness.plan();
    let (preemptions, host_blocks) = (harness.stats().preemptions, harness.stats().host_blocks_used);
    assert!(harness.fail_after_copies("out of order") > 0);
    hit.iter_mut().for_each(|client| check_ended(client, FinishReason::Failed("out of order".into())));
    assert_eq!((harness.stats().preemptions, harness.stats().host_blocks_used), (preemptions, host_blocks));
    harness.run();
    let loaded = harness.stats().prefix_host_hit_tokens;
    assert_eq!((loaded, harness.stats().recomputed_tokens), (12, 0));
    check_output(&mut loading, &harness.limits);
    assert!(read(&mut waiting).1.unwrap().cached.device >= 12, "shared with the request that loads");
}
