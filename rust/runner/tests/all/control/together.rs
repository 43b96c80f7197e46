//! Everything together: requests do not influence others in the batch or in their slot.

use std::sync::Arc;

use penstock_engine::{Consumer, Engine, Event, FinishReason, Port, PromptPosition, Request};
use penstock_types::Token;
use penstock_types::{EngineConfig, Speculation};
use penstock_types::{OutputScope, RequestedOutputs, Sampling};

use super::device;
use super::rules::{Fault, Thirds, pulled, with_everything};
use super::steps::{Steps, bits_of};
use crate::common::{TinyModel, request};

#[test]
fn reused_slot_has_no_trace_of_its_former_request() {
    let plain = || Request {
        outputs: RequestedOutputs { logprobs: Some(2), ..RequestedOutputs::default() },
        ..request(20, 30, 20)
    };
    let constrained = |number| {
        let grammar = Some(Arc::new(Thirds(Fault::Never)) as _);
        Request { grammar, stop_token_ids: vec![], ..with_everything(number, 30, 3) }
    };
    let expected = bits_of(&Steps::of_four().run_plainly(plain()));
    let mut steps = Steps::of_four();
    for number in 0..4 {
        steps.run_plainly(constrained(number));
        assert_eq!(bits_of(&steps.run_plainly(plain())), expected);
    }
}

/// Thirty-two requests with different parameters.
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
            embeddings: every(10).then_some(OutputScope::All),
            prompt_logprobs: every(3).then_some(number as u32 % 3),
        };
        let grammar = (number % 5 == 1).then(|| Arc::new(Thirds(Fault::Never)) as _);
        let processors = if number % 6 == 1 { vec![pulled(0.02)] } else { vec![] };
        Request { sampling, outputs, grammar, processors, ..plain }
    })
}

/// All outputs of each request as text.
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
    let config = EngineConfig {
        threads: Some(2),
        max_num_seqs: Some(32),
        max_num_batched_tokens: Some(100),
        speculation: (num_speculative_tokens > 0).then_some(Speculation::Ngram),
        num_speculative_tokens: (num_speculative_tokens > 0).then_some(num_speculative_tokens),
        ..EngineConfig::default()
    };
    TinyModel::write().launch_on(device(2), &config.into()).unwrap().0
}

#[test]
fn mixed_batch_has_the_bits_of_single_requests_for_any_drafts() {
    let plain = engine(0);
    let alone: Vec<String> = requests().flat_map(|request| run(&plain, vec![request])).collect();
    assert_eq!(run(&plain, requests().collect()), alone);
    let drafting = engine(8);
    assert_eq!(run(&drafting, requests().collect()), alone);
    for (request, alone) in requests().zip(&alone) {
        assert_eq!(&run(&drafting, vec![request])[0], alone);
    }
}

#[test]
fn repetitive_output_is_drafted_and_has_the_same_bits() {
    let repetitive = || {
        let sampling = Sampling { allowed_token_ids: Some(vec![5]), ..Sampling::default() };
        let outputs = RequestedOutputs { logprobs: Some(2), ..RequestedOutputs::default() };
        Request { sampling, outputs, ..request(40, 10, 60) }
    };
    let (plain, drafting) = (engine(0), engine(8));
    assert_eq!(run(&drafting, vec![repetitive()]), run(&plain, vec![repetitive()]));
    assert_eq!(plain.stats().accepted_tokens, 0);
    assert!(drafting.stats().accepted_tokens > 30, "{:?}", drafting.stats());
}
