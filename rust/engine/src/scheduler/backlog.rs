//! The least time until a request that waits can end, from the tokens before it and the rate of the engine.
//!
//! A client's requests with one adapter get slots in order. So a request gets one when all that come before it have
//! ended but as many as there are other slots, and each of them computes its prompt first. Which of them are left is
//! not known: the prompts with the most tokens are assumed. Tokens that the prefix cache has, or that an earlier request
//! brings there, do not count. The rate is the highest that was measured, so the time is a lower bound.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::clients::Lane;
use crate::prefix_cache::Namespace;
use crate::request::Request;

/// The number of latest requests that a prompt is compared with. Prompts with a common prefix mostly come together.
const NUM_RECENT: usize = 8;
/// The least time for which a rate is measured.
const MIN_WINDOW: Duration = Duration::from_secs(1);

/// Numbers of tokens from 2^i to 2^(i+1) - 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bucket {
    num_requests: usize,
    num_tokens: u64,
}

/// The tokens that requests certainly compute for their prompts.
type Buckets = [Bucket; u32::BITS as usize];

fn bucket_of(num_tokens: u32) -> usize {
    num_tokens.max(1).ilog2() as usize
}

/// The requests that were never scheduled and that have deadlines.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    /// By lane and priority. None is empty.
    waiting: BTreeMap<(Lane, i32), Buckets>,
    /// The prompts of the latest requests, the last one last, with their namespaces in the prefix cache.
    recent: VecDeque<(Namespace, Arc<[u32]>)>,
    rate: Rate,
}

impl Backlog {
    /// A request waits that certainly computes as many tokens for its prompt.
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
        for (_, buckets) in self.waiting.range((lane, i32::MIN)..=(lane, priority)) {
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

    /// The number of first tokens of a prompt that one of the latest requests has, too. The prompt is one of them now.
    pub(super) fn num_common(&mut self, request: &Request) -> usize {
        let namespace = Namespace { salt: request.cache_salt.clone(), adapter: request.adapter };
        let num_equal = |other: &[u32]| {
            other.iter().zip(request.prompt.iter()).take_while(|(other, own)| other == own).count()
        };
        let comparable = self.recent.iter().filter(|(other, _)| *other == namespace);
        let most = comparable.map(|(_, prompt)| num_equal(prompt)).max();
        if self.recent.len() == NUM_RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back((namespace, Arc::clone(&request.prompt)));
        most.unwrap_or(0)
    }

    /// A step has computed as many tokens; `is_idle` if no sequence runs or waits now.
    pub(super) fn step_done(&mut self, num_tokens: u64, is_idle: bool, now: Instant) {
        self.rate.add(num_tokens, is_idle, now);
        if is_idle {
            self.recent.clear(); // an idle engine keeps no prompts
        }
    }

    /// Panics unless these requests were added.
    pub(super) fn check_integrity(&self, waiting: impl Iterator<Item = (Lane, i32, u32)>) {
        let mut found = Self::default();
        waiting.for_each(|(lane, priority, num_tokens)| found.add(lane, priority, num_tokens));
        assert_eq!(found.waiting, self.waiting, "waiting tokens miscounted; this is a bug");
    }
}

/// Measures tokens per second.
#[derive(Debug, Default)]
struct Rate {
    highest: Option<f64>,
    /// The end of the step before the window.
    begin: Option<Instant>,
    num_tokens: u64,
}

impl Rate {
    fn add(&mut self, num_tokens: u64, is_idle: bool, now: Instant) {
        let Some(begin) = self.begin else {
            self.begin = (!is_idle).then_some(now);
            return;
        };
        self.num_tokens += num_tokens;
        let seconds = now.saturating_duration_since(begin);
        if seconds >= MIN_WINDOW {
            let rate = self.num_tokens as f64 / seconds.as_secs_f64();
            self.highest = Some(self.highest.map_or(rate, |highest| highest.max(rate)));
            (self.begin, self.num_tokens) = (Some(now), 0);
        }
        if is_idle {
            // The time until the next step is not that of computing.
            (self.begin, self.num_tokens) = (None, 0);
        }
    }
}
