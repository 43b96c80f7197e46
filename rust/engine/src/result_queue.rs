//! The event queue of one request: a bounded single-producer single-consumer ring buffer, lock-free on both sides.
//!
//! The engine thread holds the [`Writer`], the consumer the [`Reader`]. Three flags go beside the ring:
//!
//! ```text
//!             slots       0 1 2 3 4 5 6 7        a power of two; a count is a slot by masking
//!                             ▲       ▲
//!             head (reader) ──┘       └── tail (writer)       counts of entries read and written, never reset
//!             cancelled   reader → writer   the rest is not wanted
//!             closed      writer → reader   nothing follows
//!             armed       both              the sequence is paused for lack of room: nudge the engine when there is some
//! ```
//!
//! A request can always be opened and ended. The first event, `Admitted`, is counted and not stored, and the last event
//! has a place of its own, so the slots are allocated when the first token or prompt position is pushed: a request that
//! waits has none.
//!
//! A fourth flag, `listed`, is set while the port has the queue in its list of queues with new events (see `port`). The
//! writer pushes, then sets it; the reader clears it, then pops.
//!
//! The queue neither waits nor wakes. The reader reports when a nudge is due ([`Reader::must_nudge`]) and the handle
//! sends it.

use std::cell::Cell;
use std::mem::MaybeUninit;
use std::sync::OnceLock;

use crate::request::{CachedTokens, Event, Finish, FinishReason, PromptPosition, Rejection, StopCause};
use crate::sync::{Arc, AtomicBool, AtomicU8, AtomicUsize, Ordering, UnsafeCell, fence};
use penstock_types::Token;

/// An event in a slot.
enum QueuedEvent {
    Prompt(Vec<PromptPosition>),
    Token(Token),
}

/// Keeps the counters of the two sides on separate pairs of cache lines.
#[repr(align(128))]
struct Padded<T>(T);

struct Ring {
    /// Set by the writer before its first push to a slot.
    slots: OnceLock<Box<[Slot]>>,
    /// The last event. It belongs to the writer until the queue is closed, and to the reader afterwards.
    last: UnsafeCell<Option<Event>>,
    /// The number of unread events at which a sequence pauses, `Admitted` included.
    capacity: usize,
    head: Padded<AtomicUsize>,
    tail: Padded<AtomicUsize>,
    /// 0, or the [`CancelCause`] of the first cancellation.
    cancelled: AtomicU8,
    closed: AtomicBool,
    armed: AtomicBool,
    listed: AtomicBool,
    /// The [`CachedTokens`], set before the first push to a slot.
    cached_device: AtomicUsize,
    cached_host: AtomicUsize,
}

type Slot = UnsafeCell<MaybeUninit<QueuedEvent>>;

// SAFETY: a slot is only touched by the side that owns it. Slots in head..tail belong to the reader, the others to the
// writer; ownership passes with the release store of a counter and the acquire load of it, and that of `last` with
// `closed`. There is one `Writer` and one `Reader`, neither is `Clone`, and their methods that touch slots or `last`
// take `&mut self`.
unsafe impl Sync for Ring {}
// SAFETY: an event may move between threads, and the ring holds nothing else that is tied to one.
unsafe impl Send for Ring {}

/// The engine's end. If it is dropped without a last event, the reader finds that the engine has crashed.
pub struct Writer {
    ring: Arc<Ring>,
    /// A copy of `ring.tail`, which only this side writes.
    tail: usize,
    /// `ring.head` when it was last read: never ahead of it.
    seen_head: Cell<usize>,
}

/// The consumer's end.
pub struct Reader {
    ring: Arc<Ring>,
    /// A copy of `ring.head`, which only this side writes.
    head: usize,
    /// `ring.tail` when it was last read: never ahead of it.
    seen_tail: usize,
    /// Whether the first event, `Admitted`, has been popped.
    is_admitted: bool,
    is_ended: bool,
}

/// The cause for which a consumer cancels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CancelCause {
    /// The consumer is gone, or was told to cancel.
    Unwanted = 1,
    /// The output has a stop string.
    StopString = STOP_STRING,
}

