//! `Health`: the state of an engine that works.

use std::time::Instant;

/// The class is generated; `definitions/stats.toml` documents the fields.
#[derive(Clone, Debug, PartialEq)]
pub struct Health {
    pub state: String,
    pub running: u64,
    pub waiting: u64,
    pub step_age: Option<f64>,
}

impl Health {
    pub fn of(engine: &penstock_engine::Engine, state: &str) -> Self {
        let stats = engine.stats();
        let step_age = engine.step_age(Instant::now()).map(|age| age.as_secs_f64());
        Self { state: state.to_owned(), running: stats.running, waiting: stats.waiting, step_age }
    }
}
