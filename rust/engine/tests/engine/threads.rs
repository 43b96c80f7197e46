//! The engine with real threads: many consumers on a port, dropped consumers, a full mailbox.

use std::collections::VecDeque;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};
use penstock_engine::{
    AdapterError, AdapterId, Consumer, Engine, Executor, FinishReason, Limits, Port, Request, StartError,
    StepOutput, StepPlan, StopCause,
};

use crate::harness::Harness;
use crate::oracle::{request, weights};
use crate::threaded::{PATIENCE, Received, engine, eventually, gated_engine, limits, requests};

#[test]
fn choices_are_started_as_one() {
    let port = Port::with_condvar();
    let engine = engine(Limits { prefix_cache_ttl: Some(Duration::from_secs(300)), ..limits() });
    let invalid = engine.start_choices(request(0, 6, 0), 8, &port);
    assert!(matches!(invalid, Err(StartError::Invalid(_))));
    let request = Arc::new(request(30, 6, 0));
    let consumers = engine.start_choices(Arc::clone(&request), 8, &port).unwrap();
    for (choice, consumer) in (0..).zip(consumers) {
        let mut received = Received::new(Arc::new(request.of_choice(choice)), consumer);
        received.read_to_end(&port);
        received.check(engine.limits());
    }
    assert_eq!(engine.stats().requests_finished, 8);
    assert!(engine.start_choices(request, 0, &port).unwrap().is_empty());
}

#[test]
fn engines_never_assign_the_same_request_id() {
    let port = Port::with_condvar();
    let mut ids = Vec::new();
    let mut start = |engine: &Engine, num_choices| {
        let consumers = engine.start_choices(request(4, 2, 0), num_choices, &port).unwrap();
        ids.extend(consumers.iter().map(Consumer::id));
    };
    let (first, second) = (engine(limits()), engine(limits()));
    for engine in [&first, &second, &first] {
        start(engine, 2);
    }
    first.shutdown();
    start(&engine(limits()), 3);
    assert!(ids.is_sorted_by(|one, other| one < other), "{ids:?}");
}

#[test]
fn many_consumers_share_one_port() {
    for port in [Port::with_descriptor().unwrap(), Port::with_condvar()] {
        let engine = engine(limits());
        let mut open: VecDeque<_> =
            requests(256).iter().map(|request| Received::start(&engine, request, &port)).collect();
        while !open.is_empty() {
            assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
            port.clear();
            open.iter_mut().for_each(Received::drain);
            open.retain(|received| {
                if received.consumer.is_ended() {
                    received.check(engine.limits());
                }
                !received.consumer.is_ended()
            });
        }
        let stats = engine.stats();
        assert_eq!(
            (stats.running, stats.waiting, stats.blocks_used, stats.requests_finished),
            (0, 0, 0, 256)
        );
    }
}

