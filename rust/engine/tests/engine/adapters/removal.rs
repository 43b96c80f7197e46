//! The removal of adapters in every state of their requests.

use penstock_engine::{AdapterError, Event, FinishReason, Limits, PreemptionMode, Rejection};

use super::{bounded_harness, changes, harness, harness_with, load, run_one, too_many, with_adapter};
use crate::harness::{Client, Harness, Removal, caching, check_ended, check_output, limits, read};
use crate::oracle::request;

const REASON: &str = "the adapter was unloaded";

fn check_forced(client: &mut Client) {
    check_ended(client, FinishReason::Failed(REASON.into()));
}

/// The number of the adapter is free after the next plan.
fn check_unloaded(harness: &mut Harness, number: u32) {
    changes(harness);
    let mut next = harness.start(request(4, 2, 99));
    harness.run();
    check_output(&mut next, &harness.limits);
    assert_eq!(changes(harness), [(number, None)]);
}

#[test]
fn a_removal_waits_for_running_and_waiting_requests() {
    let mut harness = harness_with(1, Limits { max_num_seqs: 1, max_adapters: 1, ..limits() });
    let mut clients = [0, 1].map(|seed| harness.start(with_adapter(1, request(4, 4, seed))));
    harness.step();
    let removal = harness.unload_adapter(1, None);
    let mut late = harness.start(with_adapter(1, request(4, 4, 2)));
    assert_eq!(late.drain(), [Event::Rejected(Rejection::UnknownAdapter { num_adapters: 0 })], "at once");
    while !clients[0].is_ended() {
        assert!(!removal.is_done());
        harness.step();
        clients[0].drain();
    }
    assert!(!removal.is_done(), "the other one still waits");
    harness.run();
    check_output(&mut clients[1], &harness.limits);
    assert!(removal.is_done());
    check_unloaded(&mut harness, 0);
}

#[test]
fn other_adapters_load_while_a_removal_waits() {
    let mut harness = harness(1, 2);
    let mut running = harness.start(with_adapter(1, request(4, 40, 0)));
    harness.step();
    let removal = harness.unload_adapter(1, None);
    harness.load_adapter(2, 1).unwrap();
    let mut other = harness.start(with_adapter(2, request(4, 4, 1)));
    while !other.is_ended() {
        harness.step();
        other.drain();
    }
    assert!(!removal.is_done() && !running.is_ended());
    assert!(harness.unload_adapter(2, None).is_done());
    harness.run();
    check_output(&mut running, &harness.limits);
    assert!(removal.is_done());
}

#[test]
fn a_forced_removal_ends_running_and_waiting_requests() {
    let mut harness = harness_with(1, Limits { max_num_seqs: 2, max_adapters: 1, ..limits() });
    harness.load_adapter(2, 10).unwrap();
    let mut clients = [0, 1, 2].map(|seed| harness.start(with_adapter(1, request(4, 20, seed))));
    let mut other = harness.start(with_adapter(2, request(4, 4, 3)));
    harness.plan();
    harness.plan();
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    clients.iter_mut().for_each(check_forced);
    changes(&mut harness);
    harness.complete();
    harness.plan();
    assert_eq!(changes(&mut harness), [(0, None), (0, Some(2))], "its memory is free");
    harness.run();
    check_output(&mut other, &harness.limits);
}

#[test]
fn a_forced_removal_ends_all_choices() {
    let mut harness = harness_with(1, Limits { max_adapters: 1, ..caching() });
    let mut choices = harness.start_choices(with_adapter(1, request(33, 6, 0)), 4);
    harness.step();
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 3));
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    choices.iter_mut().for_each(check_forced);
    assert_eq!((harness.stats().running, harness.stats().waiting), (0, 0));
}

#[test]
fn an_unused_adapter_is_removed_at_once() {
    let mut harness = harness(2, 2);
    run_one(&mut harness, 1);
    assert!(harness.unload_adapter(1, None).is_done());
    check_unloaded(&mut harness, 0);
    assert!(harness.unload_adapter(2, None).is_done(), "it was never loaded");
    run_one_without(&mut harness);
}

