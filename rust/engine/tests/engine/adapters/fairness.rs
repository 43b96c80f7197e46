//! The order of requests with more adapters than there is room for.

use penstock_engine::{Limits, Request};

use super::{harness, harness_with, run_until_token, with_adapter};
use crate::harness::{Client, Harness, check_output, limits, read};
use crate::oracle::request;
use crate::random::Random;

/// The steps for which a request without room is overtaken by all others.
const OVERTAKING_STEPS: usize = 64;

/// Output tokens of a request.
const LENGTH: usize = 20;

/// The most steps from the admission of a request to its first token.
const LATENCY: usize = 3;

fn with_priority(priority: i32, request: Request) -> Request {
    Request { priority, ..request }
}

#[test]
fn requests_overtake_one_without_room_for_its_adapter() {
    let mut harness = harness(3, 2);
    let mut running = harness.start(with_adapter(1, request(4, 40, 0)));
    let mut other = harness.start(with_adapter(2, request(4, 40, 1)));
    let mut blocked = harness.start(with_adapter(3, request(4, 4, 2)));
    let mut overtaking = [harness.start(request(4, 4, 3)), harness.start(with_adapter(1, request(4, 4, 4)))];
    assert_eq!((harness.stats().running, harness.stats().waiting), (4, 1));
    harness.run();
    for client in [&mut running, &mut other, &mut blocked].into_iter().chain(&mut overtaking) {
        check_output(client, &harness.limits);
    }
}

#[test]
fn a_request_without_room_for_its_blocks_is_not_overtaken() {
    let mut harness = harness_with(2, Limits { max_adapters: 2, num_blocks: 10, ..limits() });
    let _running = harness.start(with_adapter(1, request(20, 5, 0)));
    let _large = harness.start(with_adapter(2, request(20, 5, 1)));
    let _small = harness.start(with_adapter(1, request(2, 2, 2)));
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 2));
}

/// Requests of hot adapters, one of each every ten steps, so that two of each run at any time.
struct Traffic {
    harness: Harness,
    num_steps: usize,
    /// With the step in which it was started.
    open: Vec<(Client, usize)>,
    /// The requests that have a token: adapter, step of the start, steps to the token.
    started: Vec<(u64, usize, usize)>,
}

impl Traffic {
    fn new(harness: Harness) -> Self {
        Self { harness, num_steps: 0, open: vec![], started: vec![] }
    }

    fn step(&mut self, hot: &[u64]) {
        if self.num_steps.is_multiple_of(LENGTH / 2) {
            for id in hot {
                let request = Request { adapter: None, ..request(4, LENGTH, self.num_steps as u64) };
                let request = if *id > 0 { with_adapter(*id, request) } else { request };
                self.open.push((self.harness.start(request), self.num_steps));
            }
        }
        assert!(self.harness.step());
        self.num_steps += 1;
        let Self { open, started, num_steps, .. } = self;
        open.retain_mut(|(client, start)| {
            let has_token = !read(client).0.is_empty();
            if has_token {
                let id = client.request.adapter.map_or(0, |id| id.0);
                started.push((id, *start, *num_steps - *start));
            }
            !has_token
        });
    }

    /// Steps until the request has a token. Returns the number of steps.
    fn run_until_token(&mut self, client: &mut Client, hot: &[u64]) -> usize {
        let before = self.num_steps;
        while read(client).0.is_empty() {
            self.step(hot);
            assert!(self.num_steps - before < 10 * OVERTAKING_STEPS, "it starves");
        }
        self.num_steps - before
    }

    /// The longest time to the first token of a request of an adapter that was started in these steps.
    fn longest_wait(&self, id: u64, steps: std::ops::Range<usize>) -> usize {
        let of_it = self.started.iter().filter(|(other, start, _)| *other == id && steps.contains(start));
        of_it.map(|(_, _, wait)| *wait).max().unwrap()
    }
}

fn crowded(num_adapters: u64, max_adapters: usize) -> Harness {
    let limits = Limits {
        max_adapters,
        max_num_seqs: 64,
        max_num_batched_tokens: 256,
        num_blocks: 64 * 16,
        max_waiting: 10_000,
        max_unfinished: 10_000,
        ..limits()
    };
    harness_with(num_adapters, limits)
}

#[test]
fn a_hot_adapter_does_not_starve_a_cold_one() {
    let mut traffic = Traffic::new(crowded(2, 1));
    let hot = [0, 1];
    (0..30).for_each(|_| traffic.step(&hot));
    let mut cold = traffic.harness.start(with_adapter(2, request(4, LENGTH, 0)));
    let num_steps = traffic.run_until_token(&mut cold, &hot);
    assert!(num_steps > OVERTAKING_STEPS, "the hot adapter takes requests for {num_steps} steps");
    assert!(num_steps <= OVERTAKING_STEPS + LENGTH + LATENCY, "{num_steps} steps");
    assert!(traffic.longest_wait(1, 30..30 + OVERTAKING_STEPS - LENGTH) <= LATENCY);
    let before = traffic.num_steps;
    (0..2 * LENGTH).for_each(|_| traffic.step(&hot));
    assert!(traffic.longest_wait(1, 0..before) <= 3 * LENGTH, "it takes requests again after the cold one");
    assert!(traffic.longest_wait(0, 0..before) <= LATENCY, "requests without adapter never wait");
}

