//! One request, from its parameters to its output: parameters, prompt, output. The interpreter is not known here.

#![allow(missing_docs)]

pub mod adapters;
pub mod config;
mod error;
#[cfg(feature = "testing")]
mod fake_executor;
pub mod field;
#[cfg(test)]
mod json_value;
pub mod output;
pub mod panics;
pub mod params;
pub mod prompt;
pub mod selection;
pub mod value;

pub use error::Error;
#[cfg(feature = "testing")]
pub use fake_executor::FakeExecutor;
