//! Adapters: replacement, pinning, refusals, and failed steps.

mod fairness;
mod prefixes;
mod removal;

use std::sync::Arc;

use penstock_engine::testing::{Message, NewAdapter};
use penstock_engine::{AdapterError, AdapterId, Event, FinishReason, Limits, Rejection, Request, StopCause};

use crate::harness::{Client, Harness, adapter_name, caching, check_ended, check_output, limits, read};
use crate::oracle::{self, request};

/// A harness with `num_adapters` registered adapters, from number 1 on, of which `max_adapters` may be loaded.
fn harness(num_adapters: u64, max_adapters: usize) -> Harness {
    harness_with(num_adapters, Limits { max_adapters, ..limits() })
}

fn harness_with(num_adapters: u64, limits: Limits) -> Harness {
    let mut harness = Harness::new(Limits { adapter_bytes: 10, max_registered_adapters: 1_000, ..limits });
    for id in 1..=num_adapters {
        harness.load_adapter(id, 1).unwrap();
    }
    harness
}

fn with_adapter(id: u64, request: Request) -> Request {
    Request { adapter: Some(AdapterId(id)), ..request }
}

/// Runs a request to its end.
fn run_one(harness: &mut Harness, id: u64) {
    let mut client = harness.start(with_adapter(id, request(4, 3, id)));
    harness.run();
    check_output(&mut client, &harness.limits);
}

/// The adapter changes of the plans since the last call.
fn changes(harness: &mut Harness) -> Vec<(u32, Option<u64>)> {
    let changes = std::mem::take(&mut harness.device.changes);
    changes.into_iter().map(|(number, id)| (number, id.map(|id| id.0))).collect()
}

/// Steps until the request has a token. Returns the number of steps.
fn run_until_token(harness: &mut Harness, client: &mut Client) -> usize {
    let mut num_steps = 0;
    while read(client).0.is_empty() {
        assert!(harness.step(), "it waits and nothing runs");
        num_steps += 1;
    }
    num_steps
}

#[test]
fn the_least_recently_used_adapter_is_replaced() {
    let mut harness = harness(3, 2);
    for id in [1, 2, 1] {
        run_one(&mut harness, id);
    }
    assert_eq!(changes(&mut harness), [(0, Some(1)), (1, Some(2))]);
    run_one(&mut harness, 3);
    assert_eq!(changes(&mut harness), [(1, None), (1, Some(3))], "in this order");
    run_one(&mut harness, 1);
    assert_eq!(changes(&mut harness), []);
    run_one(&mut harness, 2);
    assert_eq!(changes(&mut harness), [(1, None), (1, Some(2))]);
    assert_eq!((harness.stats().adapter_loads, harness.stats().adapter_evictions), (4, 2));
    assert!(harness.unload_adapter(2, None).is_done());
    assert_eq!(harness.stats().adapter_evictions, 2, "an unloaded adapter makes room for no other");
}

#[test]
fn an_adapter_is_used_until_its_last_request_ends() {
    let mut harness = harness(3, 2);
    let mut long = harness.start(with_adapter(1, request(4, 20, 0)));
    let mut short = harness.start(with_adapter(2, request(4, 2, 1)));
    harness.run();
    [&mut long, &mut short].into_iter().for_each(|client| check_output(client, &harness.limits));
    run_one(&mut harness, 3);
    assert_eq!(changes(&mut harness)[2..], [(1, None), (1, Some(3))], "the second one was used before");
}

#[test]
fn a_pinned_adapter_is_never_replaced() {
    let mut harness = harness(4, 2);
    let mut pinned = harness.start(with_adapter(1, request(4, 40, 0)));
    for id in [2, 3, 4, 2] {
        let mut other = harness.start(with_adapter(id, request(4, 2, 1)));
        run_until_token(&mut harness, &mut other);
        while !other.is_ended() {
            harness.step();
            other.drain();
        }
    }
    assert!(!pinned.is_ended(), "it ran beside the others");
    let replaced = [(1, None), (1, Some(3)), (1, None), (1, Some(4)), (1, None), (1, Some(2))];
    assert_eq!(changes(&mut harness)[2..], replaced);
    harness.run();
    check_output(&mut pinned, &harness.limits);
}

#[test]
fn a_large_adapter_replaces_as_many_as_it_needs() {
    let mut harness = harness(4, 8);
    harness.load_adapter(5, 8).unwrap();
    for id in 1..=4 {
        run_one(&mut harness, id);
    }
    changes(&mut harness);
    run_one(&mut harness, 5);
    assert_eq!(changes(&mut harness), [(0, None), (1, None), (0, Some(5))], "of 10 bytes 2 may stay");
}

