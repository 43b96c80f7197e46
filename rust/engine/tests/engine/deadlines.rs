//! Requests with deadlines: those that cannot end in time are rejected on arrival.

use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_engine::{AdapterId, ClientId, Event, Limits, Rejection, Request};

use crate::harness::{Client, Harness, caching, limits, read};
use crate::oracle::request;
use crate::random::Random;

const STEP_MILLISECONDS: u64 = 100;
const FAR: Duration = Duration::from_secs(100_000);

/// An engine that was measured: it computes at most 160 tokens per second.
fn measured(limits: Limits) -> Harness {
    let mut harness = Harness::new(Limits { max_model_len: 512, ..limits });
    let client = harness.start(unshared(320, 1, 0));
    while step(&mut harness) {}
    drop(client);
    harness
}

fn step(harness: &mut Harness) -> bool {
    harness.pass(STEP_MILLISECONDS);
    harness.step()
}

fn unshared(num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    Request { prefix_cache: false, ..request(num_prompt, max_tokens, seed) }
}

fn start_by(harness: &mut Harness, request: Request, left: Duration) -> Client {
    let deadline = Some(harness.now + left);
    harness.start(Request { deadline, ..request })
}

/// The least time until the end of a request, for which it was rejected.
fn least_time(client: &mut Client) -> Option<Duration> {
    match client.pop() {
        Some(Event::Rejected(Rejection::TooLate { least, left })) => {
            assert!(least > left);
            Some(least)
        }
        _ => None,
    }
}

#[test]
fn a_request_that_cannot_end_before_its_deadline_is_rejected() {
    let mut harness = measured(Limits { max_num_seqs: 2, max_waiting: 100, num_blocks: 128, ..limits() });
    let clients: Vec<_> = (0..11).map(|seed| start_by(&mut harness, unshared(40, 8, seed), FAR)).collect();
    // Two run and nine wait, of which eight end before it gets a slot.
    let mut late = start_by(&mut harness, unshared(32, 1, 50), Duration::from_millis(1799));
    // Prompts of 32 to 63 tokens are one class, of which the last one counts as 32.
    let least = least_time(&mut late).expect("it is rejected");
    assert_eq!(least, Duration::from_secs_f64(f64::from(8 * 32 + 32) / 160.0));
    assert_eq!(harness.stats().requests_rejected, 1);
    let mut early = start_by(&mut harness, unshared(32, 1, 51), Duration::from_millis(1800));
    while step(&mut harness) {}
    assert!(read(&mut early).1.is_some(), "it is admitted");
    assert!(harness.core.is_idle());
    drop(clients);
}

#[test]
fn requests_that_may_come_later_do_not_count() {
    let mut harness = measured(Limits {
        max_num_seqs: 1,
        max_waiting: 100,
        num_blocks: 128,
        max_adapters: 1,
        adapter_bytes: 8,
        max_registered_adapters: 2,
        ..limits()
    });
    harness.load_adapter(1, 1).unwrap();
    let other = |seed| match seed % 4 {
        0 => Request { client: Some(ClientId(2)), ..unshared(40, 8, seed) },
        1 => Request { priority: 1, ..unshared(40, 8, seed) },
        2 => Request { adapter: Some(AdapterId(1)), ..unshared(40, 8, seed) },
        _ => unshared(40, 8, seed),
    };
    let clients: Vec<_> = (0..41).map(|seed| start_by(&mut harness, other(seed), FAR)).collect();
    let mut late = start_by(&mut harness, unshared(16, 1, 50), Duration::ZERO);
    let without_deadline = harness.start(unshared(40, 8, 51));
    assert_eq!(least_time(&mut late), Some(Duration::from_secs_f64(f64::from(10 * 40 + 16) / 160.0)));
    drop((clients, without_deadline));
}

#[test]
fn no_request_is_rejected_before_a_rate_is_measured() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 100, ..limits() });
    let clients: Vec<_> = (0..50).map(|seed| start_by(&mut harness, unshared(40, 8, seed), FAR)).collect();
    let mut last = start_by(&mut harness, unshared(40, 8, 50), Duration::ZERO);
    assert_eq!(least_time(&mut last), None);
    drop(clients);
}

#[test]
fn steps_with_room_for_more_tokens_give_no_rate() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, max_waiting: 100, num_blocks: 128, ..limits() });
    let decoding = harness.start(unshared(1, 40, 0));
    while step(&mut harness) {}
    let clients: Vec<_> = (0..50).map(|seed| start_by(&mut harness, unshared(40, 8, seed), FAR)).collect();
    // It computes 1 token per step so far, and could compute 16.
    let mut last = start_by(&mut harness, unshared(40, 8, 50), Duration::from_secs(1));
    assert_eq!(least_time(&mut last), None);
    drop((decoding, clients));
}

/// A prompt of 40 tokens. The first `num_common` are those of the opening.
fn with_opening(num_common: usize, opening: u64, seed: u64) -> Request {
    let mut prompt = request(num_common, 1, opening).prompt.to_vec();
    prompt.extend_from_slice(&request(40 - num_common, 1, seed).prompt);
    Request { prompt: prompt.into(), ..request(1, 1, seed) }
}

