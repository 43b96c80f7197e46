//! Estimates the least time until a waiting request ends, from the prompt tokens before it and the rate of the engine.
//!
//! A client's requests with one adapter get slots in order. With `n` slots, a request gets one when at most `n - 1` of
//! the requests before it are left. The others compute their prompts first, and those with the most tokens are assumed
//! to be left. Tokens that the prefix cache has, or that an unfinished request brings there, do not count. The rate is
//! the highest that was measured in steps without room for further tokens. So the time is a lower bound, unless
//! requests are cancelled or the engine becomes faster than it was.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, Hash, Hasher, RandomState};
use std::time::{Duration, Instant};

use super::clients::Lane;
use crate::request::Request;

/// The least time for which a rate is measured.
const MIN_WINDOW: Duration = Duration::from_secs(1);
/// Maximum number of priorities of a lane in an estimate: that of the new request, and the next more urgent ones.
const MAX_PRIORITIES: usize = 64;

/// The requests that compute from 2^i to 2^(i+1) - 1 tokens each, where i is the index of the bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    num_requests: usize,
    num_tokens: u64,
}

/// The requests by the number of tokens that they compute for their prompts.
type Buckets = [Bucket; u32::BITS as usize];

fn bucket_of(num_tokens: u32) -> usize {
    num_tokens.max(1).ilog2() as usize
}

/// The requests that were never scheduled and that have deadlines.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// The waiting requests by lane and priority. No entry is empty.
    waiting: BTreeMap<(Lane, i32), Buckets>,
    prefixes: Prefixes,
    rate: Rate,
}

/// Counts the prefixes of the prompts of unfinished requests that arrived with or after the first deadline.
#[derive(Debug, Default)]
struct Prefixes {
    has_deadlines: bool,
    /// The number of requests with each prefix.
    counts: HashMap<u64, usize>,
    hasher: RandomState,
}

impl Backlog {
    /// Counts a request that waits and computes `num_tokens` tokens for its prompt.
    pub(super) fn add(&mut self, lane: Lane, priority: i32, num_tokens: u32) {
        let bucket = &mut self.waiting.entry((lane, priority)).or_default()[bucket_of(num_tokens)];
        bucket.num_requests += 1;
        bucket.num_tokens += u64::from(num_tokens);
    }

    /// The opposite of `add`.
    pub(super) fn remove(&mut self, lane: Lane, priority: i32, num_tokens: u32) {
        let buckets = self.waiting.get_mut(&(lane, priority)).expect("it was added; this is a bug");
        let bucket = &mut buckets[bucket_of(num_tokens)];
        bucket.num_requests -= 1;
        bucket.num_tokens -= u64::from(num_tokens);
        if buckets.iter().all(|bucket| bucket.num_requests == 0) {
            self.waiting.remove(&(lane, priority));
        }
    }

    /// The least time until a new request of this lane and priority ends, if `num_others` can have a slot beside it.
    /// `None` before a rate was measured.
    pub(super) fn least_time(
        &self,
        lane: Lane,
        priority: i32,
        num_tokens: u32,
        num_others: usize,
    ) -> Option<Duration> {
        let rate = self.rate.highest?;
        let mut before = Buckets::default();
        let classes = self.waiting.range((lane, i32::MIN)..=(lane, priority)).rev();
        for (_, buckets) in classes.take(MAX_PRIORITIES) {
            for (sum, bucket) in before.iter_mut().zip(buckets) {
                sum.num_requests += bucket.num_requests;
                sum.num_tokens += bucket.num_tokens;
            }
        }
        let num_before: usize = before.iter().map(|bucket| bucket.num_requests).sum();
        let mut num_ended = num_before.saturating_sub(num_others);
        let mut sum = u64::from(num_tokens);
        for (exponent, bucket) in before.iter().enumerate() {
            if num_ended < bucket.num_requests {
                sum += (num_ended as u64) << exponent;
                break;
            }
            sum += bucket.num_tokens;
            num_ended -= bucket.num_requests;
        }
        Duration::try_from_secs_f64(sum as f64 / rate).ok()
    }

