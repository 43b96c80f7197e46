//! Prefixes of adapters in the prefix cache.

use penstock_engine::testing::Message;
use penstock_engine::{AdapterId, Limits, Request};

use super::{harness_with, with_adapter};
use crate::harness::{cached, caching, check_output, found};
use crate::oracle::request;

#[test]
fn prefixes_are_shared_within_an_adapter_and_a_salt_only() {
    let mut harness = harness_with(2, Limits { max_adapters: 2, num_blocks: 200, ..caching() });
    let mut requests = vec![];
    for adapter in [None, Some(AdapterId(1)), Some(AdapterId(2))] {
        for salt in [None, Some("mine"), Some("1")] {
            requests.push(Request { adapter, cache_salt: salt.map(Into::into), ..request(33, 3, 0) });
        }
    }
    for request in &requests {
        assert_eq!(cached(&mut harness, request.clone()), found(0, 0));
    }
    for request in &requests {
        assert_eq!(cached(&mut harness, request.clone()), found(32, 0));
    }
}

#[test]
fn an_adapter_that_is_loaded_again_finds_no_old_prefixes() {
    let mut harness = harness_with(1, Limits { max_adapters: 1, ..caching() });
    assert_eq!(cached(&mut harness, with_adapter(1, request(33, 3, 0))), found(0, 0));
    assert!(harness.unload_adapter(1, None).is_done());
    harness.load_adapter(2, 1).unwrap();
    assert_eq!(cached(&mut harness, with_adapter(2, request(33, 3, 0))), found(0, 0));
    assert_eq!(cached(&mut harness, with_adapter(2, request(33, 3, 0))), found(32, 0));
}

#[test]
fn blocks_of_a_removed_adapter_leave_the_cache() {
    let mut harness = harness_with(2, Limits { max_adapters: 2, num_blocks: 128, ..caching() });
    for adapter in [None, Some(AdapterId(2))] {
        cached(&mut harness, Request { adapter, ..request(33, 3, 0) });
    }
    let of_others = harness.stats().blocks_cached;
    for salt in [None, Some("mine"), Some("yours")] {
        let salted = Request { cache_salt: salt.map(Into::into), ..request(33, 3, 0) };
        cached(&mut harness, with_adapter(1, salted));
    }
    assert_eq!(harness.stats().blocks_cached, of_others + 3 * of_others / 2);
    let mut open = harness.start(with_adapter(1, request(33, 3, 0)));
    let removal = harness.unload_adapter(1, None);
    assert!(harness.stats().blocks_cached > of_others, "an open request has the adapter");
    harness.run();
    check_output(&mut open, &harness.limits);
    assert!(removal.is_done());
    assert_eq!(harness.stats().blocks_cached, of_others);
    for adapter in [None, Some(AdapterId(2))] {
        assert_eq!(cached(&mut harness, Request { adapter, ..request(33, 3, 0) }), found(32, 0));
    }
}

#[test]
fn blocks_of_a_removed_adapter_leave_the_host_tier() {
    let mut harness =
        harness_with(1, Limits { max_adapters: 1, num_blocks: 16, host_blocks: 64, ..caching() });
    for seed in 0..3 {
        cached(&mut harness, with_adapter(1, request(60, 4, seed)));
    }
    assert!(harness.stats().host_blocks_used > 0);
    assert!(harness.unload_adapter(1, None).is_done());
    assert_eq!((harness.stats().blocks_cached, harness.stats().host_blocks_used), (0, 0));
    assert_eq!(cached(&mut harness, request(60, 4, 0)), found(0, 0));
}

#[test]
fn a_reset_of_a_salt_covers_every_adapter() {
    let mut harness = harness_with(1, Limits { max_adapters: 1, ..caching() });
    let salted = |adapter: Option<u64>| Request {
        adapter: adapter.map(AdapterId),
        cache_salt: Some("mine".into()),
        ..request(33, 3, 0)
    };
    for adapter in [None, Some(1)] {
        cached(&mut harness, salted(adapter));
    }
    harness.handle(Message::ResetPrefixCache(Some("mine".into())));
    for adapter in [None, Some(1)] {
        assert_eq!(cached(&mut harness, salted(adapter)), found(0, 0));
    }
}
