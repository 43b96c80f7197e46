//! Model checks of the few places where two threads share memory: one small model per race. A program of its own,
//! because `make test-loom` compiles the engine with loom's primitives.

#![cfg(feature = "loom")]
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::time::Duration;

use loom::sync::Notify;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;
use penstock_engine::Port;
use penstock_engine::testing::{CancelCause, CancelSet, Gate, Outbox, result_queue};
use penstock_engine::{CachedTokens, Event, Finish, FinishReason, RequestId, StopCause};
use penstock_types::Token;

/// Three preemptions find every known bug of this kind, and keep a model within seconds.
fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

fn token(id: u32) -> Token {
    Token::new(id, 0.0)
}

fn finish(reason: FinishReason) -> Finish {
    Finish {
        reason,
        cached: CachedTokens::default(),
        queued: Duration::ZERO,
        first_token: None,
        total: Duration::ZERO,
    }
}

#[test]
fn push_vs_pop_at_wrap() {
    check(|| {
        let (mut writer, mut reader) = result_queue(1);
        let engine = thread::spawn(move || {
            writer.admit();
            for id in 0..3 {
                while !writer.has_room_for(1) {
                    thread::yield_now();
                }
                writer.push_token(token(id));
            }
            writer.finish(finish(FinishReason::Length));
        });
        let mut next = 0;
        while !reader.is_ended() {
            match reader.pop() {
                Some(Event::Admitted) => assert_eq!(next, 0),
                Some(Event::Token(popped)) => {
                    assert_eq!(popped, token(next));
                    next += 1;
                }
                Some(event) => assert_eq!(event, Event::Finished(finish(FinishReason::Length))),
                None => thread::yield_now(),
            }
        }
        assert_eq!(next, 3);
        engine.join().unwrap();
    });
}

#[test]
fn writer_drop_vs_pop() {
    check(|| {
        let (mut writer, mut reader) = result_queue(4);
        let engine = thread::spawn(move || {
            writer.admit();
            writer.push_token(token(0));
        });
        let mut events = vec![];
        while !reader.is_ended() {
            match reader.pop() {
                Some(event) => events.push(event),
                None => thread::yield_now(),
            }
        }
        let stopped = Event::Finished(finish(FinishReason::EngineStopped(StopCause::Crashed)));
        assert_eq!(events, [Event::Admitted, Event::Token(token(0)), stopped]);
        engine.join().unwrap();
    });
}

#[test]
fn reader_drop_vs_push() {
    check(|| {
        let (mut writer, mut reader) = result_queue(2);
        let engine = thread::spawn(move || {
            writer.admit();
            writer.finish(finish(FinishReason::Failed("boxed".into())));
        });
        reader.pop();
        drop(reader);
        engine.join().unwrap();
    });
}

#[test]
fn cancel_vs_push() {
    check(|| {
        let (mut writer, reader) = result_queue(2);
        let cancel_set = Arc::new(CancelSet::default());
        let seen = Arc::clone(&cancel_set);
        let engine = thread::spawn(move || {
            writer.admit();
            let is_seen = seen.take();
            assert!(!is_seen || writer.cancel_cause().is_some(), "the flag came before what it calls for");
            writer.push_token(token(0));
            (is_seen, writer)
        });
        assert!(reader.cancel_flag().set(CancelCause::Unwanted));
        cancel_set.raise();
        let (is_seen, writer) = engine.join().unwrap();
        assert!(is_seen != cancel_set.take(), "seen once");
        assert!(writer.cancel_cause().is_some());
    });
}

#[test]
fn cancel_vs_full_mailbox() {
    check(|| {
        // A full mailbox of one message.
        let num_messages = Arc::new(AtomicUsize::new(1));
        let cancel_set = Arc::new(CancelSet::default());
        let client = {
            let (num_messages, cancel_set) = (Arc::clone(&num_messages), Arc::clone(&cancel_set));
            thread::spawn(move || {
                cancel_set.raise();
                // The nudge, if there is room for it. Relaxed: the mailbox need not order memory.
                if num_messages.load(Ordering::Relaxed) == 0 {
                    num_messages.fetch_add(1, Ordering::Relaxed);
                }
            })
        };
        let iterate = || {
            num_messages.fetch_sub(1, Ordering::Relaxed);
            cancel_set.take()
        };
        let is_seen = iterate();
        client.join().unwrap();
        // The engine sleeps unless there is a message. It must have seen the cancel or be woken to see it.
        assert!(is_seen || (num_messages.load(Ordering::Relaxed) == 1 && iterate()), "the cancel was lost");
    });
}

