//! The cost of many waiting sequences, counted in waiting sequences that the engine looks at: an operation on one
//! sequence does not look at all others. The cost of preemptions, counted in blocks.

use crossbeam_channel::{TryRecvError, bounded};
use penstock_engine::testing::Message;
use penstock_engine::{AdapterId, FinishReason, Limits, Request};

use crate::harness::{Client, Harness, caching, check_ended, limits};
use crate::oracle::request;

const NUM_REQUESTS: u64 = 500;
const NUM_CHOICES: u32 = 128;

/// The number of waiting sequences that `operation` looks at. Without the harness's checks, which look at all of them.
fn num_visited(harness: &mut Harness, operation: impl FnOnce(&mut Harness)) -> u64 {
    let before = harness.core.num_visited();
    operation(harness);
    harness.core.num_visited() - before
}

fn run_steps(harness: &mut Harness, num_steps: usize) {
    for _ in 0..num_steps {
        let (plan, output) = harness.core.plan(harness.now).expect("choices are waiting");
        harness.device.submit(plan, output);
        let done = harness.device.complete();
        harness.core.handle(Message::StepDone(done), harness.now);
    }
}

fn check_many_choices(limits: Limits) {
    let mut harness = Harness::new(Limits { max_waiting: usize::MAX, max_unfinished: 100_000, ..limits });
    let mut requests: Vec<Vec<Client>> = vec![];
    let num_choices = NUM_REQUESTS * u64::from(NUM_CHOICES);
    let started = num_visited(&mut harness, |harness| {
        for seed in 0..NUM_REQUESTS {
            let (start, clients) = harness.post(request(9, 4, seed), NUM_CHOICES);
            harness.core.handle(Message::Start(start), harness.now);
            requests.push(clients);
        }
    });
    assert_eq!(harness.stats().running + harness.stats().waiting, num_choices);
    assert!(started <= 4 * num_choices, "{started} visits for {num_choices} started choices");

    let stepped = num_visited(&mut harness, |harness| run_steps(harness, 20));
    // A first choice that has computed its prompt releases the others.
    let most = 20 * 4 * 10 + harness.stats().requests_finished * u64::from(NUM_CHOICES);
    assert!(stepped <= most, "{stepped} visits in 20 steps");

    let mut cancelled: Vec<Client> = requests.drain(300..350).flatten().collect();
    let num_cancelled = cancelled.len() as u64;
    let attended = num_visited(&mut harness, |harness| {
        for client in &cancelled {
            client.cancel();
            harness.core.attend(harness.now);
        }
    });
    cancelled.iter_mut().for_each(|client| check_ended(client, FinishReason::Cancelled));
    assert!(attended <= 12 * num_cancelled, "{attended} visits for {num_cancelled} cancelled choices");

    let num_left = harness.stats().running + harness.stats().waiting;
    assert!(num_left > num_choices * 4 / 5);
    let closed = num_visited(&mut harness, |harness| {
        harness.core.handle(Message::Shutdown, harness.now);
    });
    assert!(closed <= 4 * num_left, "{closed} visits for {num_left} choices");
    assert_eq!(harness.stats().running + harness.stats().waiting, 0);
}

#[test]
fn many_choices_that_share_a_prompt_cost_little() {
    check_many_choices(caching());
}

#[test]
fn many_choices_that_share_no_prompt_cost_little() {
    check_many_choices(limits());
}

