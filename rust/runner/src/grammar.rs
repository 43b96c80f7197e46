//! The grammar of one sequence, and the threads that compute its masks while the device runs.
//!
//! A [`SequenceGrammar`] goes to a thread with [`MaskThreads::start`] and comes back with [`MaskThreads::collect`], its
//! masks filled in; the collecting thread takes over waiting jobs. In between it belongs to that thread alone.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

use crossbeam_channel::{Receiver, Sender, bounded};
use penstock_engine::request::{Grammar, GrammarState};

use crate::slot::FailingPosition;
use crate::user_code::catch_user_code;

/// The name of grammars in error messages.
const GRAMMAR: &str = "grammar";
/// One mask thread is started for this many compute threads.
const THREADS_PER_MASK_THREAD: usize = 8;

/// A grammar state. The mutex is never contended: it makes the state `Sync`, so that slots can be shared.
type State = Mutex<Box<dyn GrammarState>>;

/// The state of a sequence in its grammar, and the masks of its next positions. After an error it must be dropped.
pub(crate) struct SequenceGrammar {
    /// The state after all generated tokens.
    state: State,
    /// The state after the first `num_followed` drafts, if it is not 0.
    fork: Option<State>,
    num_followed: usize,
    /// The draft tokens of the next step, up to the first that ends the request.
    drafts: Vec<u32>,
    /// The bitmaps of the positions that can be sampled in the next step, one after the other.
    masks: Vec<u32>,
    /// Words of a bitmap.
    words: usize,
    /// The reason why the position after the followed drafts cannot be sampled.
    failure: Option<String>,
}

impl SequenceGrammar {
    /// The state of a sequence that has generated these tokens.
    pub fn new(grammar: &dyn Grammar, generated: &[u32], vocabulary: usize) -> Result<Box<Self>, String> {
        let mut state = catch_user_code(GRAMMAR, || grammar.start())?;
        generated.iter().try_for_each(|token| catch_user_code(GRAMMAR, || state.accept(*token)))?;
        Ok(Box::new(Self {
            state: Mutex::new(state),
            fork: None,
            num_followed: 0,
            drafts: Vec::new(),
            masks: Vec::new(),
            words: vocabulary.div_ceil(32),
            failure: None,
        }))
    }

    /// Sets the draft tokens of the next step.
    pub fn set_drafts(&mut self, drafts: impl Iterator<Item = u32>) {
        self.drafts.clear();
        self.drafts.extend(drafts);
    }

    /// Number of positions that have a mask. Later ones are not sampled.
    pub fn num_masks(&self) -> usize {
        self.masks.len() / self.words.max(1)
    }

    /// The ids allowed at a position of the next step.
    pub fn mask(&self, position: usize) -> &[u32] {
        &self.masks[position * self.words..][..self.words]
    }

    /// The position that fails the request, if it is reached.
    pub fn take_failure(&mut self) -> Option<FailingPosition> {
        let position = self.num_followed;
        let draft = position.checked_sub(1).map(|before| self.drafts[before]);
        self.failure.take().map(|failure| FailingPosition { position, draft, failure })
    }

    /// Advances by the tokens of a step, of which all but the last are drafts.
    pub fn accept(&mut self, tokens: &[u32]) -> Result<(), String> {
        let fork = self.fork.take().filter(|_| tokens.starts_with(&self.drafts[..self.num_followed]));
        let num_accepted = if fork.is_some() { self.num_followed } else { 0 };
        if let Some(fork) = fork {
            self.state = fork;
        }
        let state = exclusive(&mut self.state);
        tokens[num_accepted..].iter().try_for_each(|token| catch_user_code(GRAMMAR, || state.accept(*token)))
    }

