//! Counters, gauges and histograms of the engine. Any thread may read them at any time.
//!
//! Each number is one entry of rust/frontend's `definitions/stats.toml`, from which the table below, the Python class
//! and the documentation follow: a new counter is an entry and the statement that increments it.

use std::sync::atomic::{AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::histogram::{Histogram, SharedHistogram};
use crate::request::{ClientId, FinishReason, Overload};

/// The kind of a number of [`Stats`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StatKind {
    /// A current value, which goes up and down.
    Gauge,
    /// A total since the engine started, which never goes down.
    Counter,
}

/// One counter or gauge of [`Stats`] with its description.
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
    (
        $($(#[doc = $doc:literal])+ $name:ident: $kind:ident,)+;
        $($(#[doc = $histogram_doc:literal])+ $histogram:ident: $buckets:expr,)+
    ) => {
        /// A snapshot of the engine's numbers. Each was true at some moment of the latest iteration of the engine. A
        /// consumer that has received its last event finds its blocks, its slot and its tokens accounted for.
        #[derive(Clone, Debug, Default, PartialEq)]
        pub struct Stats {
            $($(#[doc = $doc])+ pub $name: u64,)+
            $($(#[doc = $histogram_doc])+ pub $histogram: Histogram,)+
        }

        /// The counters and gauges of [`Stats`].
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters {
            $(pub(crate) $name: u64,)+
        }

        /// The [`Stats`] of the engine thread, for other threads to read.
        pub struct SharedStats {
            counters: [AtomicU64; Counters::LEN],
            $(pub(crate) $histogram: SharedHistogram,)+
            num_rejected: AtomicU64,
            overloads: Overloads,
            epoch: Instant,
            /// Nanoseconds from `epoch` to the latest progress of the steps in flight, or `NO_STEP`.
            step_progress: AtomicU64,
        }

        impl Default for SharedStats {
            fn default() -> Self {
                Self {
                    counters: [const { AtomicU64::new(0) }; Counters::LEN],
                    $($histogram: SharedHistogram::new(&$buckets),)+
                    num_rejected: AtomicU64::new(0),
                    overloads: Overloads::default(),
                    epoch: Instant::now(),
                    step_progress: AtomicU64::new(NO_STEP),
                }
            }
        }

        impl Counters {
            const LEN: usize = [$(stringify!($name)),+].len();

            fn to_values(self) -> [u64; Self::LEN] {
                [$(self.$name),+]
            }
        }

        impl Stats {
            /// Every counter and gauge with its name and description.
            pub fn entries(&self) -> [StatEntry; Counters::LEN] {
                [$(StatEntry {
                    name: stringify!($name),
                    doc: concat!($($doc),+).trim_ascii_start(),
                    kind: StatKind::$kind,
                    value: self.$name,
                }),+]
            }
        }

        impl SharedStats {
            /// The latest numbers.
            pub fn read(&self) -> Stats {
                // Relaxed: see `publish`.
                let [$($name),+] = std::array::from_fn(|index| self.counters[index].load(Ordering::Relaxed));
                Stats {
                    $($name,)+
                    $($histogram: self.$histogram.read(),)+
                }
                .with_rejected(self.num_rejected.load(Ordering::Relaxed))
            }
        }
    };
}

// begin generated: Stats
stats! {
    /// Sequences that hold a slot, paused ones included.
    running: Gauge,
    /// Sequences that wait for a slot or for blocks, preempted ones included.
    waiting: Gauge,
    /// Those among `waiting` that have blocks in the host tier.
    swapped: Gauge,
    /// Those among `running` and `waiting` that compute nothing because their consumer does not read.
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
    /// Requests admitted; each of the `n` choices counts.
    requests_admitted: Counter,
    /// Requests refused with `OverloadedError`, which are not admitted. A request that is tried again counts each time.
    requests_rejected: Counter,
    /// Admitted requests that have ended.
    requests_finished: Counter,
    /// Requests among `requests_finished` that ended with a stop token, stop sequence or stop string.
    finished_stop: Counter,
    /// Those that reached their maximum length.
    finished_length: Counter,
    /// Those that were cancelled or dropped, or open when the engine was closed.
    finished_cancelled: Counter,
    /// Those that were preempted with `preemption_mode="interrupt"`.
    finished_interrupted: Counter,
    /// Those that ended because more than `max_paused` outputs were paused.
    finished_unread: Counter,
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
    /// LoRA adapters that steps put on the device.
    adapter_loads: Counter,
    /// LoRA adapters that left the device to make room for others.
    adapter_evictions: Counter,
    /// Steps completed, failed ones included.
    steps: Counter,
    ;
    /// Seconds from a request's arrival to its first token.
    time_to_first_token: [
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0
    ],
    /// Seconds from a token of a request to the next. Several tokens of one step share the time since the step before it.
    inter_token_latency: [
        0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0
    ],
    /// Seconds from a request's arrival to its first step, counted when the request ends.
    queue_time: [
        0.001, 0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
        240.0, 480.0, 960.0, 1920.0, 7680.0
    ],
    /// Tokens computed by a step: of prompts, generated ones and drafts.
    tokens_per_step: [
        1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0
    ],
}
// end generated: Stats

impl Stats {
    /// Ratio of `prefix_hit_tokens` to `prefix_query_tokens`; 0 before the first query.
    pub fn prefix_hit_rate(&self) -> f64 {
        self.prefix_hit_tokens as f64 / self.prefix_query_tokens.max(1) as f64
    }

    /// The rejected requests are counted by the threads that start them.
    fn with_rejected(self, requests_rejected: u64) -> Self {
        Self { requests_rejected, ..self }
    }
}

impl Counters {
    /// The counter of the requests that ended for a reason.
    pub(crate) fn finished_for(&mut self, reason: &FinishReason) -> &mut u64 {
        match reason {
            FinishReason::Stop(_) | FinishReason::StopSequence(_) | FinishReason::StopString => {
                &mut self.finished_stop
            }
            FinishReason::Length => &mut self.finished_length,
            FinishReason::Cancelled => &mut self.finished_cancelled,
            FinishReason::Interrupted => &mut self.finished_interrupted,
            FinishReason::Unread => &mut self.finished_unread,
            FinishReason::Failed(_) | FinishReason::EngineStopped(_) => &mut self.finished_failed,
        }
    }
}

/// The bounds that clients have reached. If there are more clients, requests of the others are rejected when they
/// arrive.
#[derive(Default)]
struct Overloads {
    len: AtomicUsize,
    entries: [OverloadEntry; 32],
}

#[derive(Default)]
struct OverloadEntry {
    client: AtomicU64,
    code: AtomicU8,
}

/// The bit of a code that says that the client has an id.
const HAS_ID: u8 = 1;

impl Overloads {
    // Relaxed: each entry was true at some moment, also half of it.
    fn set(&self, overloads: impl Iterator<Item = (Option<ClientId>, Overload)>) {
        let mut len = 0;
        for (entry, (client, overload)) in self.entries.iter().zip(overloads) {
            let code = match overload {
                Overload::Waiting => 2,
                Overload::Unfinished => 4,
            };
            entry.client.store(client.map_or(0, |id| id.0), Ordering::Relaxed);
            entry.code.store(code | if client.is_some() { HAS_ID } else { 0 }, Ordering::Relaxed);
            len += 1;
        }
        self.len.store(len, Ordering::Relaxed);
    }

    fn get(&self, client: Option<ClientId>) -> Option<Overload> {
        self.entries[..self.len.load(Ordering::Relaxed)].iter().find_map(|entry| {
            let (code, id) = (entry.code.load(Ordering::Relaxed), entry.client.load(Ordering::Relaxed));
            let found = (code & HAS_ID != 0).then_some(ClientId(id));
            (found == client).then_some(if code < 4 { Overload::Waiting } else { Overload::Unfinished })
        })
    }
}

/// The value of `step_progress` while no step is in flight.
const NO_STEP: u64 = u64::MAX;

impl SharedStats {
    /// Called with `publish`, with the bounds for which new requests of clients with open requests would be rejected.
    pub fn set_overloads(&self, overloads: impl Iterator<Item = (Option<ClientId>, Overload)>) {
        self.overloads.set(overloads);
    }

    /// The bound for which a new request of a client would be rejected, unless it is the most urgent.
    pub fn overload(&self, client: Option<ClientId>) -> Option<Overload> {
        self.overloads.get(client)
    }

    /// Called by the engine thread before it pushes the events that the numbers account for.
    pub fn publish(&self, counters: Counters) {
        for (value, new) in self.counters.iter().zip(counters.to_values()) {
            // Relaxed: a reader that popped an event pushed after this is ordered by the queue.
            value.store(new, Ordering::Relaxed);
        }
    }

    /// Counts a request that was refused because the engine is overloaded. Called by any thread.
    pub fn count_rejection(&self) {
        self.num_rejected.fetch_add(1, Ordering::Relaxed); // as in `publish`
    }

    /// Called by the engine thread when a step has finished or the first one was submitted: the time, or `None` if no
    /// step is in flight any more.
    pub fn set_step_progress(&self, now: Option<Instant>) {
        let progress = now.map_or(NO_STEP, |now| self.since_epoch(now));
        self.step_progress.store(progress, Ordering::Relaxed); // as in `publish`
    }

    /// The time since the latest progress of the steps in flight; `None` if there is none.
    pub fn step_age(&self, now: Instant) -> Option<Duration> {
        let progress = self.step_progress.load(Ordering::Relaxed);
        (progress != NO_STEP).then(|| Duration::from_nanos(self.since_epoch(now).saturating_sub(progress)))
    }

    fn since_epoch(&self, now: Instant) -> u64 {
        now.saturating_duration_since(self.epoch).as_nanos() as u64 // 584 years
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_numbers_are_read_in_their_fields() {
        let shared = SharedStats::default();
        shared.publish(Counters { running: 1, waiting: 2, steps: 3, ..Counters::default() });
        shared.count_rejection();
        let stats = shared.read();
        assert_eq!((stats.running, stats.waiting, stats.steps, stats.requests_rejected), (1, 2, 3, 1));
        assert_eq!((stats.queue_time.count(), stats.paused), (0, 0));
    }

    #[test]
    fn step_age_is_the_time_since_the_latest_progress() {
        let shared = SharedStats::default();
        let start = shared.epoch + Duration::from_secs(5);
        assert_eq!(shared.step_age(start), None);
        shared.set_step_progress(Some(start));
        assert_eq!(shared.step_age(start + Duration::from_secs(3)), Some(Duration::from_secs(3)));
        assert_eq!(shared.step_age(start - Duration::from_secs(1)), Some(Duration::ZERO));
        shared.set_step_progress(None);
        assert_eq!(shared.step_age(start), None);
    }

    #[test]
    fn each_finish_reason_has_a_counter() {
        let mut stats = Counters::default();
        for (reason, count) in [
            (FinishReason::Stop(7), 1),
            (FinishReason::StopSequence(0), 1),
            (FinishReason::StopString, 1),
            (FinishReason::Length, 3),
            (FinishReason::Cancelled, 4),
            (FinishReason::Interrupted, 5),
            (FinishReason::Failed("x".to_owned()), 6),
            (FinishReason::Unread, 7),
        ] {
            *stats.finished_for(&reason) += count;
        }
        let Counters { finished_stop, finished_length, finished_cancelled, .. } = stats;
        assert_eq!((finished_stop, finished_length, finished_cancelled), (3, 3, 4));
        assert_eq!((stats.finished_interrupted, stats.finished_failed, stats.finished_unread), (5, 6, 7));
    }

    #[test]
    fn entries_name_describe_and_type_every_number() {
        let entries = Stats { running: 3, ..Stats::default() }.entries();
        let doc = "Sequences that hold a slot, paused ones included.";
        assert_eq!(entries[0], StatEntry { name: "running", doc, kind: StatKind::Gauge, value: 3 });
        let names: std::collections::HashSet<_> = entries.iter().map(|entry| entry.name).collect();
        assert_eq!(names.len(), Counters::LEN);
        assert!(entries.iter().all(|entry| entry.doc.ends_with('.')));
    }
}
