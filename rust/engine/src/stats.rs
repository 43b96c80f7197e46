//! Counters and gauges of the engine. Any thread may read them at any time.
//!
//! Each number is one entry of rust/frontend's `definitions/stats.toml`, from which the table below, the Python class and
//! the documentation follow: a new counter is an entry and the statement that increments it.

use crate::request::FinishReason;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The kind of a number of [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatKind {
    /// A current value, which goes up and down.
    Gauge,
    /// A total since the engine started, which never goes down.
    Counter,
}

/// One number of [`Stats`] with its description.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatEntry {
    /// The name of the field.
    pub name: &'static str,
    /// The description of the field.
    pub doc: &'static str,
    /// Its kind.
    pub kind: StatKind,
    /// Its value.
    pub value: u64,
}

macro_rules! stats {
    ($($(#[doc = $doc:literal])+ $name:ident: $kind:ident,)+) => {
        /// A snapshot of the engine's numbers. Each was true at some moment of the latest iteration of the engine. A
        /// consumer that has received its last event finds its blocks, its slot and its tokens accounted for.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Stats {
            const LEN: usize = [$(stringify!($name)),+].len();

            /// Every number with its name and description.
            pub fn entries(&self) -> [StatEntry; Self::LEN] {
                [$(StatEntry {
                    name: stringify!($name),
                    doc: concat!($($doc),+).trim_ascii_start(),
                    kind: StatKind::$kind,
                    value: self.$name,
                }),+]
            }

            fn to_values(self) -> [u64; Self::LEN] {
                [$(self.$name),+]
            }

            fn from_values([$($name),+]: [u64; Self::LEN]) -> Self {
                Self { $($name),+ }
            }
        }
    };
}

// begin generated: Stats
stats! {
    /// Sequences that hold a slot, paused ones included.
    running: Gauge,
    /// Requests that wait for a slot or for blocks, preempted ones included.
    waiting: Gauge,
    /// Running sequences that compute nothing because their consumer does not read.
    paused: Gauge,
    /// Blocks of the KV cache.
    blocks_total: Gauge,
    /// Blocks that hold tokens of running sequences.
    blocks_used: Gauge,
    /// Blocks that no sequence uses and that are kept for reuse. They are evicted when blocks are needed.
    blocks_cached: Gauge,
    /// Blocks reserved for tokens that running sequences have already, and not allocated yet.
    blocks_reserved: Gauge,
    /// Blocks of the host tier.
    host_blocks_total: Gauge,
    /// Blocks of the host tier that hold prefixes or swapped sequences.
    host_blocks_used: Gauge,
    /// Requests admitted.
    requests_admitted: Counter,
    /// Admitted requests that have ended.
    requests_finished: Counter,
    /// Requests among `requests_finished` that ended with a stop token or stop sequence.
    finished_stop: Counter,
    /// Those that reached their maximum length.
    finished_length: Counter,
    /// Those that their consumer ended: cancelled, dropped, or stopped by a stop string.
    finished_cancelled: Counter,
    /// Those that were preempted with `preemption_mode="interrupt"`.
    finished_interrupted: Counter,
    /// Those that failed, in a step or because the engine crashed.
    finished_failed: Counter,
    /// Prompt tokens computed; each counts once, however often it was computed.
    prompt_tokens: Counter,
    /// Tokens computed again after their sequence was preempted.
    recomputed_tokens: Counter,
    /// Tokens generated for requests.
    generation_tokens: Counter,
    /// Draft tokens verified: predicted, or forced by a grammar.
    drafted_tokens: Counter,
    /// Draft tokens accepted.
    accepted_tokens: Counter,
    /// Prompt tokens of scheduled requests that may use the prefix cache.
    prefix_query_tokens: Counter,
    /// Tokens among `prefix_query_tokens` that the prefix cache had, in the KV cache or on the host.
    prefix_hit_tokens: Counter,
    /// Tokens among `prefix_query_tokens` that the prefix cache had on the host.
    prefix_host_hit_tokens: Counter,
    /// Running sequences with tokens to compute that were preempted, whether they wait or end.
    preemptions: Counter,
    /// Preemptions that saved the sequence's blocks in the host tier.
    swaps: Counter,
    /// Steps completed, failed ones included.
    steps: Counter,
}
// end generated: Stats

impl Stats {
    /// Ratio of `prefix_hit_tokens` to `prefix_query_tokens`; 0 before the first query.
    pub fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hit_tokens as f64 / self.prefix_query_tokens.max(1) as f64
    }

    /// The counter of the requests that ended for a reason.
    pub(crate) fn finished_for(&mut self, reason: &FinishReason) -> &mut u64 {
        match reason {
            FinishReason::Stop(_) | FinishReason::StopSequence(_) => &mut self.finished_stop,
            FinishReason::Length => &mut self.finished_length,
            FinishReason::Cancelled => &mut self.finished_cancelled,
            FinishReason::Interrupted => &mut self.finished_interrupted,
            FinishReason::Failed(_) | FinishReason::EngineStopped(_) => &mut self.finished_failed,
        }
    }
}

