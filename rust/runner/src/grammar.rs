//! The grammar of one sequence and its masks, and the grammars of sequences without a slot.
//!
//! A state that falls behind the tokens of its sequence accepts them when its masks are computed. A grammar is the
//! client's: one call can take seconds.

use std::cmp::Reverse;
use std::mem;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use penstock_engine::request::{Grammar, GrammarState};

use crate::cpu_time::CpuTimer;
use crate::user_code::catch_user_code;

/// The name of grammars in error messages.
const GRAMMAR: &str = "grammar";
/// The CPU time that a token is assumed to take, for states that are behind.
const COST_OF_TOKEN: Duration = Duration::from_micros(100);
/// The CPU time that a byte of a new state is assumed to take: its copy touches new pages.
const COST_OF_BYTE: Duration = Duration::from_nanos(2);

/// A grammar state. The mutex is never contended: it makes the state `Sync`, so that slots can be shared.
type State = Mutex<Box<dyn GrammarState>>;

/// A position of a step at which the request fails, if it is reached.
#[derive(Debug, PartialEq)]
pub(crate) struct FailingPosition {
    pub position: usize,
    /// The draft before it, unless it is the first.
    pub draft: Option<u32>,
    pub failure: String,
}

/// The state of a sequence in its grammar, and the masks of its next positions. After an error it must be dropped.
pub(crate) struct SequenceGrammar {
    /// The lifetime of the sequence.
    lifetime: Weak<()>,
    /// The tokens that the sequence has generated.
    tokens: Vec<u32>,
    /// The number of those that the state has accepted.
    num_accepted: usize,
    grammar: Arc<dyn Grammar>,
    /// `None` until its first mask is computed.
    state: Option<State>,
    /// The state after the first `num_followed` drafts, if it is not 0.
    fork: Option<State>,
    num_followed: usize,
    /// The draft tokens of the next step, up to the first that ends the request.
    drafts: Vec<u32>,
    /// The bitmaps of the positions that can be sampled in the next step, one after the other.
    masks: Vec<u32>,
    /// The number of words of a bitmap.
    words: usize,
    /// Whether `masks` and `failure` are those of the next step.
    is_computed: bool,
    /// The reason why the position after the followed drafts cannot be sampled.
    failure: Option<String>,
    /// The CPU time of the calls since masks were computed.
    spent: Duration,
    /// The CPU time of the last token and the masks after it.
    last_cost: Duration,
}

impl SequenceGrammar {
    /// The grammar of a sequence that has generated these tokens.
    pub fn new(
        grammar: &Arc<dyn Grammar>,
        lifetime: &Weak<()>,
        generated: &[u32],
        vocabulary: usize,
    ) -> Box<Self> {
        Box::new(Self {
            lifetime: Weak::clone(lifetime),
            tokens: generated.to_vec(),
            num_accepted: 0,
            grammar: Arc::clone(grammar),
            state: None,
            fork: None,
            num_followed: 0,
            drafts: Vec::new(),
            masks: Vec::new(),
            words: vocabulary.div_ceil(32),
            is_computed: false,
            failure: None,
            spent: Duration::ZERO,
            last_cost: Duration::ZERO,
        })
    }

    /// The lifetime of its sequence.
    pub fn lifetime(&self) -> Weak<()> {
        Weak::clone(&self.lifetime)
    }

    /// Whether the grammar belongs to the sequence with this lifetime, which has not ended.
    pub fn is_of(&self, lifetime: &Weak<()>) -> bool {
        self.is_alive() && self.lifetime.ptr_eq(lifetime)
    }

    /// Whether its sequence has not ended.
    pub fn is_alive(&self) -> bool {
        self.lifetime.strong_count() > 0
    }

    /// The CPU time that the next masks are expected to take.
    pub fn expected_cost(&self) -> Duration {
        let num_behind = self.tokens.len() - self.num_accepted;
        let num_bytes = if self.state.is_none() { self.grammar.start_bytes() } else { 0 };
        let [tokens, bytes] = [(COST_OF_TOKEN, num_behind), (COST_OF_BYTE, num_bytes)]
            .map(|(cost, number)| cost.saturating_mul(u32::try_from(number).unwrap_or(u32::MAX)));
        self.last_cost.max(self.spent).max(tokens + bytes)
    }

    /// Whether its masks are those of a step with these draft tokens.
    pub fn has_masks(&self, drafts: impl Iterator<Item = u32>) -> bool {
        let mut own = self.drafts.iter().copied();
        self.is_computed && drafts.map(Some).all(|draft| draft == own.next())
    }

