//! The profile of an engine's device.

use penstock_engine::{Port, Request};
use penstock_types::EngineConfig;
use penstock_types::{OutputScope, RequestedOutputs};

use crate::common::{HIDDEN, LAYERS, TinyModel, VOCABULARY, request, run};

const TOKENS: usize = 5;

#[test]
fn profile_counts_the_operations_of_every_step() {
    let model = TinyModel::write();
    let config = EngineConfig { threads: Some(1), profile: true, ..EngineConfig::default() };
    let (engine, info) = model.launch(&config).unwrap();
    let profile = info.profile.unwrap();
    assert_eq!(profile.rows(), [], "the warm-up is not counted");
    assert_eq!(run(&engine, &Port::with_condvar(), [request(0, 16, TOKENS)].into_iter()), TOKENS);
    let rows = profile.rows();
    let row = |operation| rows.iter().find(|row| row.operation == operation).unwrap();
    // The last step may not have been read yet, or one more may have been planned.
    let steps = row("upload").calls as usize;
    assert!((TOKENS..=TOKENS + 1).contains(&steps), "{rows:?}");
    assert_eq!(row("attention").calls as usize, steps * LAYERS);
    assert_eq!(row("linear").calls as usize, steps * (4 * LAYERS + 1));
    assert_eq!((row("admit_slot").calls, row("sample").calls as usize), (1, steps));
    assert_eq!(row("sample").bytes as usize, 4 * VOCABULARY * steps);
    assert!(row("linear").flops > row("attention").flops && row("embed").flops.is_none());
    assert!(rows.iter().all(|row| row.seconds > 0.0));
    assert_eq!(row("gather").calls, 2, "only the step of the prompt has rows without an output");
}

#[test]
fn hidden_states_of_a_prompt_compute_no_logits() {
    const PROMPT: usize = 40;
    let flops = |outputs: RequestedOutputs| {
        let config = EngineConfig { threads: Some(1), profile: true, ..EngineConfig::default() };
        let (engine, info) = TinyModel::write().launch(&config).unwrap();
        let scored = Request { outputs, ..request(0, PROMPT, 0) };
        assert_eq!(run(&engine, &Port::with_condvar(), [scored].into_iter()), 0);
        let rows = info.profile.unwrap().rows();
        rows.iter().find(|row| row.operation == "linear").unwrap().flops.unwrap() as usize
    };
    let hidden_states = Some(OutputScope::Prompt);
    let without = flops(RequestedOutputs { hidden_states, ..RequestedOutputs::default() });
    let logits = Some(OutputScope::Prompt);
    let with = flops(RequestedOutputs { hidden_states, logits, ..RequestedOutputs::default() });
    assert_eq!(with - without, 2 * PROMPT * VOCABULARY * HIDDEN);
}

#[test]
fn engine_without_profile_has_none() {
    let (_, info) = TinyModel::write().launch(&EngineConfig::default()).unwrap();
    assert!(info.profile.is_none());
}
