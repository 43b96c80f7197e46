//! Finds stop strings in text that comes in parts.
//!
//! The rule depends on the text alone, never on how it was cut into tokens: reading character by character,
//! the first one that completes a stop string ends the text; if it completes several, the longest of them
//! counts. The text is cut before that stop. One automaton of all stop strings reads every byte once, so
//! their number and length cost nothing per byte.

use std::collections::HashMap;
use std::sync::Arc;

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;

use crate::TextError;

/// The most bytes that the stop strings of one request may have together; the automaton takes about 20 bytes
/// for each.
const MAX_STOP_BYTES: usize = 1 << 20;

/// Says that a stop string ended the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Which one: its place in the list that was given.
    pub stop: usize,
}

/// The place of a stop string in the bytes fed.
pub(crate) struct Found {
    pub(crate) stop: usize,
    /// The first byte after it.
    pub(crate) end: usize,
    /// Its length.
    pub(crate) length: usize,
}

/// Looks for the stop strings of one stream. Copies share the automaton.
#[derive(Clone)]
pub(crate) struct StopFinder {
    automaton: Arc<NFA>,
    /// How many last bytes of the text, at that state, begin a stop string. A state of the automaton stands
    /// for one prefix, the longest that the text ends with.
    depths: Arc<HashMap<StateID, usize>>,
    state: StateID,
}

impl StopFinder {
    /// None where there is nothing to look for.
    pub(crate) fn new(stops: &[String]) -> Result<Option<Self>, TextError> {
        if stops.is_empty() {
            return Ok(None);
        }
        if let Some(index) = stops.iter().position(String::is_empty) {
            return Err(TextError::EmptyStop { index });
        }
        let bytes = stops.iter().map(String::len).sum();
        let too_long = TextError::StopsTooLong { bytes, limit: MAX_STOP_BYTES };
        if bytes > MAX_STOP_BYTES {
            return Err(too_long);
        }
        let Ok(automaton) = NFA::builder().prefilter(false).build(stops) else { return Err(too_long) };
        let Ok(root) = automaton.start_state(Anchored::No) else { return Err(too_long) };
        let mut depths = HashMap::with_capacity(bytes + 1);
        depths.insert(root, 0);
        for stop in stops {
            let mut state = root;
            for (read, &byte) in stop.as_bytes().iter().enumerate() {
                state = automaton.next_state(Anchored::No, state, byte);
                depths.insert(state, read + 1);
            }
        }
        Ok(Some(Self { automaton: Arc::new(automaton), depths: Arc::new(depths), state: root }))
    }

    /// Reads on. A stop found ends the search: the finder must not be fed again.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Option<Found> {
        for (index, &byte) in bytes.iter().enumerate() {
            self.state = self.automaton.next_state(Anchored::No, self.state, byte);
            if self.automaton.is_match(self.state) {
                let found = (0..self.automaton.match_len(self.state))
                    .map(|match_index| self.automaton.match_pattern(self.state, match_index))
                    .max_by_key(|&pattern| (self.automaton.pattern_len(pattern), std::cmp::Reverse(pattern)));
                let pattern = found.expect("a match state has a pattern; this is a bug");
                let length = self.automaton.pattern_len(pattern);
                return Some(Found { stop: pattern.as_usize(), end: index + 1, length });
            }
        }
        None
    }

    /// How many last bytes of what was fed may be the beginning of a stop string.
    pub(crate) fn pending(&self) -> usize {
        self.depths[&self.state]
    }
}