#[test]
fn prefixes_of_unfinished_requests_count_once() {
    let limits = Limits { max_num_seqs: 1, max_waiting: 100, num_blocks: 200, ..caching() };
    let mut harness = measured(limits);
    // The first runs. The second has no deadline: its tokens do not count, and others need not compute its opening.
    let mut clients = vec![start_by(&mut harness, with_opening(24, 0, 0), FAR)];
    clients.push(harness.start(with_opening(24, 1, 1)));
    for seed in 2..60 {
        clients.push(start_by(&mut harness, with_opening(24, seed % 20, seed), FAR));
    }
    let mut late = start_by(&mut harness, with_opening(24, 3, 60), Duration::ZERO);
    // Prompts with 24 common tokens may have 31, of which 28 are in full blocks.
    let num_tokens = 18 * 40 + (40 + 1) * (40 - 28);
    assert_eq!(least_time(&mut late), Some(Duration::from_secs_f64(f64::from(num_tokens) / 160.0)));
    drop(clients);
}

#[test]
fn tokens_that_the_prefix_cache_can_have_do_not_count() {
    let limits = Limits { max_num_seqs: 1, max_waiting: 100, num_blocks: 200, ..caching() };
    let mut harness = measured(limits);
    let with_end = |opening: u64, seed: u64| with_opening(24, opening, seed);
    // One prefix is cached; the requests of the other one follow each other.
    let cached = start_by(&mut harness, with_end(1, 70), FAR);
    while step(&mut harness) {}
    let clients: Vec<_> =
        (0..20).map(|seed| start_by(&mut harness, with_end(1 + seed % 2, seed), FAR)).collect();
    let mut late = start_by(&mut harness, with_end(2, 50), Duration::ZERO);
    // The first runs, the second brings its prefix.
    assert_eq!(least_time(&mut late), Some(Duration::from_secs_f64(f64::from(18 * 12 + 40 + 12) / 160.0)));
    drop((cached, clients));
}

/// A request of a random schedule, with the number of steps before it arrives.
fn random_request(random: &mut Random, seed: u64) -> (usize, Request) {
    let num_prompt = random.between(1, 60);
    let mut prompt = request(num_prompt, 1, seed).prompt.to_vec();
    if random.chance(60) {
        let opening = request(random.between(1, num_prompt), 1, random.below(12) as u64).prompt;
        prompt[..opening.len()].copy_from_slice(&opening);
    }
    let request = Request {
        prompt: Arc::from(prompt),
        prefix_cache: random.chance(70),
        priority: random.below(2) as i32,
        client: Some(ClientId(random.below(3) as u64)),
        ..request(1, random.between(1, 4), seed)
    };
    (if random.chance(30) { random.below(4) } else { 0 }, request)
}

/// Runs a schedule. Of the last request, which has this deadline: its least time if it is rejected, and the time from
/// its arrival to its end otherwise.
fn run(harness: &mut Harness, schedule: &[(usize, Request)], left: Duration) -> Result<Duration, Duration> {
    let (mut clients, mut arrival) = (vec![], harness.now);
    for (index, (num_steps, request)) in schedule.iter().enumerate() {
        (0..*num_steps).for_each(|_| _ = step(harness));
        arrival = harness.now;
        let is_last = index + 1 == schedule.len();
        clients.push(start_by(harness, request.clone(), if is_last { left } else { FAR }));
    }
    let mut last = clients.pop().expect("a schedule has requests");
    if let Some(least) = least_time(&mut last) {
        return Err(least);
    }
    let end = |harness: &Harness, arrival: Instant| harness.now - arrival;
    while step(harness) {
        clients.iter_mut().for_each(|client| _ = read(client));
        if read(&mut last).1.is_some() {
            return Ok(end(harness, arrival));
        }
    }
    panic!("the last request does not end");
}

#[test]
fn no_request_is_rejected_that_would_meet_its_deadline() {
    let (mut num_rejected, mut closest) = (0, 0.0_f64);
    for seed in 0..400 {
        let mut random = Random(seed);
        let limits = Limits {
            max_num_seqs: random.between(1, 4),
            max_waiting: 100,
            num_blocks: random.between(128, 160),
            ..if random.chance(70) { caching() } else { limits() }
        };
        let num_requests = random.between(2, 40) as u64;
        let schedule: Vec<_> = (0..num_requests).map(|id| random_request(&mut random, 1000 + id)).collect();
        let Err(least) = run(&mut measured(limits.clone()), &schedule, Duration::ZERO) else { continue };
        let time = run(&mut measured(limits), &schedule, FAR).expect("the deadline is far");
        assert!(time >= least, "schedule {seed} takes {time:?}, not {least:?}");
        num_rejected += 1;
        closest = closest.max(least.as_secs_f64() / time.as_secs_f64());
    }
    assert!(num_rejected > 100, "{num_rejected} schedules have a bound");
    assert!(closest > 0.5, "the bounds are at most {closest} of the times");
}