/// A request without adapter changes nothing.
fn run_one_without(harness: &mut Harness) {
    let mut client = harness.start(request(4, 2, 0));
    harness.run();
    check_output(&mut client, &harness.limits);
    assert_eq!(changes(harness), []);
}

#[test]
fn a_removal_of_an_unknown_adapter_is_done() {
    let mut harness = harness(1, 1);
    let mut client = harness.start(with_adapter(1, request(4, 4, 0)));
    assert!(harness.unload_adapter(9, None).is_done());
    assert!(harness.unload_adapter(9, Some(REASON)).is_done());
    harness.run();
    check_output(&mut client, &harness.limits);
}

#[test]
fn two_removals_of_an_adapter_end_together() {
    let mut harness = harness(1, 1);
    let mut client = harness.start(with_adapter(1, request(4, 4, 0)));
    let removals = [harness.unload_adapter(1, None), harness.unload_adapter(1, None)];
    harness.step();
    assert!(!removals.iter().any(Removal::is_done));
    harness.run();
    check_output(&mut client, &harness.limits);
    assert!(removals.iter().all(Removal::is_done));
}

#[test]
fn a_held_adapter_takes_requests_until_it_is_released() {
    let mut harness = harness(1, 1);
    harness.hold_adapter(1);
    harness.hold_adapter(1);
    let removal = harness.unload_adapter(1, None);
    for _ in 0..2 {
        run_one(&mut harness, 1);
        assert!(!removal.is_done());
        harness.release_adapter(1);
    }
    assert!(removal.is_done());
    let mut late = harness.start(with_adapter(1, request(4, 4, 2)));
    assert_eq!(late.drain(), [Event::Rejected(Rejection::UnknownAdapter { num_adapters: 0 })]);
    check_unloaded(&mut harness, 0);
}

#[test]
fn a_released_adapter_stays_until_its_request_ends() {
    let mut harness = harness(1, 1);
    harness.hold_adapter(1);
    let removal = harness.unload_adapter(1, None);
    let mut client = harness.start(with_adapter(1, request(4, 4, 0)));
    harness.step();
    harness.release_adapter(1);
    assert!(!removal.is_done());
    harness.run();
    check_output(&mut client, &harness.limits);
    assert!(removal.is_done());
}

#[test]
fn a_hold_of_an_adapter_that_is_not_removed_changes_nothing() {
    let mut harness = harness(1, 1);
    harness.hold_adapter(1);
    harness.release_adapter(1);
    harness.hold_adapter(9);
    harness.release_adapter(9);
    run_one(&mut harness, 1);
    assert!(harness.unload_adapter(1, None).is_done());
}

#[test]
fn a_forced_removal_ends_holds() {
    let mut harness = harness(1, 1);
    harness.hold_adapter(1);
    let mut client = harness.start(with_adapter(1, request(4, 20, 0)));
    harness.step();
    let waiting = harness.unload_adapter(1, None);
    assert!(harness.unload_adapter(1, Some(REASON)).is_done() && waiting.is_done());
    check_forced(&mut client);
    harness.release_adapter(1);
    let mut late = harness.start(with_adapter(1, request(4, 4, 2)));
    assert_eq!(late.drain(), [Event::Rejected(Rejection::UnknownAdapter { num_adapters: 0 })]);
}

#[test]
fn a_held_adapter_that_is_replaced_counts_as_closing() {
    let mut harness = bounded_harness(1);
    load(&mut harness, 1).unwrap();
    harness.hold_adapter(1);
    harness.replace_adapter(1, 2).unwrap();
    let removal = harness.unload_adapter(1, None);
    run_one(&mut harness, 1);
    run_one(&mut harness, 2);
    assert_eq!(harness.replace_adapter(2, 3), too_many(1, 1, 1));
    harness.release_adapter(1);
    assert!(removal.is_done());
    harness.replace_adapter(2, 3).unwrap();
}

