//! The shares of clients that compete: of slots, steps, blocks and the queue.

use penstock_engine::{ClientId, Event, Limits, Overload, Rejection, Request};

use crate::harness::{Client, Harness, caching, check_output, limits, read};
use crate::oracle::request;

fn request_of(client: u64, num_prompt: usize, max_tokens: usize, seed: u64) -> Request {
    Request { client: Some(ClientId(client)), ..request(num_prompt, max_tokens, seed) }
}

/// Fills the engine with requests of one client: groups of choices until it rejects them.
fn flood(harness: &mut Harness, client: u64, num_prompt: usize, num_choices: u32) -> Vec<Client> {
    let mut clients = vec![];
    for seed in 0.. {
        let mut choices = harness.start_choices(request_of(client, num_prompt, 20, seed), num_choices);
        if is_rejected(&mut choices[0]) {
            return clients;
        }
        clients.extend(choices);
    }
    unreachable!("the queue is bounded")
}

fn is_rejected(client: &mut Client) -> bool {
    matches!(client.pop(), Some(Event::Rejected(_)))
}

/// The number of completed steps until a client has a token.
fn steps_to_first_token(harness: &mut Harness, client: &mut Client) -> usize {
    for num_steps in 0..1000 {
        if !read(client).0.is_empty() {
            return num_steps;
        }
        assert!(harness.step(), "nothing is computed, and it has no token");
    }
    panic!("no token after 1000 steps")
}

/// The number of steps to the first token of a client that is alone, and of one beside a flood of another client.
fn first_tokens(limits: &Limits, num_prompt: usize, flood_prompt: usize, num_choices: u32) -> (usize, usize) {
    let mut harness = Harness::new(limits.clone());
    let mut alone = harness.start(request_of(2, num_prompt, 4, 7));
    let num_alone = steps_to_first_token(&mut harness, &mut alone);

    let mut harness = Harness::new(limits.clone());
    let mut others = flood(&mut harness, 1, flood_prompt, num_choices);
    (0..5).for_each(|_| assert!(harness.step()));
    others.extend(flood(&mut harness, 1, flood_prompt, num_choices));
    harness.plan();
    harness.plan();
    let mut client = harness.start(request_of(2, num_prompt, 4, 7));
    let num_beside = steps_to_first_token(&mut harness, &mut client);
    harness.run();
    check_output_from(&mut client, &harness.limits);
    drop(others);
    (num_alone, num_beside)
}

/// Checks the rest of an output, of which tokens were read before.
#[track_caller]
fn check_output_from(client: &mut Client, limits: &Limits) {
    let expected = crate::oracle::expected_output(&client.request, limits).0;
    let (tokens, last) = read(client);
    assert!(expected.ends_with(&tokens), "an output beside others is that of the request alone");
    assert!(last.is_some());
}

#[test]
fn a_flood_delays_the_first_token_of_another_client_little() {
    for (num_prompt, flood_prompt, num_choices) in [
        (10, 10, 1), // many prompts
        (10, 10, 8), // many choices
        (120, 10, 1),
        (120, 200, 1), // long prompts on both sides
        (200, 40, 8),
    ] {
        for limits in [limits(), caching()] {
            let limits = Limits {
                max_model_len: 256,
                max_num_seqs: 8,
                max_num_batched_tokens: 64,
                max_waiting: 32,
                num_blocks: 700,
                ..limits
            };
            let (alone, beside) = first_tokens(&limits, num_prompt, flood_prompt, num_choices);
            let case = format!("{num_prompt} {flood_prompt} {num_choices}: {alone} steps, then {beside}");
            assert!(2 * beside <= 3 * alone + 2 * 2, "{case}");
        }
    }
}

#[test]
fn a_client_gets_blocks_that_a_flood_has_taken() {
    let limits = Limits { max_model_len: 64, num_blocks: 32, max_num_seqs: 8, ..limits() };
    let (alone, beside) = first_tokens(&limits, 30, 16, 1);
    assert!(2 * beside <= 3 * alone + 2 * 2, "{alone} steps, then {beside}");
}

