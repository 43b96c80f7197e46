//! Sequences whose consumers do not read: they pause, give way to all others, and end if there are too many.

use penstock_engine::{ClientId, FinishReason, Limits, PreemptionMode, Request};

use crate::harness::{Client, Harness, caching, check_output, limits, read};
use crate::oracle::{expected_output, request};

fn with_priority(priority: i32, request: Request) -> Request {
    Request { priority, ..request }
}

/// Starts `num_unread` requests one after the other, none of which is read.
fn start_unread(harness: &mut Harness, num_unread: u64) -> Vec<Client> {
    let start = |seed| {
        let client = harness.start(request(4, 4, seed));
        harness.run();
        client
    };
    (0..num_unread).map(start).collect()
}

/// Reads a request to its end. Returns its number of tokens and the reason.
fn read_to_end(harness: &mut Harness, client: &mut Client) -> (usize, FinishReason) {
    let mut num_tokens = 0;
    loop {
        let (tokens, finish) = read(client);
        num_tokens += tokens.len();
        match finish {
            Some(finish) => return (num_tokens, finish.reason),
            None => assert!(harness.step() || harness.stats().paused == 0, "it waits for a reader"),
        }
    }
}

#[test]
fn unread_requests_do_not_reject_new_ones() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, queue_capacity: 1, ..limits() });
    let mut unread = start_unread(&mut harness, 10);
    let stats = harness.stats();
    assert_eq!((stats.running, stats.waiting, stats.paused), (1, 9, 10), "each was preempted for the next");
    let mut reading = harness.start(request(4, 4, 99));
    assert_eq!(read_to_end(&mut harness, &mut reading), (4, FinishReason::Length));
    assert_eq!(harness.stats().paused, 10);
    for client in &mut unread {
        assert_eq!(
            read_to_end(&mut harness, client),
            (4, FinishReason::Length),
            "it completes once it is read"
        );
    }
}

#[test]
fn unread_choices_do_not_reject_new_ones() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, queue_capacity: 1, ..limits() });
    let clients = harness.start_choices(request(4, 4, 0), 5);
    harness.run();
    assert_eq!((harness.stats().running, harness.stats().waiting, harness.stats().paused), (1, 4, 5));
    for mut client in harness.start_choices(request(4, 4, 1), 5) {
        assert_eq!(read_to_end(&mut harness, &mut client), (4, FinishReason::Length));
    }
    clients.iter().for_each(Client::cancel);
    harness.attend();
    assert!(harness.core.is_idle());
}

#[test]
fn longest_unread_request_ends_at_max_paused() {
    let limits = Limits { max_num_seqs: 2, max_paused: 3, queue_capacity: 3, ..caching() };
    let mut harness = Harness::new(limits);
    let mut clients = start_unread(&mut harness, 3);
    assert_eq!((harness.stats().paused, harness.stats().finished_unread), (3, 0));
    assert_eq!(read(&mut clients[0]).0.len(), 2, "the first is read, so the second is unread for longest");
    harness.run();
    assert_eq!((harness.stats().paused, harness.stats().finished_unread), (2, 0));
    clients.extend(start_unread(&mut harness, 2));
    assert_eq!((harness.stats().paused, harness.stats().finished_unread), (3, 1));
    let (tokens, finish) = read(&mut clients[1]);
    assert_eq!(finish.unwrap().reason, FinishReason::Unread);
    let expected = expected_output(&clients[1].request, &harness.limits).0;
    assert!(tokens.len() == 2 && expected.starts_with(&tokens), "the output so far can be read");
    clients.remove(1);
    for (client, num_read) in clients.iter_mut().zip([2, 0, 0, 0]) {
        assert_eq!(read_to_end(&mut harness, client), (4 - num_read, FinishReason::Length));
    }
    assert_eq!((harness.stats().paused, harness.stats().blocks_used), (0, 0));
}

#[test]
fn client_with_the_most_paused_requests_loses_one() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, max_paused: 4, queue_capacity: 3, ..limits() });
    let mut start_as = |client, seed| {
        let client = harness.start(Request { client: Some(ClientId(client)), ..request(4, 4, seed) });
        harness.run();
        client
    };
    let first = start_as(1, 0);
    let mut flood: Vec<_> = (1..7).map(|seed| start_as(2, seed)).collect();
    let second = start_as(1, 7);
    assert_eq!((harness.stats().paused, harness.stats().finished_unread), (4, 4));
    assert!(!first.is_ended() && !second.is_ended(), "a client with fewer loses none");
    for client in &mut flood[..4] {
        assert_eq!(read(client).1.unwrap().reason, FinishReason::Unread, "the longest of the client first");
    }
}

#[test]
fn urgent_unread_request_interrupts_no_live_one() {
    let lacking = Limits { num_blocks: 10, queue_capacity: 4, ..limits() };
    let mut harness = Harness::new(Limits { preemption_mode: PreemptionMode::Interrupt, ..lacking });
    let unread = harness.start(with_priority(-5, request(12, 13, 0)));
    harness.run();
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 1));
    let mut reading: Vec<_> = (1..3).map(|seed| harness.start(request(4, 13, seed))).collect();
    let mut outputs = vec![vec![]; 2];
    while harness.step() {
        for (client, tokens) in reading.iter_mut().zip(&mut outputs) {
            tokens.extend(read(client).0);
        }
    }
    for (client, tokens) in reading.iter().zip(outputs) {
        assert_eq!(tokens, expected_output(&client.request, &harness.limits).0);
    }
    let stats = harness.stats();
    assert_eq!((stats.finished_interrupted, stats.paused, stats.preemptions), (0, 1, 1));
    assert!(!unread.is_ended());
}

#[test]
fn unread_request_is_not_admitted_again() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, queue_capacity: 3, ..limits() });
    let mut unread = harness.start(request(4, 8, 0));
    while harness.stats().generation_tokens < 2 {
        harness.plan();
        harness.complete();
    }
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 0), "its result queue is full");
    let mut urgent = harness.start(with_priority(-1, request(4, 4, 1)));
    assert_eq!((harness.stats().preemptions, harness.stats().paused), (1, 1));
    let mut waiting = harness.start(request(4, 2, 2));
    assert_eq!(read_to_end(&mut harness, &mut urgent), (4, FinishReason::Length));
    harness.run();
    check_output(&mut waiting, &harness.limits);
    let stats = harness.stats();
    assert_eq!((stats.paused, stats.running, stats.recomputed_tokens), (1, 0, 0));
    assert_eq!(read_to_end(&mut harness, &mut unread), (8, FinishReason::Length));
}
