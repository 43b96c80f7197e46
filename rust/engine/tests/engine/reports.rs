//! What a request is told of its prompt, when, and at what cost to whom.

use penstock_engine::{Event, FinishReason, Limits, PreemptionMode, PromptPosition, Request, Token};
use penstock_types::{OutputScope, RequestedOutputs};

use crate::harness::{Client, Harness, cached, caching, found, limits};
use crate::oracle::{answer, positions, request};

fn told(request: Request) -> Request {
    let outputs = RequestedOutputs { prompt_logprobs: Some(0), ..RequestedOutputs::default() };
    Request { outputs, ..request }
}

/// Everything that was said, in four parts: chunks of positions, tokens, and the end if it has come.
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
            Event::Rejected(refusal) => panic!("refused: {refusal:?}"),
        }
    }
    (chunks, tokens, end)
}

/// It was told everything, once, and answered.
#[track_caller]
fn check_told(client: &mut Client, limits: &Limits) {
    let (chunks, tokens, end) = read(client);
    assert_eq!(chunks.concat(), positions(&client.request, limits));
    let (expected, reason) = answer(&client.request, limits);
    assert_eq!((tokens, end), (expected, Some(reason)));
}

#[test]
fn a_chunk_of_a_prompt_is_told_of_at_once_and_its_last_position_with_the_first_token() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(told(request(40, 3, 0)));
    harness.run();
    let (chunks, tokens, _) = read(&mut client);
    assert_eq!(chunks.iter().map(Vec::len).collect::<Vec<_>>(), [16, 16, 7]);
    assert_eq!((chunks.concat(), tokens.len()), (positions(&client.request, &harness.limits), 3));
}

#[test]
fn a_request_for_no_token_ends_when_it_is_told_of_its_whole_prompt() {
    let mut harness = Harness::new(Limits { num_blocks: 16, ..limits() });
    let mut client = harness.start(told(request(64, 0, 0)));
    harness.run();
    let (chunks, tokens, end) = read(&mut client);
    assert_eq!((chunks.concat(), tokens), (positions(&client.request, &harness.limits), vec![]));
    assert_eq!((chunks.concat().len(), end), (64, Some(FinishReason::Length)));
    assert!(harness.core.is_idle());
    let stats = harness.stats();
    assert_eq!((stats.prompt_tokens, stats.generation_tokens, stats.steps), (64, 0, 4));
}

#[test]
fn what_is_told_of_is_computed_and_not_taken_from_the_cache_but_left_there() {
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
    assert_eq!(harness.stats().prefix_query_tokens, 2 * 32, "who takes nothing does not ask");
    assert_eq!(harness.stats().prompt_tokens, 2 * 32 + 4);
}

#[test]
fn nothing_is_told_twice_whoever_loses_a_place() {
    for preemption_mode in [PreemptionMode::Recompute, PreemptionMode::Swap] {
        let limits = Limits { num_blocks: 12, host_blocks: 16, preemption_mode, ..caching() };
        for max_tokens in [0, 6] {
            let mut harness = Harness::new(limits.clone());
            let mut client = harness.start(Request { priority: 1, ..told(request(40, max_tokens, 0)) });
            harness.step();
            let mut urgent = harness.start(request(30, 2, 1));
            assert_eq!((harness.stats().preemptions, harness.stats().waiting), (1, 1), "in mid-prompt");
            harness.run();
            assert_eq!(read(&mut urgent).1, answer(&urgent.request, &limits).0);
            check_told(&mut client, &limits);
        }
    }
}

#[test]
fn what_a_forgotten_row_told_is_told_again() {
    let limits = Limits { max_num_seqs: 2, num_blocks: 12, host_blocks: 16, ..caching() };
    let mut harness = Harness::new(limits);
    cached(&mut harness, request(13, 1, 0));
    cached(&mut harness, request(45, 1, 1));
    let mut loading = harness.start(request(19, 4, 0));
    harness.plan();
    let mut client = harness.start(Request { priority: 1, ..told(request(20, 0, 2)) });
    harness.plan();
    let mut urgent = harness.start(request(3, 2, 7));
    assert_eq!((harness.device.num_plans(), harness.stats().preemptions), (2, 1));
    // Whoever had no place then may have relied on the copies that failed.
    assert!(harness.fail("out of order") > 0);
    assert!(matches!(read(&mut loading).2, Some(FinishReason::Failed(_))));
    harness.complete();
    assert!(read(&mut client).0.is_empty(), "its row was forgotten");
    harness.run();
    check_told(&mut client, &harness.limits);
    check_told(&mut urgent, &harness.limits);
}

#[test]
fn a_full_queue_holds_back_what_would_be_told_and_nobody_else() {
    for queue_capacity in 1..4 {
        let mut harness = Harness::new(Limits { queue_capacity, max_num_batched_tokens: 5, ..limits() });
        let mut clients = [0, 3].map(|max_tokens| harness.start(told(request(30, max_tokens, 5))));
        for client in &mut clients {
            let mut events = vec![];
            while !client.is_ended() {
                harness.run();
                events.push(client.pop().expect("every event read makes room for the next"));
            }
            let told = events.iter().flat_map(|event| match event {
                Event::Prompt(positions) => &positions[..],
                _ => &[],
            });
            assert!(told.eq(&positions(&client.request, &harness.limits)));
        }
    }
}

#[test]
fn a_step_that_tells_of_too_few_positions_has_failed() {
    let mut harness = Harness::new(limits());
    let mut client = harness.start(told(request(10, 2, 0)));
    harness.plan();
    let mut done = harness.device.complete();
    done.output.positions.pop();
    harness.handle(penstock_engine::testing::Message::StepDone(done));
    let end = FinishReason::Failed("the step returned 8 prompt positions; its rows count 9".into());
    assert_eq!(read(&mut client).2, Some(end));
}
