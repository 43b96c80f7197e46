//! One sequence's grammar, and the threads that work out which tokens it allows next while the device computes.
//!
//! A [`Guide`] goes out with [`MaskThreads::start`] and comes back, its mask filled in, with [`MaskThreads::collect`], where
//! the thread that waits lends a hand. Nothing is allocated for that. Between the two nobody else has it.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock_engine::request::{Grammar, GrammarState};

use crate::guard::guarded;

/// What a grammar is called in failures.
const GRAMMAR: &str = "grammar";
/// So many compute threads have one beside them that works out masks.
const THREADS_PER_MASK_THREAD: usize = 8;

/// Where a sequence stands in its grammar. After a failure it is to be dropped.
pub(crate) struct Guide {
    /// Nobody locks it: a state can do nothing for several threads at once, but a guide can lie among what they share.
    state: Mutex<Box<dyn GrammarState>>,
    /// A bit for each id.
    mask: Vec<u32>,
    /// Whether `mask` is that of the next token.
    outcome: Result<(), String>,
}

impl Guide {
    /// Where a sequence stands that has generated these tokens.
    pub fn new(grammar: &dyn Grammar, generated: &[u32], vocabulary: usize) -> Result<Box<Self>, String> {
        let mask = vec![0; vocabulary.div_ceil(32)];
        let state = guarded(GRAMMAR, || grammar.start())?;
        let mut guide = Box::new(Self { state: Mutex::new(state), mask, outcome: Ok(()) });
        generated.iter().try_for_each(|token| guide.accept(*token))?;
        Ok(guide)
    }

    /// The ids that may come next, as they were worked out last.
    pub fn mask(&self) -> &[u32] {
        &self.mask
    }

    /// What became of the mask.
    pub fn outcome(&self) -> &Result<(), String> {
        &self.outcome
    }

    /// A token came.
    pub fn accept(&mut self, token: u32) -> Result<(), String> {
        guarded(GRAMMAR, || alone(&mut self.state).accept(token))
    }

    /// Appends the tokens that can only come next; or none, if that fails.
    pub fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), String> {
        let len = tokens.len();
        guarded(GRAMMAR, || {
            alone(&mut self.state).forced(tokens);
            Ok(())
        })
        .inspect_err(|_| tokens.truncate(len))
    }

    fn work_out(&mut self) {
        let Self { state, mask, outcome } = self;
        *outcome = guarded(GRAMMAR, || alone(state).mask(mask));
    }
}

/// What nobody else has.
fn alone<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// A guide on its way, and whose it is.
type Errand = (usize, Box<Guide>);

/// A few threads that work out masks. Dropping it waits for them.
pub(crate) struct MaskThreads {
    /// `None` only while it is dropped.
    wanted: Option<Sender<Errand>>,
    /// The threads' end of `wanted`.
    waiting: Receiver<Errand>,
    done: Receiver<Errand>,
    num_out: usize,
    threads: Vec<thread::JoinHandle<()>>,
}

impl MaskThreads {
    /// For no more than `slots` guides out at once, beside `threads` threads that compute.
    pub fn spawn(slots: usize, threads: usize) -> io::Result<Self> {
        let (wanted, waiting) = bounded(slots);
        let (finished, done) = bounded(slots);
        let mut spawned = Self { wanted: Some(wanted), waiting, done, num_out: 0, threads: Vec::new() };
        for _ in 0..threads.div_ceil(THREADS_PER_MASK_THREAD) {
            let (waiting, finished): (Receiver<Errand>, _) = (spawned.waiting.clone(), finished.clone());
            let run = move || {
                for (slot, mut guide) in waiting {
                    guide.work_out();
                    if finished.send((slot, guide)).is_err() {
                        break;
                    }
                }
            };
            spawned.threads.push(thread::Builder::new().name("penstock-masks".to_owned()).spawn(run)?);
        }
        Ok(spawned)
    }

    /// Has the mask of a slot's next token worked out.
    pub fn start(&mut self, slot: usize, guide: Box<Guide>) {
        let wanted = self.wanted.as_ref().expect("the channel is open until the drop");
        wanted.send((slot, guide)).expect("this holds a receiver itself; this is a bug");
        self.num_out += 1;
    }

    /// Waits until all that were started are done, and gives them back.
    pub fn collect(&mut self, mut give_back: impl FnMut(usize, Box<Guide>)) {
        while self.num_out > 0 {
            let (slot, guide) = match self.waiting.try_recv() {
                Ok((slot, mut guide)) => {
                    guide.work_out();
                    (slot, guide)
                }
                Err(_) => self.done.recv().expect("no failure ends a mask thread; this is a bug"),
            };
            self.num_out -= 1;
            give_back(slot, guide);
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        drop(self.wanted.take());
        for thread in self.threads.drain(..) {
            // Nothing there can panic but what is guarded.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the ids whose bits are those of a number, another one each time.
    #[derive(Debug)]
    struct Numbered(u32);

    impl Grammar for Numbered {
        fn start(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(Numbered(self.0)))
        }
    }

    impl GrammarState for Numbered {
        fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
            self.0 += 1;
            allowed.fill(self.0);
            if self.0.is_multiple_of(7) { Err("seven".into()) } else { Ok(()) }
        }

        fn accept(&mut self, _: u32) -> Result<(), String> {
            Ok(())
        }

        fn forced(&mut self, _: &mut Vec<u32>) {}
    }

    fn guide(number: u32) -> Box<Guide> {
        Guide::new(&Numbered(number), &[], 40).expect("it starts")
    }

    #[test]
    fn every_guide_comes_back_to_its_slot_with_its_own_mask_or_failure() {
        const SLOTS: usize = 30;
        let mut masks = MaskThreads::spawn(SLOTS, 3 * THREADS_PER_MASK_THREAD).expect("threads");
        let mut guides: Vec<_> = (0..SLOTS as u32).map(|slot| Some(guide(100 * slot))).collect();
        for turn in 1..=20 {
            for (slot, guide) in guides.iter_mut().enumerate() {
                masks.start(slot, guide.take().expect("it came back"));
            }
            masks.collect(|slot, guide| assert!(guides[slot].replace(guide).is_none()));
            for (slot, guide) in guides.iter().enumerate() {
                let (guide, number) = (guide.as_ref().expect("it came back"), 100 * slot as u32 + turn);
                assert_eq!(guide.mask(), [number; 2]);
                assert_eq!(guide.outcome().is_err(), number.is_multiple_of(7), "{number}");
            }
        }
        masks.collect(|_, _| panic!("none is out"));
    }

    #[test]
    fn threads_end_with_guides_still_out() {
        let mut masks = MaskThreads::spawn(5, 1).expect("a thread");
        (0..5).for_each(|slot| masks.start(slot, guide(0)));
        drop(masks);
    }
}