#[test]
fn a_forced_removal_ends_one_that_waits() {
    let mut harness = harness(1, 1);
    let mut client = harness.start(with_adapter(1, request(4, 20, 0)));
    harness.step();
    let waiting = harness.unload_adapter(1, None);
    assert!(harness.unload_adapter(1, Some(REASON)).is_done() && waiting.is_done());
    check_forced(&mut client);
}

/// A harness with a request that is paused because it is not read.
fn paused() -> (Harness, Client) {
    let mut harness = harness_with(1, Limits { max_adapters: 1, queue_capacity: 4, ..limits() });
    let client = harness.start(with_adapter(1, request(4, 6, 0)));
    harness.run();
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 1));
    (harness, client)
}

#[test]
fn a_removal_waits_for_a_paused_request() {
    let (mut harness, mut client) = paused();
    let removal = harness.unload_adapter(1, None);
    harness.run();
    assert!(!removal.is_done());
    let mut num_tokens = 0;
    while !client.is_ended() {
        num_tokens += read(&mut client).0.len();
        harness.run();
    }
    assert_eq!(num_tokens + read(&mut client).0.len(), 6);
    assert!(removal.is_done());
}

#[test]
fn a_forced_removal_ends_a_paused_request() {
    let (mut harness, mut client) = paused();
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    check_forced(&mut client);
    assert_eq!((harness.stats().paused, harness.stats().blocks_used), (0, 0));
    check_unloaded(&mut harness, 0);
}

#[test]
fn a_paused_request_does_not_keep_other_adapters_out() {
    let (mut harness, mut client) = paused();
    harness.load_adapter(2, 1).unwrap();
    run_one(&mut harness, 2);
    assert_eq!(harness.stats().paused, 1, "it was preempted");
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    check_forced(&mut client);
    assert_eq!(changes(&mut harness)[1..], [(0, None), (0, Some(2))]);
    run_one_without(&mut harness);
}

