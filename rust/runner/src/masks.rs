//! The threads that compute the masks of grammars while the device runs.
//!
//! A grammar goes to a thread with [`MaskThreads::start`] and comes back with [`MaskThreads::collect`], its masks
//! filled in. In between it belongs to that thread alone. Grammars that are expected to take long have a queue of their
//! own, in which clients take turns: the threads prefer the others, and no step waits for them while it has other rows.
//!
//! A step waits for the other masks about as long as it has computed before. A row whose mask is late is deferred: it
//! returns no token, its grammar stays with its thread, and the engine discards the rows behind it and plans its last
//! token again.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, select, unbounded};
use penstock_engine::request::ClientId;

use crate::grammar::SequenceGrammar;

/// One mask thread is started for this many compute threads.
const THREADS_PER_MASK_THREAD: usize = 8;
/// The number of clients of which the turns are known.
const MAX_SERVED: usize = 256;

/// The time that grammars may take from other sequences.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MaskLimits {
    /// Grammars that are expected to take more CPU time for a token are slow.
    pub slow: Duration,
    /// A step waits for the masks of other grammars as long as it has run before, within these bounds. A step of which
    /// every row waits for a mask waits up to `most_wait` for one.
    pub least_wait: Duration,
    pub most_wait: Duration,
}