#[test]
fn rows_in_flight_keep_the_adapter_that_is_replaced_behind_them() {
    let mut harness = harness(2, 1);
    let mut first = harness.start(with_adapter(1, request(4, 20, 0)));
    harness.plan();
    harness.complete();
    harness.plan();
    first.cancel();
    let mut second = harness.start(with_adapter(2, request(4, 5, 1)));
    changes(&mut harness);
    assert_eq!(harness.plan().len(), 1);
    assert_eq!(harness.device.num_plans(), 2, "a row with the first adapter is in flight");
    assert_eq!(changes(&mut harness), [(0, None), (0, Some(2))]);
    harness.run(); // the device checks the adapter of each row
    check_ended(&mut first, FinishReason::Cancelled);
    check_output(&mut second, &harness.limits);
}

#[test]
fn two_plans_in_flight_may_replace_the_same_adapter() {
    let mut harness = harness(3, 1);
    let start = |harness: &mut Harness, id| harness.start(with_adapter(id, request(4, 1, id)));
    let mut clients = [1, 2, 3].map(|id| start(&mut harness, id));
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    let replaced = [(0, Some(1)), (0, None), (0, Some(2)), (0, None), (0, Some(3))];
    assert_eq!(changes(&mut harness), replaced);
}

#[test]
fn changes_that_no_plan_has_leave_nothing_behind() {
    let mut harness = harness(2, 1);
    let weights = oracle::weights(3);
    let observer = Arc::downgrade(&weights);
    let adapter = NewAdapter {
        id: AdapterId(3),
        name: adapter_name(3),
        weights,
        bytes: 10,
        usage: Arc::default(),
        replaces: None,
    };
    harness.register_adapter(adapter).unwrap();
    for id in [1, 3, 2, 3, 1, 3] {
        let mut client = harness.start(with_adapter(id, request(4, 4, 0)));
        assert_eq!(harness.stats().running, 1, "its adapter is to be loaded by the next plan");
        client.cancel();
        harness.attend();
        check_ended(&mut client, FinishReason::Cancelled);
    }
    assert!(harness.unload_adapter(3, None).is_done());
    assert_eq!(observer.strong_count(), 0, "the weights are freed before the next step");
    run_one(&mut harness, 1);
    assert_eq!(changes(&mut harness), [(0, Some(1))]);
    assert_eq!((harness.stats().adapter_loads, harness.stats().adapter_evictions), (1, 0));
}

#[test]
fn a_request_with_an_unknown_adapter_is_rejected() {
    let mut harness = harness(1, 2);
    let refused = harness.start(with_adapter(2, request(4, 4, 0))).drain();
    assert_eq!(refused, [Event::Rejected(Rejection::UnknownAdapter { num_adapters: 1 })]);
}

/// A harness of which at most `max_registered` adapters take requests.
fn bounded_harness(max_registered: usize) -> Harness {
    let limits = Limits { max_adapters: 1, adapter_bytes: 10, ..limits() };
    Harness::new(Limits { max_registered_adapters: max_registered, ..limits })
}

fn too_many(loaded: usize, closing: usize, limit: usize) -> Result<(), AdapterError> {
    Err(AdapterError::TooMany { loaded, closing, limit })
}

fn load(harness: &mut Harness, id: u64) -> Result<(), AdapterError> {
    harness.load_adapter(id, 10).map(drop)
}

#[test]
fn too_many_registered_adapters_are_refused_with_the_limit() {
    let mut harness = bounded_harness(2);
    harness.load_adapter(1, 10).unwrap();
    harness.load_adapter(2, 10).unwrap();
    assert_eq!(load(&mut harness, 3), too_many(2, 0, 2));
    assert!(harness.unload_adapter(1, None).is_done());
    harness.load_adapter(4, 10).unwrap();
    [2, 4].into_iter().for_each(|id| run_one(&mut harness, id));
}

#[test]
fn refused_weights_are_freed() {
    let mut harness = bounded_harness(1);
    load(&mut harness, 1).unwrap();
    let weights = oracle::weights(2);
    let observer = Arc::downgrade(&weights);
    let adapter = NewAdapter {
        id: AdapterId(2),
        name: adapter_name(2),
        weights,
        bytes: 1,
        usage: Arc::default(),
        replaces: None,
    };
    assert!(harness.register_adapter(adapter).is_err());
    assert_eq!(observer.strong_count(), 0);
}

#[test]
fn a_stopped_engine_refuses_adapters() {
    let mut harness = harness(1, 1);
    harness.handle(Message::Shutdown);
    assert_eq!(harness.load_adapter(2, 1).unwrap_err(), AdapterError::Stopped(StopCause::Closed));
    assert!(harness.unload_adapter(1, None).is_done());
}

#[test]
fn an_adapter_stays_pinned_when_one_of_two_is_cancelled() {
    let mut harness = harness(2, 1);
    let mut clients = [0, 1].map(|seed| harness.start(with_adapter(1, request(4, 12, seed))));
    let mut other = harness.start(with_adapter(2, request(4, 3, 2)));
    harness.step();
    clients[0].cancel();
    harness.attend();
    check_ended(&mut clients[0], FinishReason::Cancelled);
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
    harness.run();
    check_output(&mut clients[1], &harness.limits);
    check_output(&mut other, &harness.limits);
    assert_eq!(changes(&mut harness), [(0, Some(1)), (0, None), (0, Some(2))]);
}