#[test]
fn start_vs_last_look_into_the_mailbox() {
    check(|| {
        let num_messages = Arc::new(AtomicUsize::new(0));
        let gate = Arc::new(Gate::default());
        let client = {
            let (num_messages, gate) = (Arc::clone(&num_messages), Arc::clone(&gate));
            thread::spawn(move || {
                num_messages.fetch_add(1, Ordering::Relaxed);
                gate.is_open_after_sending()
            })
        };
        gate.close(StopCause::Closed);
        let is_found = num_messages.load(Ordering::Relaxed) == 1;
        let is_promised = client.join().unwrap();
        assert!(is_found || !is_promised, "the start was swallowed");
    });
}

/// The engine pauses on a full queue. Whichever reads it has missed, it must be nudged.
fn pause_vs_pop(capacity: usize) {
    check(move || {
        let (mut writer, mut reader) = result_queue(capacity);
        writer.admit();
        (1..capacity as u32).for_each(|id| writer.push_token(token(id)));
        let nudge = Arc::new(Notify::new());
        let nudged = Arc::clone(&nudge);
        let engine = thread::spawn(move || {
            while !writer.has_room_for(1) {
                if writer.arm() {
                    nudged.wait(); // a lost nudge is a deadlock, which the model reports
                    assert!(writer.has_room_for(1), "the nudge came before the room");
                }
            }
            writer.push_token(token(99));
        });
        for _ in 0..capacity {
            assert!(reader.pop().is_some());
            if reader.must_nudge() {
                nudge.notify();
            }
        }
        engine.join().unwrap();
        assert_eq!(reader.pop(), Some(Event::Token(token(99))));
    });
}

#[test]
fn pause_vs_pop_of_the_only_event() {
    pause_vs_pop(1);
}

#[test]
fn pause_vs_pop_down_to_half() {
    pause_vs_pop(3);
}

/// The order: push, list, then ring; clear, take the list, unlist, then pop. No event is left behind.
#[test]
fn list_vs_take_and_unlist() {
    check(|| {
        let port = Port::with_descriptor().unwrap();
        let (writer, mut reader) = result_queue(4);
        let mut outbox = Outbox::new(RequestId(7), writer, port.bell());
        let bell = port.bell();
        let engine = thread::spawn(move || {
            let ring = |listed: Option<RequestId>| {
                bell.list(&mut Vec::from_iter(listed));
                bell.ring();
            };
            outbox.queue_mut().admit();
            ring(outbox.list());
            ring(outbox.finish(finish(FinishReason::Length)));
        });
        let mut ids = Vec::new();
        while !reader.is_ended() {
            port.wait(None); // a lost event never ends, which the model reports
            port.take_listed(&mut ids);
            assert!(ids.len() <= 1, "listed twice");
            if ids.pop().is_some() {
                reader.unlist();
                while reader.pop().is_some() {}
            }
        }
        engine.join().unwrap();
    });
}

/// The order: push, then ring; clear, then drain. A listener that sleeps after that has missed nothing.
fn ring_vs_clear_and_drain(port: impl Fn() -> Port + Send + Sync + 'static) {
    check(move || {
        let (mut writer, mut reader) = result_queue(4);
        let port = port();
        let bell = port.bell();
        let engine = thread::spawn(move || {
            writer.admit();
            bell.ring();
            writer.finish(finish(FinishReason::Length));
            bell.ring();
        });
        loop {
            port.clear();
            while reader.pop().is_some() {}
            if reader.is_ended() {
                break;
            }
            port.wait(None); // a lost wake-up never returns, which the model reports
        }
        engine.join().unwrap();
    });
}

#[test]
fn descriptor_ring_vs_clear_and_drain() {
    ring_vs_clear_and_drain(|| Port::with_descriptor().unwrap());
}

#[test]
fn condvar_ring_vs_clear_and_drain() {
    ring_vs_clear_and_drain(Port::with_condvar);
}

#[test]
fn rings_of_two_engines_vs_clear_and_drain() {
    check(|| {
        let port = Port::with_condvar();
        let (engines, mut readers): (Vec<_>, Vec<_>) = (0..2)
            .map(|_| {
                let (writer, reader) = result_queue(1);
                let bell = port.bell();
                let engine = thread::spawn(move || {
                    writer.finish(finish(FinishReason::Length));
                    bell.ring();
                });
                (engine, reader)
            })
            .unzip();
        loop {
            port.clear();
            readers.retain_mut(|reader| reader.pop().is_none());
            if readers.is_empty() {
                break;
            }
            port.wait(None);
        }
        engines.into_iter().for_each(|engine| engine.join().unwrap());
    });
}