const STOP_STRING: u8 = 2;

/// Sets the cancelled flag, from any thread.
#[derive(Clone)]
pub struct CancelFlag {
    ring: Arc<Ring>,
}

/// A queue for `capacity` unread events, and the last one.
pub fn result_queue(capacity: usize) -> (Writer, Reader) {
    assert!(capacity > 0, "a result queue needs room for an event; this is a bug");
    let ring = Arc::new(Ring {
        slots: OnceLock::new(),
        last: UnsafeCell::new(None),
        capacity,
        head: Padded(AtomicUsize::new(0)),
        tail: Padded(AtomicUsize::new(0)),
        cancelled: AtomicU8::new(0),
        closed: AtomicBool::new(false),
        armed: AtomicBool::new(false),
        listed: AtomicBool::new(false),
        cached_device: AtomicUsize::new(0),
        cached_host: AtomicUsize::new(0),
    });
    let writer = Writer { ring: Arc::clone(&ring), tail: 0, seen_head: Cell::new(0) };
    (writer, Reader { ring, head: 0, seen_tail: 0, is_admitted: false, is_ended: false })
}

#[cfg(any(test, feature = "testing"))]
thread_local! {
    static NUM_POPS: Cell<u64> = const { Cell::new(0) };
}

/// The number of calls of [`Reader::pop`] by this thread.
#[cfg(any(test, feature = "testing"))]
pub fn num_pops() -> u64 {
    NUM_POPS.get()
}

impl Writer {
    /// Whether `num_events` more fit now. Once true it stays true until an event is pushed.
    pub fn has_room_for(&self, num_events: usize) -> bool {
        let fits = |head: usize| self.tail.wrapping_sub(head) + num_events <= self.ring.capacity;
        if fits(self.seen_head.get()) {
            return true;
        }
        // Acquire pairs with the reader's release: it has moved out of the slots before `head`, so they may be filled.
        self.seen_head.set(self.ring.head.0.load(Ordering::Acquire));
        fits(self.seen_head.get())
    }

    /// Pushes `Admitted`, the first event.
    pub fn admit(&mut self) {
        assert_eq!(self.tail, 0, "`Admitted` is the first event; this is a bug");
        self.advance();
    }

    /// Sets the prompt tokens that the prefix cache had. To be called before the first token is pushed.
    pub fn set_cached(&self, cached: CachedTokens) {
        // Relaxed: a later push publishes them.
        self.ring.cached_device.store(cached.device, Ordering::Relaxed);
        self.ring.cached_host.store(cached.host, Ordering::Relaxed);
    }

    /// Pushes a token. There must be room; the scheduler checks before it plans the token.
    pub fn push_token(&mut self, token: Token) {
        assert!(self.has_room_for(1), "a token without room was planned; this is a bug");
        self.push(QueuedEvent::Token(token));
    }

    /// Pushes prompt positions. There must be room, as for a token.
    pub fn push_positions(&mut self, positions: Vec<PromptPosition>) {
        assert!(self.has_room_for(1), "prompt outputs without room were planned; this is a bug");
        self.push(QueuedEvent::Prompt(positions));
    }

    /// Rejects the request, as its only event. Returns as [`list`](Self::list) does.
    pub fn reject(mut self, rejection: Rejection) -> bool {
        self.end(Event::Rejected(rejection))
    }

    /// Ends the request. There is always room. Returns as [`list`](Self::list) does.
    pub fn finish(mut self, finish: Finish) -> bool {
        self.end(Event::Finished(finish))
    }

    /// Marks the queue as listed, after a push. True if it was not: then it must be added to the port's list.
    pub fn list(&self) -> bool {
        // Release and acquire: of this swap and that in `Reader::unlist`, the second sees what was written before the
        // first. Either the reader pops what was pushed, or the flag is found clear here.
        !self.ring.listed.swap(true, Ordering::AcqRel)
    }

    fn end(&mut self, event: Event) -> bool {
        self.ring.last.with_mut(|last| {
            // SAFETY: the queue is not closed, since this method is called once and by methods that take the writer,
            // so `last` belongs to this side.
            unsafe { *last = Some(event) };
        });
        self.close();
        self.list()
    }