    /// Appends the only tokens that can come next; nothing on failure.
    pub fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), String> {
        let len = tokens.len();
        catch_user_code(GRAMMAR, || {
            exclusive(&mut self.state).forced(tokens);
            Ok(())
        })
        .inspect_err(|_| tokens.truncate(len))
    }

    /// Computes the masks of the next position and of those after its drafts, as far as the grammar allows the drafts.
    fn compute(&mut self) {
        self.masks.clear();
        (self.fork, self.num_followed) = (None, 0);
        self.failure = self.follow_drafts().err();
    }

    fn follow_drafts(&mut self) -> Result<(), String> {
        loop {
            let state = exclusive(self.fork.as_mut().unwrap_or(&mut self.state));
            let start = self.masks.len();
            self.masks.resize(start + self.words, 0);
            let mask = &mut self.masks[start..];
            catch_user_code(GRAMMAR, || state.mask(mask)).inspect_err(|_| self.masks.truncate(start))?;
            let Some(&draft) = self.drafts.get(self.num_followed) else { return Ok(()) };
            let word = self.masks[start..].get(draft as usize / 32);
            if word.is_none_or(|word| word >> (draft % 32) & 1 == 0) {
                return Ok(()); // never sampled, so no later position is reached
            }
            self.num_followed += 1; // from here on, an error is that of the position after the draft
            let fork = match self.fork.take() {
                Some(fork) => fork,
                None => Mutex::new(catch_user_code(GRAMMAR, || exclusive(&mut self.state).fork())?),
            };
            let fork = self.fork.insert(fork);
            catch_user_code(GRAMMAR, || exclusive(fork).accept(draft))?;
        }
    }
}

/// The content of a mutex that nothing else uses.
fn exclusive<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// The grammar whose masks are computed, and its slot.
type MaskJob = (usize, Box<SequenceGrammar>);

/// The threads that compute masks. Dropping it waits for them.
pub(crate) struct MaskThreads {
    /// `None` only while it is dropped.
    jobs: Option<Sender<MaskJob>>,
    /// The threads' end of `jobs`.
    waiting: Receiver<MaskJob>,
    done: Receiver<MaskJob>,
    num_pending: usize,
    threads: Vec<thread::JoinHandle<()>>,
}

impl MaskThreads {
    /// Threads for at most `slots` pending jobs, beside `threads` compute threads.
    pub fn spawn(slots: usize, threads: usize) -> io::Result<Self> {
        let (jobs, waiting) = bounded(slots);
        let (finished, done) = bounded(slots);
        let mut spawned = Self { jobs: Some(jobs), waiting, done, num_pending: 0, threads: Vec::new() };
        for _ in 0..threads.div_ceil(THREADS_PER_MASK_THREAD) {
            let (waiting, finished): (Receiver<MaskJob>, _) = (spawned.waiting.clone(), finished.clone());
            let run = move || {
                for (slot, mut grammar) in waiting {
                    grammar.compute();
                    if finished.send((slot, grammar)).is_err() {
                        break;
                    }
                }
            };
            spawned.threads.push(thread::Builder::new().name("penstock-masks".to_owned()).spawn(run)?);
        }
        Ok(spawned)
    }

    /// Starts computing the masks of a slot's next positions.
    pub fn start(&mut self, slot: usize, grammar: Box<SequenceGrammar>) {
        let jobs = self.jobs.as_ref().expect("the channel is open until the drop");
        jobs.send((slot, grammar)).expect("this holds a receiver itself; this is a bug");
        self.num_pending += 1;
    }

    /// Waits until all jobs are done, and returns the grammars.
    pub fn collect(&mut self, mut on_finished: impl FnMut(usize, Box<SequenceGrammar>)) {
        while self.num_pending > 0 {
            let (slot, grammar) = match self.waiting.try_recv() {
                Ok((slot, mut grammar)) => {
                    grammar.compute();
                    (slot, grammar)
                }
                Err(_) => self.done.recv().expect("no failure ends a mask thread; this is a bug"),
            };
            self.num_pending -= 1;
            on_finished(slot, grammar);
        }
    }
}

