//! Counters of rejected requests and stop strings, latency histograms, and the age of the step in flight.

use std::time::Duration;

use penstock_engine::testing::CancelCause;
use penstock_engine::{Histogram, Limits};

use crate::harness::{Harness, limits};
use crate::oracle::request;

/// The sum in milliseconds, the number of values, and the number of those in the bucket of `value` seconds.
#[track_caller]
fn summary(histogram: &Histogram, value: f64) -> (u64, u64, u64) {
    assert_eq!(histogram.counts.len(), histogram.buckets.len() + 1);
    let bucket = histogram.buckets.iter().position(|bound| *bound >= value).unwrap();
    ((histogram.sum * 1000.0).round() as u64, histogram.count(), histogram.counts[bucket])
}

#[test]
fn latencies_of_a_request_are_counted_in_their_histograms() {
    let mut harness = Harness::new(limits());
    let _client = harness.start(request(4, 3, 1));
    harness.pass(30); // the queue time
    harness.plan();
    harness.pass(50); // 80 ms to the first token
    harness.complete();
    let stats = harness.stats();
    assert_eq!(summary(&stats.time_to_first_token, 0.08), (80, 1, 1));
    assert_eq!((stats.inter_token_latency.count(), stats.queue_time.count()), (0, 0));
    for _ in 0..2 {
        harness.plan();
        harness.pass(20);
        harness.complete();
    }
    let stats = harness.stats();
    assert_eq!(summary(&stats.inter_token_latency, 0.02), (40, 2, 2));
    assert_eq!(summary(&stats.queue_time, 0.03), (30, 1, 1));
    assert_eq!(stats.requests_finished, 1);
    assert_eq!((stats.tokens_per_step.sum, stats.tokens_per_step.count()), (6.0, stats.steps));
}

#[test]
fn a_request_cancelled_in_the_queue_has_no_latencies() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    let _running = harness.start(request(4, 8, 1));
    let waiting = harness.start(request(4, 8, 2));
    harness.step();
    waiting.cancel();
    harness.attend();
    let stats = harness.stats();
    assert_eq!((stats.finished_cancelled, stats.queue_time.count()), (1, 0));
    assert_eq!(stats.time_to_first_token.count(), 1, "only that of the running request");
}

#[test]
fn a_stop_string_counts_as_a_stop() {
    let mut harness = Harness::new(limits());
    let (stopped, cancelled) = (harness.start(request(4, 8, 1)), harness.start(request(4, 8, 2)));
    harness.step();
    stopped.cancel_for(CancelCause::StopString);
    stopped.cancel(); // the first cause is kept
    cancelled.cancel();
    harness.attend();
    let stats = harness.stats();
    assert_eq!((stats.finished_stop, stats.finished_cancelled), (1, 1));
}

#[test]
fn rejected_requests_are_counted() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 0, ..limits() });
    let _running = harness.start(request(4, 8, 1));
    let _rejected = harness.start_choices(request(4, 8, 2), 2);
    let stats = harness.stats();
    assert_eq!((stats.requests_admitted, stats.requests_rejected), (1, 1));
}

#[test]
fn step_age_restarts_with_each_step_and_ends_with_the_last() {
    let mut harness = Harness::new(limits());
    let age = |harness: &Harness| harness.shared_stats().step_age(harness.now);
    let seconds = |milliseconds| Some(Duration::from_millis(milliseconds));
    harness.pass(60_000);
    assert_eq!(age(&harness), None, "idle");
    let client = harness.start(request(4, 8, 1));
    harness.plan();
    harness.pass(40);
    assert_eq!(age(&harness), seconds(40), "since the first step began");
    harness.plan();
    harness.complete();
    harness.pass(7);
    assert_eq!(age(&harness), seconds(7), "since the last step finished");
    client.cancel();
    harness.run();
    assert_eq!(age(&harness), None);
}