#[test]
fn each_choice_pins_the_adapter_that_is_loaded_once() {
    for limits in [limits(), caching()] {
        let mut harness = harness_with(2, Limits { max_adapters: 1, ..limits });
        let mut choices = harness.start_choices(with_adapter(1, request(9, 12, 0)), 3);
        let mut other = harness.start(with_adapter(2, request(4, 3, 1)));
        while harness.stats().running < 3 {
            harness.step();
        }
        for choice in &mut choices[..2] {
            choice.cancel();
            harness.attend();
            check_ended(choice, FinishReason::Cancelled);
        }
        assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
        harness.run();
        check_output(&mut choices[2], &harness.limits);
        check_output(&mut other, &harness.limits);
        assert_eq!(changes(&mut harness), [(0, Some(1)), (0, None), (0, Some(2))]);
    }
}

#[test]
fn the_use_of_an_adapter_is_counted() {
    let mut harness = Harness::new(Limits {
        max_adapters: 1,
        max_num_seqs: 2,
        adapter_bytes: 10,
        max_registered_adapters: 2,
        ..limits()
    });
    let usages = [1, 2].map(|id| harness.load_adapter(id, 1).unwrap());
    let counts =
        || usages.each_ref().map(|usage| (usage.num_running(), usage.num_waiting(), usage.is_on_device()));
    assert_eq!(counts(), [(0, 0, false); 2]);
    let mut clients = [0, 1, 2].map(|seed| harness.start(with_adapter(1, request(4, 8, seed))));
    let mut other = harness.start(with_adapter(2, request(4, 8, 3)));
    assert_eq!(counts(), [(2, 1, true), (0, 1, false)]);
    clients[0].cancel();
    clients[2].cancel();
    harness.attend();
    assert_eq!(counts(), [(1, 0, true), (0, 1, false)]);
    harness.run();
    check_output(&mut clients[1], &harness.limits);
    check_output(&mut other, &harness.limits);
    assert_eq!(counts(), [(0, 0, false), (0, 0, true)]);
    assert!(harness.unload_adapter(2, None).is_done());
    assert_eq!(counts(), [(0, 0, false); 2]);
}

#[test]
fn a_step_that_fails_after_its_changes_keeps_them() {
    let mut harness = harness(2, 1);
    let mut failed = harness.start(with_adapter(1, request(4, 4, 0)));
    harness.plan();
    harness.fail_after_copies("the step failed");
    check_ended(&mut failed, FinishReason::Failed("the step failed".into()));
    run_one(&mut harness, 1);
    assert_eq!(changes(&mut harness), [(0, Some(1))], "it is loaded already");
    run_one(&mut harness, 2);
    assert_eq!(changes(&mut harness), [(0, None), (0, Some(2))]);
}

#[test]
fn a_step_that_fails_between_adapters_and_copies_keeps_adapters() {
    let mut harness = harness(2, 1);
    let mut failed = harness.start(with_adapter(1, request(4, 4, 0)));
    harness.plan();
    harness.fail_after_adapters("a slot was not admitted");
    check_ended(&mut failed, FinishReason::Failed("a slot was not admitted".into()));
    run_one(&mut harness, 1);
    assert_eq!(changes(&mut harness), [(0, Some(1))], "it is loaded already");
    run_one(&mut harness, 2);
    assert_eq!(changes(&mut harness), [(0, None), (0, Some(2))]);
}

#[test]
fn a_step_that_fails_before_its_changes_stops_the_engine() {
    let mut harness = harness(2, 1);
    let mut clients = [
        harness.start(with_adapter(1, request(4, 8, 0))),
        harness.start(request(4, 8, 1)),
        harness.start(with_adapter(2, request(4, 8, 2))),
    ];
    harness.plan();
    harness.plan();
    harness.fail("no adapter was loaded");
    let lost = StopCause::DeviceLost("no adapter was loaded".into());
    for client in &mut clients {
        check_ended(client, FinishReason::EngineStopped(lost.clone()));
    }
    assert!(harness.core.is_stopped() && harness.plan().is_empty());
    assert_eq!(harness.load_adapter(3, 1).unwrap_err(), AdapterError::Stopped(lost));
}

#[test]
fn a_failed_step_without_changes_leaves_adapters_loaded() {
    let mut harness = harness(1, 1);
    let mut failed = harness.start(with_adapter(1, request(4, 8, 0)));
    harness.step();
    harness.fail("the step failed");
    check_ended(&mut failed, FinishReason::Failed("the step failed".into()));
    run_one(&mut harness, 1);
    assert_eq!(changes(&mut harness), [(0, Some(1))]);
}