    fn push(&mut self, entry: QueuedEvent) {
        let slots = self.ring.slots.get_or_init(|| new_slots(self.ring.capacity));
        slots[self.tail & (slots.len() - 1)].with_mut(|slot| {
            // SAFETY: room was checked against an acquired `head` (`has_room_for`), so the slot is outside head..tail
            // and belongs to this side.
            unsafe { (*slot).write(entry) };
        });
        self.advance();
    }

    fn advance(&mut self) {
        self.tail = self.tail.wrapping_add(1);
        // Release: a reader that sees the new tail sees the entry below it.
        self.ring.tail.0.store(self.tail, Ordering::Release);
    }

    /// The cause for which the consumer has cancelled. Never becomes `None` again.
    pub fn cancel_cause(&self) -> Option<CancelCause> {
        // Relaxed: the flag carries no data, and the mailbox's flag of the cancel set ensures that it is seen in time.
        match self.ring.cancelled.load(Ordering::Relaxed) {
            0 => None,
            STOP_STRING => Some(CancelCause::StopString),
            _ => Some(CancelCause::Unwanted),
        }
    }

    /// Requests a nudge once at most half the capacity is unread; false if that is already so. To be called when there
    /// is no room and no token in flight, so that only reading can change that.
    pub fn arm(&mut self) -> bool {
        // Release: the reader that takes the flag sees the tail that filled the ring.
        self.ring.armed.store(true, Ordering::Release);
        // Here: write the flag, fence, read the head. In `must_nudge`: write the head, fence, read the flag. The side
        // whose fence is second sees what the other wrote: either the room is seen here or the reader sees the flag.
        fence(Ordering::SeqCst);
        self.seen_head.set(self.ring.head.0.load(Ordering::Acquire)); // as in `has_room_for`
        if self.tail.wrapping_sub(self.seen_head.get()) <= self.ring.capacity / 2 {
            self.ring.armed.store(false, Ordering::Relaxed); // if the reader was faster, a needless nudge comes
            return false;
        }
        true
    }

    /// Whether the requested nudge is still to come.
    pub fn is_armed(&self) -> bool {
        self.ring.armed.load(Ordering::Relaxed) // carries no data; `has_room_for` looks at `head` itself
    }

    /// Tells the reader that nothing follows. Dropping does the same.
    pub fn close(&mut self) {
        // Release: a reader that sees the queue closed sees every entry pushed before.
        self.ring.closed.store(true, Ordering::Release);
    }
}

fn new_slots(capacity: usize) -> Box<[Slot]> {
    (0..capacity.next_power_of_two()).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect()
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.close();
    }
}

impl Reader {
    /// The next event, if there is one; always `None` after the last. If the engine has crashed, the last event is
    /// made here: `Rejected` for a request that was not admitted, `Finished` for an open one.
    pub fn pop(&mut self) -> Option<Event> {
        #[cfg(any(test, feature = "testing"))]
        NUM_POPS.set(NUM_POPS.get() + 1);
        if self.is_ended {
            return None;
        }
        self.pop_entry().or_else(|| {
            // Acquire pairs with the release in `close`, so the second attempt sees everything pushed before it.
            if !self.ring.closed.load(Ordering::Acquire) {
                return None;
            }
            Some(self.pop_entry().unwrap_or_else(|| self.take_last()))
        })
    }

    /// The last event of a closed queue.
    fn take_last(&mut self) -> Event {
        self.is_ended = true;
        let last = self.ring.last.with_mut(|last| {
            // SAFETY: the queue is closed, so `last` belongs to this side.
            unsafe { (*last).take() }
        });
        last.unwrap_or_else(|| self.engine_stopped_event())
    }

