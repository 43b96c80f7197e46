//! Stop string matching in streamed text.
//!
//! The result depends only on the text, not on token boundaries: the first character that completes a stop string ends
//! the text; if it completes several, the longest counts. One Aho-Corasick automaton of all stop strings reads every
//! byte once, so the cost per byte does not depend on their number or length.

use std::sync::Arc;

use aho_corasick::Anchored;
use aho_corasick::automaton::{Automaton, StateID};
use aho_corasick::nfa::contiguous::NFA;

use crate::error::TextError;

/// Maximum total length of the stop strings of one request, in bytes. They take about 28 bytes of memory for each byte,
/// also while the request waits.
pub const MAX_STOP_BYTES: usize = 16 << 10;

/// A stop string that ended the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Index in the list of stop strings.
    pub stop: usize,
}

/// The position of a stop string in the bytes of one call.
pub(crate) struct StopPosition {
    pub(crate) stop: usize,
    pub(crate) end: usize,
    pub(crate) length: usize,
}

/// Matches the stop strings of one stream. Clones share the automaton.
#[derive(Clone)]
pub(crate) struct StopStringMatcher {
    automaton: Arc<NFA>,
    /// Each state with the length of the prefix of a stop string that it stands for, the longest one that the text ends
    /// with; sorted.
    depths: Arc<[(StateID, u32)]>,
    state: StateID,
}

impl StopStringMatcher {
    /// Returns `None` if there are no stop strings.
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
        let mut depths = vec![(root, 0)];
        for stop in stops {
            let mut state = root;
            for (read, &byte) in stop.as_bytes().iter().enumerate() {
                state = automaton.next_state(Anchored::No, state, byte);
                depths.push((state, read as u32 + 1));
            }
        }
        depths.sort_unstable();
        depths.dedup();
        Ok(Some(Self { automaton: Arc::new(automaton), depths: depths.into(), state: root }))
    }

    /// Reads more text. Must not be called again after a match.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Option<StopPosition> {
        for (index, &byte) in bytes.iter().enumerate() {
            self.state = self.automaton.next_state(Anchored::No, self.state, byte);
            if self.automaton.is_match(self.state) {
                let found = (0..self.automaton.match_len(self.state))
                    .map(|match_index| self.automaton.match_pattern(self.state, match_index))
                    .max_by_key(|&pattern| (self.automaton.pattern_len(pattern), std::cmp::Reverse(pattern)));
                let pattern = found.expect("a match state has a pattern; this is a bug");
                let length = self.automaton.pattern_len(pattern);
                return Some(StopPosition { stop: pattern.as_usize(), end: index + 1, length });
            }
        }
        None
    }

    /// Number of last bytes read that may be a prefix of a stop string.
    pub(crate) fn held_back(&self) -> usize {
        let place = self.depths.binary_search_by_key(&self.state, |(state, _)| *state);
        self.depths[place.expect("each state is a prefix; this is a bug")].1 as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_share_one_automaton_of_all_stop_strings() {
        let stops: Vec<String> = (0..64).map(|index| format!("{index:02}{}", "x".repeat(200))).collect();
        let matcher =
            StopStringMatcher::new(&stops).expect("within the limit").expect("there are stop strings");
        let mut copy = matcher.clone();
        assert!(
            Arc::ptr_eq(&matcher.automaton, &copy.automaton) && Arc::ptr_eq(&matcher.depths, &copy.depths)
        );
        let num_bytes: usize = stops.iter().map(String::len).sum();
        assert!(matcher.depths.len() <= num_bytes + 1, "a state for each prefix");
        let memory = matcher.automaton.memory_usage() + size_of_val(&*matcher.depths);
        assert!(memory <= 28 * num_bytes, "{memory} bytes for {num_bytes}");
        // A clone continues alone.
        assert!(copy.feed(stops[63].as_bytes()).is_some_and(|found| found.stop == 63));
        assert_eq!(matcher.held_back(), 0);
    }
}