#[test]
fn clients_get_the_same_number_of_slots() {
    let mut harness = Harness::new(Limits { max_num_seqs: 6, max_waiting: 100, num_blocks: 300, ..limits() });
    let mut clients: Vec<_> = (0..30).map(|seed| harness.start(request_of(1, 3, 40, seed))).collect();
    (0..3).for_each(|_| assert!(harness.step()));
    clients.extend((0..5).map(|seed| harness.start(request_of(2, 3, 40, 100 + seed))));
    clients.extend((0..5).map(|seed| harness.start(request_of(3, 3, 40, 200 + seed))));
    harness.step();
    harness.step();
    let mut num_running = [0; 4];
    for client in &mut clients {
        num_running[client.request.client.unwrap().0 as usize] += usize::from(!read(client).0.is_empty());
    }
    (0..4).for_each(|_| assert!(harness.step()));
    let mut advancing = [0; 4];
    for client in &mut clients {
        advancing[client.request.client.unwrap().0 as usize] += usize::from(!read(client).0.is_empty());
    }
    assert_eq!(advancing, [0, 2, 2, 2]);
    assert_eq!(harness.stats().preemptions, 3 + 2, "for the first slots of one client, and then of another");
    harness.run();
}

#[test]
fn clients_take_turns_at_a_single_slot() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 20, ..limits() });
    let order = [1, 1, 1, 1, 2, 2, 3];
    let mut clients: Vec<_> = order.map(|client| harness.start(request_of(client, 2, 3, client))).into();
    let mut ended = vec![];
    while ended.len() < order.len() {
        assert!(harness.step());
        for client in &mut clients {
            if read(client).1.is_some() {
                ended.push(client.request.client.unwrap().0);
            }
        }
    }
    assert_eq!(ended, [1, 2, 3, 1, 2, 1, 1]);
    assert_eq!(harness.stats().preemptions, 0);
}

#[test]
fn clients_that_come_again_do_not_pass_one_that_waits() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 20, ..limits() });
    let mut waiting: Vec<_> = (0..6).map(|seed| harness.start(request_of(1, 2, 3, seed))).collect();
    let mut returning = [2, 3].map(|client| harness.start(request_of(client, 2, 3, client)));
    let mut num_ended = [0; 2];
    while num_ended[0] < 6 {
        assert!(harness.step());
        num_ended[0] += waiting.iter_mut().filter_map(|client| read(client).1).count();
        for (client, number) in returning.iter_mut().zip([2, 3]) {
            if read(client).1.is_some() {
                num_ended[1] += 1;
                *client = harness.start(request_of(number, 2, 3, 100 + num_ended[1] as u64));
            }
        }
    }
    assert!((8..=12).contains(&num_ended[1]), "each client has every third turn: {num_ended:?}");
    harness.run();
}

#[test]
fn a_share_does_not_change_the_order_of_priorities() {
    let mut harness = Harness::new(Limits { max_num_seqs: 4, ..limits() });
    let urgent = |seed| Request { priority: -1, ..request_of(1, 3, 30, seed) };
    let mut first: Vec<_> = (0..4).map(|seed| harness.start(urgent(seed))).collect();
    let mut other = harness.start(request_of(2, 3, 4, 9));
    while read(&mut other).0.is_empty() {
        assert!(harness.step());
    }
    let are_ended = first.iter_mut().all(|client| read(client).1.is_some());
    assert!(are_ended, "the urgent ones go first");
    assert_eq!(harness.stats().preemptions, 0);
    harness.run();
}

#[test]
fn prompts_share_steps_within_a_priority_only() {
    let limits = Limits { max_num_seqs: 4, max_num_batched_tokens: 20, num_blocks: 300, ..limits() };
    for (priority, expected) in [(0, vec![(0, 2), (1, 2), (2, 16)]), (1, vec![(0, 10), (1, 10)])] {
        let mut harness = Harness::new(limits.clone());
        let mut clients: Vec<_> = (0..2).map(|seed| harness.start(request_of(1, 40, 2, seed))).collect();
        clients.push(harness.start(Request { priority, ..request_of(2, 40, 2, 9) }));
        assert_eq!(harness.plan(), expected);
        harness.run();
        clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    }
}

