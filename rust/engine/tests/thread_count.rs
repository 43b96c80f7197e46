//! Closed engines leave no thread. The only test of its process, because it counts the threads of the process.

#![cfg(all(not(feature = "loom"), target_os = "linux"))]
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use penstock_engine::{Engine, Executor, Limits, StepOutput, StepPlan};

struct Nothing;

impl Executor for Nothing {
    fn submit(&mut self, _: Box<StepPlan>, _: Box<StepOutput>) {}
}

/// A joined thread may be listed for a moment longer, so this waits for the number.
fn check_threads(expected: usize) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while num_threads() != expected && Instant::now() < deadline {
        std::thread::yield_now();
    }
    assert_eq!(num_threads(), expected);
}

fn num_threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn closed_engines_leave_no_thread() {
    let limits = Limits {
        max_model_len: 16,
        max_num_seqs: 1,
        max_num_batched_tokens: 1,
        max_waiting: 0,
        max_paused: 1,
        block_size: 16,
        num_blocks: 1,
        vocabulary_size: 1,
        queue_capacity: 1,
        ..Limits::small()
    };
    let before = num_threads();
    for _ in 0..10 {
        let engine = Engine::start(limits.clone(), |_| Box::new(Nothing)).unwrap();
        check_threads(before + 1);
        drop(engine);
        check_threads(before);
    }
}
