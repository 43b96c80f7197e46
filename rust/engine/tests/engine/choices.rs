//! Several answers to one prompt.

use penstock_engine::testing::Message;
use penstock_engine::{Event, FinishReason, Limits, Rejection};

use crate::harness::{Client, Harness, caching, check_answered, check_ended, limits, read};
use crate::oracle::request;

#[test]
fn the_first_computes_the_prompt_for_all() {
    let mut harness = Harness::new(Limits { num_blocks: 32, ..caching() });
    let mut clients = harness.start_choices(&request(33, 6, 0), 0..4);
    while harness.stats().generation_tokens == 0 {
        assert_eq!((harness.stats().running, harness.stats().waiting), (1, 3));
        harness.step();
    }
    harness.plan();
    assert_eq!((harness.stats().running, harness.stats().waiting), (4, 0), "with its first token");
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
    let stats = harness.stats();
    assert_eq!((stats.prompt_tokens, stats.prefix_hit_tokens), (33 + 3, 3 * 32));
    assert_eq!(stats.requests_finished, 4);
}

#[test]
fn where_there_is_nothing_to_share_nobody_is_held_back() {
    for (limits, num_prompt) in [(limits(), 20), (caching(), 4)] {
        let mut harness = Harness::new(limits);
        let mut clients = harness.start_choices(&request(num_prompt, 6, 0), 0..3);
        harness.step();
        assert_eq!(harness.stats().running, 3);
        harness.run();
        clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
    }
}

#[test]
fn choices_are_admitted_together_and_count_once_among_those_that_wait() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 2, ..caching() });
    let mut running = harness.start(request(4, 20, 9));
    let mut groups = [1, 2].map(|seed| harness.start_choices(&request(9, 3, seed), 0..5));
    let mut refused = harness.start_choices(&request(9, 3, 3), 0..5);
    for client in &mut refused {
        assert_eq!(
            client.drain(),
            [Event::Rejected(Rejection::Overloaded { waiting: 10, limit: 2 })],
            "together, or not at all"
        );
    }
    for client in groups.iter_mut().flatten() {
        assert_eq!(client.drain(), [Event::Admitted]);
    }
    harness.run();
    check_answered(&mut running, &harness.limits);
    groups.iter_mut().flatten().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn those_who_wait_for_a_place_after_the_first_turn_no_newcomer_away() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..caching() });
    let mut clients = harness.start_choices(&request(9, 8, 1), 0..6);
    harness.step();
    clients.push(harness.start(request(3, 2, 0)));
    assert_eq!(harness.stats().waiting, 6);
    harness.run();
    clients.iter_mut().for_each(|client| check_answered(client, &harness.limits));
}

#[test]
fn when_the_first_ends_too_soon_the_next_computes_the_prompt() {
    let mut harness = Harness::new(caching());
    let mut clients = harness.start_choices(&request(40, 6, 0), 0..4);
    harness.step();
    clients[0].cancel();
    clients[2].cancel();
    harness.attend();
    assert_eq!(harness.stats().waiting, 2);
    harness.run();
    for index in [0, 2] {
        check_ended(&mut clients[index], FinishReason::Cancelled);
    }
    for index in [1, 3] {
        check_answered(&mut clients[index], &harness.limits);
    }
    assert!(harness.stats().prompt_tokens < 2 * 40);
}

#[test]
fn a_first_that_does_not_read_holds_nobody_back() {
    let mut harness = Harness::new(Limits { queue_capacity: 1, ..caching() });
    let mut clients = harness.start_choices(&request(12, 3, 0), 0..3);
    harness.run();
    let mut reading = clients.split_off(1);
    for client in &mut reading {
        while !client.is_ended() {
            client.pop().expect("every event read makes room for the next");
            harness.run();
        }
    }
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 1));
}

#[test]
fn choices_that_nobody_reads_do_not_pile_up_beyond_those_that_were_admitted() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, queue_capacity: 1, ..limits() });
    let clients = harness.start_choices(&request(4, 4, 0), 0..5);
    harness.run();
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 4), "each made way for the next");
    let refused = harness.start_choices(&request(4, 4, 1), 0..5).pop().unwrap().drain();
    assert_eq!(refused, [Event::Rejected(Rejection::Overloaded { waiting: 4, limit: 1 })]);
    clients.iter().for_each(Client::cancel);
    harness.attend();
    assert!(harness.core.is_idle());
}

#[test]
fn a_shutdown_ends_those_who_are_held_back() {
    let mut harness = Harness::new(caching());
    let mut clients = harness.start_choices(&request(40, 6, 0), 0..4);
    harness.plan();
    harness.handle(Message::Shutdown);
    for client in &mut clients {
        let (tokens, finish) = read(client);
        assert_eq!((tokens.len(), finish.unwrap().reason), (0, FinishReason::Cancelled));
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (0, 0));
}
