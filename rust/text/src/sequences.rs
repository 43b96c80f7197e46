//! How many of the last ids may turn out to be a stop sequence.
//!
//! Whoever generates ids decides where they end; this only knows early enough which text must wait for that.
//! Each sequence has an automaton (Knuth, Morris and Pratt's) that looks at every id once.

/// Some sequences of ids, and how far a stream of ids has come in each.
#[derive(Clone)]
pub struct StopSequences(Vec<Automaton>);

#[derive(Clone)]
struct Automaton {
    ids: Vec<u32>,
    /// Of the first `n` ids, the length of the longest proper beginning that is their end, too; `n` is the index.
    borders: Vec<usize>,
    /// The most of the last ids with which the sequence begins; all of it where it has just come.
    matched: usize,
}

impl StopSequences {
    /// None of `sequences`, of which none may be empty, has begun.
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        Self(sequences.iter().map(|ids| Automaton::new(ids.clone())).collect())
    }

    /// Adds an id. Says how many of the last ones, this one included, are a stop sequence or may begin one.
    pub fn push(&mut self, id: u32) -> usize {
        self.0.iter_mut().map(|automaton| automaton.push(id)).max().unwrap_or(0)
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

    fn push(&mut self, id: u32) -> usize {
        if self.matched == self.ids.len() {
            self.matched = self.borders[self.matched];
        }
        while self.matched > 0 && self.ids[self.matched] != id {
            self.matched = self.borders[self.matched];
        }
        self.matched += usize::from(self.ids[self.matched] == id);
        self.matched
    }
}
