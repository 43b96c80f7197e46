//! Beam search on an engine, compared with the enumeration of all outputs.

use std::sync::Arc;

use penstock_engine::request::Request;
use penstock_engine::{Limits, Port, StartError};
use penstock_frontend::Error;
use penstock_frontend::output::{Choice, Milestone, RequestOutput, StopReason};
use penstock_frontend::params::SamplingParams;
use penstock_frontend::prompt::{Mode, Prompt};
use penstock_frontend::selection::BeamSearch;

use crate::support::{END, Setup, VOCABULARY_SIZE, bytes, wait, with_limits};

const LETTERS: [u32; 3] = [b'a' as u32, b'b' as u32, b'c' as u32];
/// As wide as the tree of outputs: at most 3^3 beams run.
const EXHAUSTIVE: usize = 32;

/// Log probabilities of the letters and of the end token, which depend on all tokens.
fn distribution(tokens: &[u32]) -> [(u32, f32); 4] {
    let hash = tokens.iter().fold(17_u64, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3).rotate_left(23)
    });
    let weights = [0, 1, 2, 3].map(|index| 1.0 + ((hash >> (index * 13)) % 97) as f32);
    let sum: f32 = weights.iter().sum();
    let [a, b, c] = LETTERS;
    [(a, weights[0]), (b, weights[1]), (c, weights[2]), (END, weights[3])]
        .map(|(token, weight)| (token, (weight / sum).ln()))
}

fn setup() -> Setup {
    setup_with(|_| {})
}

fn setup_with(change: impl FnOnce(&mut Limits)) -> Setup {
    with_limits(change, |request: &Request, generated| {
        let mut logprobs = vec![f32::NEG_INFINITY; VOCABULARY_SIZE];
        for (token, logprob) in distribution(&[&request.prompt, generated].concat()) {
            logprobs[token as usize] = logprob;
        }
        logprobs
    })
}

fn params(num_beams: usize) -> SamplingParams {
    SamplingParams {
        num_beams,
        n: num_beams,
        max_tokens: Some(3),
        logprobs: true,
        ..SamplingParams::default()
    }
}

fn begin(setup: &Setup, params: &SamplingParams) -> BeamSearch {
    let prompt = Prompt::Text("prompt".to_owned());
    setup.frontend.prepare_beams(params, prompt, Mode::Completion, &mut || true).unwrap()
}

fn step(search: &BeamSearch) -> Vec<Arc<RequestOutput>> {
    let port = Port::with_condvar();
    let states = search.start_step(&port).unwrap();
    states.iter().for_each(|state| wait(state, Milestone::End, &port));
    states.iter().map(|state| Arc::new(state.result().unwrap())).collect()
}

fn run(setup: &Setup, params: &SamplingParams) -> RequestOutput {
    let mut search = begin(setup, params);
    while search.is_running() {
        let outputs = step(&search);
        search.advance(&outputs);
    }
    search.result()
}

/// All outputs that end at `is_end` or at three tokens, with their scores, best first.
fn all_outputs(is_end: impl Fn(&[u32]) -> bool, min_tokens: usize) -> Vec<(f64, Vec<u32>)> {
    let mut outputs = Vec::new();
    let mut prefixes = vec![(0.0, Vec::new())];
    while let Some((total, prefix)) = prefixes.pop() {
        for (token, logprob) in distribution(&[bytes("prompt"), prefix.clone()].concat()) {
            let ids = [&prefix[..], &[token]].concat();
            let total: f64 = total + f64::from(logprob);
            if token == END && prefix.len() < min_tokens {
                continue;
            } else if token == END || is_end(&ids) || ids.len() == 3 {
                outputs.push((total / ids.len() as f64, ids));
            } else {
                prefixes.push((total, ids));
            }
        }
    }
    outputs.sort_by(|one, other| other.0.total_cmp(&one.0));
    outputs
}

/// Compares the best outputs with the enumeration.
fn assert_best(choices: &[Arc<Choice>], expected: &[(f64, Vec<u32>)]) {
    assert_eq!(choices.len(), EXHAUSTIVE.min(expected.len()));
    for (choice, (score, ids)) in choices.iter().zip(expected) {
        assert_eq!((choice.score, &choice.token_ids), (Some(*score), ids));
    }
}

#[test]
fn search_reserves_output_memory_until_it_ends() {
    // Eight of 28 logprobs are counted, each with its token, at 3 positions of 2 beams.
    let bytes = 2 * 3 * 8 * 2 * size_of::<f32>();
    let mut setup = setup_with(|limits| limits.max_output_bytes = bytes + 1);
    setup.frontend.max_logprobs = 28;
    let params = SamplingParams { top_logprobs: Some(28), ..params(2) };
    let prepare = || {
        let prompt = Prompt::Text("prompt".to_owned());
        setup.frontend.prepare_beams(&params, prompt, Mode::Completion, &mut || true)
    };
    let mut first = prepare().unwrap();
    let Err(Error::Start(refused)) = prepare() else { panic!("the budget is exceeded") };
    assert_eq!(refused, StartError::OutputMemory { bytes, reserved: bytes, limit: bytes + 1 });
    while first.is_running() {
        let outputs = step(&first);
        first.advance(&outputs);
    }
    first.close();
    drop(prepare().unwrap());
    drop(prepare().unwrap());
    assert_eq!(setup.frontend.engine.stats().requests_rejected, 1);
}