    /// Sets the draft tokens of the next step.
    pub fn set_drafts(&mut self, drafts: impl Iterator<Item = u32>) {
        self.is_computed = false;
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

    /// Advances by the tokens of a step, of which all but the last are drafts. If not `at_once`, the state accepts them
    /// when the next masks are computed.
    pub fn accept(&mut self, tokens: &[u32], at_once: bool) -> Result<(), String> {
        self.advance(tokens);
        if at_once { self.timed(Self::catch_up) } else { Ok(()) }
    }

    fn advance(&mut self, tokens: &[u32]) {
        let fork = self.fork.take().filter(|_| tokens.starts_with(&self.drafts[..self.num_followed]));
        if let Some(fork) = fork {
            self.state = Some(fork);
            self.num_accepted += self.num_followed;
        }
        self.tokens.extend_from_slice(tokens);
        self.is_computed = false;
    }

    /// Appends the only tokens that can come next; nothing on failure, and if the state is behind.
    pub fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), String> {
        if self.num_accepted < self.tokens.len() {
            return Ok(());
        }
        let len = tokens.len();
        self.timed(|grammar| {
            let Some(state) = &mut grammar.state else { return Ok(()) };
            catch_user_code(GRAMMAR, || {
                exclusive(state).forced(tokens);
                Ok(())
            })
            .inspect_err(|_| tokens.truncate(len))
        })
    }

    /// Computes the masks of the next position and of those after its drafts, as far as the grammar allows the drafts.
    pub fn compute(&mut self) {
        self.masks.clear();
        (self.fork, self.num_followed) = (None, 0);
        self.failure = self.timed(|grammar| grammar.catch_up().and_then(|()| grammar.follow_drafts())).err();
        self.is_computed = true;
        self.last_cost = mem::take(&mut self.spent);
    }

    fn timed<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let timer = CpuTimer::start();
        let result = run(self);
        self.spent += timer.elapsed();
        result
    }

    /// Makes the state if there is none. It accepts the tokens that it has not accepted.
    fn catch_up(&mut self) -> Result<(), String> {
        let state = match self.state.take() {
            Some(state) => state,
            None => Mutex::new(catch_user_code(GRAMMAR, || self.grammar.start())?),
        };
        let state = exclusive(self.state.insert(state));
        let behind = &self.tokens[mem::replace(&mut self.num_accepted, self.tokens.len())..];
        behind.iter().try_for_each(|token| catch_user_code(GRAMMAR, || state.accept(*token)))
    }

    /// Computes the masks after [`catch_up`](Self::catch_up).
    fn follow_drafts(&mut self) -> Result<(), String> {
        loop {
            let Some(state) = self.fork.as_mut().or(self.state.as_mut()).map(exclusive) else {
                return Ok(());
            };
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
            if let (None, Some(state)) = (&self.fork, &mut self.state) {
                self.fork = Some(Mutex::new(catch_user_code(GRAMMAR, || exclusive(state).fork())?));
            }
            let Some(fork) = self.fork.as_mut().map(exclusive) else { return Ok(()) };
            catch_user_code(GRAMMAR, || fork.accept(draft))?;
        }
    }
}

/// The content of a mutex that nothing else uses.
fn exclusive<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// The grammars of sequences without a slot: those that were preempted follow their grammars no second time.
#[derive(Default)]
pub(crate) struct KeptGrammars(Vec<SequenceGrammar>);

impl KeptGrammars {
    /// Keeps the grammar of a sequence, unless it has ended.
    pub fn keep(&mut self, grammar: Box<SequenceGrammar>) {
        if grammar.is_alive() {
            self.0.push(*grammar);
        }
    }

    /// The grammar of a sequence that has generated these tokens: the kept one, or another in the same state.
    pub fn resume(
        &mut self,
        lifetime: &Weak<()>,
        grammar: &Arc<dyn Grammar>,
        generated: &[u32],
        vocabulary: usize,
    ) -> Box<SequenceGrammar> {
        if let Some(index) = self.0.iter().position(|grammar| grammar.is_of(lifetime)) {
            let mut kept = self.0.swap_remove(index);
            if let Some(rest) = generated.strip_prefix(&*kept.tokens) {
                if !rest.is_empty() {
                    kept.advance(rest);
                }
                return Box::new(kept);
            }
        }
        SequenceGrammar::new(grammar, lifetime, generated, vocabulary)
    }

