//! Handles as the child of a fork has them: copies without the engine's threads.

use std::sync::Arc;

use penstock_engine::{Limits, Port, StartError, StopCause};

use crate::random::Random;
use crate::threaded::{Received, engine, eventually, limits, requests};

#[test]
fn forked_handles_refuse_calls_and_change_nothing() {
    let engine = engine(Limits { queue_capacity: 8, max_waiting: 40, ..limits() });
    let (port, mut random) = (Port::with_condvar(), Random(10));
    let forked = StopCause::Forked(std::process::id());
    let (mut open, mut num_unread) = (vec![], 0);
    for request in requests(300) {
        match random.below(4) {
            0 => {
                let copy = engine.in_child();
                let error = copy.start_request(Arc::clone(&request), &port).unwrap_err();
                assert_eq!(error, StartError::Stopped(forked.clone()));
                assert_eq!((copy.is_running(), copy.stop_cause()), (false, Some(forked.clone())));
                copy.reset_prefix_cache(None);
                copy.drain();
                copy.shutdown();
                drop(copy.clone());
            }
            1 => {
                // The child reads what had arrived; cancelling and dropping concern the parent's request only.
                let received = Received::start(&engine, &request, &port);
                let mut consumer = received.consumer.in_child();
                let _ = consumer.pop();
                consumer.cancel();
                num_unread += u64::from(request.max_tokens > 8);
            }
            _ => open.push(Received::start(&engine, &request, &port)),
        }
        if open.len() > 30 {
            let mut received = open.swap_remove(random.below(open.len()));
            received.read_to_end(&port);
            received.check(engine.limits());
        }
    }
    for received in &mut open {
        received.read_to_end(&port);
        received.check(engine.limits());
    }
    assert!(engine.is_running() && num_unread > 10);
    eventually(|| engine.stats().paused > 10);
    assert_eq!(engine.stats().finished_cancelled, 0);
    engine.shutdown();
    assert_eq!(engine.stats().running + engine.stats().waiting, 0);
}