    /// The hashes of the first 1, 2, 4, 8 and so on tokens of a new request's prompt. None before a request has a
    /// deadline.
    pub(super) fn prefix_hashes(&mut self, request: &Request) -> Vec<u64> {
        self.prefixes.has_deadlines |= request.deadline.is_some();
        if !self.prefixes.has_deadlines || !request.prefix_cache {
            return Vec::new();
        }
        let mut hasher = self.prefixes.hasher.build_hasher();
        (request.adapter, &request.cache_salt).hash(&mut hasher);
        let mut hashes = Vec::new();
        for (index, token) in request.prompt.iter().enumerate() {
            hasher.write_u32(*token);
            if (index + 1).is_power_of_two() {
                hashes.push(hasher.finish());
            }
        }
        hashes
    }

    /// The most first tokens that a prompt can have in common with that of an unfinished request.
    pub(super) fn max_common(&self, hashes: &[u64]) -> usize {
        // They differ before the next power of two.
        let num_common = hashes.iter().take_while(|hash| self.prefixes.counts.contains_key(hash)).count();
        (1 << num_common) - 1
    }

    /// Counts the prefixes of a request.
    pub(super) fn add_prefixes(&mut self, hashes: &[u64]) {
        hashes.iter().for_each(|hash| *self.prefixes.counts.entry(*hash).or_default() += 1);
    }

    /// The opposite of `add_prefixes`.
    pub(super) fn remove_prefixes(&mut self, hashes: &[u64]) {
        for hash in hashes {
            let count = self.prefixes.counts.get_mut(hash).expect("it was added; this is a bug");
            *count -= 1;
            if *count == 0 {
                self.prefixes.counts.remove(hash);
            }
        }
    }

    /// A step has computed as many tokens. `is_full` if it had no room for more; `is_idle` if no sequence runs or waits
    /// now.
    pub(super) fn step_done(&mut self, num_tokens: u64, is_full: bool, is_idle: bool, now: Instant) {
        self.rate.add(num_tokens, is_full, now);
        if is_idle {
            self.rate.begin = None; // the time until the next step is not that of computing
        }
    }

    /// Panics unless these requests wait and are unfinished.
    pub(super) fn check_integrity<'a>(
        &self,
        waiting: impl Iterator<Item = (Lane, i32, u32)>,
        unfinished: impl Iterator<Item = &'a [u64]>,
    ) {
        let mut found = Self::default();
        waiting.for_each(|(lane, priority, num_tokens)| found.add(lane, priority, num_tokens));
        assert_eq!(found.waiting, self.waiting, "waiting tokens miscounted; this is a bug");
        unfinished.for_each(|hashes| found.add_prefixes(hashes));
        assert_eq!(found.prefixes.counts, self.prefixes.counts, "prefixes miscounted; this is a bug");
    }
}

/// Measures tokens per second of full steps.
#[derive(Debug, Default)]
struct Rate {
    highest: Option<f64>,
    /// The end of the step before the window.
    begin: Option<Instant>,
    num_tokens: u64,
}

impl Rate {
    fn add(&mut self, num_tokens: u64, is_full: bool, now: Instant) {
        let Some(begin) = self.begin.filter(|_| is_full) else {
            (self.begin, self.num_tokens) = (Some(now), 0);
            return;
        };
        self.num_tokens += num_tokens;
        let seconds = now.saturating_duration_since(begin);
        if seconds >= MIN_WINDOW {
            let rate = self.num_tokens as f64 / seconds.as_secs_f64();
            self.highest = Some(self.highest.map_or(rate, |highest| highest.max(rate)));
            (self.begin, self.num_tokens) = (Some(now), 0);
        }
    }
}
