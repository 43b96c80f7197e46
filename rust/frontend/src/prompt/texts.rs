//! The texts that are tokenised at the same time: a bound on their bytes, each of which takes up to 340 bytes of memory
//! until the text is encoded.
//!
//! A long text has a share of the bytes while it is encoded, and waits for it, without a slot that other callers need.
//! Clients take turns, and a client has at most half of the bytes, so that one with many long texts does not keep others
//! from tokenising theirs.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use penstock_guidance::Caller;

/// Bytes of a text that needs no share: few threads encode texts at a time, and such a text takes 22 MB of memory.
const SMALL_TEXT: usize = 64 << 10;
/// Bytes of the texts of a client, and of all clients. A longer text counts as many as a client may have.
const CLIENT_BYTES: usize = 4 << 20;
const TOTAL_BYTES: usize = 2 * CLIENT_BYTES;

/// Interval at which a waiting caller is asked whether to continue.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The bytes that texts have while they are encoded.
#[derive(Default)]
pub struct TextBudget {
    queue: Mutex<Queue>,
    /// Signals those that wait: another text may be the next one.
    changed: Condvar,
}

/// The share of a text, or its place in the queue. Dropping it gives it up.
pub(crate) struct TextShare<'a> {
    budget: &'a TextBudget,
    ticket: u64,
}

#[derive(Default)]
struct Queue {
    /// The texts that have their share.
    served: Vec<Text>,
    /// The texts that wait, in the order of their turns.
    waiting: Vec<Text>,
    num_tickets: u64,
}

struct Text {
    ticket: u64,
    client: Option<u64>,
    bytes: usize,
}

impl TextBudget {
    /// Takes the share of a text, after a wait if other texts have the bytes. `Err` if it is no longer wanted; a text
    /// that needs no share has none.
    pub(crate) fn take(
        &self,
        bytes: usize,
        caller: &mut dyn Caller,
    ) -> Result<Option<TextShare<'_>>, NotWanted> {
        if bytes <= SMALL_TEXT {
            return Ok(None);
        }
        let mut queue = self.lock();
        let ticket = queue.join(caller.client(), bytes);
        let is_served = queue.serve(ticket);
        drop(queue);
        let share = TextShare { budget: self, ticket };
        if !is_served {
            if !caller.begin_wait() {
                return Err(NotWanted);
            }
            self.wait(ticket, caller)?;
        }
        Ok(Some(share))
    }

    /// Waits until a text has its share. The callback may block on threads that need the lock.
    fn wait(&self, ticket: u64, caller: &mut dyn Caller) -> Result<(), NotWanted> {
        loop {
            let queue = self.lock();
            let (mut queue, _) = self
                .changed
                .wait_timeout_while(queue, POLL_INTERVAL, |queue| !queue.serve(ticket))
                .unwrap_or_else(PoisonError::into_inner);
            if queue.serve(ticket) {
                self.changed.notify_all(); // the next text may have room, too
                return Ok(());
            }
            drop(queue);
            if !caller.is_wanted() {
                return Err(NotWanted);
            }
        }
    }

    /// Ignores poisoning: a panic while the lock is held leaves the queue consistent.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for TextShare<'_> {
    fn drop(&mut self) {
        self.budget.lock().leave(self.ticket);
        self.budget.changed.notify_all();
    }
}

/// The caller does not want the share any more.
#[derive(Debug)]
pub(crate) struct NotWanted;

impl Queue {
    /// Adds a text that waits.
    fn join(&mut self, client: Option<u64>, bytes: usize) -> u64 {
        self.num_tickets += 1;
        let ticket = self.num_tickets;
        self.waiting.push(Text { ticket, client, bytes: bytes.min(CLIENT_BYTES) });
        ticket
    }

    /// Gives a text its share if it is the next one and there is room; returns whether it has its share.
    fn serve(&mut self, ticket: u64) -> bool {
        if self.served.iter().any(|text| text.ticket == ticket) {
            return true;
        }
        let Some(index) = self.next().filter(|&index| self.waiting[index].ticket == ticket) else {
            return false;
        };
        let text = self.waiting.remove(index);
        self.waiting.sort_by_key(|other| other.client == text.client); // the others of the client are last
        self.served.push(text);
        true
    }

