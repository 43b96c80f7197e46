//! What the engine is doing, in numbers anybody may read at any time without asking the engine thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// A snapshot. Each number was true at some moment of the latest turn of the engine; a consumer that has received its
/// last event finds its blocks, its place and its tokens accounted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that hold a slot, paused ones included.
    pub running: usize,
    /// Requests waiting for a slot or for blocks.
    pub waiting: usize,
    /// Running sequences that compute nothing because their consumer does not read.
    pub paused: usize,
    /// Blocks of the KV cache.
    pub blocks_total: usize,
    /// Blocks that hold tokens of live requests.
    pub blocks_used: usize,
    /// Blocks promised to running sequences for their full length and not taken yet.
    pub blocks_reserved: usize,
    /// Requests that were admitted, since the start.
    pub requests_admitted: u64,
    /// Admitted requests that have ended, since the start.
    pub requests_finished: u64,
    /// Prompt tokens computed, since the start.
    pub prompt_tokens: u64,
    /// Tokens generated for requests, since the start.
    pub generation_tokens: u64,
    /// Steps completed, failed ones included, since the start.
    pub steps: u64,
}

/// Where the engine thread writes its [`Stats`] and everybody reads them.
#[derive(Default)]
pub struct Board {
    numbers: [AtomicU64; Stats::LEN],
}

impl Stats {
    const LEN: usize = 11;

    fn to_numbers(self) -> [u64; Self::LEN] {
        [
            self.running as u64,
            self.waiting as u64,
            self.paused as u64,
            self.blocks_total as u64,
            self.blocks_used as u64,
            self.blocks_reserved as u64,
            self.requests_admitted,
            self.requests_finished,
            self.prompt_tokens,
            self.generation_tokens,
            self.steps,
        ]
    }

    fn from_numbers(numbers: [u64; Self::LEN]) -> Self {
        let [running, waiting, paused, blocks_total, blocks_used, blocks_reserved, counters @ ..] = numbers;
        let [requests_admitted, requests_finished, prompt_tokens, generation_tokens, steps] = counters;
        Self {
            running: running as usize,
            waiting: waiting as usize,
            paused: paused as usize,
            blocks_total: blocks_total as usize,
            blocks_used: blocks_used as usize,
            blocks_reserved: blocks_reserved as usize,
            requests_admitted,
            requests_finished,
            prompt_tokens,
            generation_tokens,
            steps,
        }
    }
}

impl Board {
    /// Called by the engine thread before it pushes the events that the numbers account for.
    pub fn publish(&self, stats: Stats) {
        for (place, number) in self.numbers.iter().zip(stats.to_numbers()) {
            // Relaxed: whoever popped an event pushed after this already has an order with it, through the queue.
            place.store(number, Ordering::Relaxed);
        }
    }

    /// The latest numbers.
    pub fn read(&self) -> Stats {
        Stats::from_numbers(std::array::from_fn(|index| self.numbers[index].load(Ordering::Relaxed))) // see `publish`
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_keeps_its_place() {
        let board = Board::default();
        assert_eq!(board.read(), Stats::default());
        let stats = Stats::from_numbers(std::array::from_fn(|index| index as u64 + 1));
        assert_eq!((stats.running, stats.steps), (1, Stats::LEN as u64));
        board.publish(stats);
        assert_eq!(board.read(), stats);
    }
}
