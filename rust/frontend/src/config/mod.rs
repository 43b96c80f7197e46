//! The configuration of an engine as a caller gives it.

#[rustfmt::skip]
mod engine_config;
mod readers;

pub use engine_config::EngineConfig;