#[test]
fn search_as_wide_as_the_tree_finds_the_best_outputs() {
    let output = run(&setup(), &params(EXHAUSTIVE));
    assert_best(&output.choices, &all_outputs(|_| false, 0));
    assert_eq!(output.usage.prompt_tokens, 6);
    let completion_tokens: usize = output.choices.iter().map(|choice| choice.token_ids.len()).sum();
    assert_eq!(output.usage.completion_tokens, completion_tokens);
    for choice in &output.choices {
        let (count, is_stopped) = (choice.token_ids.len(), choice.token_ids.ends_with(&[END]));
        let letters: Vec<u8> =
            choice.token_ids[..count - usize::from(is_stopped)].iter().map(|id| *id as u8).collect();
        assert_eq!(choice.text.as_bytes(), letters);
        assert_eq!(choice.finish_reason, if is_stopped { "stop" } else { "length" });
        assert_eq!(choice.logprobs.as_ref().unwrap().len(), count);
        assert_eq!(choice.cumulative_logprob.unwrap() / count as f64, choice.score.unwrap());
    }
}

#[test]
fn stop_strings_end_beams_and_are_cut_off() {
    let params = SamplingParams { stop: vec!["ab".to_owned(), "c".to_owned()], ..params(EXHAUSTIVE) };
    let output = run(&setup(), &params);
    let is_end = |ids: &[u32]| ids.ends_with(&bytes("ab")) || ids.ends_with(&bytes("c"));
    assert_best(&output.choices, &all_outputs(is_end, 0));
    for choice in &output.choices {
        assert!(!choice.text.contains("ab") && !choice.text.contains('c'), "{}", choice.text);
        if let Some(StopReason::Text(stop)) = &choice.stop_reason {
            let whole = format!("{}{stop}", choice.text);
            assert_eq!(bytes(&whole), choice.token_ids);
        }
    }
    let included = run(&setup(), &SamplingParams { include_stop_str_in_output: true, ..params });
    assert!(included.choices.iter().any(|choice| choice.text.ends_with("ab")));
}

#[test]
fn stop_tokens_and_sequences_end_beams_after_min_tokens() {
    let params = SamplingParams {
        stop_token_sequences: vec![bytes("aa"), bytes("b")],
        min_tokens: 2,
        ..params(EXHAUSTIVE)
    };
    let output = run(&setup(), &params);
    let is_end = |ids: &[u32]| ids.len() >= 2 && (ids.ends_with(&bytes("aa")) || ids.ends_with(&bytes("b")));
    assert_best(&output.choices, &all_outputs(is_end, 2));
    for choice in &output.choices {
        let num_stopping = match &choice.stop_reason {
            Some(StopReason::Sequence(ids)) => ids.len(),
            Some(StopReason::Token(token)) => usize::from(*token == END),
            Some(StopReason::Text(_)) | None => 0,
        };
        assert_eq!(choice.text.len(), choice.token_ids.len() - num_stopping);
    }
}

#[test]
fn narrow_search_returns_outputs_with_their_true_scores() {
    let all = all_outputs(|_| false, 0);
    let output = run(&setup(), &SamplingParams { n: 2, top_logprobs: Some(3), ..params(4) });
    assert_eq!(output.choices.len(), 2);
    for choice in &output.choices {
        assert!(all.contains(&(choice.score.unwrap(), choice.token_ids.clone())));
        assert!(choice.top_logprobs.as_ref().unwrap().iter().all(|top| top.len() == 3));
    }
}

#[test]
fn interrupted_search_returns_the_running_beams() {
    let setup = setup();
    let mut search = begin(&setup, &params(3));
    let outputs = step(&search);
    search.advance(&outputs);
    let mut outputs = step(&search);
    let cancelled = Choice { finish_reason: "cancelled".to_owned(), ..(*outputs[1].choices[0]).clone() };
    outputs[1] = Arc::new(RequestOutput { choices: vec![Arc::new(cancelled)], ..(*outputs[1]).clone() });
    search.advance(&outputs);
    assert!(!search.is_running());
    let reasons: Vec<_> = search.result().choices.iter().map(|choice| choice.finish_reason.clone()).collect();
    assert_eq!(reasons.len(), 3);
    assert!(reasons.iter().any(|reason| reason == "cancelled"), "{reasons:?}");
}
