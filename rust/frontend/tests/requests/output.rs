//! The output side: detokenisation, stop conditions, parsing, choices, chunks.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use penstock_engine::Port;
use penstock_frontend::output::{Choice, ChoiceEnd, Listener, Milestone, StopReason};
use penstock_frontend::params::{Function, SamplingParams, Tools};
use penstock_frontend::prompt::Mode;
use penstock_types::Json;

use crate::support::{END, THINK, bytes, only, saying, wait, with_model};

fn params() -> SamplingParams {
    SamplingParams { max_tokens: Some(40), ..SamplingParams::default() }
}

/// Text, finish reason and stop reason of an output.
fn ending(choice: &Choice) -> (&str, &str, Option<StopReason>) {
    (&choice.text, &choice.finish_reason, choice.stop_reason.clone())
}

fn text(text: &str) -> Option<StopReason> {
    Some(StopReason::Text(text.to_owned()))
}

#[test]
fn an_end_token_ends_the_output_and_has_no_text() {
    let setup = saying(bytes("hello"));
    let output = setup.generate(&params());
    let choice = &output.choices[0];
    assert_eq!(ending(choice), ("hello", "stop", Some(StopReason::Token(END))));
    assert_eq!(choice.token_ids, [bytes("hello"), vec![END]].concat());
    assert_eq!((output.usage.prompt_tokens, output.usage.completion_tokens), (3, 6));
}

#[test]
fn max_tokens_ends_the_output() {
    let output = saying(bytes("hello")).generate(&SamplingParams { max_tokens: Some(3), ..params() });
    assert_eq!(ending(&output.choices[0]), ("hel", "length", None));
}

#[test]
fn the_stop_string_that_is_completed_first_ends_the_text() {
    let setup = saying(bytes("one two three four"));
    let stop = vec!["three".to_owned(), "wo t".to_owned(), "o t".to_owned()];
    let output = setup.generate(&SamplingParams { stop: stop.clone(), ..params() });
    // Two strings are completed by the same character: the longer one is reported.
    assert_eq!(ending(&output.choices[0]), ("one t", "stop", text("wo t")));
    assert_eq!(output.choices[0].token_ids, bytes("one two t"));
    let included = setup.generate(&SamplingParams { stop, include_stop_str_in_output: true, ..params() });
    assert_eq!(ending(&included.choices[0]), ("one two t", "stop", text("wo t")));
}

#[test]
fn stop_sequence_ends_the_output_without_text_unless_included() {
    let setup = saying(bytes("abcabdabe"));
    let sequences = vec![bytes("abd"), bytes("be")];
    let output = setup.generate(&SamplingParams { stop_token_sequences: sequences.clone(), ..params() });
    let reason = Some(StopReason::Sequence(bytes("abd")));
    assert_eq!(ending(&output.choices[0]), ("abc", "stop", reason.clone()));
    assert_eq!(output.choices[0].token_ids, bytes("abcabd"));
    let included = SamplingParams { include_stop_str_in_output: true, ..params() };
    let included = setup.generate(&SamplingParams { stop_token_sequences: sequences, ..included });
    assert_eq!(ending(&included.choices[0]), ("abcabd", "stop", reason));
}

#[test]
fn included_stop_token_can_complete_a_stop_string() {
    let setup = saying(bytes("ab.c"));
    let stop = |included, stop: &[&str]| {
        let stop = stop.iter().map(|stop| (*stop).to_owned()).collect();
        let params = SamplingParams { stop_token_ids: bytes("."), stop, ..params() };
        setup.generate(&SamplingParams { include_stop_str_in_output: included, ..params })
    };
    let token = Some(StopReason::Token(u32::from(b'.')));
    assert_eq!(ending(&stop(false, &[]).choices[0]), ("ab", "stop", token.clone()));
    assert_eq!(ending(&stop(true, &[]).choices[0]), ("ab.", "stop", token.clone()));
    assert_eq!(ending(&stop(false, &["b."]).choices[0]), ("ab", "stop", token));
    assert_eq!(ending(&stop(true, &["b."]).choices[0]), ("ab.", "stop", text("b.")));
}

#[test]
fn an_incomplete_character_at_the_end_is_replaced() {
    let setup = saying(bytes("aé"));
    let output = setup.generate(&SamplingParams { max_tokens: Some(2), ..params() });
    assert_eq!(ending(&output.choices[0]), ("a\u{fffd}", "length", None));
    // The replacement can complete a stop string.
    let stop = vec!["\u{fffd}".to_owned()];
    let output = setup.generate(&SamplingParams { max_tokens: Some(2), stop, ..params() });
    assert_eq!(ending(&output.choices[0]), ("a", "stop", text("\u{fffd}")));
}

#[test]
fn chunks_add_up_to_the_result_and_hold_back_possible_stops() {
    let setup = saying(bytes("aé abx abc rest"));
    let params = SamplingParams {
        stop_token_sequences: vec![bytes("abc")],
        stop: vec!["never".to_owned()],
        logprobs: true,
        ..params()
    };
    let port = Port::with_condvar();
    let state = setup.start("p", &params, Mode::Completion, &port).unwrap();
    let (mut whole, mut tokens, mut logprobs) = (String::new(), Vec::new(), Vec::new());
    loop {
        wait(&state, Milestone::Chunk, &port);
        let Some(chunk) = state.take() else { break };
        whole += &chunk.text;
        tokens.extend(chunk.token_ids);
        logprobs.extend(chunk.logprobs.unwrap());
    }
    let output = state.result().unwrap();
    let choice = &output.choices[0];
    assert_eq!(whole, "aé abx ");
    assert_eq!(
        (&*choice.text, &choice.token_ids, choice.logprobs.as_ref()),
        (&*whole, &tokens, Some(&logprobs))
    );
    assert_eq!(choice.cumulative_logprob, Some(0.0));
}

