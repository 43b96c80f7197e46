//! Several choices for one prompt.

use penstock_engine::testing::Message;
use penstock_engine::{Event, FinishReason, Limits, Overload, Rejection};

use crate::harness::{Harness, caching, check_ended, check_output, limits, read};
use crate::oracle::request;

#[test]
fn the_leader_computes_the_prompt_for_all_choices() {
    let mut harness = Harness::new(Limits { num_blocks: 32, ..caching() });
    let mut clients = harness.start_choices(request(33, 6, 0), 4);
    while harness.stats().generation_tokens == 0 {
        assert_eq!((harness.stats().running, harness.stats().waiting), (1, 3));
        harness.step();
    }
    harness.plan();
    assert_eq!((harness.stats().running, harness.stats().waiting), (4, 0), "after the first token");
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    let stats = harness.stats();
    assert_eq!((stats.prompt_tokens, stats.prefix_hit_tokens), (33 + 3, 3 * 32));
    assert_eq!(stats.requests_finished, 4);
}

#[test]
fn choices_without_shared_blocks_start_at_once() {
    for (limits, num_prompt) in [(limits(), 20), (caching(), 4)] {
        let mut harness = Harness::new(limits);
        let mut clients = harness.start_choices(request(num_prompt, 6, 0), 3);
        harness.step();
        assert_eq!(harness.stats().running, 3);
        harness.run();
        clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    }
}

#[test]
fn choices_are_admitted_together_and_count_once() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 2, ..caching() });
    let mut running = harness.start(request(4, 20, 9));
    let mut groups = [1, 2].map(|seed| harness.start_choices(request(9, 3, seed), 5));
    let mut rejected = harness.start_choices(request(9, 3, 3), 5);
    for client in &mut rejected {
        assert_eq!(
            client.drain(),
            [Event::Rejected(Rejection::Overloaded { waiting: 2, limit: 2 })],
            "all or none"
        );
    }
    for client in groups.iter_mut().flatten() {
        assert_eq!(client.drain(), [Event::Admitted]);
    }
    harness.run();
    check_output(&mut running, &harness.limits);
    groups.iter_mut().flatten().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn many_choices_that_wait_are_rejected_as_one_request() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..caching() });
    let _running = harness.start(request(4, 20, 9));
    let _waiting = harness.start_choices(request(9, 3, 1), 128);
    assert_eq!(harness.stats().waiting, 128);
    let rejected = harness.start(request(4, 4, 2)).drain();
    assert_eq!(rejected, [Event::Rejected(Rejection::Overloaded { waiting: 1, limit: 1 })]);
}

#[test]
fn waiting_choices_do_not_cause_rejections() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, max_waiting: 1, ..caching() });
    let mut clients = harness.start_choices(request(9, 8, 1), 6);
    harness.step();
    clients.push(harness.start(request(3, 2, 0)));
    assert_eq!(harness.stats().waiting, 6);
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
}

#[test]
fn a_cancelled_leader_is_replaced() {
    let mut harness = Harness::new(caching());
    let mut clients = harness.start_choices(request(40, 6, 0), 4);
    harness.step();
    clients[0].cancel();
    clients[2].cancel();
    harness.attend();
    assert_eq!((harness.stats().running, harness.stats().waiting), (1, 1), "the new leader runs at once");
    harness.run();
    for index in [0, 2] {
        check_ended(&mut clients[index], FinishReason::Cancelled);
    }
    for index in [1, 3] {
        check_output(&mut clients[index], &harness.limits);
    }
    assert!(harness.stats().prompt_tokens < 2 * 40);
}

#[test]
fn a_paused_leader_releases_its_followers() {
    let mut harness = Harness::new(Limits { queue_capacity: 1, ..caching() });
    let mut clients = harness.start_choices(request(12, 3, 0), 3);
    harness.run();
    let mut reading = clients.split_off(1);
    for client in &mut reading {
        while !client.is_ended() {
            client.pop().expect("each event read makes room for the next");
            harness.run();
        }
    }
    assert_eq!((harness.stats().running, harness.stats().paused), (1, 1));
}

#[test]
fn max_unfinished_counts_each_choice() {
    let mut harness = Harness::new(Limits { max_num_seqs: 2, max_unfinished: 7, ..caching() });
    let mut clients = harness.start_choices(request(9, 4, 0), 4);
    let rejected = harness.start_choices(request(9, 4, 1), 4);
    for mut client in rejected {
        let rejection = Rejection::TooManyUnfinished { unfinished: 4, choices: 4, limit: 7 };
        assert_eq!(client.drain(), [Event::Rejected(rejection)]);
    }
    clients.extend(harness.start_choices(request(9, 4, 2), 3));
    let overload = harness.shared_stats().overload(None);
    assert_eq!(overload, Some(Overload::Unfinished), "callers know before they prepare a request");
    assert_eq!(harness.stats().requests_rejected, 1);
    harness.run();
    clients.iter_mut().for_each(|client| check_output(client, &harness.limits));
    assert_eq!(harness.shared_stats().overload(None), None);
}

#[test]
fn shutdown_cancels_followers() {
    let mut harness = Harness::new(caching());
    let mut clients = harness.start_choices(request(40, 6, 0), 4);
    harness.plan();
    harness.handle(Message::Shutdown);
    for client in &mut clients {
        let (tokens, finish) = read(client);
        assert_eq!((tokens.len(), finish.unwrap().reason), (0, FinishReason::Cancelled));
    }
    assert_eq!((harness.stats().running, harness.stats().waiting), (0, 0));
}

#[test]
fn choices_share_their_request_and_waiting_ones_have_no_slots() {
    let mut harness = Harness::new(Limits { max_num_seqs: 1, ..caching() });
    let clients = harness.start_choices(request(9, 8, 1), 6);
    assert_eq!(clients[0].shared.strong_count(), 6, "one for each sequence");
    assert!(clients.iter().all(|client| client.shared.ptr_eq(&clients[0].shared) && !client.has_slots()));
    while harness.stats().generation_tokens == 0 {
        harness.step();
    }
    let num_allocated = clients.iter().filter(|client| client.has_slots()).count();
    assert_eq!(num_allocated, 1, "the first choice runs, the others wait");
}