#[test]
fn a_preempted_sequence_does_not_take_its_slot_back() {
    let mut harness = Harness::new(Limits { max_num_seqs: 4, max_waiting: 50, num_blocks: 300, ..caching() });
    let mut others: Vec<_> = (0..8).map(|seed| harness.start(request_of(1, 4, 40, seed))).collect();
    harness.step();
    let mut clients: Vec<_> = (0..3).map(|seed| harness.start(request_of(2, 4, 40, 100 + seed))).collect();
    (0..20).for_each(|_| assert!(harness.step()));
    assert_eq!(harness.stats().preemptions, 2);
    harness.run();
    others.iter_mut().chain(&mut clients).for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn the_client_with_the_most_slots_gives_blocks() {
    // Each sequence grows to 10 blocks.
    let limits = Limits { max_num_seqs: 4, num_blocks: 24, ..limits() };
    let mut harness = Harness::new(limits);
    let mut others: Vec<_> = (0..3).map(|seed| harness.start(request_of(1, 4, 36, seed))).collect();
    let mut newest = harness.start(request_of(2, 4, 36, 9));
    let mut num_tokens = 0;
    while !newest.is_ended() {
        assert!(harness.step());
        let advance = read(&mut newest).0.len();
        num_tokens += advance;
        assert!(advance > 0 || num_tokens == 0, "it is not preempted");
    }
    assert!(harness.stats().preemptions > 0);
    harness.run();
    others.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn each_client_has_its_share_of_a_full_queue() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 8, ..limits() });
    let mut others = flood(&mut harness, 1, 4, 1);
    assert_eq!(others.len(), 9);
    let overload = |harness: &Harness, client| harness.shared_stats().overload(Some(ClientId(client)));
    assert_eq!(overload(&harness, 1), Some(Overload::Waiting));
    assert_eq!(overload(&harness, 2), None);
    let mut num_admitted = vec![];
    for client in 2..8 {
        let admitted = flood(&mut harness, client, 4, 1);
        num_admitted.push(admitted.len());
        others.extend(admitted);
    }
    // The shares of 2, 3, 4 and more clients, until twice as many wait.
    assert_eq!(num_admitted, [4, 3, 1, 0, 0, 0]);
    let mut rejected = harness.start(request_of(9, 4, 4, 0));
    let rejection = Rejection::Overloaded { waiting: 16, limit: 16 };
    assert_eq!(rejected.drain(), [Event::Rejected(rejection)]);
    harness.run();
    assert!(others.iter_mut().all(|client| read(client).1.is_some()));
    assert_eq!(overload(&harness, 1), None);
}

#[test]
fn each_client_has_its_share_of_the_unfinished_outputs() {
    let limits = Limits { max_unfinished: 12, max_waiting: 100, ..limits() };
    let mut harness = Harness::new(limits);
    let others = flood(&mut harness, 1, 4, 4);
    assert_eq!(others.len(), 12);
    let own = flood(&mut harness, 2, 4, 2);
    assert_eq!(own.len(), 6);
    let mut rejected = harness.start(request_of(1, 4, 4, 0));
    let rejection = Rejection::TooManyUnfinished { unfinished: 18, choices: 1, limit: 12 };
    assert_eq!(rejected.drain(), [Event::Rejected(rejection)]);
    harness.run();
}

#[test]
fn a_client_that_leaves_has_no_debt() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..limits() });
    for seed in 0..6 {
        let mut served = harness.start(request_of(1, 3, 8, seed));
        harness.run();
        assert!(read(&mut served).1.is_some());
    }
    let _first = harness.start(request_of(3, 3, 8, 9));
    let mut former = harness.start(request_of(1, 3, 8, 10));
    let mut other = harness.start(request_of(2, 3, 8, 11));
    while read(&mut former).1.is_none() {
        assert!(harness.step());
        assert!(read(&mut other).0.is_empty(), "the client that was served before came first");
    }
    harness.run();
}