#[test]
fn many_requests_with_many_adapters_cost_little() {
    const NUM_ADAPTERS: u64 = 1_000;
    const NUM_REQUESTS: u64 = 10_000;
    const MAX_ADAPTERS: u64 = 8;
    let mut harness = Harness::new(Limits {
        max_num_seqs: 64,
        max_num_batched_tokens: 256,
        num_blocks: 1_024,
        max_waiting: usize::MAX,
        max_unfinished: 100_000,
        max_adapters: MAX_ADAPTERS as usize,
        adapter_bytes: NUM_ADAPTERS,
        max_registered_adapters: NUM_ADAPTERS as usize,
        ..caching()
    });
    for id in 1..=NUM_ADAPTERS {
        harness.load_adapter(id, 1).unwrap();
    }
    let mut clients = vec![];
    let started = num_visited(&mut harness, |harness| {
        for seed in 0..NUM_REQUESTS {
            let adapter = Some(AdapterId(1 + seed % NUM_ADAPTERS));
            let (start, client) = harness.post(Request { adapter, ..request(9, 40, seed) }, 1);
            harness.core.handle(Message::Start(start), harness.now);
            clients.extend(client);
        }
    });
    assert!(
        started <= 4 * MAX_ADAPTERS * NUM_REQUESTS,
        "{started} visits for {NUM_REQUESTS} started requests"
    );
    assert_eq!(harness.stats().running, 64, "requests of loaded adapters far behind others run");

    let stepped = num_visited(&mut harness, |harness| run_steps(harness, 60));
    let num_finished = harness.stats().requests_finished;
    assert!(num_finished >= 64);
    assert!(stepped <= 4 * MAX_ADAPTERS * num_finished, "{stepped} visits for {num_finished} ended requests");

    let removed = num_visited(&mut harness, |harness| {
        for id in 901..=1_000 {
            let (done, removal) = bounded::<()>(0);
            let message = Message::UnloadAdapter(AdapterId(id), Some("unloaded".into()), Box::new(done));
            harness.core.handle(message, harness.now);
            assert_eq!(removal.try_recv(), Err(TryRecvError::Disconnected));
        }
    });
    let num_ended = NUM_REQUESTS / 10;
    assert_eq!(harness.stats().requests_finished, num_finished + num_ended);
    assert!(removed <= 4 * num_ended, "{removed} visits for {num_ended} ended requests");
}

/// The blocks that the engine looks at, and the preemptions, for `num_urgent` choices that come before others: those
/// have all slots and a long common prompt.
fn preempt_all(num_blocks: usize, num_prompt: usize, num_urgent: u32) -> (u64, u64) {
    let mut harness = Harness::new(Limits {
        max_model_len: 4_200,
        max_num_seqs: NUM_CHOICES as usize,
        max_num_batched_tokens: 1_024,
        num_blocks,
        max_waiting: usize::MAX,
        max_unfinished: 100_000,
        ..caching()
    });
    let (start, _others) = harness.post(Request { priority: 1, ..request(4_001, 40, 1) }, NUM_CHOICES);
    harness.core.handle(Message::Start(start), harness.now);
    run_steps(&mut harness, 8);
    assert_eq!(harness.stats().running, u64::from(NUM_CHOICES));
    let before = harness.core.num_visited_blocks();
    let (start, _urgent) = harness.post(request(num_prompt, 4, 2), num_urgent);
    harness.core.handle(Message::Start(start), harness.now);
    run_steps(&mut harness, 6);
    (harness.core.num_visited_blocks() - before, harness.stats().preemptions)
}

#[test]
fn preemption_of_many_that_share_a_prompt_costs_little() {
    const BLOCKS_OF_PROMPT: u64 = 1_000;
    let (num_visited, num_preempted) = preempt_all(4_000, 9, NUM_CHOICES);
    assert_eq!(num_preempted, u64::from(NUM_CHOICES), "for slots");
    assert!(num_visited <= BLOCKS_OF_PROMPT, "{num_visited} visits for {num_preempted} preemptions");

    let (num_visited, num_preempted) = preempt_all(1_600, 2_001, 1);
    assert!(num_preempted > u64::from(NUM_CHOICES) / 2, "for blocks");
    // They are looked at once, not for each preemption.
    let most = (BLOCKS_OF_PROMPT + 10) * u64::from(NUM_CHOICES);
    assert!(num_visited <= most, "{num_visited} visits for {num_preempted} preemptions");
}
