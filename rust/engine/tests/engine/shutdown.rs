//! The end of an engine with real threads: shutdown, crash, lost device.

use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use penstock_engine::{
    Completions, Engine, Executor, FinishReason, Port, Rejection, StartError, StepDone, StepError,
    StepOutput, StepPlan, StopCause,
};

use crate::device::Device;
use crate::oracle::request;
use crate::threaded::{PATIENCE, Received, Worker, engine, eventually, gated_engine, limits, requests};

#[test]
fn a_panic_in_submit_stops_the_engine_and_ends_all_requests() {
    struct Panicking {
        num_left: usize,
        worker: Box<dyn Executor>,
    }
    impl Executor for Panicking {
        fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
            self.num_left = self.num_left.checked_sub(1).expect("a panic on purpose");
            self.worker.submit(plan, output);
        }
    }
    let engine = Engine::start(limits(), |completions| {
        Box::new(Panicking { num_left: 5, worker: Worker::start(&limits(), completions, || {}) })
    })
    .unwrap();
    let port = Port::with_condvar();
    let request = Arc::new(request(20, 100, 0));
    let mut received: Vec<_> = (0..100)
        .map_while(|_| engine.start_request(Arc::clone(&request), &port).ok())
        .map(|consumer| Received::new(Arc::clone(&request), consumer))
        .collect();
    for received in &mut received {
        received.read_to_end(&port);
        // A request that was still in the mailbox was never admitted; all others were open.
        assert!(received.has_ended_with(&StopCause::Crashed));
    }
    assert_eq!(received[0].reason, Some(FinishReason::EngineStopped(StopCause::Crashed)));
    assert_eq!(engine.stop_cause(), Some(StopCause::Crashed));
    let error = engine.start_request(request, &port).unwrap_err();
    assert_eq!(error, StartError::Stopped(StopCause::Crashed));
    engine.shutdown();
}

#[test]
fn a_lost_device_ends_every_request_with_its_message() {
    // Every step but the first loses the device.
    struct Losing {
        device: Device,
        completions: Completions,
    }
    impl Executor for Losing {
        fn submit(&mut self, plan: Box<StepPlan>, output: Box<StepOutput>) {
            let is_first = plan.step == 1;
            self.device.submit(plan, output);
            let done = self.device.complete();
            let result = if is_first { Ok(()) } else { Err(StepError::DeviceLost("bus error".into())) };
            self.completions.send(StepDone { result, ..done });
        }
    }
    let device = Device::new(&limits());
    let engine = Engine::start(limits(), |completions| Box::new(Losing { device, completions })).unwrap();
    let (port, request) = (Port::with_condvar(), Arc::new(request(20, 100, 0)));
    let started = (0..100).map_while(|_| engine.start_request(Arc::clone(&request), &port).ok());
    let consumers: Vec<_> = started.collect();
    let lost = StopCause::DeviceLost("bus error".into());
    for consumer in consumers {
        let mut received = Received::new(Arc::clone(&request), consumer);
        received.read_to_end(&port);
        assert!(received.has_ended_with(&lost), "{:?} {:?}", received.reason, received.rejection);
        assert_eq!(engine.stop_cause().as_ref(), Some(&lost), "an ended request sees a stopped engine");
    }
    let error = engine.start_request(request, &port).unwrap_err();
    assert_eq!(error.to_string(), "the device was lost: bus error; create a new engine");
    engine.shutdown();
    assert_eq!(engine.stop_cause(), Some(lost), "the first cause stays");
}

#[test]
fn a_start_in_the_mailbox_of_a_crashed_engine_is_rejected() {
    struct Doomed {
        entered: Sender<()>,
        gate: Receiver<()>,
    }
    impl Executor for Doomed {
        fn submit(&mut self, _: Box<StepPlan>, _: Box<StepOutput>) {
            let _ = self.entered.send(());
            let _ = self.gate.recv();
            panic!("a panic on purpose");
        }
    }
    let (entered, has_entered) = unbounded();
    let (opener, gate) = unbounded::<()>();
    let engine = Engine::start(limits(), |_| Box::new(Doomed { entered, gate })).unwrap();
    let request = &requests(9)[8];
    let ports = [Port::with_condvar(), Port::with_condvar()];
    let mut open = Received::start(&engine, request, &ports[0]);
    has_entered.recv().unwrap();
    let mut left = Received::start(&engine, request, &ports[1]);
    drop(opener);
    open.read_to_end(&ports[0]);
    assert_eq!(open.reason, Some(FinishReason::EngineStopped(StopCause::Crashed)));
    assert!(ports[1].wait(Some(PATIENCE)), "its port was not rung");
    left.read_to_end(&ports[1]);
    assert_eq!(left.rejection, Some(Rejection::Stopped(StopCause::Crashed)));
}

