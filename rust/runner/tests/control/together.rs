//! All of it together: nobody disturbs his neighbours, nor whoever comes after him.

use std::sync::Arc;
use std::time::Duration;

use penstock_engine::{Consumer, Engine, Event, FinishReason, Port, PromptPosition, Request, Token};
use penstock_runner::EngineConfig;
use penstock_types::{OutputScope, RequestedOutputs, Sampling};

use crate::common::{TinyModel, request};
use crate::rules::{Thirds, Trouble, drawn, with_everything};
use crate::steps::{Steps, told};

#[test]
fn a_place_that_was_used_with_everything_on_is_as_good_as_new() {
    let plain = || Request {
        outputs: RequestedOutputs { logprobs: Some(2), ..RequestedOutputs::default() },
        ..request(20, 30, 20)
    };
    let guided = |number| {
        let grammar = Some(Arc::new(Thirds(Trouble::Never)) as _);
        Request { grammar, stop_token_ids: vec![], ..with_everything(number, 30, 3) }
    };
    let expected = told(&Steps::of_four().run_plainly(plain()));
    let mut steps = Steps::of_four();
    for number in 0..4 {
        steps.run_plainly(guided(number));
        assert_eq!(told(&steps.run_plainly(plain())), expected);
    }
}

/// Thirty-two requests, no two of which ask for the same.
fn requests() -> impl Iterator<Item = Request> {
    (0..32).map(|number: usize| {
        let every = |nth: usize| number.is_multiple_of(nth);
        let plain = request(number, 10 + number * 3, 12 + number % 7);
        let sampling = Sampling {
            temperature: [0.0, 0.7, 1.0][number % 3],
            top_k: if every(4) { 40 } else { 0 },
            min_p: if every(5) { 0.02 } else { 0.0 },
            repetition_penalty: if every(2) { 1.2 } else { 1.0 },
            frequency_penalty: if every(3) { 0.3 } else { 0.0 },
            no_repeat_ngram_size: if every(6) { 2 } else { 0 },
            logit_bias: if every(7) { vec![(number as u32, 4.0)] } else { vec![] },
            ..plain.sampling.clone()
        };
        let outputs = RequestedOutputs {
            logprobs: every(2).then_some(number as u32 % 4),
            processed_logprobs: every(4),
            hidden_states: every(8).then_some(OutputScope::Generation),
            logits: every(9).then_some(OutputScope::Generation),
            prompt_logprobs: every(3).then_some(number as u32 % 3),
        };
        let grammar = (number % 5 == 1).then(|| Arc::new(Thirds(Trouble::Never)) as _);
        let processors = if number % 6 == 1 { vec![drawn(0.02)] } else { vec![] };
        Request { sampling, outputs, grammar, processors, ..plain }
    })
}

/// All bits of what each was told, in words.
fn run(engine: &Engine, requests: Vec<Request>) -> Vec<String> {
    let port = Port::with_condvar();
    let start = |request| engine.start_request(request, &port).unwrap();
    let mut consumers: Vec<(Consumer, Vec<PromptPosition>, Vec<Token>)> =
        requests.into_iter().map(|request| (start(request), vec![], vec![])).collect();
    let mut open = consumers.len();
    while open > 0 {
        port.wait(None);
        port.clear();
        for (consumer, positions, tokens) in &mut consumers {
            while let Some(event) = consumer.pop() {
                match event {
                    Event::Admitted => {}
                    Event::Prompt(next) => positions.extend(next),
                    Event::Token(token) => tokens.push(token),
                    Event::Finished(finish) => {
                        assert_eq!(finish.reason, FinishReason::Length);
                        open -= 1;
                    }
                    Event::Rejected(refusal) => panic!("{refusal:?}"),
                }
            }
        }
    }
    consumers.iter().map(|(_, positions, tokens)| format!("{positions:?} {tokens:?}")).collect()
}

fn engine(num_speculative_tokens: usize) -> Engine {
    let options = EngineConfig {
        threads: Some(2),
        max_num_seqs: Some(32),
        max_num_batched_tokens: Some(100),
        prefix_cache_ttl: Some(Duration::from_secs(300)),
        num_speculative_tokens: (num_speculative_tokens > 0).then_some(num_speculative_tokens),
        ..EngineConfig::default()
    };
    TinyModel::write().launch(&options).unwrap().0
}

#[test]
fn requests_that_all_ask_for_something_else_get_together_what_they_get_alone_with_guesses_and_without() {
    let plain = engine(0);
    let alone: Vec<String> = requests().flat_map(|request| run(&plain, vec![request])).collect();
    assert_eq!(run(&plain, requests().collect()), alone);
    let guessing = engine(8);
    assert_eq!(run(&guessing, requests().collect()), alone);
    for (request, alone) in requests().zip(&alone) {
        assert_eq!(&run(&guessing, vec![request])[0], alone);
    }
}

#[test]
fn what_repeats_itself_is_guessed_and_told_as_if_it_were_not() {
    let repetitive = || {
        let sampling = Sampling { allowed_token_ids: Some(vec![5]), ..Sampling::default() };
        let outputs = RequestedOutputs { logprobs: Some(2), ..RequestedOutputs::default() };
        Request { sampling, outputs, ..request(40, 10, 60) }
    };
    let (plain, guessing) = (engine(0), engine(8));
    assert_eq!(run(&guessing, vec![repetitive()]), run(&plain, vec![repetitive()]));
    assert_eq!(plain.stats().accepted_tokens, 0);
    assert!(guessing.stats().accepted_tokens > 30, "{:?}", guessing.stats());
}
