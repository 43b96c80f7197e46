//! Resolution with the defaults and the limits of a model.

use penstock_types::{GenerationConfig, LogprobsMode, RequestedOutputs, Sampling};
use serde_json::json;

use super::params;
use crate::params::{ModelLimits, ResolvedParams, SamplingParams};

fn generation() -> GenerationConfig {
    GenerationConfig {
        eos_token_ids: vec![9, 4, 1000],
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.9),
        max_new_tokens: Some(50),
        max_length: Some(60),
        ..GenerationConfig::default()
    }
}

fn limits(generation: &GenerationConfig) -> ModelLimits<'_> {
    ModelLimits {
        generation,
        max_model_len: 100,
        vocabulary_size: 500,
        hidden_size: 8,
        max_logprobs: 20,
        max_output_bytes: usize::MAX,
    }
}

fn resolve(params: &SamplingParams, generation: &GenerationConfig, num_prompt: usize) -> ResolvedParams {
    params.resolve(&limits(generation), num_prompt, 77).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn parameters_that_are_not_set_come_from_the_model() {
    let sampling = resolve(&params(json!({})), &generation(), 10).sampling;
    let expected = Sampling { temperature: 0.6, top_k: 20, top_p: 0.9, seed: 77, ..Sampling::default() };
    assert_eq!(sampling, expected);
    let sampling = resolve(&params(json!({"temperature": 0.1, "top_k": 0, "seed": 5})), &generation(), 10);
    assert_eq!((sampling.sampling.temperature, sampling.sampling.top_k), (0.1, 0));
    assert_eq!(sampling.sampling.seed, 5);
}

#[test]
fn parameters_without_a_default_of_the_model_are_neutral() {
    let sampling = resolve(&params(json!({})), &GenerationConfig::default(), 10).sampling;
    assert_eq!(sampling, Sampling { seed: 77, ..Sampling::default() });
}

#[test]
fn greedy_model_samples_only_with_a_filter_or_temperature_set() {
    let greedy = GenerationConfig { do_sample: Some(false), ..generation() };
    let temperature = |fields| resolve(&params(fields), &greedy, 10).sampling.temperature;
    assert_eq!(temperature(json!({})), 0.0);
    assert_eq!(temperature(json!({"top_k": 5})), 0.6);
    assert_eq!(temperature(json!({"temperature": 0.3})), 0.3);
}

#[test]
fn stop_tokens_include_end_tokens_of_the_vocabulary() {
    let ids = |fields| resolve(&params(fields), &generation(), 10).stop_token_ids;
    assert_eq!(ids(json!({"stop_token_ids": [7, 9]})), [4, 7, 9]);
    assert_eq!(ids(json!({"stop_token_ids": [7, 9], "ignore_eos": true})), [7, 9]);
    assert_eq!(ids(json!({"stop_token_ids": [7], "eos_token_ids": [11, 4]})), [4, 7, 11]);
    assert_eq!(
        ids(json!({"stop_token_ids": [7], "eos_token_ids": [11]})),
        [7, 11],
        "in place of the model's"
    );
    assert_eq!(ids(json!({"eos_token_ids": []})), [0; 0]);
    let error = params(json!({"eos_token_ids": [3, 500]})).resolve(&limits(&generation()), 1, 0).unwrap_err();
    let expected = "eos_token_ids=[3, 500] is not allowed: it must be ids below the vocabulary's 500";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn numbers_of_logprobs_are_limited_by_the_engine() {
    let generation = GenerationConfig::default();
    let check = |fields, max_logprobs| {
        let model = ModelLimits { max_logprobs, ..limits(&generation) };
        params(fields).resolve(&model, 10, 0).map(|resolved| resolved.outputs)
    };
    let top = |count| json!({"logprobs": true, "top_logprobs": count});
    assert_eq!(check(top(5), 5).map(|outputs| outputs.logprobs), Ok(Some(5)));
    let expected =
        "top_logprobs=6 is not allowed: it must be at most max_logprobs=5, an option of the engine";
    assert_eq!(check(top(6), 5).unwrap_err().to_string(), expected);
    assert_eq!(check(json!({"prompt_logprobs": 6}), 5).unwrap_err().field, "prompt_logprobs");
    assert_eq!(check(json!({"prompt_logprobs": 500}), u32::MAX).unwrap().prompt_logprobs, Some(500));
}

#[test]
fn long_lists_of_logprobs_are_limited_in_size() {
    let generation = GenerationConfig::default();
    let model = ModelLimits { max_model_len: 1 << 20, max_logprobs: u32::MAX, ..limits(&generation) };
    let resolve = |fields| params(fields).resolve(&model, 1024, 0);
    let top = |count: u32, max_tokens| {
        resolve(json!({"logprobs": true, "top_logprobs": count, "max_tokens": max_tokens}))
    };
    // Eight bytes each, beyond the first 20.
    assert!(top((1 << 17) + 20, 1024).is_ok());
    assert_eq!(top((1 << 17) + 20, 1025).unwrap_err().field, "top_logprobs");
    assert!(top(20, 1 << 19).is_ok());
    let prompt = |count: u32| resolve(json!({"prompt_logprobs": count, "max_tokens": 1}));
    assert!(prompt((1 << 17) + 20).is_ok());
    assert_eq!(prompt((1 << 17) + 21).unwrap_err().field, "prompt_logprobs");
}

#[test]
fn output_bytes_are_resolved_and_limited_by_the_engine() {
    let generation = generation();
    let resolve = |max_output_bytes, max_tokens: usize| {
        let fields = json!({"output_logits": "generation", "n": 2, "max_tokens": max_tokens});
        let model = ModelLimits { max_output_bytes, ..limits(&generation) };
        params(fields).resolve(&model, 2, 0)
    };
    let most = 2 * 3 * 500 * 4;
    assert_eq!(resolve(most, 3).unwrap().output_bytes, most);
    let error = resolve(most, 4).unwrap_err();
    assert_eq!(error.field, "output_logits");
    assert!(error.limit.ends_with("would take 16000 bytes, the maximum is 12000"), "{error}");
}

#[test]
fn max_tokens_defaults_to_the_models_and_fits_the_length() {
    let max_tokens = |fields, generation: &GenerationConfig, num_prompt| {
        resolve(&params(fields), generation, num_prompt).max_tokens
    };
    let model = generation();
    let by_length = GenerationConfig { max_new_tokens: None, ..generation() };
    assert_eq!(max_tokens(json!({"max_tokens": 7}), &model, 10), 7);
    assert_eq!(max_tokens(json!({}), &model, 10), 50);
    assert_eq!(max_tokens(json!({}), &model, 70), 30);
    assert_eq!(max_tokens(json!({}), &by_length, 10), 50);
    assert_eq!(max_tokens(json!({}), &GenerationConfig::default(), 10), 90);
    assert_eq!(max_tokens(json!({"max_tokens": 1000}), &model, 10), 90);
    assert_eq!(max_tokens(json!({"max_length": 15}), &model, 10), 5);
    assert_eq!(max_tokens(json!({"max_length": 15, "max_tokens": 3}), &model, 10), 3);
    assert_eq!(max_tokens(json!({}), &model, 100), 1);
    let error = params(json!({"max_length": 10})).resolve(&limits(&model), 10, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "max_length=10 is not allowed: it must be more than the 10 tokens of the prompt"
    );
}

#[test]
fn logits_and_hidden_states_are_limited_in_size() {
    let generation = GenerationConfig::default();
    let huge = ModelLimits { max_model_len: 1 << 20, vocabulary_size: 1 << 18, ..limits(&generation) };
    let size = |max_tokens| {
        params(json!({"output_logits": "generation", "max_tokens": max_tokens})).resolve(&huge, 1, 0)
    };
    assert!(size(1024).is_ok());
    let error = size(1025).unwrap_err();
    assert_eq!(error.field, "output_logits");
    assert!(error.limit.ends_with("would take 1074790400 bytes, the maximum is 1073741824"), "{error}");
}

#[test]
fn filled_parameters_resolve_to_the_same_values() {
    let params = params(json!({"n": 2, "top_p": 0.5, "stop": "x"}));
    let resolved = resolve(&params, &generation(), 10);
    let filled = params.filled(&resolved);
    assert_eq!((filled.temperature, filled.top_k, filled.top_p), (Some(0.6), Some(20), Some(0.5)));
    assert_eq!((filled.max_tokens, filled.seed), (Some(50), Some(77)));
    assert_eq!(
        resolve(&filled, &GenerationConfig { eos_token_ids: vec![4, 9], ..Default::default() }, 10),
        resolved
    );
}

#[test]
fn outputs_follow_from_the_logprobs_parameters() {
    let outputs = |fields| resolve(&params(fields), &generation(), 10).outputs;
    assert_eq!(outputs(json!({})), RequestedOutputs::default());
    let fields =
        json!({"logprobs": true, "top_logprobs": 3, "prompt_logprobs": 0, "logprobs_mode": "processed"});
    let expected = RequestedOutputs {
        logprobs: Some(3),
        prompt_logprobs: Some(0),
        processed_logprobs: true,
        ..RequestedOutputs::default()
    };
    assert_eq!(outputs(fields), expected);
}

#[test]
fn choices_differ_in_seeds_and_the_first_has_prompt_outputs() {
    let resolved =
        resolve(&params(json!({"n": 3, "seed": u64::MAX, "prompt_logprobs": 1})), &generation(), 2);
    let first = resolved.request([1, 2].into());
    assert_eq!((first.choice_seed(0), first.choice_outputs(0).prompt_logprobs), (u64::MAX, Some(1)));
    assert_eq!((first.choice_seed(1), first.choice_outputs(1).prompt_logprobs), (0, None));
    assert_eq!((first.max_tokens, first.stop_token_ids.as_slice()), (50, &[4, 9][..]));
}

#[test]
fn beam_step_generates_one_greedy_token_with_the_masks() {
    let asked = params(json!({
        "num_beams": 4, "n": 2, "length_penalty": 2.0, "max_tokens": 9, "min_tokens": 3, "stop": "a",
        "stop_token_ids": [1], "stop_token_sequences": [[2]], "bad_token_ids": [3], "logprobs": true,
    }));
    let step = asked.for_beams();
    assert_eq!((step.n, step.num_beams, step.max_tokens, step.min_tokens), (1, 1, Some(1), 0));
    assert_eq!(
        (step.temperature, step.logprobs, step.logprobs_mode),
        (Some(0.0), true, LogprobsMode::Processed)
    );
    assert_eq!((step.stop_token_ids.as_slice(), step.bad_token_ids.as_slice()), (&[1][..], &[3][..]));
    assert!(step.stop.is_empty() && step.stop_token_sequences.is_empty());
    assert_eq!(step.check(), Ok(()));
}

#[test]
fn scoring_generates_nothing_and_reports_the_prompt() {
    let scoring = params(json!({"max_tokens": 5})).for_scoring();
    assert_eq!((scoring.max_tokens, scoring.prompt_logprobs), (Some(0), Some(0)));
}
