//! One request's way out: a bounded single-producer single-consumer ring, lock-free on both sides.
//!
//! The engine thread holds the [`Writer`], the consumer the [`Reader`]. Entries travel through the ring; three flags
//! travel beside it:
//!
//! ```text
//!             slots       0 1 2 3 4 5 6 7        a power of two; a count is a slot by masking
//!                             ▲       ▲
//!             head (reader) ──┘       └── tail (writer)       counts of entries read and written, never wrapped back
//!             cancelled   reader → writer   nobody wants the rest
//!             closed      writer → reader   nothing follows
//!             armed       both              the writer paused for want of room: tell the engine when there is some
//! ```
//!
//! Room is counted so that a request can always be opened and ended: the ring takes `capacity` events, of which the
//! first is `Admitted`, and one place more is kept for the last event.
//!
//! Nothing here waits or wakes. The reader reports when a nudge is due ([`Reader::must_nudge`]) and the handle sends it.

use std::mem::MaybeUninit;

use crate::request::{
    CachedTokens, Event, Finish, FinishReason, PromptPosition, Rejection, StopCause, Token,
};
use crate::sync::{Arc, AtomicBool, AtomicUsize, Ordering, UnsafeCell, fence};

/// What lies in a slot: an [`Event`] in 24 bytes, its two rare large forms boxed.
enum Entry {
    Admitted,
    Prompt(Vec<PromptPosition>),
    Token(Token),
    Rejected(Box<Rejection>),
    Finished(Box<Finish>),
}

/// Keeps the two sides' counters on cache lines of their own, prefetched pairs included.
#[repr(align(128))]
struct Padded<T>(T);

struct Ring {
    slots: Box<[UnsafeCell<MaybeUninit<Entry>>]>,
    /// Unread events at which a sequence pauses.
    capacity: usize,
    head: Padded<AtomicUsize>,
    tail: Padded<AtomicUsize>,
    cancelled: AtomicBool,
    closed: AtomicBool,
    armed: AtomicBool,
}

// SAFETY: a slot is only touched by the side that owns it. Slots in head..tail belong to the reader, the others to the
// writer; ownership passes with the release store of a counter and the acquire load of it. There is one `Writer` and
// one `Reader`, neither is `Clone`, and their methods that touch slots take `&mut self`.
unsafe impl Sync for Ring {}
// SAFETY: an `Entry` may move between threads, and the ring holds nothing else that is tied to one.
unsafe impl Send for Ring {}

/// The engine's end. Dropping it without a last event tells the reader that the engine is gone.
pub struct Writer {
    ring: Arc<Ring>,
    /// Our own copy of `ring.tail`, which nobody else writes.
    tail: usize,
    /// `ring.head` when we last looked: never ahead of it.
    seen_head: usize,
}

/// The consumer's end. Dropping it unfinished is a cancel; the handle around it sees to the nudge.
pub struct Reader {
    ring: Arc<Ring>,
    /// Our own copy of `ring.head`, which nobody else writes.
    head: usize,
    /// `ring.tail` when we last looked: never ahead of it.
    seen_tail: usize,
    is_ended: bool,
}

/// Sets the cancelled flag from anywhere, whoever is reading.
#[derive(Clone)]
pub struct CancelFlag {
    ring: Arc<Ring>,
}

