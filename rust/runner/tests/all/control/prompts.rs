//! Prompt outputs.

use penstock_checkpoint::Checkpoint;
use penstock_engine::{PromptPosition, Request};
use penstock_types::EngineConfig;
use penstock_types::{OutputScope, RequestedOutputs};

use super::steps::{Row, Sequence, Steps, bits_of};
use crate::common::{TinyModel, VOCABULARY, request};

const ALL: RequestedOutputs = RequestedOutputs {
    logprobs: Some(2),
    prompt_logprobs: Some(2),
    processed_logprobs: false,
    logits: Some(OutputScope::All),
    hidden_states: Some(OutputScope::All),
    embeddings: Some(OutputScope::All),
};

/// Raw logits of every position, computed without sampling.
fn logits(tokens: &[u32]) -> Vec<Vec<f32>> {
    let model = TinyModel::write();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let logits = penstock_runner::logits(&checkpoint, tokens, &EngineConfig::default(), 50).unwrap();
    logits.chunks(VOCABULARY).map(<[f32]>::to_vec).collect()
}

fn log_softmax(logits: &[f32], id: u32) -> f64 {
    let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
    f64::from(logits[id as usize]) - sum.ln()
}

#[test]
fn prompt_outputs_match_logits_for_every_chunk_size() {
    let prompt = request(1, 100, 0).prompt;
    let expected = logits(&prompt);
    let mut steps = Steps::of_four();
    let scored = || Request { outputs: ALL, ..request(1, 100, 0) };
    let whole = steps.run_plainly(scored());
    assert_eq!((whole.positions.len(), whole.tokens.len()), (100, 0));
    for (index, (position, expected)) in whole.positions.iter().zip(&expected).enumerate() {
        let details = position.details.as_ref().unwrap();
        assert_eq!(&details.logits, expected, "position {index}");
        assert_eq!(details.hidden_state.len(), 64);
        let Some(next) = prompt.get(index + 1) else {
            assert!(position.logprob.is_nan() && details.top.is_empty(), "nothing follows");
            continue;
        };
        assert!((f64::from(position.logprob) - log_softmax(expected, *next)).abs() < 1e-5);
        let best = (0..VOCABULARY).max_by(|a, b| expected[*a].total_cmp(&expected[*b])).unwrap() as u32;
        assert_eq!((details.top.len(), details.top[0].0), (2, best));
        assert!((f64::from(details.top[0].1) - log_softmax(expected, best)).abs() < 1e-5);
    }
    for chunk in [1, 7, 33] {
        assert_eq!(bits_of(&steps.run(scored(), chunk, |_| vec![])), bits_of(&whole), "in chunks of {chunk}");
    }
}

#[test]
fn scoring_generated_text_gives_the_bits_of_generating_it() {
    let mut steps = Steps::of_four();
    let generated = steps.run_plainly(Request { outputs: ALL, ..request(2, 40, 30) });
    assert_eq!(generated.positions.len(), 39, "the last position is reported with the first token");
    let prompt: Vec<u32> = generated.request.prompt.iter().copied().chain(generated.ids()).collect();
    let scored = steps.run_plainly(Request { outputs: ALL, prompt: prompt.into(), ..request(2, 40, 0) });
    let generated: Vec<PromptPosition> = generated
        .positions
        .into_iter()
        .chain(
            generated
                .tokens
                .into_iter()
                .map(|token| PromptPosition { logprob: token.logprob, details: token.details }),
        )
        .collect();
    assert_eq!(scored.positions[..generated.len()], generated);
}

#[test]
fn only_requested_outputs_are_returned() {
    let mut steps = Steps::of_four();
    let mut details = |outputs| {
        let sequence = steps.run_plainly(Request { outputs, ..request(3, 5, 2) });
        let lens = |details: &Option<Box<penstock_types::TokenDetails>>| {
            details
                .as_ref()
                .map(|details| (details.top.len(), details.logits.len(), details.hidden_state.len()))
        };
        let has_embedding = |details: &Option<Box<penstock_types::TokenDetails>>| {
            details.as_ref().is_some_and(|details| !details.embedding.is_empty())
        };
        assert!(!sequence.positions.iter().any(|position| has_embedding(&position.details)));
        assert!(!sequence.tokens.iter().any(|token| has_embedding(&token.details)));
        let positions: Vec<_> = sequence.positions.iter().map(|position| lens(&position.details)).collect();
        let tokens: Vec<_> = sequence.tokens.iter().map(|token| lens(&token.details)).collect();
        (positions, tokens)
    };
    let nothing = RequestedOutputs::default();
    let (logits, hidden) = (Some((0, VOCABULARY, 0)), Some((0, 0, 64)));
    assert_eq!(details(nothing), (vec![], vec![None, None]));
    assert_eq!(details(RequestedOutputs { logprobs: Some(0), ..nothing }), (vec![], vec![None, None]));
    assert_eq!(
        details(RequestedOutputs { prompt_logprobs: Some(0), ..nothing }),
        (vec![None; 4], vec![None, None])
    );
    let of_prompt = RequestedOutputs { logits: Some(OutputScope::Prompt), ..nothing };
    assert_eq!(details(of_prompt), (vec![logits; 4], vec![logits, None]));
    let of_output = RequestedOutputs { hidden_states: Some(OutputScope::Generation), ..nothing };
    assert_eq!(details(of_output), (vec![], vec![hidden, hidden]));
}