    /// The next text to have its share: the first of a client that has room. It may have to wait for that of all.
    fn next(&self) -> Option<usize> {
        let taken_by =
            |client| self.served.iter().filter(|text| text.client == client).map(|text| text.bytes).sum();
        let can_be_next = |&index: &usize| {
            let Text { client, bytes, .. } = self.waiting[index];
            let is_first = self.waiting[..index].iter().all(|other| other.client != client);
            let taken: usize = taken_by(client);
            is_first && taken + bytes <= CLIENT_BYTES
        };
        let next = (0..self.waiting.len()).find(can_be_next)?;
        let total: usize = self.served.iter().map(|text| text.bytes).sum();
        (total + self.waiting[next].bytes <= TOTAL_BYTES).then_some(next)
    }

    /// Removes a text.
    fn leave(&mut self, ticket: u64) {
        self.served.retain(|text| text.ticket != ticket);
        self.waiting.retain(|text| text.ticket != ticket);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const MEGABYTE: usize = 1 << 20;

    /// The texts that have their share, in the order in which they get it.
    fn serve_all(queue: &mut Queue) -> Vec<u64> {
        std::iter::from_fn(|| {
            let ticket = queue.waiting[queue.next()?].ticket;
            queue.serve(ticket).then_some(ticket)
        })
        .collect()
    }

    #[test]
    fn clients_with_long_texts_take_turns() {
        let mut queue = Queue::default();
        for client in [1, 1, 1, 1, 2, 3, 2] {
            queue.join(Some(client), 2 * MEGABYTE);
        }
        // Half of the bytes are for the first client.
        assert_eq!(serve_all(&mut queue), [1, 5, 6, 2]);
        for (left, served) in [(5, 7), (1, 3), (2, 4)] {
            queue.leave(left);
            assert_eq!(serve_all(&mut queue), [served]);
        }
        assert!(queue.waiting.is_empty());
    }

    #[test]
    fn client_has_at_most_half_of_the_bytes() {
        let mut queue = Queue::default();
        let one = [1_000 * MEGABYTE, MEGABYTE, 2 * MEGABYTE].map(|bytes| queue.join(None, bytes));
        assert_eq!(serve_all(&mut queue), one[..1]);
        let other = queue.join(Some(2), 1_000 * MEGABYTE);
        let third = queue.join(Some(3), MEGABYTE);
        assert_eq!(serve_all(&mut queue), [other], "there is no room for the third");
        queue.leave(one[0]);
        assert_eq!(serve_all(&mut queue), [one[1], third, one[2]]);
    }

    #[test]
    fn text_without_room_is_not_overtaken() {
        let mut queue = Queue::default();
        for (client, bytes) in [(1, 3), (2, 3), (3, 4), (4, 1)] {
            queue.join(Some(client), bytes * MEGABYTE);
        }
        assert_eq!(serve_all(&mut queue), [1, 2]);
        queue.leave(1);
        assert_eq!(serve_all(&mut queue), [3, 4]);
    }

    #[test]
    fn waiting_text_gets_the_share_that_another_gives_back() {
        let budget = TextBudget::default();
        let first = budget.take(CLIENT_BYTES, &mut || true).unwrap();
        assert!(budget.take(SMALL_TEXT, &mut || false).unwrap().is_none(), "a small text needs no share");
        thread::scope(|scope| {
            let (asked, is_asked) = mpsc::channel();
            let budget = &budget;
            let waits = scope.spawn(move || budget.take(MEGABYTE, &mut || asked.send(()).is_ok()).is_ok());
            is_asked.recv().unwrap();
            drop(first);
            assert!(waits.join().unwrap());
        });
        let queue = budget.lock();
        assert!(queue.served.is_empty() && queue.waiting.is_empty());
    }

    #[test]
    fn text_that_is_not_wanted_leaves_the_queue() {
        let budget = TextBudget::default();
        let _first = budget.take(CLIENT_BYTES, &mut || true).unwrap();
        assert!(budget.take(MEGABYTE, &mut || false).is_err());
        let queue = budget.lock();
        assert_eq!((queue.served.len(), queue.waiting.len()), (1, 0));
    }
}
