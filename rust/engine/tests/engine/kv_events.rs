//! KV events: the feed of a reader, the hashes, and adapters in them.

use penstock_engine::testing::BlockHasher;
use penstock_engine::{AdapterId, Engine, KvEvent, KvRead, KvTier, Limits, Port, Request, StopCause};

use crate::harness::{Harness, cached, caching};
use crate::mirror::Mirror;
use crate::oracle::request;
use crate::threaded::{self, PATIENCE, Received};

/// The hashes of the stored blocks after a request.
fn hashes(limits: Limits, hasher: u128, request: Request) -> Vec<u64> {
    let mut harness = Harness::with_hasher(limits, BlockHasher::new(hasher));
    if harness.limits.max_adapters > 0 {
        harness.load_adapter(hasher as u64, 1).unwrap();
    }
    let reader = harness.read_kv_events(1000);
    cached(&mut harness, request);
    harness.core.ring();
    let stored = |event: &KvEvent| match event {
        KvEvent::Stored { hash, .. } => Some(*hash),
        _ => None,
    };
    let KvRead::Read(hashes) = reader.read(|batch| batch.events.iter().filter_map(stored).collect()) else {
        panic!("no event");
    };
    hashes
}

#[test]
fn equal_blocks_have_equal_hashes_in_every_engine() {
    let first = hashes(caching(), 1, request(20, 4, 0));
    assert_eq!(first.len(), 5, "four of the prompt and one of the output");
    assert_eq!(hashes(caching(), 2, request(20, 4, 0)), first, "another key of the prefix cache");
    let other = hashes(Limits { kv_hash_key: 1, ..caching() }, 1, request(20, 4, 0));
    assert!(first.iter().zip(&other).all(|(one, other)| one != other), "another key of the events");
}

#[test]
fn hashes_depend_on_the_salt_and_the_name_of_the_adapter() {
    let limits = Limits { max_adapters: 1, adapter_bytes: 8, max_registered_adapters: 1, ..caching() };
    let with = |hasher, adapter: Option<u64>, salt: Option<&str>| {
        let adapter = adapter.map(AdapterId);
        hashes(
            limits.clone(),
            hasher,
            Request { adapter, cache_salt: salt.map(Into::into), ..request(8, 1, 0) },
        )
    };
    let all = [
        with(1, None, None),
        with(1, Some(1), None),
        with(2, Some(2), None),
        with(1, None, Some("adapter 1")),
        with(1, Some(1), Some("adapter 1")),
        with(1, None, Some("")),
    ];
    for (index, one) in all.iter().enumerate() {
        assert!(all[..index].iter().all(|other| one[0] != other[0]), "case {index}");
    }
}

#[test]
fn a_reader_that_comes_late_gets_the_whole_tree() {
    let mut harness = Harness::new(Limits { host_blocks: 32, num_blocks: 16, ..caching() });
    for seed in 0..4 {
        cached(&mut harness, request(40, 4, seed));
    }
    assert!(harness.stats().host_blocks_used > 0);
    let mut early = Mirror::new(&mut harness, usize::MAX);
    early.compare(&mut harness);
    cached(&mut harness, request(40, 4, 9));
    harness.core.ring();
    let mut late = Mirror::new(&mut harness, usize::MAX);
    for mirror in [&mut early, &mut late] {
        assert!(mirror.compare(&mut harness).host);
        assert!(!mirror.blocks.is_empty());
    }
}

#[test]
fn a_reader_of_too_few_events_loses_them_and_begins_again() {
    let mut harness = Harness::new(caching());
    let mut mirror = Mirror::new(&mut harness, 12);
    let mut other = Mirror::new(&mut harness, usize::MAX);
    for seed in 0..3 {
        cached(&mut harness, request(40, 4, seed));
        harness.core.ring();
    }
    assert!(mirror.compare(&mut harness).lost);
    assert!(!other.compare(&mut harness).lost, "another reader has lost nothing");
    cached(&mut harness, request(8, 1, 5));
    harness.core.ring();
    assert!(!mirror.compare(&mut harness).lost);
}

#[test]
fn blocks_of_an_adapter_that_lost_its_name_are_withdrawn() {
    let limits = Limits { max_adapters: 2, adapter_bytes: 8, max_registered_adapters: 2, ..caching() };
    let mut harness = Harness::new(limits);
    harness.load_adapter(1, 1).unwrap();
    let mut mirror = Mirror::new(&mut harness, usize::MAX);
    let of = |id| Request { adapter: Some(AdapterId(id)), ..request(20, 4, 0) };
    cached(&mut harness, of(1));
    let mut update = |harness: &mut Harness| {
        harness.core.ring();
        assert!(mirror.compare(harness).adapters || mirror.blocks.is_empty());
        mirror.blocks.len()
    };
    assert_eq!(update(&mut harness), 5);
    let _open = harness.start(of(1));
    harness.replace_adapter(1, 2).unwrap();
    assert_eq!(update(&mut harness), 0, "no new request finds them");
    harness.run();
    assert_eq!(update(&mut harness), 0);
    cached(&mut harness, of(2));
    assert_eq!(update(&mut harness), 5);
    let _ = harness.unload_adapter(2, None);
    assert_eq!(update(&mut harness), 0);
}

#[test]
fn events_end_with_the_engine_and_a_port_outlives_it() {
    let port = Port::with_condvar();
    for _ in 0..2 {
        let limits = Limits { prefix_cache_ttl: caching().prefix_cache_ttl, ..threaded::limits() };
        let engine = threaded::engine(limits);
        let mut events = engine.kv_events(&port).unwrap();
        assert_eq!(events.block_size(), engine.limits().block_size);
        let mut next = |engine: &Engine| loop {
            assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
            port.clear();
            match events.read(|batch| batch.events.clone()).unwrap() {
                KvRead::Read(found) => break found,
                KvRead::Empty => {}
                KvRead::Lost => panic!("lost"),
                KvRead::Ended => {
                    assert!(!engine.is_running());
                    break vec![];
                }
            }
        };
        assert_eq!(next(&engine), [KvEvent::Cleared]);
        let output = Port::with_condvar();
        Received::start(&engine, &request(20, 4, 0).into(), &output).read_to_end(&output);
        let stored = next(&engine);
        assert!(matches!(stored[0], KvEvent::Stored { parent: None, tier: KvTier::Device, .. }));
        engine.shutdown();
        while !next(&engine).is_empty() {}
    }
}

#[test]
fn a_reader_of_an_engine_that_stopped_finds_the_end() {
    let limits = Limits { prefix_cache_ttl: caching().prefix_cache_ttl, ..threaded::limits() };
    let (engine, port) = (threaded::engine(limits), Port::with_condvar());
    let forked = engine.in_child().kv_events(&port).unwrap().read(|_| ());
    assert!(matches!(forked, Err(StopCause::Forked(_))));
    engine.shutdown();
    let mut events = engine.kv_events(&port).unwrap();
    assert!(port.wait(Some(PATIENCE)));
    assert_eq!(events.read(|_| ()), Ok(KvRead::Ended));
}

#[test]
fn an_engine_without_prefix_cache_has_no_events() {
    let engine = threaded::engine(threaded::limits());
    assert!(engine.limits().prefix_cache_ttl.is_none());
    assert!(engine.kv_events(&Port::with_condvar()).is_err());
}