/// The [`Stats`] of the engine thread, for other threads to read.
#[derive(Default)]
pub struct SharedStats {
    values: [AtomicU64; Stats::LEN],
    is_overloaded: AtomicBool,
}

impl SharedStats {
    /// Called with `publish`.
    pub fn set_overloaded(&self, is_overloaded: bool) {
        self.is_overloaded.store(is_overloaded, Ordering::Relaxed); // as in `publish`
    }

    /// Whether a new request would be rejected, unless it is the most urgent.
    pub fn is_overloaded(&self) -> bool {
        self.is_overloaded.load(Ordering::Relaxed)
    }

    /// Called by the engine thread before it pushes the events that the numbers account for.
    pub fn publish(&self, stats: Stats) {
        for (value, new) in self.values.iter().zip(stats.to_values()) {
            // Relaxed: a reader that popped an event pushed after this is ordered by the queue.
            value.store(new, Ordering::Relaxed);
        }
    }

    /// The latest numbers.
    pub fn read(&self) -> Stats {
        Stats::from_values(std::array::from_fn(|index| self.values[index].load(Ordering::Relaxed))) // see `publish`
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_numbers_are_read_in_their_fields() {
        let shared = SharedStats::default();
        assert_eq!(shared.read(), Stats::default());
        let stats = Stats::from_values(std::array::from_fn(|index| index as u64 + 1));
        assert_eq!((stats.running, stats.steps), (1, Stats::LEN as u64));
        shared.publish(stats);
        assert_eq!(shared.read(), stats);
    }

    #[test]
    fn each_finish_reason_has_a_counter() {
        let mut stats = Stats::default();
        for (reason, count) in [
            (FinishReason::Stop(7), 1),
            (FinishReason::StopSequence(0), 1),
            (FinishReason::Length, 3),
            (FinishReason::Cancelled, 4),
            (FinishReason::Interrupted, 5),
            (FinishReason::Failed("x".to_owned()), 6),
        ] {
            *stats.finished_for(&reason) += count;
        }
        let Stats { finished_stop, finished_length, finished_cancelled, .. } = stats;
        assert_eq!((finished_stop, finished_length, finished_cancelled), (2, 3, 4));
        assert_eq!((stats.finished_interrupted, stats.finished_failed), (5, 6));
    }

    #[test]
    fn entries_name_describe_and_type_every_number() {
        let entries = Stats { running: 3, ..Stats::default() }.entries();
        let doc = "Sequences that hold a slot, paused ones included.";
        assert_eq!(entries[0], StatEntry { name: "running", doc, kind: StatKind::Gauge, value: 3 });
        let names: std::collections::HashSet<_> = entries.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), Stats::LEN);
        assert!(entries.iter().all(|entry| entry.doc.ends_with('.')));
    }
}