#[test]
fn embeddings_are_the_rows_of_the_table() {
    let model = TinyModel::write();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let table = checkpoint.tensor("model.embed_tokens.weight").unwrap();
    let row_of = |token: u32| {
        let mut row = vec![0.0; table.columns()];
        table.read_rows(token as usize..token as usize + 1, &mut row);
        row
    };
    let mut steps = Steps::of_four();
    for (scope, first, last) in [
        (OutputScope::Prompt, 0, 20),
        (OutputScope::Generation, 19, 20 + 12 - 1),
        (OutputScope::All, 0, 20 + 12 - 1),
    ] {
        let outputs = RequestedOutputs { embeddings: Some(scope), ..RequestedOutputs::default() };
        let request = || Request { outputs, stop_token_ids: vec![], ..request(5, 20, 12) };
        let whole = steps.run_plainly(request());
        let inputs: Vec<u32> = whole.request.prompt.iter().copied().chain(whole.ids()).collect();
        let details = whole.positions.iter().map(|position| &position.details);
        let details = details.chain(whole.tokens.iter().map(|token| &token.details));
        let rows: Vec<_> = details.filter_map(|details| Some(details.as_ref()?.embedding.clone())).collect();
        let expected: Vec<_> = inputs[first..last].iter().map(|token| row_of(*token)).collect();
        assert_eq!(rows, expected, "{scope:?}");
        assert_eq!(bits_of(&steps.run(request(), 6, |_| vec![])), bits_of(&whole), "{scope:?} in chunks");
    }
}

#[test]
fn refused_memory_for_embeddings_ends_only_their_request() {
    let mut steps = Steps::of_four();
    let neighbour = || Request { stop_token_ids: vec![], ..request(17, 20, 6) };
    let alone = steps.run_plainly(neighbour());
    steps.refuse_details(64);
    let embeddings = Some(OutputScope::All);
    let outputs = RequestedOutputs { embeddings, ..RequestedOutputs::default() };
    let mut refused = Sequence::new(Request { outputs, ..request(16, 20, 6) }, 3);
    let mut other = Sequence::new(neighbour(), 1);
    for _ in 0..6 {
        let row = |sequence| Row { sequence, chunk: usize::MAX, drafts: vec![] };
        steps.step(&mut [row(&mut refused), row(&mut other)]);
    }
    let failure = "out of memory: 256 bytes for the requested tensors";
    assert_eq!(refused.failure.as_deref(), Some(failure));
    assert!(refused.tokens.is_empty() && refused.positions.is_empty());
    assert_eq!(bits_of(&other), bits_of(&alone));
}

#[test]
fn logits_are_equal_for_every_chunk_size() {
    let prompt = request(4, 90, 1).prompt;
    let model = TinyModel::write();
    let checkpoint = Checkpoint::open(model.path()).unwrap();
    let in_chunks =
        |chunk| penstock_runner::logits(&checkpoint, &prompt, &EngineConfig::default(), chunk).unwrap();
    assert_eq!(in_chunks(90), in_chunks(8));
}

#[test]
fn refused_memory_ends_only_the_request_that_needs_it() {
    let mut steps = Steps::of_four();
    let outputs = RequestedOutputs { hidden_states: Some(OutputScope::All), ..RequestedOutputs::default() };
    let neighbour = || Request { outputs, stop_token_ids: vec![], ..request(17, 20, 6) };
    let alone = steps.run_plainly(neighbour());
    steps.refuse_details(VOCABULARY);
    for logits in [OutputScope::Prompt, OutputScope::Generation] {
        let outputs = RequestedOutputs { logits: Some(logits), ..outputs };
        let mut refused = Sequence::new(Request { outputs, ..request(16, 20, 6) }, 3);
        let mut other = Sequence::new(neighbour(), 1);
        for _ in 0..6 {
            let row = |sequence| Row { sequence, chunk: usize::MAX, drafts: vec![] };
            steps.step(&mut [row(&mut refused), row(&mut other)]);
        }
        let bytes = VOCABULARY * size_of::<f32>();
        let failure = format!("out of memory: {bytes} bytes for the requested tensors");
        assert_eq!(refused.failure, Some(failure));
        assert!(refused.tokens.is_empty() && refused.positions.is_empty());
        assert_eq!(bits_of(&other), bits_of(&alone));
    }
}