#[test]
fn shutdown_cancels_all_requests_from_several_threads() {
    let (engine, gate) = gated_engine(limits());
    let port = Port::with_condvar();
    let mut received: Vec<_> =
        requests(100).iter().map(|request| Received::start(&engine, request, &port)).collect();
    eventually(|| engine.stats().running + engine.stats().waiting == 100); // a closed engine rejects what it has not seen
    let callers: Vec<_> = (0..4)
        .map(|_| {
            let engine = engine.clone();
            thread::spawn(move || engine.shutdown())
        })
        .collect();
    for received in &mut received {
        received.read_to_end(&port);
        assert_eq!(received.reason, Some(FinishReason::Cancelled));
    }
    drop(gate); // the drop of the executor waits for its thread
    callers.into_iter().for_each(|caller| caller.join().unwrap());
    engine.shutdown();
    assert!(!engine.is_running());
    let error = engine.start_request(request(1, 1, 0), &port).unwrap_err();
    assert_eq!(error, StartError::Stopped(StopCause::Closed));
}

#[test]
fn dropping_the_last_handle_ends_all_requests() {
    let (engine, gate) = gated_engine(limits());
    let port = Port::with_condvar();
    let mut received = Received::start(&engine, &requests(9)[8], &port);
    let other = engine.clone();
    drop(engine);
    assert!(other.is_running());
    drop(gate);
    drop(other);
    received.read_to_end(&port);
    assert!(received.reason.is_some());
}

#[test]
fn requests_racing_with_shutdown_all_end() {
    for round in 0..20 {
        let engine = engine(limits());
        let starters: Vec<_> = (0..4)
            .map(|_| {
                let engine = engine.clone();
                thread::spawn(move || {
                    let port = Port::with_condvar();
                    for request in requests(200) {
                        match engine.start_request(Arc::clone(&request), &port) {
                            Ok(consumer) => {
                                Received::new(request, consumer).read_to_end(&port);
                            }
                            Err(StartError::Stopped(_)) => return,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        eventually(|| engine.stats().requests_finished >= round);
        engine.shutdown();
        starters.into_iter().for_each(|starter| starter.join().unwrap());
    }
}

#[test]
fn a_drained_engine_finishes_its_requests_and_then_ends() {
    let (engine, gate) = gated_engine(limits());
    let (port, end) = (Port::with_condvar(), Port::with_condvar());
    let mut received: Vec<_> =
        requests(50).iter().map(|request| Received::start(&engine, request, &port)).collect();
    engine.drain();
    engine.ring_at_end(&end);
    let late = Received::start(&engine, &requests(9)[8], &port);
    assert!(engine.is_running(), "no step is done");
    drop(gate);
    for received in received.iter_mut().chain([late].iter_mut()) {
        received.read_to_end(&port);
        received.check(&limits());
    }
    assert!(end.wait(Some(PATIENCE)), "its end was not announced");
    assert_eq!(engine.stop_cause(), Some(StopCause::Closed));
}

#[test]
fn an_end_in_the_past_is_announced_at_once() {
    let engine = engine(limits());
    engine.shutdown();
    let end = Port::with_condvar();
    engine.ring_at_end(&end);
    assert!(end.wait(Some(PATIENCE)), "its end was not announced");
}

#[test]
fn a_hold_keeps_a_drained_engine_running() {
    let engine = engine(limits());
    let (port, end) = (Port::with_condvar(), Port::with_condvar());
    let hold = engine.hold(None);
    engine.drain();
    engine.ring_at_end(&end);
    for request in requests(3) {
        let mut received = Received::start(&engine, &request, &port);
        received.read_to_end(&port);
        received.check(&limits());
    }
    drop(hold);
    assert!(end.wait(Some(PATIENCE)), "its end was not announced");
}

#[test]
fn shutdown_ends_a_drain() {
    let (engine, gate) = gated_engine(limits());
    let port = Port::with_condvar();
    let mut open = Received::start(&engine, &requests(9)[8], &port);
    engine.drain();
    engine.close();
    open.read_to_end(&port);
    assert_eq!(open.reason, Some(FinishReason::Cancelled));
    drop(gate);
    engine.shutdown();
}
