//! A listener receives for its requests, and a drain costs nothing for those without new events.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_engine::testing::num_pops;
use penstock_engine::{Limits, Port};
use penstock_frontend::output::{Listener, RequestState};
use penstock_frontend::params::SamplingParams;
use penstock_frontend::prompt::Mode;

use crate::support::*;

const LONG_WAIT: Duration = Duration::from_secs(30);

fn params(n: usize, max_tokens: usize) -> SamplingParams {
    SamplingParams { n, max_tokens: Some(max_tokens), ignore_eos: true, ..SamplingParams::default() }
}

fn start(setup: &Setup, listener: &Listener, params: &SamplingParams) -> Arc<RequestState> {
    let state = Arc::new(setup.start("abc", params, Mode::Completion, listener.port()).unwrap());
    listener.add(&state);
    state
}

/// Drains once the bell has rung.
fn drain(listener: &Listener) -> Vec<u64> {
    assert!(listener.port().wait(Some(LONG_WAIT)), "the bell does not ring");
    listener.drain()
}

#[test]
fn a_drain_visits_only_choices_with_new_events() {
    let (sender, permits) = channel();
    let permits = Mutex::new(permits);
    let model = move |_: &_, _: &[u32]| {
        let _ = permits.lock().unwrap().recv(); // an error ends the test
        only(u32::from(b'a'))
    };
    let bounds = |limits: &mut Limits| {
        (limits.max_num_seqs, limits.max_waiting, limits.max_unfinished) = (1, 1000, 100_000);
    };
    let setup = with_limits(bounds, model);
    let permit = sender; // dropped before the setup
    let listener = Listener::new(Port::with_condvar());
    let stream = start(&setup, &listener, &params(1, 100));
    permit.send(()).unwrap();
    while stream.usage().completion_tokens == 0 {
        drain(&listener);
    }
    let waiting: Vec<_> = (0..300).map(|_| start(&setup, &listener, &params(128, 8))).collect();
    let num_before = num_pops();
    while waiting.iter().any(|request| !request.was_admitted()) {
        drain(&listener);
    }
    // Every choice was admitted: one event, and a look for the next.
    assert!(num_pops() - num_before <= 300 * 128 * 2 * 2, "a drain visits choices without events");
    for num_tokens in 2..=50 {
        permit.send(()).unwrap();
        let num_before = num_pops();
        while stream.usage().completion_tokens < num_tokens {
            drain(&listener);
        }
        assert!(stream.take().is_some());
        assert!(num_pops() - num_before <= 3, "38,400 waiting choices are visited for a token");
    }
}

#[test]
fn ids_drained_before_their_request_is_added_are_received() {
    let setup = saying(bytes("abcdef"));
    let listener = Listener::new(Port::with_condvar());
    let state = setup.start("abc", &params(4, 6), Mode::Completion, listener.port()).unwrap();
    assert!(drain(&listener).is_empty(), "not known yet");
    let state = Arc::new(state);
    listener.add(&state);
    let mut reached = Vec::new();
    while !state.is_over() {
        reached = drain(&listener);
    }
    assert_eq!(state.result().unwrap().usage.completion_tokens, 24);
    assert!(reached.is_empty() || reached == [state.id]);
}

#[test]
fn choices_that_were_full_are_received_once_they_are_taken() {
    let setup = saying(bytes(&"a".repeat(100)));
    let listener = Listener::new(Port::with_condvar());
    let state = start(&setup, &listener, &params(3, 90));
    while setup.frontend.engine.stats().paused < 3 {
        listener.port().wait(Some(Duration::from_millis(1)));
        listener.drain();
    }
    listener.drain();
    let mut num_tokens = 0;
    loop {
        while let Some(chunk) = state.take() {
            num_tokens += chunk.token_ids.len();
        }
        if state.is_over() {
            break;
        }
        drain(&listener); // without a look at the request itself
    }
    assert_eq!(num_tokens, 270);
}

#[test]
fn a_dropped_request_does_not_disturb_its_neighbours() {
    let setup = saying(bytes("abcdef"));
    let listener = Listener::new(Port::with_condvar());
    let [first, dropped, last] = [0, 1, 2].map(|_| start(&setup, &listener, &params(3, 6)));
    drop(dropped);
    let mut reached = Vec::new();
    while !(first.is_over() && last.is_over()) {
        reached.extend(drain(&listener));
    }
    for request in [first, last] {
        assert_eq!(request.result().unwrap().usage.completion_tokens, 18);
    }
}
