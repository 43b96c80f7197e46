//! The configuration of an engine as a caller gives it.

#[rustfmt::skip]
mod engine_config;
mod quantization;
mod readers;

pub use engine_config::EngineConfig;