    fn pop_entry(&mut self) -> Option<Event> {
        let ring = &*self.ring;
        if self.head == self.seen_tail {
            // Acquire pairs with the writer's release: the entries below the tail are written.
            self.seen_tail = ring.tail.0.load(Ordering::Acquire);
            if self.head == self.seen_tail {
                return None;
            }
        }
        let event = match self.is_admitted {
            false => Event::Admitted,
            true => {
                let slots = ring.slots.get().expect("slots are allocated before a push; this is a bug");
                let slot = &slots[self.head & (slots.len() - 1)];
                // SAFETY: the slot is in head..tail, so it is written and belongs to this side; moving `head` on below
                // gives it away, so it is read once.
                match slot.with(|slot| unsafe { (*slot).assume_init_read() }) {
                    QueuedEvent::Prompt(positions) => Event::Prompt(positions),
                    QueuedEvent::Token(token) => Event::Token(token),
                }
            }
        };
        self.is_admitted = true;
        self.head = self.head.wrapping_add(1);
        // Release: a writer that sees the new head fills the slot only after it was read.
        ring.head.0.store(self.head, Ordering::Release);
        Some(event)
    }

    /// The last event of a request whose engine crashed. Its times are not known here.
    fn engine_stopped_event(&self) -> Event {
        if !self.is_admitted {
            return Event::Rejected(Rejection::Stopped(StopCause::Crashed));
        }
        let reason = FinishReason::EngineStopped(StopCause::Crashed);
        Event::Finished(Finish {
            reason,
            cached: self.cached(),
            queued: Default::default(),
            first_token: None,
            total: Default::default(),
        })
    }

    /// Whether the sequence is paused and there is room now. True at most once per pause; the caller must nudge the
    /// engine.
    pub fn must_nudge(&self) -> bool {
        fence(Ordering::SeqCst); // between writing the head and reading the flag: see `Writer::arm`
        // Acquire: with the flag comes the tail that filled the ring, so the length below is exact.
        if !self.ring.armed.load(Ordering::Acquire) {
            return false;
        }
        let unread = self.ring.tail.0.load(Ordering::Relaxed).wrapping_sub(self.head);
        // Relaxed: of the two sides that may clear it, a reader that sees true sends the nudge.
        unread <= self.ring.capacity / 2 && self.ring.armed.swap(false, Ordering::Relaxed)
    }

    /// Marks the queue as not listed, before popping everything. To be called when it was taken off the port's list.
    pub fn unlist(&self) {
        self.ring.listed.swap(false, Ordering::AcqRel); // see `Writer::list`
    }

    /// Whether memory for events was allocated.
    #[cfg(any(test, feature = "testing"))]
    pub fn has_slots(&self) -> bool {
        self.ring.slots.get().is_some()
    }

    /// The prompt tokens that the prefix cache had; zero until a token or prompt positions have been popped.
    pub fn cached(&self) -> CachedTokens {
        if self.head <= 1 {
            return CachedTokens::default(); // possibly half written
        }
        // Relaxed: written before the push of an event that this side has popped.
        CachedTokens {
            device: self.ring.cached_device.load(Ordering::Relaxed),
            host: self.ring.cached_host.load(Ordering::Relaxed),
        }
    }

    /// Whether the last event has been popped.
    pub fn is_ended(&self) -> bool {
        self.is_ended
    }

    /// A handle to cancel without the reader.
    pub fn cancel_flag(&self) -> CancelFlag {
        CancelFlag { ring: Arc::clone(&self.ring) }
    }
}

impl CancelFlag {
    /// Cancels. True the first time: then the engine needs a nudge. The first cause is kept.
    pub fn set(&self, cause: CancelCause) -> bool {
        let cancelled = &self.ring.cancelled;
        // Relaxed: carries no data (see `Writer::cancel_cause`).
        cancelled.compare_exchange(0, cause as u8, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // Both ends are gone, and the reference count ordered their last writes before this.
        let head = self.head.0.load(Ordering::Relaxed);
        let tail = self.tail.0.load(Ordering::Relaxed);
        let Some(slots) = self.slots.get() else { return };
        // Event 0, `Admitted`, is not stored.
        let mut head = head.max(1);
        while head != tail {
            // SAFETY: slots in head..tail are written and unread, and no other thread has access to them.
            slots[head & (slots.len() - 1)].with_mut(|slot| unsafe { (*slot).assume_init_drop() });
            head = head.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests;