/// A cold adapter of `bytes` beside two hot ones of 4 bytes each: `kept` of them never wait.
fn check_drained(bytes: u64, kept: &[u64]) {
    let mut harness = crowded(0, 8);
    for (id, bytes) in [(1, 4), (2, 4), (3, bytes)] {
        harness.load_adapter(id, bytes).unwrap();
    }
    let mut traffic = Traffic::new(harness);
    let hot = [2, 1]; // the first one is used last
    (0..30).for_each(|_| traffic.step(&hot));
    let mut cold = traffic.harness.start(with_adapter(3, request(4, LENGTH, 0)));
    let num_steps = traffic.run_until_token(&mut cold, &hot);
    assert!(num_steps <= OVERTAKING_STEPS + LENGTH + LATENCY, "{num_steps} steps");
    let end = traffic.num_steps;
    (0..3 * LENGTH).for_each(|_| traffic.step(&hot));
    for id in hot {
        let longest = traffic.longest_wait(id, 30..end - LATENCY);
        assert_eq!(longest <= LATENCY, kept.contains(&id), "adapter {id} waited for {longest} steps");
    }
}

#[test]
fn only_adapters_that_leave_no_room_are_drained() {
    check_drained(6, &[1]);
    check_drained(7, &[]);
}

/// One long request after another with adapter 1 of 6 bytes, for which a request with adapter 2 of 7 bytes waits for
/// longer than it is overtaken.
fn long_blocked() -> (Harness, Vec<Client>, Client) {
    let mut harness = harness(0, 8);
    for (id, bytes) in [(1, 6), (2, 7), (3, 3), (4, 4)] {
        harness.load_adapter(id, bytes).unwrap();
    }
    let mut running = vec![harness.start(with_adapter(1, request(4, 50, 0)))];
    let blocked = harness.start(with_priority(1, with_adapter(2, request(4, 40, 1))));
    (0..40).for_each(|_| assert!(harness.step()));
    running.push(harness.start(with_adapter(1, request(4, 50, 2))));
    (0..30).for_each(|_| assert!(harness.step()));
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1));
    (harness, running, blocked)
}

#[test]
fn a_small_adapter_overtakes_one_without_room() {
    let mut harness = harness(0, 8);
    for (id, bytes) in [(1, 5), (2, 8), (3, 2), (4, 4)] {
        harness.load_adapter(id, bytes).unwrap();
    }
    let start = |harness: &mut Harness, id| harness.start(with_adapter(id, request(4, 20, id)));
    let mut clients = [1, 2, 3, 4].map(|id| start(&mut harness, id));
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 2), "5 and 2 of 10 bytes");
    (0..4).for_each(|_| assert!(harness.step()));
    let has_token = clients.each_mut().map(|client| !read(client).0.is_empty());
    assert_eq!(has_token, [true, false, true, false]);
}

