//! Tests of the result queue with both ends on one thread.

use std::time::Duration;

use super::*;

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
fn a_queued_event_is_three_words() {
    assert_eq!(size_of::<QueuedEvent>(), 24);
}

#[test]
fn events_are_popped_in_order_when_the_ring_wraps() {
    for capacity in 1..=9 {
        let (mut writer, mut reader) = result_queue(capacity);
        writer.admit();
        let (mut pushed, mut popped) = (0, 0);
        assert_eq!(reader.pop(), Some(Event::Admitted));
        while popped < 100 {
            while writer.has_room_for(1) {
                writer.push_token(token(pushed));
                pushed += 1;
            }
            assert_eq!((pushed - popped) as usize, capacity);
            for _ in 0..capacity.div_ceil(2) {
                assert_eq!(reader.pop(), Some(Event::Token(token(popped))));
                popped += 1;
            }
        }
    }
}

#[test]
fn a_full_queue_has_room_for_the_last_event() {
    let (mut writer, mut reader) = result_queue(1);
    writer.admit();
    assert!(!writer.has_room_for(1));
    writer.finish(finish(FinishReason::Length));
    assert_eq!(reader.pop(), Some(Event::Admitted));
    assert_eq!(reader.pop(), Some(Event::Finished(finish(FinishReason::Length))));
    assert!(reader.is_ended());
    assert_eq!(reader.pop(), None);
}

#[test]
fn a_crashed_engine_is_reported_once_after_its_events() {
    let (mut writer, mut reader) = result_queue(4);
    writer.admit();
    writer.push_token(token(7));
    drop(writer);
    assert_eq!(reader.pop(), Some(Event::Admitted));
    assert_eq!(reader.pop(), Some(Event::Token(token(7))));
    assert_eq!(reader.pop(), Some(Event::Finished(finish(FinishReason::EngineStopped(StopCause::Crashed)))));
    assert_eq!(reader.pop(), None);

    let (writer, mut reader) = result_queue(4);
    assert_eq!(reader.pop(), None);
    drop(writer);
    assert_eq!(
        reader.pop(),
        Some(Event::Rejected(Rejection::Stopped(StopCause::Crashed))),
        "it was not admitted"
    );
    assert_eq!(reader.pop(), None);
}

#[test]
fn slots_are_allocated_with_the_first_token() {
    let (mut writer, mut reader) = result_queue(4);
    writer.admit();
    assert_eq!(reader.pop(), Some(Event::Admitted));
    assert!(!reader.has_slots());
    writer.push_token(token(1));
    assert!(reader.has_slots());
    assert_eq!(reader.pop(), Some(Event::Token(token(1))));
}

#[test]
fn unread_events_are_dropped_with_the_queue() {
    let (mut writer, reader) = result_queue(4);
    writer.admit();
    writer.finish(finish(FinishReason::Failed("boxed text, for leak checkers".into())));
    drop(reader);
}

#[test]
fn a_nudge_is_due_once_when_half_is_read() {
    let (mut writer, mut reader) = result_queue(4);
    writer.admit();
    (0..3).for_each(|id| writer.push_token(token(id)));
    assert!(!writer.has_room_for(1) && writer.arm());
    reader.pop();
    assert!(!reader.must_nudge(), "three of four are unread");
    assert!(writer.is_armed());
    reader.pop();
    assert!(reader.must_nudge());
    assert!(!writer.is_armed() && !reader.must_nudge());
    assert!(!writer.arm(), "there is room already");
    assert!(!reader.must_nudge());
}

#[test]
fn cancel_returns_true_only_the_first_time() {
    let (writer, reader) = result_queue(1);
    let flag = reader.cancel_flag();
    assert_eq!(writer.cancel_cause(), None);
    assert!(flag.set(CancelCause::Unwanted) && !flag.clone().set(CancelCause::StopString));
    assert_eq!(writer.cancel_cause(), Some(CancelCause::Unwanted));
}
