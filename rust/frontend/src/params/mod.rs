//! The parameters of a request: read, checked, resolved.
//!
//! ```text
//! values ── read ──> SamplingParams ── resolve, with the model's defaults ──> ResolvedParams
//!  any source        asked, checked          └─ types::Sampling, RequestedOutputs
//! ```
//!
//! `definitions/sampling_params.toml` is the table of the parameters; `sampling_params.rs` is generated from it.

mod close_schema;
mod conflicts;
mod json;
mod readers;
mod resolve;
#[rustfmt::skip]
mod sampling_params;
mod structured;
#[cfg(test)]
mod tests;

pub(crate) use json::read_json;
pub use readers::LogitBias;
pub use resolve::{ModelLimits, ResolvedParams};
pub use sampling_params::SamplingParams;
pub use structured::{Function, ResponseFormat, ResponseKind, ToolChoice, Tools};
pub(crate) use structured::{check_keys, get};

/// The shortest decimal that reads as this single: 0.9, not 0.8999999761581421.
fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or(f64::from(value))
}