#[test]
fn each_pending_read_is_followed_by_a_drain_that_names_it() {
    let setup = saying(bytes("abcdefghijklmnopqrstuvwxyz"));
    let listener = Listener::new(Port::with_condvar());
    let state = Arc::new(setup.start("p", &params(), Mode::Completion, listener.port()).unwrap());
    listener.add(&state);
    let mut whole = String::new();
    loop {
        match state.poll_next() {
            Poll::Ready(Some(chunk)) => whole += &chunk.text,
            Poll::Ready(None) => break,
            Poll::Pending => {
                assert!(!state.is_readable());
                while listener.drain() != [state.id] {
                    assert!(
                        listener.port().wait(Some(Duration::from_secs(10))),
                        "no drain named the request"
                    );
                }
                assert!(state.is_readable());
            }
        }
    }
    assert_eq!(whole, "abcdefghijklmnopqrstuvwxyz");
    assert!(state.is_over() && state.is_readable());
}

#[test]
fn echo_puts_the_prompt_first_and_not_into_the_content() {
    let params = SamplingParams { echo: true, stop: vec!["b".to_owned()], ..params() };
    let output = saying(bytes("xyz")).generate(&params);
    assert_eq!(ending(&output.choices[0]), ("abcxyz", "stop", Some(StopReason::Token(END))));
    assert_eq!(&*output.choices[0].content, "xyz");
}

#[test]
fn choices_end_independently_and_are_counted_together() {
    let setup = with_model(|request, generated| {
        let length = request.sampling.seed as usize;
        only(if generated.len() < length { u32::from(b'a') + length as u32 } else { END })
    });
    let output = setup.generate(&SamplingParams { n: 3, seed: Some(1), ..params() });
    let texts: Vec<_> = output.choices.iter().map(|choice| &*choice.text).collect();
    assert_eq!(texts, ["b", "cc", "ddd"]);
    let indices: Vec<_> = output.choices.iter().map(|choice| (choice.index, choice.seed)).collect();
    assert_eq!(indices, [(0, 1), (1, 2), (2, 3)]);
    assert_eq!((output.usage.prompt_tokens, output.usage.completion_tokens), (3, 2 + 3 + 4));
}

#[test]
fn chat_output_is_parsed_into_reasoning_content_and_calls() {
    let script = [
        vec![THINK],
        bytes("hm</think>Hi<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"),
    ];
    let setup = saying(script.concat());
    let function = Function { name: "f".to_owned(), parameters: "{}".to_owned(), ignores_unsupported: false };
    let tools = Some(Tools { functions: vec![function], json: Json("[]".to_owned()) });
    let params = SamplingParams { tools, max_tokens: Some(100), ..params() };
    let output = setup.run("question", &params, Mode::Chat);
    let choice = &output.choices[0];
    assert_eq!((&*choice.reasoning, &*choice.content), ("hm", "Hi"));
    assert_eq!(choice.tool_calls.len(), 1);
    assert_eq!((&*choice.tool_calls[0].name, &*choice.tool_calls[0].arguments), ("f", "{\"a\": 1}"));
    // The special token is part of the parsed text only.
    assert!(choice.text.starts_with("hm</think>"), "{}", choice.text);
    let completion = setup.run("question", &SamplingParams { tools: None, ..params }, Mode::Completion);
    assert_eq!(completion.choices[0].content, completion.choices[0].text);
}

#[test]
fn a_cancelled_request_keeps_the_output_so_far() {
    let setup = saying(bytes("abcdefghijklmnopqrstuvwxyz"));
    let port = Port::with_condvar();
    let state = setup.start("p", &params(), Mode::Completion, &port).unwrap();
    // The queue holds 8 tokens, so the sequence pauses until it is read.
    wait(&state, Milestone::Chunk, &port);
    state.cancel();
    wait(&state, Milestone::End, &port);
    let output = state.result().unwrap();
    assert_eq!(output.choices[0].finish_reason, "cancelled");
    assert!("abcdefghijklmnopqrstuvwxyz".starts_with(&*output.choices[0].text));
    assert!(
        matches!(state.end(), Some(ChoiceEnd::Finished(ending, _)) if ending.finish_reason == "cancelled")
    );
}

#[test]
fn scoring_returns_a_logprob_for_each_token_after_the_first() {
    let setup = saying([]);
    let output =
        Arc::new(setup.run("abcd", &SamplingParams { max_tokens: Some(1), ..params() }, Mode::Scoring));
    let score = penstock_frontend::selection::score(&output).unwrap();
    assert_eq!(score.token_ids, bytes("abcd"));
    assert_eq!(score.logprobs, [None, Some(-0.5), Some(-1.0), Some(-1.5)]);
    assert_eq!(score.perplexity, Some(1.0_f64.exp()));
    assert!(output.choices[0].token_ids.is_empty());
}