/// A queue that lets `capacity` events wait unread, and the last one on top.
pub fn result_queue(capacity: usize) -> (Writer, Reader) {
    assert!(capacity > 0, "a result queue needs room for an event; this is a bug");
    let slots =
        (0..(capacity + 1).next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect();
    let ring = Arc::new(Ring {
        slots,
        capacity,
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
        cancelled: AtomicBool::new(false),
        closed: AtomicBool::new(false),
        armed: AtomicBool::new(false),
    });
    let writer = Writer { ring: Arc::clone(&ring), tail: 0, seen_head: 0 };
    (writer, Reader { ring, head: 0, seen_tail: 0, is_ended: false })
}

impl Writer {
    /// Whether `num_events` more fit now. Once true it stays true until something is pushed: reading makes room only.
    pub fn has_room_for(&mut self, num_events: usize) -> bool {
        let fits =
            |head: usize, writer: &Self| writer.tail.wrapping_sub(head) + num_events <= writer.ring.capacity;
        if fits(self.seen_head, self) {
            return true;
        }
        // Acquire pairs with the reader's release: it has moved out of the slots before `head`, so we may fill them.
        self.seen_head = self.ring.head.0.load(Ordering::Acquire);
        fits(self.seen_head, self)
    }

    /// Says that the request was taken. The first event, so there is room.
    pub fn admit(&mut self) {
        self.push(Entry::Admitted);
    }

    /// Delivers a token. There must be room: the scheduler asks before it plans the token.
    pub fn push_token(&mut self, token: Token) {
        assert!(self.has_room_for(1), "a token without room was planned; this is a bug");
        self.push(Entry::Token(token));
    }

    /// Delivers positions of the prompt. There must be room, as for a token.
    pub fn push_positions(&mut self, positions: Vec<PromptPosition>) {
        assert!(self.has_room_for(1), "a report without room was planned; this is a bug");
        self.push(Entry::Prompt(positions));
    }

    /// Turns the request away, as its only event.
    pub fn refuse(mut self, refusal: Rejection) {
        self.push(Entry::Rejected(Box::new(refusal)));
    }

    /// Ends the request. There is always room.
    pub fn finish(mut self, finish: Finish) {
        self.push(Entry::Finished(Box::new(finish)));
    }

    fn push(&mut self, entry: Entry) {
        let ring = &*self.ring;
        let slot = &ring.slots[self.tail & (ring.slots.len() - 1)];
        slot.with_mut(|slot| {
            // SAFETY: room was checked against an acquired `head` (`has_room_for`; the first and the last event have
            // their places), so the slot lies outside head..tail and is ours.
            unsafe { (*slot).write(entry) };
        });
        self.tail = self.tail.wrapping_add(1);
        // Release: a reader that sees the new tail sees the entry below it.
        ring.tail.0.store(self.tail, Ordering::Release);
    }

    /// Whether the consumer wants no more. Never becomes false again.
    pub fn is_cancelled(&self) -> bool {
        // Relaxed: the flag carries no data; that it is seen in time is the business of the mailbox's attention flag.
        self.ring.cancelled.load(Ordering::Relaxed)
    }

    /// Asks for a nudge once the reader is down to half the capacity; false if it already is. To be called when there
    /// is no room and no token on its way, so that only reading can change anything.
    pub fn arm(&mut self) -> bool {
        // Release: the reader that takes the flag sees the tail that filled the ring.
        self.ring.armed.store(true, Ordering::Release);
        // Here: flag, fence, head. In `must_nudge`: head, fence, flag. The side whose fence is second sees what the
        // other wrote, so either we see the room or the reader sees the flag.
        fence(Ordering::SeqCst);
        self.seen_head = self.ring.head.0.load(Ordering::Acquire); // as in `has_room_for`
        if self.tail.wrapping_sub(self.seen_head) <= self.ring.capacity / 2 {
            self.ring.armed.store(false, Ordering::Relaxed); // if the reader was faster, a nudge comes in vain
            return false;
        }
        true
    }

    /// Whether the nudge asked for is still to come.
    pub fn is_armed(&self) -> bool {
        self.ring.armed.load(Ordering::Relaxed) // carries no data; `has_room_for` looks at `head` itself
    }

    /// Says that nothing follows. Dropping does the same.
    pub fn close(&mut self) {
        // Release: a reader that sees the queue closed sees every entry pushed before.
        self.ring.closed.store(true, Ordering::Release);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.close();
    }
}

impl Reader {
    /// The next event, if there is one. After the last it is `None` for ever. If the engine is gone, the last event is
    /// made up here: `Refused` for a request it never looked at, `Finished` for an open one, since it crashed.
    pub fn pop(&mut self) -> Option<Event> {
        if self.is_ended {
            return None;
        }
        let entry = self.pop_entry().or_else(|| {
            // Acquire pairs with the release in `close`, so the second look sees whatever was pushed before it.
            if !self.ring.closed.load(Ordering::Acquire) {
                return None;
            }
            Some(self.pop_entry().unwrap_or_else(|| self.obituary()))
        })?;
        Some(match entry {
            Entry::Admitted => Event::Admitted,
            Entry::Prompt(positions) => Event::Prompt(positions),
            Entry::Token(token) => Event::Token(token),
            Entry::Rejected(refusal) => {
                self.is_ended = true;
                Event::Rejected(*refusal)
            }
            Entry::Finished(finish) => {
                self.is_ended = true;
                Event::Finished(*finish)
            }
        })
    }

    fn pop_entry(&mut self) -> Option<Entry> {
        let ring = &*self.ring;
        if self.head == self.seen_tail {
            // Acquire pairs with the writer's release: the entries below the tail are written.
            self.seen_tail = ring.tail.0.load(Ordering::Acquire);
            if self.head == self.seen_tail {
                return None;
            }
        }
        let slot = &ring.slots[self.head & (ring.slots.len() - 1)];
        // SAFETY: the slot lies in head..tail, so it is written and ours; moving `head` on below gives it away, so it
        // is read once.
        let entry = slot.with(|slot| unsafe { (*slot).assume_init_read() });
        self.head = self.head.wrapping_add(1);
        // Release: a writer that sees the new head fills the slot only after we moved out of it.
        ring.head.0.store(self.head, Ordering::Release);
        Some(entry)
    }

    /// Words for an engine that could not speak for itself. Its times are not known here.
    fn obituary(&self) -> Entry {
        if self.head == 0 {
            return Entry::Rejected(Box::new(Rejection::Stopped(StopCause::Crashed)));
        }
        let reason = FinishReason::EngineStopped(StopCause::Crashed);
        Entry::Finished(Box::new(Finish {
            reason,
            cached: CachedTokens::default(),
            queued: Default::default(),
            first_token: None,
            total: Default::default(),
        }))
    }

    /// Whether the engine waits for room that now exists. True at most once per pause: the caller must nudge it.
    pub fn must_nudge(&self) -> bool {
        fence(Ordering::SeqCst); // between our head and the look at the flag: see `Writer::arm`
        // Acquire: with the flag comes the tail that filled the ring, so the length below is exact.
        if !self.ring.armed.load(Ordering::Acquire) {
            return false;
        }
        let unread = self.ring.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head);
        // Relaxed: of the two sides that may clear it, a reader that sees true sends the nudge.
        unread <= self.ring.capacity / 2 && self.ring.armed.swap(false, Ordering::Relaxed)
    }

    /// Whether the last event has been popped.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// A way to cancel that does not need the reader.
    pub fn cancel_flag(&self) -> CancelFlag {
        CancelFlag { ring: Arc::clone(&self.ring) }
    }
}