#[test]
fn only_small_adapters_overtake_one_that_waits_for_long() {
    let (mut harness, mut clients, blocked) = long_blocked();
    clients.push(blocked);
    for id in [4, 3] {
        clients.push(harness.start(with_priority(1, with_adapter(id, request(4, 4, id)))));
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 2));
    while harness.stats().running == 2 {
        assert!(harness.step());
    }
    let [.., beside, small] = &mut clients[..] else { unreachable!() };
    check_output(small, &harness.limits); // 7 and 3 of 10 bytes
    assert!(read(beside).0.is_empty(), "7 and 4 of 10 bytes do not fit");
    harness.run();
    clients.remove(4);
    clients.remove(3);
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn a_preempted_request_is_overtaken_anew() {
    let (mut harness, mut running, mut preempted) = long_blocked();
    let mut tokens = vec![];
    while tokens.is_empty() {
        assert!(harness.step());
        tokens = read(&mut preempted).0;
    }
    running.iter_mut().for_each(|client| check_output(client, &harness.limits));
    let urgent = harness.start(with_adapter(1, request(4, 20, 3)));
    assert_eq!((harness.stats().preemptions, harness.stats().running), (1, 1));
    let later = harness.start(with_priority(1, with_adapter(1, request(4, 20, 4))));
    (0..3).for_each(|_| assert!(harness.step())); // its tokens in flight arrive
    assert_eq!((harness.stats().running, harness.stats().waiting), (2, 1));
    harness.run();
    [urgent, later].iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn a_blocked_request_keeps_its_place_behind_urgent_ones() {
    let mut traffic = Traffic::new(crowded(2, 1));
    (0..30).for_each(|_| traffic.step(&[1]));
    let mut cold = traffic.harness.start(with_adapter(2, request(4, LENGTH, 0)));
    let (mut num_steps, mut urgent) = (0, vec![]);
    while read(&mut cold).0.is_empty() {
        // Admitted before it: they are the first in scheduling order for a moment.
        if num_steps % 50 == 0 {
            urgent.push(traffic.harness.start(with_priority(-1, with_adapter(1, request(4, 2, 1)))));
        }
        traffic.step(&[1]);
        num_steps += 1;
        assert!(num_steps <= OVERTAKING_STEPS + LENGTH + LATENCY, "{num_steps} steps");
    }
}

#[test]
fn only_sequences_that_take_room_are_preempted_for_an_adapter() {
    let mut harness = harness(3, 2);
    let mut clients = [(0, 1), (1, 2), (1, 1)]
        .map(|(priority, id)| harness.start(with_priority(priority, with_adapter(id, request(4, 40, id)))));
    harness.step();
    clients.iter_mut().for_each(|client| drop(client.drain()));
    let mut urgent = harness.start(with_adapter(3, request(4, 4, 3)));
    assert_eq!((harness.stats().preemptions, harness.stats().running), (1, 3));
    run_until_token(&mut harness, &mut urgent); // and tokens in flight arrive
    clients.iter_mut().for_each(|client| drop(client.drain()));
    harness.step();
    let has_token = clients.each_mut().map(|client| !read(client).0.is_empty());
    assert_eq!(has_token, [true, false, true], "the newest has an adapter that stays");
}

#[test]
fn one_adapter_is_preempted_at_a_time() {
    let mut harness = harness(3, 2);
    for id in [1, 2, 1, 2] {
        harness.start(with_priority(1, with_adapter(id, request(4, 40, id))));
    }
    harness.step();
    let _urgent = harness.start(with_adapter(3, request(4, 4, 3)));
    assert_eq!((harness.stats().preemptions, harness.stats().running), (2, 3), "both of one adapter");
}

#[test]
fn an_adapter_that_leaves_room_is_not_preempted() {
    let mut harness = harness(0, 8);
    for (id, bytes) in [(1, 8), (2, 1), (3, 5)] {
        harness.load_adapter(id, bytes).unwrap();
    }
    for id in [1, 2] {
        harness.start(with_priority(1, with_adapter(id, request(4, 40, id))));
    }
    harness.step();
    let _urgent = harness.start(with_adapter(3, request(4, 4, 3)));
    assert_eq!((harness.stats().preemptions, harness.stats().running), (1, 2), "1 and 5 of 10 bytes");
}

#[test]
fn nothing_is_preempted_if_that_makes_no_room() {
    let mut harness = harness(0, 8);
    for (id, bytes) in [(1, 4), (2, 4), (3, 2), (4, 3)] {
        harness.load_adapter(id, bytes).unwrap();
    }
    for (priority, id) in [(0, 1), (0, 2), (1, 3)] {
        harness.start(with_priority(priority, with_adapter(id, request(4, 20, id))));
    }
    harness.step();
    let _blocked = harness.start(with_adapter(4, request(4, 4, 3)));
    assert_eq!((harness.stats().preemptions, harness.stats().running), (0, 3), "2 of 10 bytes would be free");
}

#[test]
fn every_request_starts_with_more_adapters_than_places() {
    const NUM_REQUESTS: u64 = 6_000;
    const NUM_HOT: u64 = 8;
    let mut harness = crowded(1_000, NUM_HOT as usize);
    let mut random = Random(1);
    let mut waiting: Vec<Client> = vec![];
    let (mut num_started, mut num_steps, mut oldest_since, mut longest) = (0, 0, 0, 0);
    while num_started < NUM_REQUESTS || !waiting.is_empty() {
        // Requests of the hot adapters always wait.
        let is_hot = |client: &&Client| client.request.adapter.unwrap().0 <= NUM_HOT;
        let num_missing = 64_usize.saturating_sub(waiting.iter().filter(is_hot).count());
        for _ in 0..num_missing.min((NUM_REQUESTS - num_started) as usize) {
            let id = if random.chance(99) { random.between(1, 8) } else { random.between(9, 1_000) };
            let length = random.between(LENGTH / 2, LENGTH);
            waiting.push(harness.start(with_adapter(id as u64, request(4, length, num_started))));
            num_started += 1;
        }
        assert!(harness.step());
        num_steps += 1;
        let oldest = waiting.first().map(|client| client.request.sampling.seed);
        waiting.retain_mut(|client| read(client).0.is_empty());
        if waiting.first().map(|client| client.request.sampling.seed) != oldest {
            oldest_since = num_steps;
        }
        longest = longest.max(num_steps - oldest_since);
        let most = OVERTAKING_STEPS + 2 * LENGTH + LATENCY;
        assert!(longest <= most, "the oldest request waits for {longest} steps");
    }
    harness.run();
    assert!(harness.core.is_idle());
}