/// A harness with two requests of an adapter, one of which is swapped out.
fn swapped() -> (Harness, [Client; 2]) {
    let limits = Limits {
        max_adapters: 1,
        num_blocks: 6,
        host_blocks: 8,
        preemption_mode: PreemptionMode::Swap,
        ..limits()
    };
    let mut harness = harness_with(1, limits);
    let clients = [0, 1].map(|seed| harness.start(with_adapter(1, request(4, 16, seed))));
    while harness.stats().swaps == 0 {
        assert!(harness.step());
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
    assert!(harness.stats().host_blocks_used > 0);
    (harness, clients)
}

#[test]
fn a_removal_waits_for_a_swapped_request() {
    let (mut harness, mut clients) = swapped();
    let removal = harness.unload_adapter(1, None);
    while !clients[0].is_ended() {
        assert!(!removal.is_done());
        check_ahead(&mut harness, &mut clients[0]);
    }
    assert!(!removal.is_done(), "the other one is swapped out");
    harness.run();
    check_output(&mut clients[1], &harness.limits);
    assert!(removal.is_done());
}

/// Steps, and reads the request once it has ended.
fn check_ahead(harness: &mut Harness, client: &mut Client) {
    let before = harness.stats().requests_finished;
    assert!(harness.step());
    if harness.stats().requests_finished > before {
        check_output(client, &harness.limits);
    }
}

#[test]
fn a_forced_removal_ends_a_swapped_request() {
    let (mut harness, mut clients) = swapped();
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    clients.iter_mut().for_each(check_forced);
    assert_eq!((harness.stats().blocks_used, harness.stats().host_blocks_used), (0, 0));
    check_unloaded(&mut harness, 0);
}

#[test]
fn a_forced_removal_before_the_load_leaves_nothing_to_do() {
    let mut harness = harness(1, 1);
    let mut client = harness.start(with_adapter(1, request(4, 4, 0)));
    assert_eq!(harness.stats().running, 1, "the next plan loads its adapter");
    assert!(harness.unload_adapter(1, Some(REASON)).is_done());
    check_forced(&mut client);
    run_one_without(&mut harness);
}

#[test]
fn a_removal_before_the_load_waits_for_the_request() {
    let mut harness = harness(1, 1);
    let mut client = harness.start(with_adapter(1, request(4, 4, 0)));
    let removal = harness.unload_adapter(1, None);
    assert!(!removal.is_done());
    harness.run();
    check_output(&mut client, &harness.limits);
    assert!(removal.is_done());
    assert_eq!(changes(&mut harness), [(0, Some(1))]);
}

#[test]
fn removed_adapters_in_use_have_a_limit_of_their_own() {
    let mut harness = bounded_harness(1);
    let mut clients = vec![];
    let mut removals = vec![];
    for id in [1, 2] {
        load(&mut harness, id).unwrap();
        clients.push(harness.start(with_adapter(id, request(4, 4, id))));
        assert_eq!(load(&mut harness, 9), too_many(1, id as usize - 1, 1));
        removals.push(harness.unload_adapter(id, None));
    }
    let refused = load(&mut harness, 3);
    assert_eq!(refused, too_many(0, 2, 1));
    let text = "0 adapters are loaded, and 2 unloaded ones have open requests; max_cpu_adapters is 1";
    assert_eq!(refused.unwrap_err().to_string(), text);
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    assert!(removals.iter().all(Removal::is_done));
    load(&mut harness, 3).unwrap();
}

#[test]
fn bytes_of_all_adapters_in_memory_are_limited() {
    let limits = Limits { max_adapters: 1, max_registered_adapters: 9, max_registered_bytes: 12, ..limits() };
    let mut harness = Harness::new(Limits { adapter_bytes: 10, ..limits });
    harness.load_adapter(1, 6).unwrap();
    harness.load_adapter(2, 5).unwrap();
    let refused = harness.load_adapter(3, 2).map(drop);
    assert_eq!(refused, Err(AdapterError::TooManyBytes { bytes: 2, registered: 11, limit: 12 }));
    let text = "it takes 2 bytes, and those in memory take 11 of max_cpu_adapter_bytes=12";
    assert_eq!(refused.unwrap_err().to_string(), text);
    harness.load_adapter(4, 1).unwrap();
    let mut open = harness.start(with_adapter(1, request(4, 4, 0)));
    harness.step();
    let removal = harness.unload_adapter(1, None);
    assert!(harness.load_adapter(5, 6).is_err(), "a request is open");
    harness.run();
    check_output(&mut open, &harness.limits);
    assert!(removal.is_done());
    harness.load_adapter(5, 6).unwrap();
}

#[test]
fn an_adapter_that_is_replaced_does_not_count() {
    let mut harness = bounded_harness(2);
    load(&mut harness, 1).unwrap();
    load(&mut harness, 2).unwrap();
    harness.replace_adapter(1, 3).unwrap();
    harness.replace_adapter(2, 4).unwrap(); // before the first one is unloaded
    run_one(&mut harness, 1);
    assert_eq!(harness.replace_adapter(1, 5), too_many(2, 2, 2), "it was replaced before");
    [1, 2].into_iter().for_each(|id| assert!(harness.unload_adapter(id, None).is_done()));
    assert_eq!(load(&mut harness, 5), too_many(2, 0, 2));
    assert_eq!(harness.replace_adapter(1, 5), too_many(2, 0, 2), "it is unknown now");
    [3, 4].into_iter().for_each(|id| run_one(&mut harness, id));
}

#[test]
fn adapters_are_replaced_while_their_requests_are_open() {
    let mut harness = bounded_harness(1);
    load(&mut harness, 1).unwrap();
    let mut open = harness.start(with_adapter(1, request(4, 20, 0)));
    harness.replace_adapter(1, 2).unwrap();
    let removal = harness.unload_adapter(1, None);
    let mut next = harness.start(with_adapter(2, request(4, 4, 1)));
    assert_eq!(harness.replace_adapter(2, 3), too_many(1, 1, 1));
    harness.run();
    [&mut open, &mut next].into_iter().for_each(|client| check_output(client, &harness.limits));
    assert!(removal.is_done());
    harness.replace_adapter(2, 3).unwrap();
}