impl CancelFlag {
    /// Says that nobody wants the rest. True the first time: then the engine needs a nudge.
    pub fn set(&self) -> bool {
        // Relaxed: carries no data (see `Writer::is_cancelled`).
        !self.ring.cancelled.swap(true, Ordering::Relaxed)
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Both ends are gone, and the count of owners ordered their last writes before this. Relaxed on our own.
        let mut head = self.head.0.load(Ordering::Relaxed);
        let tail = self.tail.0.load(Ordering::Relaxed);
        while head != tail {
            let mask = self.slots.len() - 1;
            // SAFETY: slots in head..tail are written and unread, and nobody else is left to read them.
            self.slots[head & mask].with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
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
    fn an_entry_is_three_words() {
        assert_eq!(size_of::<Entry>(), 24);
    }

    #[test]
    fn events_come_out_in_order_however_often_the_ring_wraps() {
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
    fn a_full_queue_still_takes_the_end() {
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
    fn a_vanished_engine_is_reported_once_after_what_it_had_pushed() {
        let (mut writer, mut reader) = result_queue(4);
        writer.admit();
        writer.push_token(token(7));
        drop(writer);
        assert_eq!(reader.pop(), Some(Event::Admitted));
        assert_eq!(reader.pop(), Some(Event::Token(token(7))));
        assert_eq!(
            reader.pop(),
            Some(Event::Finished(finish(FinishReason::EngineStopped(StopCause::Crashed))))
        );
        assert_eq!(reader.pop(), None);

        let (writer, mut reader) = result_queue(4);
        assert_eq!(reader.pop(), None);
        drop(writer);
        assert_eq!(
            reader.pop(),
            Some(Event::Rejected(Rejection::Stopped(StopCause::Crashed))),
            "it never looked at this one"
        );
        assert_eq!(reader.pop(), None);
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
    fn cancelling_reports_only_the_first_time() {
        let (writer, reader) = result_queue(1);
        let flag = reader.cancel_flag();
        assert!(!writer.is_cancelled());
        assert!(flag.set() && !flag.clone().set());
        assert!(writer.is_cancelled());
    }
}
