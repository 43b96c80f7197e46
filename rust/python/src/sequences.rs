//! How many of the last tokens may turn out to be a stop sequence.
//!
//! The engine decides where a request ends; this only knows early enough which text must wait for that. One automaton
//! a sequence (Knuth, Morris and Pratt's) looks at every token once.

/// The stop sequences of one choice, and how far its tokens have come in each.
pub struct StopSequences(Vec<Automaton>);

struct Automaton {
    ids: Vec<u32>,
    /// Of the first `n` ids, the length of the longest proper beginning that is their end, too; `n` is the index.
    borders: Vec<usize>,
    /// The most of the last tokens with which the sequence begins; all of them where it has just come.
    matched: usize,
}

impl StopSequences {
    /// None of `sequences`, of which none is empty, has begun.
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        Self(sequences.iter().map(|ids| Automaton::new(ids.clone())).collect())
    }

    /// Adds a token. Says how many of the last ones, this one included, are a stop sequence or may begin one.
    pub fn push(&mut self, token: u32) -> usize {
        self.0.iter_mut().map(|automaton| automaton.push(token)).max().unwrap_or(0)
    }
}

impl Automaton {
    fn new(ids: Vec<u32>) -> Self {
        let mut automaton = Self { borders: vec![0; ids.len() + 1], matched: 0, ids };
        // The longest border of n ids is what the automaton of the first n - 1 matches in all but the first of them.
        for length in 2..=automaton.ids.len() {
            automaton.borders[length] = automaton.push(automaton.ids[length - 1]);
        }
        automaton.matched = 0;
        automaton
    }

    fn push(&mut self, token: u32) -> usize {
        if self.matched == self.ids.len() {
            self.matched = self.borders[self.matched];
        }
        while self.matched > 0 && self.ids[self.matched] != token {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(self.ids[self.matched] == token);
        self.matched
    }
}
