//! The profile of an engine's device.

use penstock_engine::Port;
use penstock_runner::EngineConfig;

use crate::common::{LAYERS, TinyModel, VOCABULARY, request, run};

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
}

#[test]
fn engine_without_profile_has_none() {
    let (_, info) = TinyModel::write().launch(&EngineConfig::default()).unwrap();
    assert!(info.profile.is_none());
}