#[test]
fn blocking_threads_with_tiny_queues_get_whole_outputs() {
    let engine = engine(Limits { queue_capacity: 2, ..limits() });
    let threads: Vec<_> = requests(64)
        .into_iter()
        .map(|request| {
            let engine = engine.clone();
            thread::spawn(move || {
                let port = Port::with_condvar();
                let mut received = Received::start(&engine, &request, &port);
                received.read_to_end(&port);
                received.check(engine.limits());
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn blocks_are_free_before_the_last_event() {
    // Many requests end in one step while another thread polls the first of them, without waiting for the bell.
    let limits = Limits { max_num_seqs: 64, max_num_batched_tokens: 64, num_blocks: 64, ..limits() };
    let mut harness = Harness::new(limits);
    for _ in 0..500 {
        let mut first = harness.start(request(1, 1, 0));
        let _others: Vec<_> = (1..64).map(|seed| harness.start(request(1, 1, seed))).collect();
        let (shared_stats, ready) = (harness.shared_stats(), Barrier::new(2));
        harness.plan();
        thread::scope(|scope| {
            scope.spawn(|| {
                ready.wait();
                while !first.is_ended() {
                    first.pop();
                }
                let stats = shared_stats.read();
                assert_eq!((stats.running, stats.blocks_used, stats.blocks_reserved), (0, 0, 0));
            });
            ready.wait();
            harness.complete();
        });
    }
}

#[test]
fn dropped_consumers_free_everything() {
    let engine = engine(Limits { queue_capacity: 4, ..limits() });
    let port = Port::with_condvar();
    for request in requests(300) {
        drop(Received::start(&engine, &request, &port));
    }
    eventually(|| {
        let stats = engine.stats();
        (stats.running, stats.waiting, stats.blocks_used, stats.requests_admitted) == (0, 0, 0, 300)
    });
    let mut alive = Received::start(&engine, &requests(9)[8], &port);
    alive.read_to_end(&port);
    alive.check(engine.limits());
}

#[test]
fn a_full_mailbox_rejects_starts_but_loses_no_cancel() {
    // The engine thread blocks inside `submit` until the gate opens.
    struct Blocking {
        entered: Sender<()>,
        gate: Receiver<()>,
    }
    impl Executor for Blocking {
        fn submit(&mut self, _: Box<StepPlan>, _: Box<StepOutput>) {
            let _ = self.entered.send(());
            let _ = self.gate.recv();
        }
    }
    let (entered, has_entered) = unbounded();
    let (opener, gate) = unbounded::<()>();
    let limits = Limits { max_waiting: 8, ..limits() };
    let engine = Engine::start(limits, |_| Box::new(Blocking { entered, gate })).unwrap();
    let port = Port::with_condvar();
    let request = &requests(9)[8];
    let mut first = Received::start(&engine, request, &port);
    has_entered.recv().unwrap();
    let mut posted = vec![];
    let error = loop {
        match engine.start_request(Arc::clone(request), &port) {
            Ok(consumer) => posted.push(consumer),
            Err(error) => break error,
        }
    };
    assert_eq!(error, StartError::Overloaded);
    first.consumer.cancel();
    posted[0].cancel();
    drop(opener);
    first.read_to_end(&port);
    assert_eq!(first.reason, Some(FinishReason::Cancelled));
    eventually(|| std::iter::from_fn(|| posted[0].pop()).count() > 0 && posted[0].is_ended());
}

#[test]
fn output_bytes_are_reserved_until_all_is_received() {
    let engine = engine(Limits { max_output_bytes: 100, ..limits() });
    let port = Port::with_condvar();
    let wide = |output_bytes| Arc::new(Request { output_bytes, ..request(4, 8, 0) });
    let mut first = Received::start(&engine, &wide(60), &port);
    let error = engine.start_request(wide(41), &port).unwrap_err();
    assert_eq!(error, StartError::OutputMemory { bytes: 41, reserved: 60, limit: 100 });
    assert_eq!(engine.stats().requests_rejected, 1);
    drop(engine.start_choices(wide(40), 2, &port).unwrap());
    let second = Received::start(&engine, &wide(40), &port);
    first.read_to_end(&port);
    let third = Received::start(&engine, &wide(60), &port);
    let plain = Received::start(&engine, &wide(0), &port);
    for mut received in [second, third, plain] {
        received.read_to_end(&port);
        received.check(engine.limits());
    }
}

#[test]
fn an_engine_does_not_start_with_invalid_limits() {
    let error = Engine::start(Limits { num_blocks: 0, ..limits() }, |_| unreachable!()).unwrap_err();
    assert_eq!(error.to_string(), "num_blocks=0 is not allowed: it must be at least 1");
}

#[test]
fn a_request_that_never_fits_is_rejected_at_once() {
    let engine = engine(Limits { num_blocks: 2, ..limits() });
    let error = engine.start_request(request(30, 40, 0), &Port::with_condvar()).unwrap_err();
    assert_eq!(error.to_string(), "prompt of 30 tokens and max_tokens=40 need 5 KV blocks; the cache has 2");
}

/// An engine that has run one request, whose prefix it keeps for `ttl`.
fn engine_with_prefix(ttl: Duration) -> Engine {
    let engine = engine(Limits { prefix_cache_ttl: Some(ttl), ..limits() });
    let port = Port::with_condvar();
    let mut received = Received::start(&engine, &Arc::new(request(40, 2, 0)), &port);
    received.read_to_end(&port);
    received.check(engine.limits());
    engine
}

#[test]
fn prefixes_expire_in_an_idle_engine() {
    let engine = engine_with_prefix(Duration::from_millis(20));
    eventually(|| engine.stats().blocks_cached == 0);
}

#[test]
fn reset_empties_the_cache_and_ignores_a_stopped_engine() {
    let engine = engine_with_prefix(PATIENCE);
    assert!(engine.stats().blocks_cached > 0);
    engine.reset_prefix_cache(None);
    eventually(|| engine.stats().blocks_cached == 0);
    engine.shutdown();
    engine.reset_prefix_cache(None);
}

#[test]
fn removals_of_adapters_ring_in_every_state_of_the_engine() {
    let limits = Limits { max_adapters: 1, adapter_bytes: 8, max_registered_adapters: 2, ..limits() };
    let (engine, port) = (engine(limits), Port::with_condvar());
    let unload = |engine: &Engine, id| {
        engine.unload_adapter(id, None, Some(&port));
        assert!(port.wait(Some(PATIENCE)), "a wake-up was lost");
        port.clear();
    };
    let load = |engine: &Engine| engine.load_adapter("a", weights(1), 8).map(|(id, _)| id);
    let ids = [load(&engine).unwrap(), load(&engine).unwrap()];
    assert_ne!(ids[0], ids[1]);
    let full = Err(AdapterError::TooMany { loaded: 2, closing: 0, limit: 2 });
    assert_eq!(load(&engine), full);
    unload(&engine, ids[0]);
    unload(&engine, ids[0]); // it is unknown now
    load(&engine).unwrap();
    let forked = engine.in_child();
    assert!(matches!(load(&forked), Err(AdapterError::Stopped(StopCause::Forked(_)))));
    unload(&forked, ids[1]);
    assert_eq!(load(&engine), full, "a child changes nothing");
    engine.shutdown();
    assert_eq!(load(&engine), Err(AdapterError::Stopped(StopCause::Closed)));
    unload(&engine, ids[1]);
    unload(&engine, AdapterId(0));
}

#[test]
fn an_unload_that_waits_can_be_forced() {
    let limits =
        Limits { max_num_seqs: 1, max_adapters: 1, adapter_bytes: 8, max_registered_adapters: 1, ..limits() };
    let (engine, _gate) = gated_engine(limits);
    let (former, _) = engine.load_adapter("a", weights(1), 8).unwrap();
    let [output, waiting, forced] = [(); 3].map(|()| Port::with_condvar());
    let start =
        |adapter| Received::start(&engine, &Arc::new(Request { adapter, ..request(4, 4, 0) }), &output);
    let (_running, mut open) = (start(None), start(Some(former)));
    let full = AdapterError::TooMany { loaded: 1, closing: 0, limit: 1 };
    assert_eq!(engine.load_adapter("a", weights(2), 8).unwrap_err(), full);
    engine.replace_adapter(former, "a", weights(2), 8).unwrap();
    engine.unload_adapter(former, None, Some(&waiting));
    let full = AdapterError::TooMany { loaded: 1, closing: 1, limit: 1 };
    assert_eq!(engine.load_adapter("a", weights(3), 8).unwrap_err(), full, "after the unload");
    assert!(!waiting.wait(Some(Duration::ZERO)), "a request is open");
    engine.unload_adapter(former, Some("unloaded".into()), Some(&forced));
    assert!(forced.wait(Some(PATIENCE)) && waiting.wait(Some(PATIENCE)));
    open.read_to_end(&output);
    assert_eq!(open.reason, Some(FinishReason::Failed("unloaded".into())));
}

#[test]
fn a_hold_keeps_an_adapter_that_is_unloaded() {
    let limits = Limits { max_adapters: 1, adapter_bytes: 8, max_registered_adapters: 1, ..limits() };
    let (engine, removed) = (engine(limits), Port::with_condvar());
    let (id, usage) = engine.load_adapter("a", weights(1), 8).unwrap();
    let (hold, forked) = (engine.hold(Some(id)), engine.in_child().hold(Some(id)));
    assert_eq!(hold.adapter(), Some(id));
    engine.unload_adapter(id, None, Some(&removed));
    engine.load_adapter("a", weights(2), 8).unwrap();
    drop(forked);
    let full = AdapterError::TooMany { loaded: 1, closing: 1, limit: 1 };
    assert_eq!(engine.load_adapter("a", weights(3), 8).unwrap_err(), full, "after the unload");
    assert!(!usage.is_removed() && !removed.wait(Some(Duration::ZERO)));
    drop(hold);
    assert!(removed.wait(Some(PATIENCE)) && usage.is_removed());
}