impl Default for MaskLimits {
    fn default() -> Self {
        Self {
            slow: Duration::from_millis(2),
            least_wait: Duration::from_millis(10),
            most_wait: Duration::from_millis(50),
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl MaskLimits {
    /// Steps wait this long for the masks of grammars, of which none is slow.
    pub const fn waiting(wait: Duration) -> Self {
        Self { slow: Duration::MAX, least_wait: wait, most_wait: wait }
    }
}

/// A grammar, and the slot and the client that it was taken from.
pub(crate) struct MaskJob {
    pub slot: usize,
    pub client: Option<ClientId>,
    pub grammar: Box<SequenceGrammar>,
}

impl MaskJob {
    /// Computes the masks, unless the sequence has ended.
    fn run(mut self) -> Self {
        if self.grammar.is_alive() {
            self.grammar.compute();
        }
        self
    }
}

/// The slow jobs that wait for a thread.
#[derive(Default)]
struct SlowJobs {
    /// The oldest job is first.
    jobs: Vec<MaskJob>,
    /// The clients of the last jobs that a thread took. The latest is last.
    served: Vec<Option<ClientId>>,
}

impl SlowJobs {
    /// Takes the oldest job of the client that has waited longest for its turn.
    fn pop(&mut self) -> Option<MaskJob> {
        let Self { jobs, served } = self;
        let last_turn = |job: &MaskJob| served.iter().position(|client| *client == job.client);
        let index = (0..jobs.len()).min_by_key(|index| last_turn(&jobs[*index]))?;
        let job = jobs.remove(index);
        served.retain(|client| *client != job.client);
        served.drain(..(served.len() + 1).saturating_sub(MAX_SERVED));
        served.push(job.client);
        Some(job)
    }
}

/// The jobs that wait for a thread.
#[derive(Clone)]
struct WaitingJobs {
    quick: Receiver<MaskJob>,
    slow: Arc<Mutex<SlowJobs>>,
    /// An item for each slow job.
    slow_added: Receiver<()>,
}

impl WaitingJobs {
    /// The next job of a thread, and whether it is slow; `None` at the end.
    fn next(&self) -> Option<(MaskJob, bool)> {
        if let Ok(job) = self.quick.try_recv() {
            return Some((job, false));
        }
        select! {
            recv(self.quick) -> job => Some((job.ok()?, false)),
            recv(self.slow_added) -> added => {
                added.ok()?;
                Some((self.lock_slow().pop()?, true))
            }
        }
    }

    fn lock_slow(&self) -> MutexGuard<'_, SlowJobs> {
        self.slow.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The mask threads of an engine. Dropping this ends each thread after its job.
pub(crate) struct MaskThreads {
    limits: MaskLimits,
    /// The sending ends of the channels of `waiting`; `None` only while this is dropped.
    senders: Option<(Sender<MaskJob>, Sender<()>)>,
    waiting: WaitingJobs,
    /// Finished jobs, and whether they were slow.
    done: Receiver<(MaskJob, bool)>,
    /// The lifetimes of the sequences of jobs that have not returned.
    pending: Vec<Weak<()>>,
    /// The number of pending jobs that are not slow.
    num_quick: usize,
    threads: Vec<thread::JoinHandle<()>>,
}

impl MaskThreads {
    /// Starts the mask threads for an engine with `threads` compute threads.
    pub fn spawn(threads: usize, limits: MaskLimits) -> io::Result<Self> {
        let ((quick_sender, quick), (slow_sender, slow_added)) = (unbounded(), unbounded());
        let (finished, done) = unbounded();
        let mut spawned = Self {
            limits,
            senders: Some((quick_sender, slow_sender)),
            waiting: WaitingJobs { quick, slow: Arc::default(), slow_added },
            done,
            pending: Vec::new(),
            num_quick: 0,
            threads: Vec::new(),
        };
        for _ in 0..threads.div_ceil(THREADS_PER_MASK_THREAD) {
            let (waiting, finished) = (spawned.waiting.clone(), finished.clone());
            let run = move || {
                while let Some((job, is_slow)) = waiting.next() {
                    if finished.send((job.run(), is_slow)).is_err() {
                        break;
                    }
                }
            };
            spawned.threads.push(thread::Builder::new().name("penstock-masks".to_owned()).spawn(run)?);
        }
        Ok(spawned)
    }

    /// Changes the limits.
    #[cfg(feature = "testing")]
    pub fn set_limits(&mut self, limits: MaskLimits) {
        self.limits = limits;
    }

    /// The limits.
    pub fn limits(&self) -> MaskLimits {
        self.limits
    }

    /// Starts computing the masks of a grammar.
    pub fn start(&mut self, job: MaskJob) {
        let is_slow = job.grammar.expected_cost() > self.limits.slow;
        self.pending.push(job.grammar.lifetime());
        self.num_quick += usize::from(!is_slow);
        let (quick_sender, slow_sender) =
            self.senders.as_ref().expect("the channels are open until the drop");
        let is_sent = if is_slow {
            self.waiting.lock_slow().jobs.push(job);
            slow_sender.send(()).is_ok()
        } else {
            quick_sender.send(job).is_ok()
        };
        assert!(is_sent, "this holds the receivers itself; this is a bug");
    }

    /// Whether a job of the sequence with this lifetime has not returned.
    pub fn has_job_of(&self, lifetime: &Weak<()>) -> bool {
        self.pending.iter().any(|other| other.ptr_eq(lifetime))
    }

    /// Returns the jobs that are done, for a step that was launched at `launched`. Waits within the limits for those
    /// that are not slow, and takes over some of them. If `needs_one`, waits up to `most_wait` until a job has
    /// returned.
    pub fn collect(&mut self, launched: Instant, needs_one: bool, mut on_finished: impl FnMut(MaskJob)) {
        let MaskLimits { least_wait, most_wait, .. } = self.limits;
        let started = Instant::now();
        let wait = (started - launched).clamp(least_wait, most_wait);
        let mut num_returned = 0;
        loop {
            let waits_for_any = needs_one && num_returned == 0 && !self.pending.is_empty();
            let wait = match waits_for_any {
                true => most_wait,
                false if self.num_quick > 0 => wait,
                false => Duration::ZERO,
            };
            let Some((job, is_slow)) = self.finished(wait.saturating_sub(started.elapsed())) else { break };
            self.num_quick -= usize::from(!is_slow);
            self.pending.retain(|lifetime| !lifetime.ptr_eq(&job.grammar.lifetime()));
            num_returned += 1;
            on_finished(job);
        }
    }

    /// The next job that is done within a time, and whether it is slow.
    fn finished(&self, wait: Duration) -> Option<(MaskJob, bool)> {
        if let Ok(done) = self.done.try_recv() {
            return Some(done);
        }
        if wait.is_zero() {
            return None;
        }
        match self.waiting.quick.try_recv() {
            Ok(job) => Some((job.run(), false)),
            Err(_) => self.done.recv_timeout(wait).ok(),
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        drop(self.senders.take());
        self.waiting.quick.try_iter().for_each(drop);
        self.waiting.lock_slow().jobs.clear();
        for thread in self.threads.drain(..) {
            // Panics of user code are caught, so there is none.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use penstock_engine::request::{Grammar, GrammarState};

    use super::*;

    /// Fills its masks with the number of masks so far, for each of which it takes an item from a channel.
    #[derive(Clone, Debug)]
    struct Gated(Receiver<()>, u32);

    impl Grammar for Gated {
        fn start(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(self.clone()))
        }
    }

    impl GrammarState for Gated {
        fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
            self.0.recv().expect("the gate is open at the end");
            self.1 += 1;
            allowed.fill(self.1);
            Ok(())
        }

        fn accept(&mut self, _: u32) -> Result<(), String> {
            Ok(())
        }

        fn forced(&mut self, _: &mut Vec<u32>) {}

        fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(self.clone()))
        }
    }

    const NO_LIMITS: MaskLimits = MaskLimits::waiting(Duration::MAX);
    /// Grammars that have generated a token are slow.
    const ALL_SLOW: MaskLimits = MaskLimits { slow: Duration::ZERO, ..NO_LIMITS };

    /// A job of a sequence that has generated these tokens.
    fn job(slot: usize, gate: &Receiver<()>, lifetime: &Arc<()>, generated: &[u32]) -> MaskJob {
        let grammar = Arc::new(Gated(gate.clone(), 10 * slot as u32)) as Arc<dyn Grammar>;
        let lifetime = Arc::downgrade(lifetime);
        let grammar = SequenceGrammar::new(&grammar, &lifetime, generated, 40);
        MaskJob { slot, client: None, grammar }
    }

    fn open_gate() -> Receiver<()> {
        let (opener, gate) = unbounded();
        (0..10_000).for_each(|_| opener.send(()).expect("a receiver"));
        gate
    }

    /// The slots of the jobs that return now.
    fn collected(masks: &mut MaskThreads, needs_one: bool) -> Vec<usize> {
        let mut slots = vec![];
        masks.collect(Instant::now(), needs_one, |job| slots.push(job.slot));
        slots.sort_unstable();
        slots
    }

    #[test]
    fn every_grammar_returns_to_its_slot_with_its_mask() {
        const SLOTS: usize = 30;
        let (gate, lifetime) = (open_gate(), Arc::new(()));
        let mut masks = MaskThreads::spawn(3 * THREADS_PER_MASK_THREAD, NO_LIMITS).expect("threads");
        let mut jobs: Vec<_> = (0..SLOTS).map(|slot| job(slot, &gate, &lifetime, &[])).collect();
        for round in 1..=20 {
            for mut job in jobs.drain(..) {
                job.grammar.set_drafts([].into_iter());
                masks.start(job);
            }
            masks.collect(Instant::now(), false, |job| jobs.push(job));
            jobs.sort_unstable_by_key(|job| job.slot);
            assert_eq!(jobs.len(), SLOTS);
            for (slot, job) in jobs.iter().enumerate() {
                assert_eq!((job.slot, job.grammar.mask(0)), (slot, &[10 * slot as u32 + round; 2][..]));
            }
        }
        masks.collect(Instant::now(), true, |_| panic!("no job is pending"));
    }

    #[test]
    fn collecting_waits_for_one_at_most_beside_slow_jobs() {
        let (opener, gate) = unbounded();
        let lifetimes: Vec<_> = (0..3).map(|_| Arc::new(())).collect();
        let mut masks = MaskThreads::spawn(1, ALL_SLOW).expect("a thread");
        for (slot, lifetime) in lifetimes.iter().enumerate() {
            masks.start(job(slot, &gate, lifetime, &[7]));
            assert!(masks.has_job_of(&Arc::downgrade(lifetime)));
        }
        assert!(collected(&mut masks, false).is_empty(), "the gate is closed");
        let waiting = thread::spawn(move || (collected(&mut masks, true), masks));
        opener.send(()).expect("a receiver");
        let (returned, mut masks) = waiting.join().expect("it waits until one returns");
        assert_eq!(returned, [0]);
        let is_pending = lifetimes.iter().map(|lifetime| masks.has_job_of(&Arc::downgrade(lifetime)));
        assert_eq!(is_pending.collect::<Vec<_>>(), [false, true, true]);
        (0..2).for_each(|_| opener.send(()).expect("a receiver"));
        let mut returned = collected(&mut masks, true);
        returned.extend(collected(&mut masks, true)); // both may be in the first
        assert_eq!(returned, [1, 2]);
    }

    #[test]
    fn clients_with_slow_jobs_take_turns() {
        let (gate, lifetime) = (open_gate(), Arc::new(()));
        let mut waiting = SlowJobs::default();
        let push = |waiting: &mut SlowJobs, slot, client| {
            waiting.jobs.push(MaskJob { client: Some(ClientId(client)), ..job(slot, &gate, &lifetime, &[]) });
        };
        (0..4).for_each(|slot| push(&mut waiting, slot, 1));
        assert_eq!(waiting.pop().map(|job| job.slot), Some(0));
        (4..6).for_each(|slot| push(&mut waiting, slot, 2));
        push(&mut waiting, 6, 3);
        push(&mut waiting, 7, 1);
        let order: Vec<_> = std::iter::from_fn(|| waiting.pop()).map(|job| job.slot).collect();
        assert_eq!(order, [4, 6, 1, 5, 2, 3, 7]);
        (0..2 * MAX_SERVED).for_each(|slot| push(&mut waiting, slot, slot as u64));
        while waiting.pop().is_some() {}
        assert_eq!(waiting.served.len(), MAX_SERVED);
        push(&mut waiting, 8, 2 * MAX_SERVED as u64 - 1);
        push(&mut waiting, 9, 0);
        assert_eq!(waiting.pop().map(|job| job.slot), Some(9), "a client that is no longer known is first");
    }

    #[test]
    fn quick_jobs_return_while_threads_are_busy_with_slow_ones() {
        let (opener, closed) = unbounded();
        let (open, lifetime) = (open_gate(), Arc::new(()));
        let mut masks = MaskThreads::spawn(1, ALL_SLOW).expect("a thread");
        (0..5).for_each(|slot| masks.start(job(slot, &closed, &lifetime, &[7])));
        (5..9).for_each(|slot| masks.start(job(slot, &open, &lifetime, &[])));
        assert_eq!(collected(&mut masks, false), [5, 6, 7, 8]);
        (0..5).for_each(|_| opener.send(()).expect("a receiver"));
    }

    #[test]
    fn masks_of_ended_sequences_are_not_computed() {
        let (_opener, closed) = unbounded();
        let mut masks = MaskThreads::spawn(1, NO_LIMITS).expect("a thread");
        let ended = job(3, &closed, &Arc::new(()), &[]);
        masks.start(ended);
        assert_eq!(collected(&mut masks, false), [3]);
    }

    #[test]
    fn threads_end_with_jobs_pending() {
        let (opener, gate) = unbounded();
        let lifetime = Arc::new(());
        let mut masks = MaskThreads::spawn(1, ALL_SLOW).expect("a thread");
        (0..5).for_each(|slot| masks.start(job(slot, &gate, &lifetime, &[7])));
        drop(gate);
        opener.send(()).expect("a receiver"); // one job ends, and no other is needed
        drop(masks);
    }
}
