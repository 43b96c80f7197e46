//! The cost of many waiting choices, counted in waiting sequences that the engine looks at: an operation on one sequence
//! does not look at all others.

use penstock_engine::testing::Message;
use penstock_engine::{FinishReason, Limits};

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

    let stepped = num_visited(&mut harness, |harness| {
        for _ in 0..20 {
            let (plan, output) = harness.core.plan(harness.now).expect("choices are waiting");
            harness.device.submit(plan, output);
            let done = harness.device.complete();
            harness.core.handle(Message::StepDone(done), harness.now);
        }
    });
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