    /// Drops the grammars of sequences that have ended, and of those beyond a number: the ones that cost least to
    /// follow again.
    pub fn trim(&mut self, max_kept: usize) {
        self.0.retain(|grammar| grammar.is_alive());
        if self.0.len() > max_kept {
            self.0.sort_by_key(|grammar| Reverse(grammar.tokens.len()));
            self.0.truncate(max_kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

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
        let numbered = Arc::new(Numbered(number)) as Arc<dyn Grammar>;
        SequenceGrammar::new(&numbered, &Weak::new(), &[], 40)
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
        let next = |at_once: bool, drafts: &[u32], tokens: &[u32]| {
            let mut grammar = drafted(2, drafts);
            grammar.accept(tokens, at_once).expect("it never fails");
            grammar.set_drafts([].into_iter());
            grammar.compute();
            grammar.mask(0)[0]
        };
        for at_once in [true, false] {
            let next = |drafts, tokens| next(at_once, drafts, tokens);
            assert_eq!(next(&[], &[4]), 404);
            // The draft is confirmed: the fork continues, which has computed one mask more.
            assert_eq!([next(&[0], &[0, 4]), next(&[0], &[0])], [405, 5]);
            // It is not: the former state continues.
            assert_eq!([next(&[0], &[1]), next(&[0], &[4])], [104, 404]);
        }
    }

    #[test]
    fn failure_after_a_draft_leaves_the_state_before_it() {
        // 13 allows 0; the mask after it is the failing 14.
        let mut grammar = drafted(12, &[0]);
        assert_eq!(grammar.num_masks(), 1);
        let failing = grammar.take_failure().expect("a failure");
        assert_eq!((failing.position, failing.draft), (1, Some(0)));
        grammar.accept(&[2], true).expect("it never fails");
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
        grammar.accept(&[2], true).expect("the draft was not sampled, so the state continues");
        assert!(drafted(100, &[1]).take_failure().is_none(), "101 does not allow 1, so nothing is forked");
    }

    /// Allows everything, forces 9, and counts the tokens that it accepts.
    #[derive(Clone, Debug, Default)]
    struct Counting(Arc<AtomicUsize>);

    impl Grammar for Counting {
        fn start(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(self.clone()))
        }
    }

    impl GrammarState for Counting {
        fn mask(&mut self, allowed: &mut [u32]) -> Result<(), String> {
            allowed.fill(u32::MAX);
            Ok(())
        }

        fn accept(&mut self, _: u32) -> Result<(), String> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn forced(&mut self, tokens: &mut Vec<u32>) {
            tokens.push(9);
        }

        fn fork(&self) -> Result<Box<dyn GrammarState>, String> {
            Ok(Box::new(self.clone()))
        }
    }

    #[test]
    fn kept_grammar_accepts_only_the_tokens_after_its_own() {
        let (counting, mut kept) = (Counting::default(), KeptGrammars::default());
        let shared = Arc::new(counting.clone()) as Arc<dyn Grammar>;
        let mut resumed = |lifetime: &Arc<()>, generated: &[u32]| {
            let before = counting.0.load(Ordering::Relaxed);
            let lifetime = Arc::downgrade(lifetime);
            let mut grammar = kept.resume(&lifetime, &shared, generated, 40);
            grammar.compute();
            kept.keep(grammar);
            counting.0.load(Ordering::Relaxed) - before
        };
        let (first, second) = (Arc::new(()), Arc::new(()));
        assert_eq!(resumed(&first, &[1, 2, 3]), 3, "there is none");
        assert_eq!(resumed(&second, &[1, 2]), 2, "that of another sequence is not taken");
        assert_eq!(resumed(&first, &[1, 2, 3]), 0);
        assert_eq!(resumed(&first, &[1, 2, 3, 4, 5]), 2);
        assert_eq!(resumed(&first, &[1, 2, 9]), 3, "it had accepted other tokens");
    }

    #[test]
    fn kept_grammars_are_those_of_the_longest_sequences() {
        let (counting, mut kept) =
            (Arc::new(Counting::default()) as Arc<dyn Grammar>, KeptGrammars::default());
        let sequences: Vec<_> = (1..=4).map(|length| (Arc::new(()), vec![0; length])).collect();
        for (lifetime, generated) in &sequences {
            let lifetime = Arc::downgrade(lifetime);
            kept.keep(SequenceGrammar::new(&counting, &lifetime, generated, 40));
        }
        let lengths = |kept: &KeptGrammars| {
            let mut lengths: Vec<_> = kept.0.iter().map(|grammar| grammar.tokens.len()).collect();
            lengths.sort_unstable();
            lengths
        };
        kept.trim(4);
        assert_eq!(lengths(&kept), [1, 2, 3, 4]);
        kept.trim(3);
        assert_eq!(lengths(&kept), [2, 3, 4]);
        let mut sequences = sequences;
        sequences.remove(2);
        kept.trim(3);
        assert_eq!(lengths(&kept), [2, 4]);
        kept.keep(SequenceGrammar::new(&counting, &Weak::new(), &[], 40));
        assert_eq!(lengths(&kept), [2, 4], "a sequence that has ended keeps nothing");
    }

    #[test]
    fn masks_stay_those_of_a_step_with_the_same_drafts() {
        let mut grammar = drafted(2, &[0, 2]);
        for (drafts, is_same) in
            [(&[0, 2][..], true), (&[0], true), (&[], true), (&[1], false), (&[0, 2, 2], false)]
        {
            assert_eq!(grammar.has_masks(drafts.iter().copied()), is_same, "{drafts:?}");
        }
        grammar.accept(&[0], false).expect("it never fails");
        assert!(!grammar.has_masks([].into_iter()), "they were those of the token before");
    }

    #[test]
    fn state_that_is_behind_forces_nothing_and_costs_more() {
        let (counting, mut forced) = (Counting::default(), vec![]);
        let shared = Arc::new(counting.clone()) as Arc<dyn Grammar>;
        let mut grammar = SequenceGrammar::new(&shared, &Weak::new(), &[7; 100], 40);
        assert!(grammar.expected_cost() >= 100 * COST_OF_TOKEN);
        grammar.forced(&mut forced).expect("it never fails");
        assert!(forced.is_empty());
        grammar.compute();
        grammar.forced(&mut forced).expect("it never fails");
        assert_eq!((counting.0.load(Ordering::Relaxed), forced), (100, vec![9]));
        assert!(grammar.expected_cost() < 100 * COST_OF_TOKEN);
    }

    /// Counts its states, which are large. The second one fails.
    #[derive(Debug, Default)]
    struct Large(AtomicUsize);

    impl Grammar for Large {
        fn start(&self) -> Result<Box<dyn GrammarState>, String> {
            match self.0.fetch_add(1, Ordering::Relaxed) {
                0 => Ok(Box::new(Counting::default())),
                _ => Err("no room".into()),
            }
        }

        fn start_bytes(&self) -> usize {
            10_000_000
        }
    }

    #[test]
    fn state_is_made_with_its_first_masks() {
        let large = Arc::new(Large::default());
        let num_states = || large.0.load(Ordering::Relaxed);
        let shared = Arc::clone(&large) as Arc<dyn Grammar>;
        let [mut grammar, mut failing] = [0, 1].map(|_| SequenceGrammar::new(&shared, &Weak::new(), &[], 40));
        let mut forced = vec![];
        grammar.forced(&mut forced).expect("it never fails");
        assert_eq!((num_states(), forced), (0, vec![]));
        assert!(grammar.expected_cost() >= 10_000_000 * COST_OF_BYTE);
        grammar.compute();
        assert_eq!((num_states(), grammar.take_failure()), (1, None));
        assert!(grammar.expected_cost() < 10_000_000 * COST_OF_BYTE);
        failing.compute();
        let failure =
            FailingPosition { position: 0, draft: None, failure: "the grammar failed: no room".into() };
        assert_eq!((num_states(), failing.take_failure()), (2, Some(failure)));
    }

    #[test]
    fn kept_grammar_has_the_masks_and_the_failure_of_its_tokens() {
        let (lifetime, mut kept) = (Arc::new(()), KeptGrammars::default());
        let lifetime = Arc::downgrade(&lifetime);
        for (number, num_masks, failure) in [(2, 1, None), (6, 0, Some("the grammar failed: seven"))] {
            let [numbered, other] = [number, 9].map(|number| Arc::new(Numbered(number)) as Arc<dyn Grammar>);
            let mut grammar = SequenceGrammar::new(&numbered, &lifetime, &[], 40);
            grammar.compute();
            kept.keep(grammar);
            let mut resumed = kept.resume(&lifetime, &other, &[], 40);
            assert!(resumed.has_masks([].into_iter()));
            assert_eq!(resumed.num_masks(), num_masks);
            let found = resumed.take_failure().map(|failing| (failing.position, failing.failure));
            assert_eq!(found, failure.map(|text| (0, text.to_owned())));
        }
    }
}
