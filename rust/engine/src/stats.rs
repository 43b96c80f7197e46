//! What the engine is doing, in numbers anybody may read at any time without asking the engine thread.

use std::sync::atomic::{AtomicU64, Ordering};

/// A snapshot. Each number was true at some moment of the latest turn of the engine; a consumer that has received its
/// last event finds its blocks, its place and its tokens accounted for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that hold a slot, paused ones included.
    pub running: usize,
    /// Requests waiting for a slot or for blocks, those that have lost theirs included.
    pub waiting: usize,
    /// Running sequences that compute nothing because their consumer does not read.
    pub paused: usize,
    /// Blocks of the KV cache.
    pub blocks_total: usize,
    /// Blocks that hold tokens of running sequences.
    pub blocks_used: usize,
    /// Blocks that nobody uses and that are kept to be used again. They can be had at any time.
    pub blocks_cached: usize,
    /// Blocks promised to running sequences for tokens they have already, and not taken yet.
    pub blocks_reserved: usize,
    /// Blocks of the host tier.
    pub host_blocks_total: usize,
    /// Blocks of the host tier that hold prefixes, or sequences that wait for their next place.
    pub host_blocks_used: usize,
    /// Requests that were admitted, since the start.
    pub requests_admitted: u64,
    /// Admitted requests that have ended, since the start.
    pub requests_finished: u64,
    /// Prompt tokens computed, since the start; each counts once, however often it was computed.
    pub prompt_tokens: u64,
    /// Tokens computed again, after their sequence had lost its place, since the start.
    pub recomputed_tokens: u64,
    /// Tokens generated for requests, since the start.
    pub generation_tokens: u64,
    /// Tokens that were guessed, or forced by a grammar, and verified in advance, since the start.
    pub drafted_tokens: u64,
    /// Those of them that came true and were generated.
    pub accepted_tokens: u64,
    /// Prompt tokens of requests that may take from the prefix cache and have had a place, since the start.
    pub prefix_query_tokens: u64,
    /// Those of them that the prefix cache had then: in the KV cache or on the host.
    pub prefix_hit_tokens: u64,
    /// Those of them that it had on the host.
    pub prefix_host_hit_tokens: u64,
    /// Times a running sequence with tokens to compute lost its place to others, whether to wait or to end, since the
    /// start.
    pub preemptions: u64,
    /// Those of them whose blocks were saved in the host tier.
    pub swaps: u64,
    /// Steps completed, failed ones included, since the start.
    pub steps: u64,
}

/// Where the engine thread writes its [`Stats`] and everybody reads them.
#[derive(Default)]
pub struct Board {
    numbers: [AtomicU64; Stats::LEN],
}

impl Stats {
    const LEN: usize = 22;

    fn to_numbers(self) -> [u64; Self::LEN] {
        [
            self.running as u64,
            self.waiting as u64,
            self.paused as u64,
            self.blocks_total as u64,
            self.blocks_used as u64,
            self.blocks_cached as u64,
            self.blocks_reserved as u64,
            self.host_blocks_total as u64,
            self.host_blocks_used as u64,
            self.requests_admitted,
            self.requests_finished,
            self.prompt_tokens,
            self.recomputed_tokens,
            self.generation_tokens,
            self.drafted_tokens,
            self.accepted_tokens,
            self.prefix_query_tokens,
            self.prefix_hit_tokens,
            self.prefix_host_hit_tokens,
            self.preemptions,
            self.swaps,
            self.steps,
        ]
    }

    fn from_numbers(numbers: [u64; Self::LEN]) -> Self {
        let mut numbers = numbers.into_iter();
        let mut next = || numbers.next().expect("one number per field; this is a bug");
        Self {
            running: next() as usize,
            waiting: next() as usize,
            paused: next() as usize,
            blocks_total: next() as usize,
            blocks_used: next() as usize,
            blocks_cached: next() as usize,
            blocks_reserved: next() as usize,
            host_blocks_total: next() as usize,
            host_blocks_used: next() as usize,
            requests_admitted: next(),
            requests_finished: next(),
            prompt_tokens: next(),
            recomputed_tokens: next(),
            generation_tokens: next(),
            drafted_tokens: next(),
            accepted_tokens: next(),
            prefix_query_tokens: next(),
            prefix_hit_tokens: next(),
            prefix_host_hit_tokens: next(),
            preemptions: next(),
            swaps: next(),
            steps: next(),
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