impl Drop for MaskThreads {
    fn drop(&mut self) {
        drop(self.jobs.take());
        for thread in self.threads.drain(..) {
            // Panics of user code are caught, so there is none.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Allows the ids whose bits are those of a number, which grows with each mask and each token.
    #[derive(Clone, Debug)]
    struct Numbered(u32);

    impl Grammar for Numbered {
        fn start(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(self.clone()))
        }
    }

    impl GrammarState for Numbered {
        fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
            self.0 += 1;
            allowed.fill(self.0);
            if self.0.is_multiple_of(7) { Err("seven".into()) } else { Ok(()) }
        }

        fn accept(&mut self, token: u32) -> Result<(), String> {
            self.0 += 100 * token;
            Ok(())
        }

        fn forced(&mut self, _: &mut Vec<u32>) {}

        fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
            if self.0 == 101 { Err("no fork".into()) } else { Ok(Box::new(self.clone())) }
        }
    }

    fn grammar(number: u32) -> Box<SequenceGrammar> {
        SequenceGrammar::new(&Numbered(number), &[], 40).expect("it starts")
    }

    #[test]
    fn every_grammar_returns_to_its_slot_with_its_mask_or_failure() {
        const SLOTS: usize = 30;
        let mut masks = MaskThreads::spawn(SLOTS, 3 * THREADS_PER_MASK_THREAD).expect("threads");
        let mut grammars: Vec<_> = (0..SLOTS as u32).map(|slot| Some(grammar(100 * slot))).collect();
        for round in 1..=20 {
            for (slot, grammar) in grammars.iter_mut().enumerate() {
                masks.start(slot, grammar.take().expect("it came back"));
            }
            masks.collect(|slot, grammar| assert!(grammars[slot].replace(grammar).is_none()));
            for (slot, grammar) in grammars.iter_mut().enumerate() {
                let (grammar, number) = (grammar.as_mut().expect("it came back"), 100 * slot as u32 + round);
                let fails = number.is_multiple_of(7);
                assert_eq!(grammar.num_masks(), usize::from(!fails), "{number}");
                assert_eq!(grammar.take_failure().is_some(), fails, "{number}");
                assert!(fails || grammar.mask(0) == [number; 2]);
            }
        }
        masks.collect(|_, _| panic!("no job is pending"));
    }

    /// The masks of the next position and of those after `drafts`; the first mask is `number + 1`.
    fn drafted(number: u32, drafts: &[u32]) -> Box<SequenceGrammar> {
        let mut grammar = grammar(number);
        grammar.set_drafts(drafts.iter().copied());
        grammar.compute();
        grammar
    }

    #[test]
    fn masks_follow_drafts_until_one_is_not_allowed() {
        // 3 allows 0; after it, 4 does not allow 1.
        let mut grammar = drafted(2, &[0, 1, 1, 0]);
        assert_eq!((grammar.num_masks(), grammar.mask(0), grammar.mask(1)), (2, &[3; 2][..], &[4; 2][..]));
        assert_eq!(grammar.take_failure(), None);
        assert_eq!(drafted(2, &[2, 0]).num_masks(), 1, "3 does not allow 2");
        assert_eq!(drafted(2, &[999]).num_masks(), 1, "there is no such id");
        assert_eq!(drafted(2, &[0, 2, 0, 2]).num_masks(), 5, "3, 4, 205 and 206 allow their drafts");
    }

    #[test]
    fn accepted_tokens_continue_from_the_fork_or_the_state_before() {
        let next = |drafts: &[u32], tokens: &[u32]| {
            let mut grammar = drafted(2, drafts);
            grammar.accept(tokens).expect("it never fails");
            grammar.set_drafts([].into_iter());
            grammar.compute();
            grammar.mask(0)[0]
        };
        assert_eq!(next(&[], &[4]), 404);
        // The draft is confirmed: the fork continues, which has computed one mask more.
        assert_eq!([next(&[0], &[0, 4]), next(&[0], &[0])], [405, 5]);
        // It is not: the former state continues.
        assert_eq!([next(&[0], &[1]), next(&[0], &[4])], [104, 404]);
    }

    #[test]
    fn failure_after_a_draft_leaves_the_state_before_it() {
        // 13 allows 0; the mask after it is the failing 14.
        let mut grammar = drafted(12, &[0]);
        assert_eq!(grammar.num_masks(), 1);
        let failing = grammar.take_failure().expect("a failure");
        assert_eq!((failing.position, failing.draft), (1, Some(0)));
        grammar.accept(&[2]).expect("it never fails");
        grammar.set_drafts([].into_iter());
        grammar.compute();
        assert_eq!((grammar.num_masks(), grammar.mask(0)[0], grammar.take_failure()), (1, 214, None));
    }

    #[test]
    fn failed_fork_is_the_failure_of_the_position_after_the_draft() {
        // 101 allows 0, and its state cannot be forked.
        let mut grammar = drafted(100, &[0, 0]);
        assert_eq!(grammar.num_masks(), 1);
        let FailingPosition { position, draft, failure } = grammar.take_failure().expect("a failure");
        assert_eq!((position, draft, &*failure), (1, Some(0), "the grammar failed: no fork"));
        grammar.accept(&[2]).expect("the draft was not sampled, so the state continues");
        assert!(drafted(100, &[1]).take_failure().is_none(), "101 does not allow 1, so nothing is forked");
    }

    #[test]
    fn threads_end_with_jobs_pending() {
        let mut masks = MaskThreads::spawn(5, 1).expect("a thread");
        (0..5).for_each(|slot| masks.start(slot, grammar(0)));
        drop(masks);
    }
}
