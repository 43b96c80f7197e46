//! Tracking of stop token sequences, to hold back the text of tokens that may belong to one.
//!
//! The engine decides where generation stops; this only tells which text to hold back until then. Each sequence has a
//! Knuth-Morris-Pratt automaton that reads every id once.

/// Stop token sequences and the progress of one stream of ids in each.
#[derive(Clone)]
pub struct StopSequences(Vec<SequenceAutomaton>);

#[derive(Clone)]
struct SequenceAutomaton {
    ids: Vec<u32>,
    /// The failure function: `failure[n]` is the length of the longest proper prefix of the first `n` ids that is also
    /// their suffix.
    failure: Vec<usize>,
    /// Length of the longest prefix of the sequence that the stream ends with.
    matched: usize,
}

impl StopSequences {
    /// Creates the automata. No sequence may be empty.
    pub fn new(sequences: &[Vec<u32>]) -> Self {
        Self(sequences.iter().map(|ids| SequenceAutomaton::new(ids.clone())).collect())
    }

    /// Adds an id. Returns the number of last ids, including this one, that are a stop sequence or a prefix of one.
    pub fn push(&mut self, id: u32) -> usize {
        self.0.iter_mut().map(|automaton| automaton.push(id)).max().unwrap_or(0)
    }
}

impl SequenceAutomaton {
    fn new(ids: Vec<u32>) -> Self {
        let mut automaton = Self { failure: vec![0; ids.len() + 1], matched: 0, ids };
        // The failure value of n ids is what the automaton of the first n - 1 ids matches in ids 1..n.
        for length in 2..=automaton.ids.len() {
            automaton.failure[length] = automaton.push(automaton.ids[length - 1]);
        }
        automaton.matched = 0;
        automaton
    }

    fn push(&mut self, id: u32) -> usize {
        if self.matched == self.ids.len() {
            self.matched = self.failure[self.matched];
        }
        while self.matched > 0 && self.ids[self.matched] != id {
            self.matched = self.failure[self.matched];
        }
        self.matched += usize::from(self.ids[self.matched] == id);
        self.matched
    }
}
