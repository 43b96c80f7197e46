//! Prompt outputs: when they come, and their effect on other requests.

use penstock_engine::{Event, FinishReason, Limits, PreemptionMode, PromptPosition, Request};
use penstock_types::Token;
use penstock_types::{OutputScope, RequestedOutputs};

use crate::harness::{Client, Harness, cached, caching, found, limits};
use crate::oracle::{expected_output, positions, request};

fn scored(request: Request) -> Request {
    let outputs = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
    Request { outputs, ..request }
}

/// The events so far: chunks of positions, tokens, and the finish reason.
fn read(client: &mut Client) -> (Vec<Vec<PromptPosition>>, Vec<Token>, Option<FinishReason>) {
    let (mut chunks, mut tokens, mut end) = (vec![], vec![], None);
    for event in client.drain() {
        match event {
            Event::Admitted => {}
            Event::Prompt(positions) => {
                assert!(tokens.is_empty(), "a token came first");
                chunks.push(positions);
            }
            Event::Token(token) => tokens.push(token),
            Event::Finished(finish) => end = Some(finish.reason),
            Event::Rejected(refusal) => panic!("rejected: {refusal:?}"),
        }
    }
    (chunks, tokens, end)
}

/// It has ended, with the expected prompt outputs and tokens.
#[track_caller]
fn check_scored(client: &mut Client, limits: &Limits) {
    let (chunks, tokens, end) = read(client);
    assert_eq!(chunks.concat(), positions(&client.request, limits));
    let (expected, reason) = expected_output(&client.request, limits);
    assert_eq!((tokens, end), (expected, Some(reason)));
}

#[test]
fn prompt_outputs_come_chunk_by_chunk() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(scored(request(40, 3, 0)));
    harness.run();
    let (chunks, tokens, _) = read(&mut client);
    assert_eq!(chunks.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 7]);
    assert_eq!((chunks.concat(), tokens.len()), (positions(&client.request, &harness.limits), 3));
}

#[test]
fn a_request_without_tokens_ends_with_its_prompt_outputs() {
    let mut harness = Harness::new(Limits { num_blocks: 16, ..limits() });
    let mut client = harness.start(scored(request(64, 0, 0)));
    harness.run();
    let (chunks, tokens, end) = read(&mut client);
    assert_eq!((chunks.concat(), tokens), (positions(&client.request, &harness.limits), vec![]));
    assert_eq!((chunks.concat().len(), end), (64, Some(FinishReason::Length)));
    assert!(harness.core.is_idle());
    let stats = harness.stats();
    assert_eq!((stats.prompt_tokens, stats.generation_tokens, stats.steps), (64, 0, 4));
}

#[test]
fn prompt_outputs_bypass_and_fill_the_prefix_cache() {
    let mut harness = Harness::new(caching());
    for (kind, expected) in [(None, 0), (Some(OutputScope::Prompt), 0), (None, 28)] {
        let mut request = request(32, 2, 7);
        request.outputs.hidden_states = kind;
        request.outputs.logits = Some(OutputScope::Generation);
        let mut client = harness.start(request);
        harness.run();
        let events = client.drain();
        let Some(Event::Finished(finish)) = events.last() else { panic!("it has not ended: {events:?}") };
        assert_eq!(finish.cached, found(expected, 0));
    }
    assert_eq!(harness.stats().prefix_query_tokens, 2 * 32, "requests that bypass the cache are not counted");
    assert_eq!(harness.stats().prompt_tokens, 2 * 32 + 4);
}

#[test]
fn prompt_outputs_come_once_despite_preemption() {
    for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let limits = Limits { num_blocks: 12, host_blocks: 16, preemption_mode, ..caching() };
        for max_tokens in [0, 6] {
            let mut harness = Harness::new(limits.clone());
            let mut client = harness.start(Request { priority: 1, ..scored(request(40, max_tokens, 0)) });
            harness.step();
            let mut high = harness.start(request(30, 2, 1));
            assert_eq!(
                (harness.stats().preemptions, harness.stats().waiting),
                (1, 1),
                "in the middle of the prompt"
            );
            harness.run();
            assert_eq!(read(&mut high).1, expected_output(&high.request, &limits).0);
            check_scored(&mut client, &limits);
        }
    }
}

#[test]
fn prompt_outputs_of_an_invalidated_row_are_computed_again() {
    let limits = Limits { max_num_seqs: 2, num_blocks: 12, host_blocks: 16, ..caching() };
    let mut harness = Harness::new(limits);
    cached(&mut harness, request(13, 1, 0));
    cached(&mut harness, request(45, 1, 1));
    let mut loading = harness.start(request(19, 4, 0));
    harness.plan();
    let mut client = harness.start(Request { priority: 1, ..scored(request(20, 0, 2)) });
    harness.plan();
    let mut high = harness.start(request(3, 2, 7));
    assert_eq!((harness.device.num_plans(), harness.stats().preemptions), (2, 1));
    // The preempted sequence may depend on the copies that failed.
    assert!(harness.fail("out of order") > 0);
    assert!(matches!(read(&mut loading).2, Some(FinishReason::Failed(_))));
    harness.complete();
    assert!(read(&mut client).0.is_empty(), "its row was invalidated");
    harness.run();
    check_scored(&mut client, &harness.limits);
    check_scored(&mut high, &harness.limits);
}

#[test]
fn a_full_queue_delays_only_its_own_prompt_outputs() {
    for queue_capacity in 1..4 {
        let mut harness = Harness::new(Limits { queue_capacity, max_num_batched_tokens: 5, ..limits() });
        let mut clients = [0, 3].map(|max_tokens| harness.start(scored(request(30, max_tokens, 5))));
        for client in &mut clients {
            let mut events = vec![];
            while !client.is_ended() {
                harness.run();
                events.push(client.pop().expect("each event read makes room for the next"));
            }
            let outputs = events.iter().flat_map(|event| match event {
                Event::Prompt(positions) => &positions[..],
                _ => &[],
            });
            assert!(outputs.eq(&positions(&client.request, &harness.limits)));
        }
    }
}

#[test]
fn a_step_with_too_few_prompt_positions_fails() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(scored(request(10, 2, 0)));
    harness.plan();
    let mut done = harness.device.complete();
    done.output.positions.pop();
    harness.handle(penstock_engine::testing::Message::StepDone(done));
    let end = FinishReason::Failed("the step returned 8 prompt positions; its rows count 9".into());
    assert_eq!(read(&mut client).2, Some(end));
}
