//! One request, from its parameters to its output: parameters, prompt, output. The interpreter is not known here.

#![allow(missing_docs)]

mod error;
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
